"""Results folders with invented numbers, for tests of what is made of results: many clients in no time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pfl_ext.data import Partition
from pfl_ext.metrics import summarize
from pfl_ext.reports import ResultsFolder

__all__ = ["HOSTILE", "add_rounds", "invented_run"]

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">'&"
"""A name that would be code on a page that does not take care."""

_UPDATE = 250_000  # bytes


def invented_run(
    folder: Path,
    method: str = "ditto",
    *,
    clients: int = 12,
    classes: Sequence[str] = ("cat", "dog", "ship"),
    rounds: int = 4,
    planned: int | None = None,
    seed: int = 0,
    level: float = 0.8,
    models: Sequence[str] = ("personal", "global"),
) -> ResultsFolder:
    """A run in a folder, with everything that a finished one has but checkpoints.

    Args:
        folder: to be made.
        method: its name in config.toml.
        clients, classes: of the partition; the same arguments and seed give the same one.
        rounds: that are over.
        planned: that the configuration names; the same unless given.
        seed: of data and configuration.
        level: the accuracy that is approached.
        models: that are evaluated.
    """
    results = ResultsFolder.create(folder)
    drawn = np.random.default_rng(seed)
    counts = np.maximum(drawn.poisson(6, (clients, len(classes))) - 4, 0)
    counts[:, 0] += 1  # a training sample at least
    begin, train, test = 0, [], []
    for size in counts.sum(1).tolist():
        train.append(torch.arange(begin, begin + size))
        test.append(torch.arange(begin + size, begin + size + 4))
        begin += size + 4
    nothing = torch.zeros(0, dtype=torch.int64)
    made = {"dataset": "invented", "partitioner": "dirichlet", "alpha": 0.3}
    partition = Partition(
        tuple(train), (nothing,) * clients, tuple(test), nothing, torch.arange(begin, begin + 9), made
    )
    partition.save(folder / "partition.safetensors")
    results.write_classes(
        [
            {"client": int(client), "class": int(place), "name": classes[place], "train": int(counts[client, place])}
            for client, place in zip(*np.nonzero(counts), strict=True)
        ]
    )
    options = {"rounds": planned or rounds, "seed": seed}
    sections = {"data": {"name": "invented"}, "federation": options, "method": {"name": method, "lr": level}}
    results.write_toml("config.toml", {"metric": "accuracy", "statistic": "mean", **sections})
    results.write_json("versions.json", {"pfl_ext": "0.0", "torch": "2.10", "gpu": None})
    add_rounds(results, 1, rounds, clients=clients, level=level, seed=seed, models=models, sizes=counts.sum(1).tolist())
    return results


def add_rounds(
    results: ResultsFolder,
    first: int,
    last: int,
    *,
    clients: int = 12,
    level: float = 0.8,
    seed: int = 0,
    models: Sequence[str] = ("personal", "global"),
    sizes: Sequence[int] | None = None,
) -> None:
    """More rounds of an invented run, as it goes on; the other arguments are those of `invented_run`."""
    talent = np.random.default_rng(seed + 1).uniform(0.5, 1.2, clients)
    for number in range(first, last + 1):
        grown = level * (1 - 0.6**number)
        values = {m: np.clip(grown * talent - 0.1 * place, 0, 1) for place, m in enumerate(models)}
        record = {
            "round": number,
            "seconds": 0.5,
            "clients": list(range(clients)),
            "communication": {"up_bytes": clients * _UPDATE, "down_bytes": 2 * clients * _UPDATE},
            "training": {"loss": 1 / number, "trained_parameters": 7510},
            "clock": {"compute-and-wait": 2.0 * number, "wait-free": 1.5 * number},
            "models": {
                model: {"test": {"accuracy": summarize(own), "loss": summarize(1 - own)}}
                for model, own in values.items()
            },
        }
        results.append(record)
        rows = [
            {
                "client": client,
                "train_samples": sizes[client] if sizes else 1,
                "test_samples": 4,
                **{f"{model}/test/accuracy": own[client] for model, own in values.items()},
                **{f"{model}/test/loss": 1 - own[client] for model, own in values.items()},
            }
            for client in range(clients)
        ]
        if number == last:
            results.write_clients(rows)
