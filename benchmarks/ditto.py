"""A race of rounds of Ditto, which trains two models for each client.

100 clients of 480 samples of CIFAR-10, 10 of them a round, LeNet (62,006 parameters), one epoch of each model in
batches of 32, step size 0.05, lambda 1. Nothing is evaluated: peers evaluate different things at different times. A
round is timed as the mean of three behind one that is not counted, after which all must have the same global model, and
but for fluke, whose proximal term is another one, the same personal models of the clients that took part.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

from pfl_ext import algorithms
from pfl_ext.data import Dataset, Partition, load
from pfl_ext.engines import EngineOptions, make_engine
from pfl_ext.federation import Federation, Settings, WorkingModel, stream
from pfl_ext.federation.rounds import selected_clients
from pfl_ext.nn import build

from . import report, round_race
from .measure import threads
from .opponents import fluke
from .opponents.ditto import DittoClients, FLBench, Images, PFLlibDitto, TensorDitto
from .opponents.federation import ClientData, pfllib_network
from .round_race import Outcome, Racer

__all__ = ["OP", "Setting", "contestants", "markdown", "measure", "official", "setting"]

OP = "ditto"
_METHOD = algorithms.Ditto(lr=0.05, batch_size=32, local_epochs=1, personal_epochs=1, lam=1.0)
_SEED, _TIMED = 0, 3


@dataclass(frozen=True)
class Setting:
    """The data of the race, cut into clients, and the network."""

    dataset: Dataset
    partition: Partition
    participation: float
    network: nn.Sequential

    @property
    def clients(self) -> int:
        """The number of clients in the partition."""
        return self.partition.clients

    @property
    def shapes(self) -> str:
        """What is raced on, for the CSV file."""
        each = len(self.partition.train[0])
        return f"{each} samples of {self.dataset.name} a client, {round(self.participation * self.clients)} a round"

    def cohorts(self) -> list[list[int]]:
        """The clients of each round."""
        return [selected_clients(_SEED, t, self.clients, self.participation) for t in range(1, _TIMED + 2)]

    def orders(self) -> DittoClients:
        """In which order ours sees each client's samples in the first round."""
        return DittoClients(*([self._order(k, name) for k in range(self.clients)] for name in ("batches", "personal")))

    def _order(self, client: int, name: str) -> Tensor:
        return torch.randperm(len(self.partition.train[client]), generator=stream(_SEED, name, 1, client))

    def data(self) -> list[ClientData]:
        """The clients as the opponents have them."""
        none = torch.empty(0, dtype=torch.int64)
        test = self.dataset.batch(none)
        return [ClientData(*self.dataset.batch(train), *test, none) for train in self.partition.train]


def setting(dataset: Dataset, clients: int, samples: int, participation: float) -> Setting:
    """A number of clients, each with the same number of samples of the training part."""
    train = (~dataset.is_test).nonzero().flatten()
    mixed = train[torch.randperm(len(train), generator=stream(_SEED, "partition"))][: clients * samples]
    none = torch.empty(0, dtype=torch.int64)
    shares = tuple(share.sort().values for share in mixed.split(samples))
    partition = Partition(shares, (none,) * clients, (none,) * clients, server=none, global_test=none)
    network = build("lenet", dataset.input_shape, len(dataset.classes), stream(_SEED, "network"))
    assert isinstance(network, nn.Sequential)
    return Setting(dataset, partition, participation, network)


def official(root: Path | None) -> Setting:
    """The setting that is published."""
    return setting(load("cifar10", root), clients=100, samples=480, participation=0.1)


# ---- the contestants -----------------------------------------------------------------------------------------------


def contestants(s: Setting, cores: Sequence[int]) -> list[Racer]:
    """Everyone who races, for each number of cores; ours first."""
    racers = []
    for n in cores:
        racers += [
            Racer("pfl_ext", "ours", n, partial(_ours, s, n)),
            Racer("PFLlib", "naive", n, partial(_pfllib, s, n)),
            Racer("FL-bench", "naive", n, partial(_fl_bench, s, n)),
            Racer("fluke", "naive", n, partial(_fluke, s, n)),
            Racer("loop over tensors", "skilled", n, partial(_tensors, s, n)),
        ]
    return racers


def _ours(s: Setting, workers: int) -> Outcome:
    settings = Settings(
        rounds=_TIMED + 1, seed=_SEED, participation=s.participation, threads=1, evaluate_every=_TIMED + 1
    )
    engine = make_engine(EngineOptions(workers=workers))
    run = Federation(_METHOD, s.network, s.dataset, s.partition, settings, engine=engine)
    seconds, first = [], None
    for record in run.rounds():
        if first is None:
            # What clients keep is there for those that have taken part, in the order of their numbers.
            first = torch.cat([run.server["model"], run.engine.state()["personal/rows"].flatten()])
        else:
            seconds.append(record["seconds_training"])
    return Outcome(mean(seconds), first)


