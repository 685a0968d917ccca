"""What a rank has: some clients, what they keep, and what they have sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pfl_ext.data import Dataset
from pfl_ext.federation import ClientRuntime, ClientStore, Plan, Reply, Request, outputs_of, threads
from pfl_ext.federation.checkpoint import write_shard
from pfl_ext.federation.engine import in_files
from pfl_ext.federation.evaluation import GLOBAL_TEST_PART
from pfl_ext.federation.mapped import MappedTensor, RemoteTensor, opened, scratch_folder
from pfl_ext.federation.messages import Vector
from pfl_ext.federation.turns import Turns
from pfl_ext.nn import Networks

from .exchange import Exchange
from .ranks import Ranks

__all__ = ["Eager", "Published", "Site", "portion", "test_rank"]


Eager: TypeAlias = frozenset[str] | None
"""Names of uploads that go on their way as soon as there are any; None: all."""


class Published(NamedTuple):
    """One of the server's vectors, as the ranks are told of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    known: int | None
    """The number of the average that it is, which all ranks have; -1: it is as it was; None: it follows."""


def test_rank(request: Request, ranks: int) -> int:
    """Which rank has the samples of a request of the stage ``test``."""
    assert request.rows is not None
    return request.rows.begin // GLOBAL_TEST_PART % ranks


def portion(plan: Plan, clients: Sequence[int], rank: int, ranks: int) -> Plan:
    """The plan of some clients, with their samples alone, and its part of the samples that belong to nobody."""
    own = [rows for k in clients for rows in plan.rows[k]]
    kept = {id(plan.dataset): (plan.dataset, own)}
    for parts in plan.tests.values():
        for data, rows in parts:
            mine = torch.arange(len(rows)) // GLOBAL_TEST_PART % ranks == rank
            if plan.settings.personal_global_test:
                mine[:] = True
            kept.setdefault(id(data), (data, []))[1].append(rows[mine])
    cut: dict[int, tuple[Dataset, Tensor]] = {}
    for key, (data, needed) in kept.items():
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *needed]).unique()
        place = torch.full((len(data),), -1)
        place[rows] = torch.arange(len(rows))
        cut[key] = (data.subset(rows), place)
    dataset, place = cut[id(plan.dataset)]
    return dataclasses.replace(
        plan,
        dataset=dataset,
        rows={k: type(plan.rows[k])(*(place[rows] for rows in plan.rows[k])) for k in clients},
        # As long as they were: a request counts in all of a test set. What is elsewhere is nobody's sample, -1.
        tests={
            name: [(cut[id(data)][0], cut[id(data)][1][rows]) for data, rows in parts]
            for name, parts in plan.tests.items()
        },
    )


