"""Asynchronous rounds: turns that begin and end by the virtual clock, and uploads on their way between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .clock import Clock, Work
from .mapped import MappedTensor, opened
from .store import ClientStore
from .streams import stream
from .turns import Diverged, Turned, Vectors

__all__ = ["Flight", "Turn"]


@dataclass
class Turn:
    """A client's turn that is not over yet."""

    work: Work
    version: int
    """How often the server had changed its vectors when it sent them to this client."""
    arrival: float
    """When what the client sends is at the server."""
    done: float
    """When the client's own model is trained too; it is kept then, and not before."""
    sent: Vectors | None
    """None once the server has it."""
    kept: Vectors
    report: dict[str, float]

    @property
    def client(self) -> int:
        """Whose it is."""
        return self.work.client


class Flight:
    """The turns of an asynchronous run.

    As many clients train at any time as there are places. When an upload arrives its place is free, and a client is
    drawn for it from those that have nothing to do; it begins at that moment with the vectors that the server then has
    (after all uploads of the same moment). A turn is computed when it begins: its work says when it will end.

    Args:
        clock: how long everything takes.
        wait_free: clients train their own model beside the upload, not before it.
        seed: the run's.

    Attributes:
        now: the time.
    """

    def __init__(self, clock: Clock, wait_free: bool, seed: int) -> None:
        """At time 0, with no place for anybody."""
        self.clock, self.wait_free, self.seed = clock, wait_free, seed
        self.now = 0.0
        self._turns: list[Turn] = []
        self._places: list[float] = []  # since when, or from when on, each free place can be taken
        self._total = 0
        self._closed = 0  # places of clients that diverged, until the server's next update
        self._begun = [0] * len(clock.devices)
        self._draws = 0

    def open(self, places: int) -> None:
        """Have that many places, and those of clients that diverged again."""
        self._places += [self.now] * (places - self._total + self._closed)
        self._total, self._closed = places, 0

    def next(
        self,
        members: int,
        version: int,
        down: int,
        begin: Callable[[list[int], list[int]], Sequence[Turned | Diverged]],
        store: ClientStore,
    ) -> Turn | Diverged | None:
        """The next upload to arrive, the clients begun that begin before; or the error of one that could not.

        None: all have diverged.

        Args:
            members: the first so many clients take part.
            version: how often the server has changed its vectors.
            down: bytes it sends to a client.
            begin: computes the turns of these clients; a number for each says which of its turns it is, from 1.
            store: where clients' vectors are kept when a turn is done.
        """
        while True:
            flying = [turn for turn in self._turns if turn.sent is not None]
            first = min(flying, key=lambda turn: (turn.arrival, turn.client), default=None)
            place = min(self._places, default=math.inf)
            if first is not None and first.arrival <= place:
                self.now = first.arrival
                self._places.append(self.now)
                return first
            if place == math.inf:
                return None
            self.now = place
            self.keep(store)
            error = self._begin(members, version, down, begin)
            if error is not None:
                return error

    def _begin(
        self,
        members: int,
        version: int,
        down: int,
        begin: Callable[[list[int], list[int]], Sequence[Turned | Diverged]],
    ) -> Diverged | None:
        """Fill the places that are free now."""
        busy = {turn.client for turn in self._turns}
        idle = [k for k in range(members) if k not in busy]
        free = [time for time in self._places if time <= self.now]
        later = [time for time in self._places if time > self.now]
        clients = []
        while free and idle:
            free.pop()
            self._draws += 1
            draw = torch.randint(len(idle), (1,), generator=stream(self.seed, "places", self._draws))
            clients.append(idle.pop(int(draw)))
        # A place without a client waits for the first that has trained its own model.
        resting = [turn.done for turn in self._turns if turn.sent is None]
        self._places = later + [min(resting) for _ in free if resting]
        clients.sort()
        for k in clients:
            self._begun[k] += 1
        error = None
        for k, turned in zip(clients, begin(clients, [self._begun[k] for k in clients]), strict=True):
            if isinstance(turned, Diverged):
                error, self._closed = turned, self._closed + 1
                continue
            up = sum(vector.nbytes for vector in turned.sent.values())
            work = Work(k, turned.trained["generic"], turned.trained["personal"], up, down, self.now)
            _, _, personal, send = self.clock.turn(work, self.now, self.wait_free)
            self._turns.append(Turn(work, version, send.end, personal.end, turned.sent, turned.kept, turned.report))
        return error

    def take(self, turn: Turn) -> Vectors:
        """What has arrived; the server has it now."""
        sent, turn.sent = turn.sent, None
        assert sent is not None
        return sent

    def keep(self, store: ClientStore) -> None:
        """Let clients keep what they have trained by now."""
        for turn in self._turns:
            if turn.done <= self.now:
                for name, vector in turn.kept.items():
                    store.write(turn.client, name.removeprefix("kept-"), opened(vector))
                    if isinstance(vector, MappedTensor):
                        vector.path.unlink(missing_ok=True)
                turn.kept = {}
        self._turns = [turn for turn in self._turns if turn.sent is not None or turn.done > self.now]

    # ---- saving ------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything to save: what JSON can say, and tensors."""
        tensors: dict[str, Tensor] = {}
        turns = []
        for i, turn in enumerate(self._turns):
            for part, vectors in (("sent", turn.sent or {}), ("kept", turn.kept)):
                tensors |= {f"{i}/{part}/{name}": opened(vector) for name, vector in vectors.items()}
            about = [list(turn.work), turn.version, turn.arrival, turn.done, turn.sent is not None, turn.report]
            turns.append(about)
        names = ("now", "_places", "_total", "_closed", "_begun", "_draws")
        return {"turns": turns, **{name: getattr(self, name) for name in names}}, tensors

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
        self._turns = []
        for i, (work, version, arrival, done, flying, report) in enumerate(state["turns"]):
            found: dict[str, dict[str, Tensor]] = {"sent": {}, "kept": {}}
            for name, tensor in tensors.items():
                number, part, vector = name.split("/", 2)
                if int(number) == i:
                    found[part][vector] = tensor
            sent = found["sent"] if flying else None
            self._turns.append(Turn(Work(*work), version, arrival, done, sent, found["kept"], report))
        for name in ("now", "_places", "_total", "_closed", "_begun", "_draws"):
            setattr(self, name, state[name])
