"""Strategies for Flower apps of your own: Flower's FedAvg with the fused average, and a say in who is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from logging import INFO, WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor, nn

from pfl_ext.ops import StreamingAverage, all_finite, server_update, weighted_average

from .arrays import copied, record_of, viewed
from .grid import ArrivingGrid, content_of

__all__ = ["FusedFedAvg", "read_arrays", "write_arrays"]


def read_arrays(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """The tensors of a record by their names, as ``load_state_dict`` takes them.

    Raises:
        ValueError: something in it is no array of numbers.
    """
    return copied(record)


def write_arrays(model: nn.Module | Mapping[str, Tensor]) -> ArrayRecord:
    """A model's state dict, or tensors by their names, as a record: parameters and buffers, each with its type."""
    return record_of(model.state_dict() if isinstance(model, nn.Module) else model)


class FusedFedAvg(FedAvg):
    """Flower's FedAvg with the average of this package: one pass over what the clients sent, where it lies.

    Takes what :class:`flwr.serverapp.strategy.FedAvg` takes, and can stand in its place. Integer arrays, such as
    BatchNorm's counts, keep their type. A client that vanishes, comes too late, or sends other names, shapes or types
    than the server has sent is named in the log and left out; the round goes on with the others.

    Args:
        lr: length of the server's step towards the average; 1: the average itself.
        nonfinite: what becomes of clients that send infinity or NaN: ``"skip"`` leaves them out, ``"raise"`` ends the
            run, ``"propagate"`` computes with them, as Flower does.
        streaming: add up uploads as they arrive and forget them, in the memory of one model. The order of the sum is
            that of arrival then, and its last bits depend on it. Use :meth:`start` as ever.
        fedavg: the options of Flower's FedAvg.

    Attributes:
        report: numbers that :meth:`combine` adds to the round's metrics.
    """

    def __init__(self, *, lr: float = 1.0, nonfinite: str = "skip", streaming: bool = False, **fedavg: Any) -> None:
        """See the class."""
        super().__init__(**fedavg)
        if not math.isfinite(lr):
            raise ValueError(f"lr is {lr}; a finite number is accepted")
        if nonfinite not in ("skip", "raise", "propagate"):
            raise ValueError(f"nonfinite is {nonfinite!r}; skip, raise or propagate is accepted")
        if streaming and lr != 1.0:
            raise ValueError(f"lr is {lr} with streaming; 1 is accepted there")
        self.lr, self.nonfinite, self.streaming = lr, nonfinite, streaming
        self.report: dict[str, float] = {}
        self._arrays = ArrayRecord()
        self._asked: set[int] = set()

    def summary(self) -> None:
        """Log what it does."""
        log(INFO, "\t├──> Fused average: lr %g, nonfinite %s, streaming %s", self.lr, self.nonfinite, self.streaming)
        super().summary()

    def start(self, grid: Grid, *args: Any, **more: Any) -> Result:
        """As Flower's; with ``streaming`` replies are taken as they arrive."""
        return super().start(ArrivingGrid(grid) if self.streaming else grid, *args, **more)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As Flower's; what is sent and to whom is remembered, as what comes back must fit it."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._arrays, self._asked = arrays, {message.metadata.dst_node_id for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model and the clients' metrics; None where no reply is usable."""
        models, weights, metrics, stream = list[dict[str, Tensor]](), list[float](), list[RecordDict](), None
        for model, weight, metric in self._usable(server_round, replies):
            weights.append(weight)
            metrics.append(metric)
            if self.streaming:
                stream = stream or StreamingAverage()
                stream.add(model, weight)
            else:
                models.append(model)
        if not weights or sum(weights) <= 0:
            return None, None
        self.report.clear()
        new = self.combine(models, weights) if stream is None else stream.result()
        told = self.train_metrics_aggr_fn(metrics, self.weighted_by_key)
        told.update(self.report)
        return record_of(new), told

    def combine(self, models: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
        """The new model of what usable clients sent: to be extended by strategies that do more than average.

        The models lie where Flower has put them: read them, and copy what you would change.
        """
        if self.lr == 1.0:
            new: dict[str, Tensor] = weighted_average(models, weights)
        else:
            new = server_update(self.server, models, weights, lr=self.lr)
        return new

    @property
    def server(self) -> dict[str, Tensor]:
        """The model that the clients began the round with; not to be changed in place."""
        return viewed(self._arrays)

    def _usable(
        self, server_round: int, replies: Iterable[Message]
    ) -> Iterator[tuple[dict[str, Tensor], float, RecordDict]]:
        """The model, weight and metrics of each client that can be averaged; the others are named."""
        expected = viewed(self._arrays)
        missing = set(self._asked)
        names: set[str] | None = None  # of the metrics
        for reply in replies:
            node = reply.metadata.src_node_id
            missing.discard(node)
            try:
                model, weight, metric = self._read(reply, expected)
                if names is not None and set(metric) != names:
                    raise ValueError(f"its metrics are {sorted(metric)}; those of the first are {sorted(names)}")
            except ValueError as error:
                log(WARNING, "round %s: node %s is left out: %s", server_round, node, error)
                continue
            if self.nonfinite != "propagate" and not all_finite(*model.values()):
                if self.nonfinite == "raise":
                    raise ValueError(
                        f"node {node} sent infinity or NaN in round {server_round}; nonfinite='skip' leaves it out"
                    )
                log(WARNING, "round %s: node %s is left out: it sent infinity or NaN", server_round, node)
                continue
            names = set(metric)
            yield model, weight, RecordDict({"metrics": metric})
        for node in sorted(missing):
            log(WARNING, "round %s: node %s is left out: it has not answered in time", server_round, node)

    def _read(self, reply: Message, expected: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float, MetricRecord]:
        """What a client sent.

        Raises:
            ValueError: it cannot be averaged; the message says why.
        """
        content = content_of(reply)
        arrays, metrics = list(content.array_records.values()), list(content.metric_records.values())
        if len(arrays) != 1 or len(metrics) != 1:
            raise ValueError(
                f"it sent {len(arrays)} ArrayRecords and {len(metrics)} MetricRecords; one of each is accepted"
            )
        weight = metrics[0].get(self.weighted_by_key)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{self.weighted_by_key} is {weight}; a finite number of 0 or more is accepted")
        model = viewed(arrays[0])
        if not expected:  # aggregate_train was called by itself: the first client says what a model is
            return model, float(weight), metrics[0]
        if model.keys() != expected.keys():
            name = sorted(model.keys() ^ expected.keys())[0]
            raise ValueError(f"{name} is {'missing' if name in expected else 'not in the model'}")
        for name, tensor in expected.items():
            if model[name].shape != tensor.shape or model[name].dtype != tensor.dtype:
                kinds = [f"{list(x.shape)} of {x.dtype}" for x in (model[name], tensor)]
                raise ValueError(f"{name} is {kinds[0]}; the model has {kinds[1]}")
        return {name: model[name] for name in expected}, float(weight), metrics[0]