class Site:
    """One rank's part of a run; the same on rank 0, which drives, and on all others.

    Args:
        ranks: all of them.
        plan: with the samples of this rank's clients.
        clients: their numbers.

    Attributes:
        averages: those since the last publication, by their numbers.
        turns: counts those that were carried out here.
    """

    def __init__(self, ranks: Ranks, plan: Plan, clients: Sequence[int]) -> None:
        self.averages: dict[int, Tensor] = {}
        self.turns = Turns()
        self._ranks, self._plan, self.rank = ranks, plan, ranks.rank
        mapped = plan.settings.store == "mapped"
        self._folder = scratch_folder(self, 1 << 62) if mapped else None
        self.device = plan.dataset.device
        store = None
        if mapped:
            of_run = None if plan.folder is None else plan.folder / "clients.store"
            store = (of_run or scratch_folder(self, 1 << 62)) / f"rank-{ranks.rank}"
        networks = Networks.of(plan.module)
        self.store = ClientStore({k: networks.network(k) for k in sorted(clients)}, plan.kept(), store)
        self.runtime = ClientRuntime(plan, self.store, self._deliver)
        self.exchange = Exchange(ranks, self.device, self._keep)
        self._vectors: dict[int, Vector] = {}
        self._numbers = 0
        self._eager: Eager = frozenset()
        self._data: Dataset | None = None

    def _keep(self, part: Tensor, name: str) -> Vector:
        return part if self._folder is None else MappedTensor.copy(part, self._folder / name)

    # ---- turns -------------------------------------------------------------------------------------------------------

    def _deliver(self, request: Request, kind: str, vectors: Mapping[str, Tensor]) -> dict[str, Vector]:
        """Vectors stay here; what was sent and will be averaged goes on its way too."""
        held = vectors if self._folder is None else in_files(vectors, self._folder, request, kind)
        found: dict[str, Vector] = {}
        for name, vector in vectors.items():
            self._numbers += 1
            self._vectors[self._numbers] = held[name]
            found[name] = RemoteTensor(self._ranks.rank, self._numbers, tuple(vector.shape), vector.dtype)
            if kind == "sent" and (self._eager is None or name in self._eager):
                self.exchange.put(self._numbers, vector)
        return found

    def _here(self, vector: Vector) -> Vector:
        if isinstance(vector, RemoteTensor):
            return self._vectors[vector.number]
        return vector.to(self.device) if isinstance(vector, Tensor) else vector

    def _with_own(self, request: Request) -> Request:
        """A request with the vectors that it speaks of."""
        if not request.sent and request.received is None:
            return request
        sent = {name: self._here(vector) for name, vector in request.sent.items()}
        received = request.received and {name: self._here(vector) for name, vector in request.received.items()}
        return dataclasses.replace(request, sent=sent, received=received)

    def run(self, requests: Sequence[Request], eager: Eager, new_round: bool) -> list[Reply]:
        """Carry out requests.

        Args:
            requests: they.
            eager: which uploads go on their way beside them.
            new_round: nothing that was sent before is needed any more.
        """
        if new_round:
            self._forget_all()
        self._eager = eager
        random_state = torch.get_rng_state()
        exchanging = eager is None or bool(eager)
        if exchanging:
            self.exchange.begin()
        try:
            with threads(self._plan.settings.threads):
                return [self._turn(request) for request in requests]
        finally:
            if exchanging:
                self.exchange.end()
            torch.set_rng_state(random_state)

    def _turn(self, request: Request) -> Reply:
        before = self._numbers
        reply = self.runtime(self._with_own(request))
        if reply.error is not None and self._plan.method.buffer is not None:
            # It diverged beside its upload, which nobody will ask for. In synchronous rounds the next one removes it.
            _remove(*(self._vectors.pop(number) for number in range(before + 1, self._numbers + 1)))
        self.turns.end()
        return reply

    def _forget_all(self) -> None:
        """A client that diverged beside its upload has left it here."""
        vectors, self._vectors = self._vectors, {}
        _remove(*vectors.values(), *self.exchange.forget_all())

    # ---- the server's part -------------------------------------------------------------------------------------------

    def average(
        self, number: int, vectors: Sequence[RemoteTensor], weights: Sequence[float], normalize: bool, fast: bool
    ) -> Tensor:
        """The average of the ranks' vectors, known to all by that number until the next publication."""
        self.exchange.wait()
        mine = self.rank
        if fast:
            total = sum(weights) if normalize else 1.0
            pairs = zip(vectors, weights, strict=True)
            own = [(self._vectors[v.number], w / total) for v, w in pairs if v.rank == mine]
            found = self.exchange.fast_average([v for v, _ in own], [w for _, w in own], vectors[0])
        else:
            coming = [v for v in vectors if not self.exchange.arrived(v)]
            self.exchange.bring(coming, lambda number: opened(self._vectors[number]))
            found = self.exchange.average(vectors, weights, normalize)
        self.averages[number] = found
        return found

    def publish(self, vectors: Sequence[Published], server: Mapping[str, Tensor] | None) -> None:
        """Take over the server's vectors, which rank 0 has."""
        self.exchange.wait()  # two collectives of NCCL at a time may wait for each other
        found: dict[str, Tensor] = {}
        for name, shape, dtype, known in vectors:
            if server is not None:
                found[name] = server[name]
            elif known is None:
                found[name] = torch.empty(shape, dtype=dtype, device=self.device)
            else:
                found[name] = self.runtime.server[name] if known < 0 else self.averages[known]
            if known is None:
                self._ranks.broadcast(found[name].contiguous())
        self.runtime.server = found
        self.averages.clear()

    def fetch(self, number: int) -> Tensor:
        """A vector that this process has, by its number."""
        return opened(self._vectors[number])

    def take_data(self, data: Dataset) -> None:
        """Unlabelled samples of the server, for outputs."""
        self._data = data.to(self.device)

    def outputs(self, numbers: Sequence[int], rows: Tensor, network: int) -> list[Tensor]:
        """What the working model makes of those samples, with vectors that are here as its state."""
        assert self._data is not None
        with threads(self._plan.settings.threads):
            model = self.runtime.models_of[network]
            return [outputs_of(model, self.fetch(number), self._data, rows) for number in numbers]

    def release(self, vectors: Sequence[RemoteTensor]) -> None:
        """Forget vectors that no other rank will ask for again."""
        for vector in vectors:
            own = self._vectors.pop(vector.number, None) if vector.rank == self.rank else None
            _remove(own, self.exchange.forget(vector.rank, vector.number))

    # ---- saving ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All vectors that this rank's clients keep, for a checkpoint."""
        return self.store.tensors()

    def save(self, stem: Path) -> Path:
        """Write what this rank's clients keep into a shard of a checkpoint."""
        return write_shard(stem, self._ranks.rank, self._ranks.size, self.store.tensors())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's clients' vectors to those of a checkpoint."""
        self.store.restore(tensors)

    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent, by kind."""
        return dict(self._ranks.sent)


def _remove(*vectors: Vector | None) -> None:
    """Remove the files of those that have one."""
    for vector in vectors:
        if isinstance(vector, MappedTensor):
            vector.path.unlink(missing_ok=True)