def _rounds(
    s: Setting, cores: int, run: Callable[[Sequence[int]], None], states: Callable[[], Sequence[nn.Module]]
) -> Outcome:
    """All rounds of an opponent; after the first its global model, and the personal ones of that round's clients."""
    moments, first = [], None
    with threads(cores):
        for cohort in s.cohorts():
            begin = time.perf_counter()
            run(cohort)
            moments.append(time.perf_counter() - begin)
            if first is None:
                first = torch.cat([WorkingModel(copy.deepcopy(model)).state() for model in states()])
    return Outcome(mean(moments[1:]), first)


def _pfllib(s: Setting, cores: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="pfllib-") as folder:
        run = PFLlibDitto(
            pfllib_network(s.network),
            s.data(),
            Path(folder),
            _METHOD.batch_size,
            _METHOD.lr,
            len(s.dataset.classes),
            orders=s.orders(),
            lam=_METHOD.lam,
        )
        first = s.cohorts()[0]
        return _rounds(s, cores, run.ditto_round, lambda: [run.server, *(run.personal[k] for k in first)])


def _of_state(s: Setting, state: dict[str, Tensor]) -> nn.Module:
    network = pfllib_network(s.network)
    network.load_state_dict(state)
    return network


def _fl_bench(s: Setting, cores: int) -> Outcome:
    data = s.dataset
    assert data.mean is not None and data.std is not None
    mean_of, std_of = (torch.as_tensor(x).flatten().tolist() for x in (data.mean, data.std))
    images = Images(data.inputs.float(), data.targets, mean_of, std_of)
    orders, rows = s.orders(), s.partition.train
    run = FLBench(pfllib_network(s.network), images, rows, _METHOD.batch_size, _METHOD.lr, _METHOD.lam, orders)
    first = s.cohorts()[0]
    return _rounds(
        s, cores, run.round, lambda: [_of_state(s, state) for state in (run.model, *(run.personal(k) for k in first))]
    )


def _fluke(s: Setting, cores: int) -> Outcome:
    orders = s.orders()
    loaders = [
        fluke.Loader(
            data.x,
            data.y,
            _METHOD.batch_size,
            [order for what in ("train", "personal") if (order := orders.order(k, what)) is not None],
        )
        for k, data in enumerate(s.data())
    ]
    run = fluke.Ditto(pfllib_network(s.network), loaders, lr=_METHOD.lr, lam=_METHOD.lam)
    return _rounds(s, cores, run.round, lambda: [run.model])


def _tensors(s: Setting, cores: int) -> Outcome:
    network = pfllib_network(s.network)
    run = TensorDitto(network, s.data(), _METHOD.batch_size, _METHOD.lr, _METHOD.lam, s.orders())
    names, first = [name for name, _ in network.named_parameters()], s.cohorts()[0]

    def states() -> list[nn.Module]:
        every = [run.model, *(run.personal[k] for k in first)]
        return [_of_state(s, dict(zip(names, params, strict=True))) for params in every]

    return _rounds(s, cores, run.round, states)


# ---- the race ------------------------------------------------------------------------------------------------------


def measure(s: Setting, cores: Sequence[int], repeats: int, patience: float = 0.0) -> list[report.Row]:
    """The lines of the CSV file."""
    one = WorkingModel(copy.deepcopy(s.network)).state()
    begin = one.repeat(1 + len(s.cohorts()[0]))
    return round_race.rows(OP, s.shapes, s.clients, round_race.compare(begin, contestants(s, cores), repeats, patience))


def markdown(every: Sequence[report.Row]) -> str:
    """The table, and what a reader needs to judge it; nothing without rows."""
    lines = [row for row in every if row.op == OP]
    if not lines:
        return ""
    return (
        round_race.peers_table(lines)
        + f"\n\nRounds of Ditto: {lines[0].clients:,} clients, {lines[0].shapes}, LeNet with 62,006 parameters, one "
        "epoch of the global and one of the personal model in batches of 32; nothing is evaluated. Mean of "
        f"{_TIMED} rounds, median of {lines[0].rounds} such runs, in turns; all have the same global and personal "
        "models after the first round, but for fluke, whose personal models are held by norms that are not squared. "
        "Peers are re-typed, each one process of n threads on n cores; pfl_ext runs n processes of one thread.\n\n"
    )
