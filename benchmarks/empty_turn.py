"""What a client's turn costs beside its steps: turns of one step on a network so small that the step is nearly nothing.

FedAvg with a linear layer of 15 parameters, four samples per client, one step on all of them; all clients selected,
one process of one thread, nothing evaluated but after the last round, which is not measured. What is timed is a round
divided by its clients, so the server's part of it is included. Beside it the step alone: forward and backward pass and
the fused step of SGD on one batch, as often. The clock is the processor time of this process: turns are so short that
what runs beside them on a busy machine would be most of what another clock shows.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch.nn import functional as F

from pfl_ext.algorithms import FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, stream
from pfl_ext.ops import proximal_sgd_step_

from . import report, round_race
from .measure import threads

__all__ = ["CLIENTS", "OP", "federation", "markdown", "measure", "step_seconds", "turn_seconds"]

OP = "empty turn"
CLIENTS = 500
_SAMPLES, _FEATURES, _CLASSES, _LR = 4, 4, 3, 0.01
_STEP = "the step alone"


def federation(clients: int, rounds: int) -> Federation:
    """A run of that many clients, evaluated after its last round only."""
    generator = stream(0, "inputs")
    inputs = torch.randn(clients * _SAMPLES, _FEATURES, generator=generator)
    labels = torch.randint(0, _CLASSES, (clients * _SAMPLES,), generator=generator)
    dataset = Dataset.from_tensors(inputs, labels, classes=[str(c) for c in range(_CLASSES)])
    none = torch.empty(0, dtype=torch.int64)
    shares = torch.arange(clients * _SAMPLES).split(_SAMPLES)
    partition = Partition(tuple(shares), (none,) * clients, (none,) * clients, none, none)
    method = FedAvg(lr=_LR, batch_size=_SAMPLES, local_epochs=1)
    settings = Settings(rounds=rounds, evaluate_every=rounds)
    return Federation(method, torch.nn.Linear(_FEATURES, _CLASSES), dataset, partition, settings)


def turn_seconds(clients: int, repeats: int) -> list[float]:
    """Seconds of a turn, one number per round: neither the first, which makes what the others find, nor the last."""
    found, begin = [], 0.0
    for record in federation(clients, repeats + 2).rounds():
        if 1 < record["round"] < repeats + 2:
            found.append((time.process_time() - begin) / clients)
        begin = time.process_time()
    return found


def step_seconds(clients: int, repeats: int) -> list[float]:
    """Seconds of the step alone, as often as a round has it."""
    network = torch.nn.Linear(_FEATURES, _CLASSES)
    weights: list[torch.Tensor] = list(network.parameters())
    inputs, labels = torch.randn(_SAMPLES, _FEATURES), torch.arange(_SAMPLES) % _CLASSES
    found = []
    with threads(1):
        for _ in range(repeats):
            begin = time.process_time()
            for _ in range(clients):
                gradients = torch.autograd.grad(F.cross_entropy(network(inputs), labels), weights)
                proximal_sgd_step_(weights, list(gradients), weights, lr=_LR, lam=0.0)
            found.append((time.process_time() - begin) / clients)
    return found


def measure(repeats: int, clients: int = CLIENTS) -> list[report.Row]:
    """The lines of the CSV file: milliseconds a turn, and of its step."""
    turns, steps = turn_seconds(clients, repeats), step_seconds(clients, repeats)
    shapes, limit = f"linear, {_FEATURES} to {_CLASSES}", median(steps)
    made = []
    for contestant, kind, times in (("pfl_ext", "ours", turns), (_STEP, "limit", steps)):
        ratio, share = median(times) / median(turns), limit / median(times)
        made.append(
            round_race.row(
                OP,
                shapes,
                clients,
                1,
                contestant,
                kind,
                times,
                ratio=ratio,
                ratio_of_medians=ratio,
                limit=limit,
                share=share,
            )
        )
    return made


def markdown(rows: list[report.Row]) -> str:
    """The numbers in a sentence; nothing without rows."""
    if not rows:
        return ""
    turn, step = (next(row for row in rows if row.kind == kind) for kind in ("ours", "limit"))
    return (
        f"An empty turn (one step of FedAvg on {_SAMPLES} samples with {_FEATURES * _CLASSES + _CLASSES} parameters, "
        f"{turn.clients} clients in one process, nothing evaluated) takes {1e3 * turn.median_ms:.0f} us "
        f"[{1e3 * turn.q25_ms:.0f}, {1e3 * turn.q75_ms:.0f}], the step alone "
        f"{1e3 * step.median_ms:.0f} us of processor time.\n\n"
    )
