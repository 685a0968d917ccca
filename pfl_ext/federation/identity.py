"""What two runs must have in common for one to go on where the other stopped."""

from __future__ import annotations

from typing import Any

from pfl_ext.data import Dataset, Partition
from pfl_ext.data.nests import mapped
from pfl_ext.tasks import Task

from .engine import Engine
from .method import Method
from .rounds import Rounds
from .server import Server
from .settings import Settings

__all__ = ["identity_of"]


def identity_of(
    method: Method,
    task: Task,
    settings: Settings,
    dataset: Dataset,
    partition: Partition,
    server: Server,
    rounds: Rounds,
    engine: Engine,
) -> dict[str, Any]:
    """Everything that has an influence on what models become, as JSON has it.

    Args:
        method, task, settings, dataset, partition, rounds, engine: the run's.
        server: before the method has set it up: its working model has the initial weights. A checkpoint has none of
            what is frozen, nor of what no client has changed.
    """
    models = server.models if len(server.models) > 1 else None
    auxiliary, by_rounds = server.auxiliary, method.lr_rounds == "cosine"
    return {
        "method": type(method).__name__,
        **{f"method.{name}": value for name, value in method.identity().items()},
        **({"rounds": settings.rounds} if by_rounds else {}),
        "task": task.name,
        **{f"task.{name}": value for name, value in task.identity().items()},
        "data": [dataset.fingerprint, _normalisation(dataset)],
        "auxiliary": None if auxiliary is None else [auxiliary.fingerprint, _normalisation(auxiliary)],
        "partition": partition.fingerprint,
        "network": server.model.layout() if models is None else [model.layout() for model in models],
        "initial_weights": server.model.digest() if models is None else [model.digest() for model in models],
        **({} if models is None else {"networks": list(server.networks)}),
        **settings.identity(),
        **rounds.identity(),
        **engine.identity(),
    }


def _normalisation(dataset: Dataset) -> list[Any] | None:
    """Mean and standard deviation of the channels, which a dataset's fingerprint does not cover."""
    if dataset.mean is None or dataset.std is None:
        return None
    return [mapped(lambda numbers: numbers.tolist(), given) for given in (dataset.mean, dataset.std)]
