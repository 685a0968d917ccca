"""Strategies for Flower apps of your own: Flower's FedAvg with the fused average, and a say in who is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from logging import INFO, WARNING
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor, nn

from pfl_ext.ops import StreamingAverage, all_finite, server_update, weighted_average

from .arrays import copied, record_of, records_in, viewed
from .grid import ArrivingGrid, content_of
from .records import told

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


class _Client(NamedTuple):
    """A client's reply: its model, weight and metrics."""

    node: int
    model: dict[str, Tensor]
    weight: float
    metrics: RecordDict


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
        super().__init__(**fedavg)
        if not math.isfinite(lr):
            raise ValueError(f"lr is {lr}; a finite number is accepted")
        if nonfinite not in ("skip", "raise", "propagate"):
            raise ValueError(f"nonfinite is {nonfinite!r}; skip, raise or propagate is accepted")
        self.lr, self.nonfinite, self.streaming = lr, nonfinite, streaming
        self.report: dict[str, float] = {}
        self._arrays = ArrayRecord()
        self._asked: set[int] = set()

    def summary(self) -> None:
        """Log the options of the average, then Flower's own summary."""
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

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As Flower's; to whom is remembered."""
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model and the clients' metrics; None where no reply is usable."""
        clients = list[_Client]()
        stream = StreamingAverage() if self.streaming else None
        for client in self._usable(server_round, replies, self.server):
            clients.append(client)
            if stream is not None and self._finite(server_round, client):
                stream.add(client.model, client.weight)
                client.model.clear()  # Flower's bytes go with it
            elif stream is not None:
                clients.pop()
        if stream is None:
            average = self._average(server_round, clients)
        else:
            average = stream.result() if sum(client.weight for client in clients) > 0 else None
        if average is None:
            return None, None
        self.report.clear()
        new = self.combine(average, [client.model for client in clients], [client.weight for client in clients])
        told = self.train_metrics_aggr_fn([client.metrics for client in clients], self.weighted_by_key)
        told.update(self.report)
        return record_of(new), told

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The clients' metrics; None where no reply is usable. Flower's own ends the run with a reply that is odd."""
        clients = list(self._usable(server_round, replies, None))
        if not sum(client.weight for client in clients) > 0:
            return None
        return self.evaluate_metrics_aggr_fn([client.metrics for client in clients], self.weighted_by_key)

    def combine(
        self, average: dict[str, Tensor], models: list[dict[str, Tensor]], weights: list[float]
    ) -> dict[str, Tensor]:
        """The new model: to be extended by strategies that do more than average.

        Args:
            average: of the models that usable clients sent.
            models: these; empty ones with ``streaming``. They lie where Flower has put them: read them, and copy what
                you would change.
            weights: of each.
        """
        if self.lr == 1.0:
            return average
        new: dict[str, Tensor] = server_update(self.server, [average], lr=self.lr)
        return new

    def _average(self, server_round: int, clients: list[_Client]) -> dict[str, Tensor] | None:
        """The average of clients; those with infinity or NaN are taken out of the list, as the policy says."""
        while sum(client.weight for client in clients) > 0:
            found: dict[str, Tensor] = weighted_average(
                [client.model for client in clients], [client.weight for client in clients]
            )
            # One look at the average saves one at every client: infinity and NaN would be in it.
            if self.nonfinite == "propagate" or all_finite(*found.values()):
                return found
            finite = [client for client in clients if self._finite(server_round, client)]
            if len(finite) == len(clients):  # the sum is too large, and none of its terms
                return found
            clients[:] = finite
        return None

    def _finite(self, server_round: int, client: _Client) -> bool:
        """Whether a client stays; the policy may be to end the run where not."""
        if self.nonfinite == "propagate" or all_finite(*client.model.values()):
            return True
        if self.nonfinite == "raise":
            said = f"node {client.node} sent infinity or NaN in round {server_round}"
            raise ValueError(f"{said}; nonfinite='skip' leaves such clients out")
        log(WARNING, "round %s: node %s is left out: it sent infinity or NaN", server_round, client.node)
        return False

    @property
    def server(self) -> dict[str, Tensor]:
        """The model that the clients began the round with; not to be changed in place."""
        return viewed(self._arrays)

    def _usable(
        self, server_round: int, replies: Iterable[Message], expected: Mapping[str, Tensor] | None
    ) -> Iterator[_Client]:
        """Each client that can be averaged; the others are named.

        Args:
            server_round: which one.
            replies: what came.
            expected: the model that the clients were sent; None: they were asked for metrics alone.
        """
        missing = set(self._asked)
        first: dict[str, str] | None = None
        for reply in replies:
            node = reply.metadata.src_node_id
            missing.discard(node)
            try:
                content = content_of(reply)
                weight, metrics = self._weighed(content)
                kinds = _kinds(metrics)  # Flower adds them up by name, lists entry by entry
                if first is not None and kinds != first:
                    raise ValueError(f"its metrics are {_shown(kinds)}; those of the first are {_shown(first)}")
                model = {} if expected is None else _model(content, expected)
            except ValueError as error:
                log(WARNING, "round %s: node %s is left out: %s", server_round, node, told(error))
                continue
            first = kinds
            yield _Client(node, model, weight, RecordDict({"metrics": metrics}))
            if self.streaming:
                reply.content.clear()
        for node in sorted(missing):
            log(WARNING, "round %s: node %s is left out: it has not answered in time", server_round, node)

    def _weighed(self, content: RecordDict) -> tuple[float, MetricRecord]:
        """What a client counts, and its metrics.

        Raises:
            ValueError: they cannot be averaged; the message says why.
        """
        metrics = list(records_in(content, MetricRecord).values())
        if len(metrics) != 1:
            raise ValueError(f"it sent {len(metrics)} MetricRecords; one is accepted")
        weight = metrics[0].get(self.weighted_by_key)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{self.weighted_by_key} is {weight}; a finite number of 0 or more is accepted")
        return float(weight), metrics[0]


def _model(content: RecordDict, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model that a client sent.

    Raises:
        ValueError: it cannot be averaged; the message says why.
    """
    arrays = list(records_in(content, ArrayRecord).values())
    if len(arrays) != 1:
        raise ValueError(f"it sent {len(arrays)} ArrayRecords; one is accepted")
    model = viewed(arrays[0])
    if not expected:  # aggregate_train was called by itself: the first client says what a model is
        return model
    if model.keys() != expected.keys():
        name = sorted(model.keys() ^ expected.keys())[0]
        raise ValueError(f"{name} is {'missing' if name in expected else 'not in the model'}")
    for name, tensor in expected.items():
        if model[name].shape != tensor.shape or model[name].dtype != tensor.dtype:
            kinds = [f"{list(x.shape)} of {x.dtype}" for x in (model[name], tensor)]
            raise ValueError(f"{name} is {kinds[0]}; the model has {kinds[1]}")
    return {name: model[name] for name in expected}


def _kinds(metrics: MetricRecord) -> dict[str, str]:
    """What each metric is: a number, or a list of so many."""
    return {name: f"{len(value)} numbers" if isinstance(value, list) else "a number" for name, value in metrics.items()}


def _shown(kinds: Mapping[str, str]) -> str:
    text = ", ".join(f"{name} ({kind})" for name, kind in sorted(kinds.items()))
    return text if len(text) <= 200 else f"{text[:197]}..."
