"""A race of rounds of FedAvg on many small clients, where what is not training is a large part of a round.

1,000 clients of 60 samples of Fashion-MNIST, 50 of them a round, one local epoch in batches of 10, step size 0.1, an
MLP of 784, 200 and 10 units (159,010 parameters). Every tenth round the global model is evaluated on the 10,000 test
samples. A round is timed with and without its share of that, as the mean of ten rounds behind one that is not counted.

pfl shuffles nothing, so its clients' samples are given to it in the order that ours draws for the first round: all must
end that round with the same model. Later rounds differ in how batches are drawn, and in nothing that takes time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FedAvg
from pfl_ext.data import Dataset, Partition, load
from pfl_ext.engines import EngineOptions, make_engine
from pfl_ext.federation import Federation, Settings, WorkingModel, stream
from pfl_ext.federation.rounds import selected_clients
from pfl_ext.nn import build

from . import report, round_race
from .measure import threads
from .opponents import pfl
from .round_race import Outcome, Racer

__all__ = ["EVALUATED", "OP", "Setting", "contestants", "markdown", "measure", "setting"]

OP, EVALUATED = "small clients", "small clients, evaluated"
_METHOD = FedAvg(lr=0.1, batch_size=10, local_epochs=1)
_SEED, _HIDDEN = 0, 200
_TIMED = 10
"""Rounds that are timed, of which one is evaluated."""
_EVALUATION_BATCH = 2048


@dataclass(frozen=True)
class Setting:
    """The data of the race, cut into clients, and the network."""

    dataset: Dataset
    partition: Partition
    participation: float
    network: nn.Module

    @property
    def shapes(self) -> str:
        """What is raced on, for the CSV file."""
        each = len(self.partition.train[0])
        return f"{each} samples of {self.dataset.name} a client, {round(self.participation * self.clients)} a round"

    @property
    def clients(self) -> int:
        """The number of clients in the partition."""
        return self.partition.clients

    def cohorts(self) -> list[list[int]]:
        """The clients of each round."""
        return [selected_clients(_SEED, t, self.clients, self.participation) for t in range(1, _TIMED + 2)]

    def samples(self) -> tuple[Tensor, Tensor]:
        """All clients' samples, [clients, samples, ...], in the order that ours draws for the first round."""
        parts = []
        for k, train in enumerate(self.partition.train):
            order = torch.randperm(len(train), generator=stream(_SEED, "batches", 1, k))
            parts.append(self.dataset.batch(train[order]))
        return torch.stack([x for x, _ in parts]), torch.stack([y for _, y in parts])

    def test(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the global test set."""
        x, y = self.dataset.batch(self.partition.global_test)
        return x, y


def setting(dataset: Dataset, clients: int, samples: int, participation: float) -> Setting:
    """Clients that each have the same number of training samples; the test part is the global test."""
    train, test = ((dataset.is_test == part).nonzero().flatten() for part in (False, True))
    mixed = train[torch.randperm(len(train), generator=stream(_SEED, "partition"))][: clients * samples]
    none = torch.empty(0, dtype=torch.int64)
    shares = tuple(share.sort().values for share in mixed.split(samples))
    partition = Partition(shares, (none,) * clients, (none,) * clients, server=none, global_test=test)
    network = build("mlp", dataset.input_shape, len(dataset.classes), stream(_SEED, "network"), hidden=_HIDDEN)
    return Setting(dataset, partition, participation, network)


# ---- the contestants -----------------------------------------------------------------------------------------------


def contestants(s: Setting, cores: Sequence[int]) -> list[Racer]:
    """Everyone who races, for each number of cores; ours first."""
    racers = []
    for n in cores:
        racers += [
            Racer("pfl_ext", "ours", n, partial(_ours, s, n)),
            Racer("pfl", "naive", n, partial(_pfl, s, n)),
            Racer("loop over tensors", "skilled", n, partial(_tensors, s, n)),
        ]
    return racers


def _ours(s: Setting, workers: int) -> Outcome:
    settings = Settings(
        rounds=_TIMED + 1,
        seed=_SEED,
        participation=s.participation,
        threads=1,
        evaluate="global",
        evaluate_every=_TIMED,
    )
    engine = make_engine(EngineOptions(workers=workers))
    run = Federation(_METHOD, s.network, s.dataset, s.partition, settings, engine=engine)
    training, whole, first, accuracy = [], [], None, float("nan")
    for record in run.rounds():
        if first is None:
            first = run.server["model"].clone()
            continue
        training.append(record["seconds_training"])
        # The last round is evaluated too, as every run's is; the tenth is the one that counts.
        last = record["round"] == settings.rounds
        whole.append(training[-1] if last else record["seconds"])
        accuracy = record["models"]["global"]["global_test"]["accuracy"] if last else accuracy
    return Outcome(mean(training), first, evaluated=mean(whole), accuracy=100 * accuracy)


def _plain(network: nn.Module) -> nn.Module:
    """A copy with the layers one by one."""
    assert isinstance(network, nn.Sequential)
    return nn.Sequential(*copy.deepcopy(network))


def _pfl(s: Setting, processes: int) -> Outcome:
    x, y = s.samples()
    task = pfl.Task(
        _plain(s.network), x, y, *s.test(), s.cohorts(), _METHOD.batch_size, _METHOD.lr, evaluate_every=_TIMED
    )
    with threads(1):
        found = pfl.run(task, processes)
    seconds = mean(found.seconds[1:])
    share = sum(found.evaluations) / _TIMED
    return Outcome(seconds, WorkingModel(found.first).state(), evaluated=seconds + share, accuracy=100 * found.accuracy)


def _tensors(s: Setting, cores: int) -> Outcome:
    """The loop that a skilled user would write: list operations, batches by indexing, one model for all clients."""
    model, (x, y) = _plain(s.network), s.samples()
    params: list[Tensor] = list(model.parameters())
    server = [p.detach().clone() for p in params]
    optimizer = torch.optim.SGD(params, lr=_METHOD.lr)
    moments, first, generator = [], None, torch.Generator().manual_seed(_SEED)
    with threads(cores):
        for t, cohort in enumerate(s.cohorts(), 1):
            moments.append(time.perf_counter())
            average = [torch.zeros_like(p) for p in server]
            for k in cohort:
                with torch.no_grad():
                    torch._foreach_copy_(params, server)
                # The samples are in the order of the first round.
                order = torch.arange(len(y[k])) if t == 1 else torch.randperm(len(y[k]), generator=generator)
                for rows in order.split(_METHOD.batch_size):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x[k, rows]), y[k, rows]).backward()
                    optimizer.step()
                with torch.no_grad():
                    torch._foreach_add_(average, params, alpha=1 / len(cohort))
            server = average
            with torch.no_grad():
                torch._foreach_copy_(params, server)
            first = WorkingModel(copy.deepcopy(model)).state() if first is None else first
        moments.append(time.perf_counter())
        test_x, test_y = s.test()
        begin = time.perf_counter()
        with torch.no_grad():
            logits = torch.cat([model(part) for part in test_x.split(_EVALUATION_BATCH)])
            right = int((logits.argmax(1) == test_y).sum())
            float(F.cross_entropy(logits, test_y))
        evaluation = time.perf_counter() - begin
    seconds = mean(end - begin for begin, end in pairwise(moments[1:]))
    return Outcome(seconds, first, evaluated=seconds + evaluation / _TIMED, accuracy=100 * right / len(test_y))


# ---- the race ------------------------------------------------------------------------------------------------------


def measure(s: Setting, cores: Sequence[int], repeats: int, patience: float = 0.0) -> list[report.Row]:
    """The lines of the CSV file."""
    begin = WorkingModel(copy.deepcopy(s.network)).state()
    results = round_race.compare(begin, contestants(s, cores), repeats, patience)
    return [
        *round_race.rows(OP, s.shapes, s.clients, results),
        *round_race.rows(EVALUATED, s.shapes, s.clients, results, lambda result: result.evaluated),
    ]


def official(root: Path | None) -> Setting:
    """The setting that is published."""
    return setting(load("fashion-mnist", root), clients=1000, samples=60, participation=0.05)


def markdown(every: Sequence[report.Row]) -> str:
    """The table, and what a reader needs to judge it; nothing without rows."""
    lines = [row for row in every if row.op == OP]
    if not lines:
        return ""
    return (
        round_race.peers_table(lines, [row for row in every if row.op == EVALUATED])
        + f"\n\nRounds of FedAvg on many small clients: {lines[0].clients:,} clients, {lines[0].shapes}, an MLP with "
        f"{_HIDDEN} hidden units, one local epoch in batches of 10. Every tenth round the global model is evaluated on "
        f"the test samples. Mean of {_TIMED} rounds, median of {lines[0].rounds} such runs, in turns; all have one "
        "model after the first round. pfl is Apple's way, re-typed: cached batches that are not shuffled, on n cores n "
        "processes of one thread that reduce their sums. The loop over tensors is one process of n threads.\n\n"
    )
