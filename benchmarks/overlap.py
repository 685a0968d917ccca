"""Whether personal training really runs beside the upload: seconds of a round under both protocols.

``python -m pfl_ext.benchmarks.overlap`` runs Ditto with clients whose uploads go to files (``store=mapped``), on images
that are made up, with a network of two linear layers. The models of both protocols are compared bit by bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from pfl_ext.algorithms import Ditto
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, stream

from . import machine

__all__ = ["main", "rounds"]

_TRAIN = 40


def rounds(protocol: str, clients: int, width: int, count: int) -> tuple[list[float], torch.Tensor]:
    """Seconds of the training of each round, and the server's model after them."""
    generator = stream(0, "images")
    inputs = torch.randn(clients * _TRAIN, 784, generator=generator)
    labels = torch.randint(0, 10, (clients * _TRAIN,), generator=generator)
    everything = torch.zeros(clients * _TRAIN, dtype=torch.bool)
    dataset = Dataset("made up", inputs, labels, tuple(str(c) for c in range(10)), everything)
    none = torch.empty(0, dtype=torch.int64)
    shares = torch.arange(clients * _TRAIN).split(_TRAIN)
    partition = Partition(tuple(shares), (none,) * clients, (none,) * clients, none, none)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    settings = Settings(rounds=count, store="mapped", protocol=protocol, evaluate_every=count)
    run = Federation(Ditto(), network, dataset, partition, settings)
    return [record["seconds_training"] for record in run.run()], run.server["model"]


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pfl_ext.benchmarks.overlap", description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--width", type=int, default=10_000, help="hidden features: 795 parameters each")
    parser.add_argument("--rounds", type=int, default=3, help="of each protocol in each repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parsed = parser.parse_args(arguments)
    seconds: dict[str, list[float]] = {"compute-and-wait": [], "wait-free": []}
    models: list[torch.Tensor] = []
    for _ in range(parsed.repetitions):
        for protocol, found in seconds.items():
            times, model = rounds(protocol, parsed.clients, parsed.width, parsed.rounds)
            found += times[1:]  # the first makes the files
            models.append(model)
    same = all(torch.equal(models[0], model) for model in models)
    about = machine.describe()
    size = models[0].nbytes / 2**20
    for protocol, found in seconds.items():
        print(f"{protocol}: {median(found):.3f} s a round")
    print(f"{parsed.clients} uploads of {size:.0f} MiB a round; models {'are' if same else 'are NOT'} the same")
    print(f"{about['machine']}, torch {about['torch']}, one thread for training")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
