"""The aggregation of a round by a strategy of Flower: from the replies, as Flower has them, to the new arrays."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from .averaging import ClientModels
from .case import Case, Contestant, Family, Grid, Skipped, Spec
from .machine import available_memory

__all__ = ["FAMILY"]

_OP = "aggregate_train"


class _Result:
    """The arrays of a strategy's result, read when it is looked at: what is timed ends with Flower's record."""

    def __init__(self, record: Any) -> None:
        self.record = record

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(array.numpy() for array in self.record.values())


def _aggregate(strategy: Any, replies: list[Any]) -> _Result:
    return _Result(strategy.aggregate_train(1, replies)[0])


def _replies(models: ClientModels) -> list[Any]:
    """What clients sent, in Flower's messages: the bytes of .npy files."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    replies = []
    for client, count in zip(models.clients, models.samples, strict=True):
        arrays = ArrayRecord({str(t): Array(x.numpy()) for t, x in enumerate(client)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": count})})
        replies.append(Message(content, dst_node_id=1, message_type="train"))
    return replies


def _case(spec: Spec) -> Case:
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    from pfl_ext.flower import FusedFedAvg

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as a simulation sets it, for messages
    models = ClientModels(spec.shapes, spec.clients, spec.dtype)
    replies = _replies(models)
    expected, size = models.average, models.bytes
    contestants = [
        Contestant("FusedFedAvg", "ours", partial(_aggregate, FusedFedAvg(), replies), models.dtype),
        Contestant("Flower's FedAvg", "naive", partial(_aggregate, FedAvg(), replies), models.dtype),
    ]
    return Case(spec, contestants, expected, size, (spec.clients + 1) * size // spec.clients)


def _plan(grid: Grid) -> list[Spec]:
    shapes, clients = grid.shapes or (("lenet",) if grid.quick else ("lenet", "resnet18")), grid.clients or (20,)
    threads = grid.threads or (1, grid.all_threads)
    dtypes = grid.dtypes or ("float32",)
    return [
        Spec(_OP, s, c, dtype, t) for s in shapes for c in clients for dtype in dtypes for t in dict.fromkeys(threads)
    ]


def _cases(specs: Iterable[Spec]) -> Iterator[Case | Skipped]:
    if importlib.util.find_spec("flwr") is None:
        raise ImportError("Flower is not installed here: pip install 'pfl_ext[flower]'")
    for spec in specs:
        needed, available = ClientModels.bytes_needed(spec.shapes, spec.clients, spec.dtype), available_memory()
        if available is not None and needed > available:
            yield Skipped(spec, f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available")
            continue
        # Flower's strategies write a line of log for every call.
        logging.getLogger("flwr").setLevel(logging.ERROR)
        yield _case(spec)


FAMILY = Family(
    name="flower",
    summary="aggregation by a Flower strategy: ours against Flower's own FedAvg",
    ops={_OP: "`strategy.aggregate_train(round, replies)`: from Flower's messages to the new `ArrayRecord`"},
    notes={
        "FusedFedAvg": "every reply checked for names, shapes, types, infinity and NaN",
        "Flower's FedAvg": "`flwr.serverapp.strategy.FedAvg`: NumPy on one thread, a copy and two passes per client",
    },
    shapes=("lenet", "resnet18"),
    clients=(20,),
    dtypes=("float32", "float64"),
    plan=_plan,
    cases=_cases,
)
