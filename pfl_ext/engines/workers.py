"""Clients' turns side by side in worker processes that share the data and what clients keep."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pfl_ext.data import Dataset
from pfl_ext.data.nests import filled, leaves, mapped
from pfl_ext.federation import ClientRuntime, ClientStore, Plan, Reply, Request
from pfl_ext.federation.engine import in_files, store_folder
from pfl_ext.federation.mapped import LARGE, MappedTensor, opened, scratch_folder
from pfl_ext.federation.messages import Vector
from pfl_ext.federation.uploads import Here

from .processes import Processes, leave_if_imported_by_a_worker

__all__ = ["Workers"]

_MESSAGES = 8  # for each worker at least, in the first round of a stage: nothing is known of its requests
# Then seconds that a message takes. Both sides and the threads between them work half a millisecond for one, on cores
# that the workers need; and longer ones would say too seldom how far a round is.
_SHORTEST, _LONGEST = 0.004, 0.2


# ---- what both sides share -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PortableDataset:
    """A dataset with its large tensors in files, on its way to a worker."""

    kind: type[Dataset]
    fields: dict[str, Any]

    @classmethod
    def of(cls, dataset: Dataset, folder: Path, label: str) -> _PortableDataset:
        """Write the dataset's large tensors into files of ``folder``."""

        def file_of(value: Any, name: str) -> Any:
            large = isinstance(value, Tensor) and value.nbytes >= LARGE
            return MappedTensor.copy(value, folder / f"{label}-{name}") if large else value

        given = {field.name: getattr(dataset, field.name) for field in dataclasses.fields(dataset) if field.init}
        inputs = [file_of(leaf, f"inputs-{i}") for i, leaf in enumerate(leaves(dataset.inputs))]
        others = {name: file_of(value, name) for name, value in given.items() if name != "inputs"}
        return cls(type(dataset), {"inputs": filled(dataset.inputs, inputs), **others})

    def open(self) -> Dataset:
        """The dataset, its large tensors mapped."""

        def opened(value: Any) -> Any:
            return value.open() if isinstance(value, MappedTensor) else value

        fields = {name: opened(value) for name, value in self.fields.items() if name != "inputs"}
        return self.kind(inputs=mapped(opened, self.fields["inputs"]), **fields)


@dataclass(frozen=True)
class _PortablePlan:
    """A plan on its way to a worker."""

    plan: Plan
    """The plan without its data and test sets, which travel beside it."""
    dataset: _PortableDataset
    tests: dict[str, list[tuple[_PortableDataset | None, Tensor]]]
    """None stands for the run's own dataset."""
    public: _PortableDataset | None

    @classmethod
    def of(cls, plan: Plan, folder: Path) -> _PortablePlan:
        """Write all large tensors into the folder."""
        tests = {
            name: [
                (None if data is plan.dataset else _PortableDataset.of(data, folder, f"test-{number}-{i}"), rows)
                for i, (data, rows) in enumerate(parts)
            ]
            for number, (name, parts) in enumerate(plan.tests.items())
        }
        nothing = plan.dataset.subset(torch.empty(0, dtype=torch.int64))
        empty = dataclasses.replace(plan, dataset=nothing, tests={}, public=None)
        public = None if plan.public is None else _PortableDataset.of(plan.public, folder, "public")
        return cls(empty, _PortableDataset.of(plan.dataset, folder, "data"), tests, public)

    def open(self) -> Plan:
        """The plan with its data mapped and a module of its own."""
        dataset = self.dataset.open()
        tests = {
            name: [(dataset if data is None else data.open(), rows) for data, rows in parts]
            for name, parts in self.tests.items()
        }
        # A copy: the module that arrived may be memory that all workers share.
        module, public = copy.deepcopy(self.plan.module), None if self.public is None else self.public.open()
        return dataclasses.replace(self.plan, module=module, dataset=dataset, tests=tests, public=public)


@dataclass(frozen=True)
class _Slot(MappedTensor):
    """A tensor in a file that is written again and again: the next one that is written there replaces it."""


