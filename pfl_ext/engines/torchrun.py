"""Clients' turns on the ranks that torchrun has started: rank 0 drives and takes its share, the others serve."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from pfl_ext.data import Dataset
from pfl_ext.federation import Plan, Reply, Request, WorkingModel
from pfl_ext.federation.mapped import RemoteTensor
from pfl_ext.federation.messages import Vector
from pfl_ext.federation.store import merged
from pfl_ext.federation.uploads import Here

from .ranks import LostRank, Ranks, leave_signals_to_rank_0, under_torchrun
from .site import Eager, Published, Site, portion, test_rank

__all__ = ["Reduction", "Torchrun", "begun_before_restart", "lead", "note_begun", "restarted"]

Reduction: TypeAlias = Literal["exact", "fast"]

# Up to this size all ranks have all samples if that lets any of them train any client.
_WHOLE_DATA = 1 << 28

_joined: Ranks | None = None


# ---- the ranks that serve --------------------------------------------------------------------------------------------


def lead(main: Callable[[], int]) -> int:
    """Call ``main`` on rank 0, in which :class:`Torchrun` is an engine; serve it on the others until it returns.

    Where torchrun has not started the process, ``main`` is just called. A script of one's own has at its end::

        if __name__ == "__main__":
            sys.exit(lead(main))

    Raises:
        LostRank: a rank did not start, or is lost. The message names it.
    """
    global _joined
    if not under_torchrun() or _joined is not None:
        return main()
    ranks = _joined = Ranks.join()
    try:
        if ranks.rank:
            leave_signals_to_rank_0()
            _serve(ranks)
            return 0
        status = main()
    except BaseException:
        _end(ranks)
        raise
    finally:
        _joined = None
    _end(ranks)
    return status


def restarted() -> bool:
    """Whether torchrun has started all processes again because one was lost (``--max-restarts``); in :func:`lead`."""
    return _joined is not None and _joined.start > 1


def note_begun(what: str) -> None:
    """Note that this job has begun something, for :func:`begun_before_restart`."""
    if _joined is not None:
        _joined.note(what)


def begun_before_restart(what: str) -> bool:
    """Whether this job had begun that before torchrun started all its processes again."""
    return _joined is not None and _joined.noted_before(what)


def _end(ranks: Ranks) -> None:
    """Tell all others that it is over, where they can be told."""
    if ranks.rank == 0 and not ranks.broken and not ranks.busy:
        for rank in range(1, ranks.size):
            ranks.send(rank, ("end", ()))
    ranks.leave()


def _serve(ranks: Ranks) -> None:
    """Do what rank 0 says until it says that it is over."""
    site: Site | None = None
    while True:
        name, arguments = ranks.receive(0)
        if name == "end":
            return
        if name == "close":
            site = None
        elif name == "look":
            sys.path[:0] = [place for place in arguments[0] if place not in sys.path]
        elif name == "start":
            site = None  # its memory first
            answer, site = _started(ranks, *arguments)
            ranks.send(0, answer)
        else:
            assert site is not None
            answer = _done(site, name, arguments)
            if name in _ANSWERED:
                ranks.send(0, answer)
            else:
                _raise(answer[0])


_ANSWERED = frozenset({"run", "average", "fetch", "outputs", "state", "save", "sent"})
_TOGETHER = frozenset({"average", "publish"})

Answer: TypeAlias = tuple[Exception | None, Any]


def _started(ranks: Ranks, plan: Plan, clients: Sequence[int]) -> tuple[Answer, Site | None]:
    try:
        device = torch.device(plan.settings.device)
        _check_device(plan.settings.device, ranks)
        tests = {name: [(data.to(device), rows) for data, rows in parts] for name, parts in plan.tests.items()}
        public = None if plan.public is None else plan.public.to(device)
        here = dataclasses.replace(
            plan, module=plan.module.to(device), dataset=plan.dataset.to(device), tests=tests, public=public
        )
        return (None, None), Site(ranks, here, clients)
    except Exception as error:
        return (_portable(error, ranks.rank), None), None


def _done(site: Site, name: str, arguments: Sequence[Any]) -> Answer:
    try:
        found = getattr(site, name)(*arguments)
    except LostRank:
        raise
    except Exception as error:
        if name in _TOGETHER:  # the others wait for this rank, and would for ever: it ends
            raise LostRank(f"rank {site.rank} cannot go on, nor can the others without it: {error}") from error
        return _portable(error, site.rank), None
    # Everybody has an average: rank 0 needs none of another.
    return None, None if name == "average" else found


def _portable(error: Exception, rank: int) -> Exception:
    """An error that can be sent, with what led to it where it was."""
    if rank == 0:
        return error
    try:
        pickle.dumps(error)
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__cause__ = None
    return _Elsewhere(rank, traceback.format_exc(), error)


class _Elsewhere(Exception):
    """An error of another rank."""

    def __init__(self, rank: int, told: str, error: Exception) -> None:
        super().__init__(rank, told, error)
        self.rank, self.told, self.error = rank, told, error

    def __str__(self) -> str:
        return f"at rank {self.rank}:\n{self.told}"


def _raise(error: Exception | None) -> None:
    """Raise an error as it was; where it comes from another rank, with what was told there as its cause."""
    if isinstance(error, _Elsewhere):
        raise error.error from error
    if error is not None:
        raise error


def _check_device(name: str, ranks: Ranks) -> None:
    device = torch.device(name)
    if device.type != "cuda":
        return
    if not ranks.gpus:
        raise ValueError(
            f"device is {device}, and this machine has {torch.cuda.device_count()} GPUs: a rank needs one of its own. "
            "Start as many ranks as there are GPUs (--nproc-per-node), or use device=cpu"
        )
    if device.index is not None and ranks.size > 1:
        raise ValueError(f"device is {device}, and each of {ranks.size} ranks has a GPU of its own: use device=cuda")


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


class Torchrun(Here):
    """Runs requests on all ranks that torchrun has started; the bits are those of one process.

    A client that keeps something is always the same rank's, which has the client's samples. Clients are dealt by the
    number of their samples, the largest first, each to the rank that has least.

    Args:
        reduction: how vectors are averaged. ``"fast"`` is an all-reduce: fewer bytes where a rank has several clients,
            and another order of sums, so that the last bits depend on the number of ranks.
    """

    def __init__(self, reduction: Reduction = "exact") -> None:
        if _joined is None:
            raise ValueError(
                "engine is torchrun, and this process is none of torchrun's: torchrun --nproc-per-node 2 -m pfl_ext "
                "run METHOD ... starts them, and a script of your own calls pfl_ext.engines.lead(main); engine=process "
                "trains in this process"
            )
        self._ranks, self._fast = _joined, reduction == "fast"
        self._started = False
        self._released: list[RemoteTensor] = []
        self._fetched: dict[RemoteTensor, Tensor] = {}
        self._published: dict[str, tuple[Tensor, int]] = {}
        self._averages: list[tuple[Tensor, int]] = []
        self._averaged: set[str] | None = None  # names of uploads, in the round before; None: nothing is known yet
        self._names: dict[RemoteTensor, str] = {}
        self._data: Dataset | None = None

    # ---- speaking with the others --------------------------------------------------------------------------------

    def _tell(self, name: str, *arguments: Any) -> None:
        for rank in range(1, self._ranks.size):
            self._ranks.send(rank, (name, arguments))

    def _ask(self, name: str, every: Sequence[tuple[Any, ...]], only: Sequence[int] | None = None) -> list[Any]:
        """Let ranks, each with arguments of its own, do something; what came of it on each."""
        if self._released:
            released, self._released = self._released, []
            self._tell("release", released)
            self._site.release(released)
        asked = range(self._ranks.size) if only is None else only
        self._ranks.busy = True
        for rank in asked:
            if rank:
                self._ranks.send(rank, (name, every[rank]))
        # An error of this rank waits until the others have answered: they must not be left in the middle.
        answers: dict[int, Answer] = {0: _done(self._site, name, every[0])} if 0 in asked else {}
        for rank in asked:
            if rank:
                answers[rank] = self._ranks.receive(rank)
                if name == "run":
                    self.turns.end(len(every[rank][0]))
        self._ranks.busy = False
        for error, _ in answers.values():
            _raise(error)
        return [answers[rank][1] for rank in asked]

    def identity(self) -> dict[str, Any]:
        """Of a fast average that it is one, and on how many ranks."""
        return {"reduction": f"fast, on {self._ranks.size} ranks"} if self._fast else {}

    # ---- clients' turns ------------------------------------------------------------------------------------------

    def start(self, plan: Plan) -> None:
        """Deal the clients, and give each rank what it needs of them."""
        ranks = self._ranks
        _check_device(plan.settings.device, ranks)
        kept = plan.kept()
        size = plan.dataset.nbytes
        self._free = not kept and size <= _WHOLE_DATA and ranks.size > 1
        costs = {k: len(rows.train) for k, rows in plan.rows.items()}
        self._owner = dealt(list(costs), list(costs.values()), ranks.size)
        ranks.busy = True
        self._tell("look", sys.path)
        for rank in range(1, ranks.size):
            own = sorted(k for k, owner in self._owner.items() if owner == rank)
            part = plan if self._free else portion(plan, own, rank, ranks.size)
            part = dataclasses.replace(part, module=copy.deepcopy(plan.module).cpu())
            ranks.send(rank, ("start", (part, [] if self._free else own)), kind="data")
        own = sorted(k for k, owner in self._owner.items() if owner == 0)
        # It has all samples anyway: they are the run's own.
        self._site = Site(ranks, plan, [] if self._free else own)
        self._site.turns = self.turns
        self._started = True
        answers = [ranks.receive(rank) for rank in range(1, ranks.size)]
        ranks.busy = False
        for error, _ in answers:
            _raise(error)
        self._asynchronous = plan.method.buffer is not None
        # On a CPU a thread beside the training takes its time from it: that pays where it hides a link, or a copy.
        hides = ranks.size > 1 and not (ranks.together and plan.dataset.device.type == "cpu")
        self._eager = hides and not self._asynchronous and not self._fast

    def publish(self, server: Mapping[str, Tensor]) -> None:
        """Send those that have changed, but for those that are an average as it was: all ranks have it."""
        about = []
        for name, vector in server.items():
            about.append(Published(name, tuple(vector.shape), vector.dtype, self._known(name, vector)))
            self._published[name] = (vector, vector._version)
        self._tell("publish", about, None)
        self._site.publish(about, server)
        self._averages.clear()

    def _known(self, name: str, vector: Tensor) -> int | None:
        def unchanged(other: tuple[Tensor, int]) -> bool:
            return other[0] is vector and other[1] == vector._version

        if name in self._published and unchanged(self._published[name]):
            return -1
        return next((number for number, average in enumerate(self._averages) if unchanged(average)), None)

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        """The replies in the order of the requests, when all are there."""
        places = self._places(requests, costs)
        every = [[i for i, place in enumerate(places) if place == rank] for rank in range(self._ranks.size)]
        training = bool(requests) and requests[0].stage == "train"
        self.turns.begin(requests)
        eager: Eager = frozenset()
        if training and self._eager:
            eager = None if self._averaged is None else frozenset(self._averaged)
        replies: list[Reply | None] = [None] * len(requests)
        new_round = training and not self._asynchronous
        found = self._ask("run", [([requests[i] for i in some], eager, new_round) for some in every])
        for some, own in zip(every, found, strict=True):
            for i, reply in zip(some, own, strict=True):
                replies[i] = reply
        if training:
            self._averaged = set()
        for reply in replies:
            assert reply is not None
            self._names |= {v: name for name, v in reply.sent.items() if isinstance(v, RemoteTensor)}
        return iter([reply for reply in replies if reply is not None])

    def _places(self, requests: Sequence[Request], costs: Sequence[int] | None) -> list[int]:
        """The rank of each request."""
        ranks = self._ranks.size
        free: dict[int, int] = {}
        if self._free and costs is not None:
            free = dealt(range(len(requests)), costs, ranks)
        places = []
        for i, request in enumerate(requests):
            held = [v.rank for v in request.sent.values() if isinstance(v, RemoteTensor)]
            if request.stage == "test":
                places.append(test_rank(request, ranks))
            elif held:
                places.append(held[0])
            else:
                places.append(free.get(i, self._owner[request.client]))
        return places

    # ---- the server's part ---------------------------------------------------------------------------------------

    def average(self, vectors: Sequence[Vector], weights: Sequence[float], normalize: bool = True) -> Tensor:
        """A slice on each rank, in the order of the clients; or an all-reduce, where that is asked for."""
        remote = [vector for vector in vectors if isinstance(vector, RemoteTensor)]
        if len(remote) < len(vectors) or self._ranks.size == 1:  # turns of a saved run are here
            return super().average([self.fetch(vector) for vector in vectors], weights, normalize)
        if self._averaged is not None:
            self._averaged |= {self._names[vector] for vector in remote if vector in self._names}
        number = len(self._averages)
        weights = [float(weight) for weight in weights]
        arguments = (number, remote, weights, normalize, self._fast)
        self._ask("average", [arguments] * self._ranks.size)
        found = self._site.averages[number]
        self._averages.append((found, found._version))
        return found

    def fetch(self, vector: Vector, hold: bool = True) -> Tensor:
        """Bring a vector to rank 0."""
        if not isinstance(vector, RemoteTensor):
            found = super().fetch(vector)
            return found.to(self._site.device)
        if vector.rank == 0:
            return self._site.fetch(vector.number)
        if vector in self._fetched:
            return self._fetched[vector]
        (found,) = self._ask("fetch", [(vector.number,)] * self._ranks.size, only=[vector.rank])
        brought: Tensor = found.to(self._site.device)
        if hold:
            self._fetched[vector] = brought
        return brought

    def outputs(self, vectors: Sequence[Vector], model: WorkingModel, data: Dataset, rows: Tensor) -> list[Tensor]:
        """Each rank computes those of its own clients; it is sent the samples once."""
        if not all(isinstance(vector, RemoteTensor) for vector in vectors):
            return super().outputs(vectors, model, data, rows)
        if self._data is not data:
            self._tell("take_data", data)
            self._site.take_data(data)
            self._data = data
        ranks = self._ranks.size
        own: list[list[int]] = [[] for _ in range(ranks)]
        places = []
        for vector in vectors:
            assert isinstance(vector, RemoteTensor)
            places.append((vector.rank, len(own[vector.rank])))
            own[vector.rank].append(vector.number)
        found = self._ask("outputs", [(numbers, rows, model.network) for numbers in own])
        return [found[rank][i].to(self._site.device) for rank, i in places]

    def release(self, vector: Vector) -> None:
        """The ranks are told with what they are told next."""
        if isinstance(vector, RemoteTensor):
            self._released.append(vector)
            self._fetched.pop(vector, None)
            self._names.pop(vector, None)
        else:
            super().release(vector)

    # ---- saving ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All vectors that the clients of all ranks keep, for a checkpoint."""
        return merged(self._ask("state", [()] * self._ranks.size))

    def save(self, stem: Path) -> list[Path]:
        """Let each rank write what its clients keep, where they keep anything."""
        if not self._site.store.labels:
            return []
        return [Path(path) for path in self._ask("save", [(stem,)] * self._ranks.size)]

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Give each rank what its clients keep."""
        for rank in reversed(range(self._ranks.size)):
            own: dict[str, Tensor] = {}
            for name in self._site.store.labels:
                clients = tensors[f"{name}/clients"]
                mine = torch.tensor([self._owner[k] == rank for k in clients.tolist()], dtype=torch.bool)
                own |= {f"{name}/clients": clients[mine], f"{name}/rows": tensors[f"{name}/rows"][mine]}
            if rank:
                self._ranks.send(rank, ("restore", (own,)))
            else:
                self._site.restore(own)

    def sent(self) -> list[dict[str, int]]:
        """Bytes that each rank has sent, by kind: of a collective those that no algorithm can do without."""
        found: list[dict[str, int]] = self._ask("sent", [()] * self._ranks.size)
        return found

    def close(self) -> None:
        """Let the ranks forget the run; they serve the next one."""
        if self._started and not self._ranks.broken:
            self._tell("close")
        self._started = False


def dealt(things: Sequence[int], costs: Sequence[int], ranks: int) -> dict[int, int]:
    """The rank of each thing: the costliest first, each to the rank that has least."""
    loads = [0] * ranks
    found = {}
    for i in sorted(range(len(things)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        loads[rank] += costs[i]
        found[things[i]] = rank
    return found
