"""Turns side by side in worker processes that share the data and the clients' vectors."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from pfl_ext.data import Dataset
from pfl_ext.federation.mapped import LARGE, MappedTensor, scratch_folder
from pfl_ext.federation.turns import Diverged, Plan, Turned, Turns, Vectors

__all__ = ["Workers"]


def _in_files(dataset: Dataset, folder: Path, label: str) -> Any:
    """A dataset with its large tensors in files of the folder; :func:`_opened` makes a dataset of that again."""

    def file_of(value: Any, name: str) -> Any:
        large = isinstance(value, Tensor) and value.nbytes >= LARGE
        return MappedTensor.copy(value, folder / f"{label}-{name}") if large else value

    given = [field.name for field in dataclasses.fields(dataset) if field.init]
    return type(dataset), {name: file_of(getattr(dataset, name), name) for name in given}


def _opened(portable: Any) -> Dataset:
    cls, fields = portable
    made = cls(**{name: value.open() if isinstance(value, MappedTensor) else value for name, value in fields.items()})
    return cast(Dataset, made)


def _share(plan: Plan, folder: Path) -> tuple[Plan, dict[str, MappedTensor]]:
    """The plan with its large tensors in files of the folder, and those of the server's vectors."""
    tests = {
        name: [_in_files(part, folder, f"test-{number}-{i}") for i, part in enumerate(parts)]
        for number, (name, parts) in enumerate(plan.extra_tests.items())
    }
    server = {name: MappedTensor.copy(vector, folder / f"server-{name}") for name, vector in plan.server.items()}
    # What is in files stands in the places of what it holds until the worker opens it.
    dataset = _in_files(plan.dataset, folder, "data")
    portable = dataclasses.replace(plan, dataset=dataset, extra_tests=cast(Any, tests), server=cast(Any, server))
    return portable, server


def _open(plan: Plan) -> Plan:
    """The plan in a worker, of what :func:`_share` made."""
    return dataclasses.replace(
        plan,
        module=copy.deepcopy(plan.module),  # what arrived may be memory that all workers share
        dataset=_opened(plan.dataset),
        extra_tests={name: [_opened(part) for part in parts] for name, parts in plan.extra_tests.items()},
        server={name: cast(Any, file).open() for name, file in plan.server.items()},
    )


def _work(plan: Plan, threads: int, folder: Path, number: int, pipe: Connection) -> None:
    """A worker's life: take a turn, answer, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    torch.set_num_threads(threads)
    turns = Turns(_open(plan))

    def deliver(client: int, round: int, vectors: Mapping[str, Tensor]) -> Vectors:
        # Uploads are large: shared, each in a file of its own.
        return {
            name: MappedTensor.copy(vector, folder / f"upload-{number}-{client}-{round}-{name}")
            for name, vector in vectors.items()
        }

    turns.deliver = deliver
    pipe.send(None)  # ready
    answer: tuple[Any, str | None]
    while True:
        try:
            turn, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (getattr(turns, turn)(*arguments), None)
        except Diverged as error:
            answer = (error, None)
        except Exception as error:
            answer = (error if _can_travel(error) else RuntimeError(str(error)), traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:  # the parent has stopped listening
            return


def _taken(vectors: Vectors) -> Vectors:
    """What a worker shared, as this process's own."""
    taken = {}
    for name, vector in vectors.items():
        assert isinstance(vector, MappedTensor)
        taken[name] = vector.open()
        vector.path.unlink(missing_ok=True)  # the memory lives as long as the tensor
    return taken


def _can_travel(error: Exception) -> bool:
    return type(error).__module__ == "builtins"


class Workers:
    """Runs turns in ``workers`` processes of ``threads`` threads each; the bits are those of one process.

    The processes are spawned: a script that makes workers must guard its entry point by ``__name__ == "__main__"``.

    Args:
        workers: how many processes.
        plan: what they do; its store must have a folder.
        threads: of each worker.
    """

    def __init__(self, workers: int, plan: Plan, threads: int = 1) -> None:
        """See the class."""
        # What all clients send may be there at once.
        sent = sum(vector.nbytes for vector in plan.server.values()) * (1 + plan.partition.clients)
        sets = [plan.dataset, *(part for parts in plan.extra_tests.values() for part in parts)]
        self._folder = scratch_folder(self, sum(data.inputs.nbytes + data.targets.nbytes for data in sets) + sent)
        portable, server = _share(plan, self._folder)
        self._server = {name: file.open() for name, file in server.items()}
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(portable, threads, self._folder, number, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:  # so that starting them is not counted as part of the first round
            try:
                pipe.recv()
            except (EOFError, OSError):
                self._lost(pipe, "while it started,")

    def publish(self, server: Mapping[str, Tensor]) -> None:
        """Make the server's vectors visible to the turns that follow."""
        for name, vector in self._server.items():
            vector.copy_(server[name])

    def map(self, turn: str, arguments: Sequence[tuple[Any, ...]], costs: Sequence[int] | None = None) -> Iterator[Any]:
        """The results of ``Turns.<turn>(*arguments[i])`` in order; a client's :class:`Diverged` is a result too.

        ``costs`` says how long each takes: the longest begin first, so that none of them is left alone at the end.
        """
        order = range(len(arguments)) if costs is None else sorted(range(len(costs)), key=lambda i: -costs[i])
        waiting = deque((place, arguments[place]) for place in order)
        idle, busy = list(self._pipes), dict[Connection, int]()
        done: dict[int, Any] = {}
        following = 0
        while following < len(arguments):
            while idle and waiting:
                pipe = idle.pop()
                place, some = waiting.popleft()
                self._send(pipe, (turn, tuple(self._handed(x, place) for x in some)))
                busy[pipe] = place
            for ready in wait(list(busy)):
                pipe = cast(Connection, ready)
                place = busy.pop(pipe)
                done[place] = self._receive(pipe, turn, arguments[place])
                idle.append(pipe)
            while following in done:
                yield done.pop(following)
                following += 1

    def _handed(self, argument: Any, place: int) -> Any:
        """An argument as it goes to a worker: vectors in files, which the next turn at this place overwrites."""
        if not isinstance(argument, dict):
            return argument
        return {
            name: MappedTensor.copy(vector, self._folder / f"handed-{place}-{name}")
            for name, vector in argument.items()
        }

    def _send(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send(message)
        except OSError:
            self._lost(pipe, "before it was given a turn")

    def _receive(self, pipe: Connection, turn: str, arguments: tuple[Any, ...]) -> Any:
        try:
            result, trace = pipe.recv()
        except (EOFError, OSError):
            self._lost(pipe, f"during {turn}{arguments[:2]}")
        if trace is not None:
            self.close()
            if hasattr(result, "add_note"):  # Python 3.11
                result.add_note(trace)
            raise result
        if isinstance(result, Turned):
            result = result._replace(sent=_taken(result.sent), kept=_taken(result.kept))
        return result

    def _lost(self, pipe: Connection, when: str) -> NoReturn:
        process = self._processes[self._pipes.index(pipe)]
        process.join(timeout=5)
        code = process.exitcode
        self.close()
        raise RuntimeError(
            f"a worker process ended {when} with exit code {code}"
            + (" (killed: out of memory?)" if code == -signal.SIGKILL else "")
            + "; use fewer workers, or workers=1 to see the error itself"
        )

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