class _Slots:
    """Slots by the names of their files: a new file costs 274 us to write and 90 to map, a slot 10."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "slots"
        self._open: dict[str, Tensor] = {}

    def write(self, name: str, tensor: Tensor) -> _Slot:
        """Put a tensor into the slot of that name."""
        kind = "-".join(map(str, (*tensor.shape, tensor.dtype)))
        label = name.replace("/", "-")  # a vector may be called model/0
        slot = _Slot(self._folder / f"{label}-{kind}", tuple(tensor.shape), tensor.dtype)
        if slot.path.name not in self._open:
            MappedTensor.create(slot.path, slot.shape, slot.dtype)
        self.read(slot).copy_(tensor)
        return slot

    def read(self, slot: _Slot) -> Tensor:
        """The tensor in a slot."""
        name = slot.path.name
        if name not in self._open:
            self._open[name] = slot.open()
        return self._open[name]


# ---- in a worker -----------------------------------------------------------------------------------------------------


class _Worker:
    """All that a worker process needs for its turns: the runtime, and where uploads go."""

    def __init__(self, plan: Plan, store: ClientStore, server: Mapping[str, MappedTensor], folder: Path) -> None:
        self._files = plan.method.buffer is not None or plan.settings.store == "mapped"
        self._folder, self._slots = folder, _Slots(folder)
        self._round, self._used = 0, 0
        self.runtime = ClientRuntime(plan, store, self._deliver)
        self.runtime.server = {name: file.open() for name, file in server.items()}

    def _deliver(self, request: Request, kind: str, vectors: Mapping[str, Tensor]) -> Mapping[str, Vector]:
        if self._files:  # they may wait long until they are needed, or be more than memory holds
            return in_files(vectors, self._folder, request, kind, large=0)
        if request.round != self._round:  # what was sent in the round before is not needed any more
            self._round, self._used = request.round, 0
        self._used += 1
        label = f"{os.getpid()}-{self._used}-{kind}"
        return {name: self._slots.write(f"{label}-{name}", vector) for name, vector in vectors.items()}

    def __call__(self, requests: Sequence[Request]) -> list[Reply]:
        replies = []
        for request in requests:
            reply = self.runtime(request)
            if reply.outputs is not None and request.rows is not None:
                label = "-".join(map(str, request.rows[1:]))
                names = ("logits", "targets")
                outputs = (opened(x) for x in reply.outputs)
                files = [self._slots.write(f"{n}-{label}", x) for n, x in zip(names, outputs, strict=True)]
                reply.outputs = (files[0], files[1])
            replies.append(reply)
        return replies


_worker: _Worker | None = None


def _begin(plan: _PortablePlan, store: ClientStore, server: dict[str, MappedTensor], folder: Path) -> None:
    """The first thing a worker process does for a run."""
    global _worker
    here = plan.open()
    torch.set_num_threads(here.settings.threads)
    _worker = _Worker(here, store, server, folder)
    # What is here now stays for the run. To look for cycles in it, all of torch's modules among it, takes long.
    gc.collect()
    gc.freeze()


def _forget() -> None:
    """The last thing: free what it has of the run."""
    global _worker
    _worker = None
    gc.unfreeze()
    gc.collect()


def _carry_out(requests: Sequence[Request]) -> tuple[list[Reply], float]:
    """The replies, and how many seconds they took."""
    assert _worker is not None
    begin = time.perf_counter()
    return _worker(requests), time.perf_counter() - begin


# ---- in the parent ---------------------------------------------------------------------------------------------------


def _messages(costs: Sequence[int], workers: int, seconds: float = 0.0) -> list[list[int]]:
    """Which requests are one message each: long ones first, and towards the end ever fewer.

    A message is at most half of what each worker has left to do, so that all of them end within a request or a short
    message of each other.

    Args:
        costs: of the requests.
        workers: how many there are.
        seconds: what a cost of 1 takes; 0: not known.
    """
    most, left = max(1, len(costs) // (workers * (1 if seconds else _MESSAGES))), sum(costs)
    least, longest = (_SHORTEST / seconds, _LONGEST / seconds) if seconds else (0.0, math.inf)
    messages: list[list[int]] = []
    cost, full = 0, True
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if full:
            messages.append([])
            left, cost = left - cost, 0
        messages[-1].append(i)
        cost += costs[i]
        # Of requests that cost nothing as many as there may be: nothing is known of them.
        share = max(least, min(longest, left / (2 * workers)))
        full = len(messages[-1]) == most or (cost > 0 and cost + costs[i] > share)
    return messages


class Workers(Here):
    """Runs requests in several processes; the bits are those of one process.

    The processes are :class:`~.processes.Processes`: a script that makes workers must guard its entry point by
    ``__name__ == "__main__"``. Several runs may share them (:func:`~.processes.kept_processes`).

    Args:
        workers: how many processes.

    Attributes:
        saved: seconds by which all they have done is more than the time that was waited for it.
    """

    def __init__(self, workers: int) -> None:
        leave_if_imported_by_a_worker()
        self.workers = workers
        self._processes: Processes | None = None
        self.saved = 0.0
        self._seconds: dict[str, float] = {}  # that a cost of 1 took, by the stage of the requests

    def start(self, plan: Plan) -> None:
        """Write the data where all see it, and start the processes."""
        if plan.dataset.device.type != "cpu":
            raise ValueError(f"{self.workers} workers on {plan.dataset.device}; workers train on the cpu")
        kept = plan.kept()
        own = max(model.size * model.state().element_size() for model in plan.working_models())
        sets = [plan.dataset, *(data for parts in plan.tests.values() for data, _ in parts)]
        sets += [] if plan.public is None else [plan.public]
        size = sum(data.nbytes for data in {id(data): data for data in sets}.values())
        size += sum(vector.nbytes for vector in kept.values()) * len(plan.rows)
        # Everybody's upload may be there at once, of a model or two.
        self._folder = scratch_folder(self, size + 2 * own * (1 + len(plan.rows)))
        mapped = plan.settings.store == "mapped"
        folder = store_folder(self, plan) if mapped else self._folder / "store"
        self.store = plan.store(folder)
        self._mapped = mapped
        self._slots = _Slots(self._folder)
        self._fetched: dict[str, Tensor] = {}
        self._server: dict[str, Tensor] = {}
        self._plan = plan

    def publish(self, server: Mapping[str, Tensor]) -> None:
        """Copy them to where the workers see them; the first time the workers are started."""
        if self._processes is None:
            files = {
                name: MappedTensor.copy(vector, self._folder / f"server-{name.replace('/', '-')}")
                for name, vector in server.items()
            }
            self._server = {name: file.open() for name, file in files.items()}
            self._start_processes(files)
            return
        for name, vector in self._server.items():
            vector.copy_(server[name])

    def _start_processes(self, server: dict[str, MappedTensor]) -> None:
        portable = _PortablePlan.of(self._plan, self._folder)
        try:
            self._processes = Processes.take(self.workers)
            self._processes.everywhere(_begin, portable, self.store, server, self._folder)
        except BrokenProcessPool:
            self._lost("while they started")

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        """The replies in the order of the requests; longest ones begin first, several short ones are one message."""
        assert self._processes is not None, "publish comes first"
        costs = [1] * len(requests) if costs is None else costs
        stage = requests[0].stage if requests else ""
        messages = _messages(costs, self.workers, self._seconds.get(stage, 0.0))
        place = {i: (number, j) for number, message in enumerate(messages) for j, i in enumerate(message)}
        submit, begin = self._processes.submit, time.perf_counter()
        self.turns.begin(requests)
        try:
            found = [submit(_carry_out, [self._portable(requests[i]) for i in some]) for some in messages]
            for future in found:
                future.add_done_callback(self._count)
            for i in range(len(requests)):
                number, j = place[i]
                yield found[number].result()[0][j]
            worked = sum(future.result()[1] for future in found)
            self.saved += worked - (time.perf_counter() - begin)
            if any(costs):
                self._seconds[stage] = worked / sum(costs)
        except BrokenProcessPool:
            self._lost(f"in the stage {requests[0].stage!r} of round {requests[0].round}")

    def _count(self, message: Future[tuple[list[Reply], float]]) -> None:
        """Count the turns of a message that is over."""
        if not message.cancelled() and message.exception() is None:
            self.turns.end(len(message.result()[0]))

    def _portable(self, request: Request) -> Request:
        """A request whose vectors are all in files."""
        if not request.sent and request.received is None:
            return request

        def in_slots(vectors: Mapping[str, Vector], kind: str) -> dict[str, Vector]:
            return {
                name: self._slots.write(f"{kind}-{request.client}-{name}", v) if isinstance(v, Tensor) else v
                for name, v in vectors.items()
            }

        received = None if request.received is None else in_slots(request.received, "received")
        return dataclasses.replace(request, sent=in_slots(request.sent, "request"), received=received)

    def average(self, vectors: Sequence[Vector], weights: Sequence[float], normalize: bool = True) -> Tensor:
        """Of what the workers have written; of a mapped store's uploads in pieces."""
        seen = [self._slots.read(v) if isinstance(v, _Slot) else v for v in vectors]
        return super().average(seen, weights, normalize)

    def fetch(self, vector: Vector, hold: bool = True) -> Tensor:
        """The vector; of a slot a copy, as whoever has it may keep it beyond the round."""
        if not isinstance(vector, _Slot):
            return super().fetch(vector)
        found = self._fetched.get(vector.path.name)
        if found is None:
            found = self._slots.read(vector).clone()
            if hold:
                self._fetched[vector.path.name] = found
        return found

    def release(self, vector: Vector) -> None:
        """Remove its file, unless that is a slot."""
        if isinstance(vector, _Slot):
            self._fetched.pop(vector.path.name, None)
        else:
            super().release(vector)

    def state(self) -> dict[str, Tensor]:
        """All vectors that the clients keep, for a checkpoint."""
        return self.store.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the clients' vectors to those of a checkpoint."""
        self.store.restore(tensors)

    def _lost(self, when: str) -> NoReturn:
        self.close()
        raise ChildProcessError(
            f"a worker process ended {when} (killed: out of memory? a script without `if __name__ == '__main__':`?); "
            "use fewer workers, or workers=1 to see the error itself"
        )

    def close(self) -> None:
        """Leave the workers to the next run, or end them."""
        if self._processes is not None:
            processes, self._processes = self._processes, None
            processes.leave(_forget, self.saved)
