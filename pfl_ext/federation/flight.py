"""Asynchronous rounds: turns that begin and end by the virtual clock, and uploads on their way between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .clock import Clock
from .messages import Diverged, Reply, Vector, Work
from .streams import stream

__all__ = ["Flight", "Flying"]


@dataclass
class Flying:
    """A client's turn that is not over yet."""

    work: Work
    version: int
    """How often the server had changed its vectors when it sent them to this client."""
    arrival: float
    """When what the client sends is at the server."""
    done: float
    """When the client's own model is trained too; it is kept then, and not before."""
    sent: Mapping[str, Vector] | None
    """None once the server has it."""
    kept: Mapping[str, Vector]
    report: dict[str, float]
    trained_parameters: int

    @property
    def client(self) -> int:
        """The number of the client whose turn this is."""
        return self.work.client


Begin = Callable[[list[int], list[int]], Sequence[Reply]]
"""Computes the turns of these clients; a number for each says which of its turns it is, from 1."""


class Flight:
    """The turns of an asynchronous run.

    As many clients train at any time as there are places. When an upload arrives its place is free, and a client is
    drawn for it from those that have nothing to do; it begins at that moment with the vectors that the server then has
    (after all uploads of the same moment). A turn is computed when it begins: its work says when it will end. A client
    that diverges leaves its place to another one and is not drawn again before the server's next update.

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
        self._turns: list[Flying] = []
        self._places: list[float] = []  # since when, or from when on, each free place can be taken
        self._out: list[int] = []  # clients that diverged, until the server's next update
        self._errors: list[Diverged] = []  # theirs, that nobody has been told yet
        self._begun = [0] * len(clock.devices)
        self._draws = 0

    def open(self, places: int) -> None:
        """Have that many places; clients that diverged may take one again."""
        taken = sum(turn.sent is not None for turn in self._turns)
        # Also those that nobody could take: a client had diverged, and all others were busy.
        self._places += [self.now] * (places - taken - len(self._places))
        self._out = []

    def next(self, members: int, version: int, begin: Begin) -> Flying | Diverged | None:
        """The next upload to arrive, the clients begun that begin before; or the error of one that could not.

        None: nobody is on the way, and nobody is left to begin.

        Args:
            members: how many clients, the first ones, take part.
            version: how often the server has changed its vectors.
            begin: computes turns. Before it does, the caller lets clients keep what is :meth:`due`.
        """
        while True:
            if self._errors:
                return self._errors.pop(0)
            flying = [turn for turn in self._turns if turn.sent is not None]
            first = min(flying, key=lambda turn: (turn.arrival, turn.client), default=None)
            place = min(self._places, default=math.inf)
            if first is not None and first.arrival <= place:
                self.now = first.arrival
                self._places.append(self.now)
                return first
            if place == math.inf:
                return None
            self.now = max(self.now, place)
            self._begin(members, version, begin)

    def _begin(self, members: int, version: int, begin: Begin) -> None:
        """Fill the places that are free now."""
        busy = {turn.client for turn in self._turns if turn.sent is not None or turn.done > self.now}
        idle = [k for k in range(members) if k not in busy and k not in self._out]
        free = [time for time in self._places if time <= self.now]
        later = [time for time in self._places if time > self.now]
        clients = []
        while free and idle:
            free.pop()
            self._draws += 1
            draw = torch.randint(len(idle), (1,), generator=stream(self.seed, "places", self._draws))
            clients.append(idle.pop(int(draw)))
        # A place without a client waits for the first that has trained its own model.
        resting = [turn.done for turn in self._turns if turn.sent is None and turn.done > self.now]
        self._places = later + [min(resting) for _ in free if resting]
        clients.sort()
        for k in clients:
            self._begun[k] += 1
        for k, reply in zip(clients, begin(clients, [self._begun[k] for k in clients]), strict=True):
            if reply.error is not None:
                self._errors.append(reply.error)
                self._out.append(k)
                self._places.append(self.now)
                continue
            work = reply.work._replace(begin=self.now)
            _, _, personal, send = self.clock.turn(work, self.now, self.wait_free)
            about = (reply.sent, reply.kept, reply.report, reply.trained_parameters)
            self._turns.append(Flying(work, version, send.end, personal.end, *about))

    def take(self, turn: Flying) -> Mapping[str, Vector]:
        """What has arrived; the server has it now."""
        sent, turn.sent = turn.sent, None
        assert sent is not None
        return sent

    def due(self) -> list[tuple[int, Mapping[str, Vector]]]:
        """What clients have trained by now and are to keep, each once."""
        found = []
        for turn in self._turns:
            if turn.done <= self.now and turn.kept:
                found.append((turn.client, turn.kept))
                turn.kept = {}
        self._turns = [turn for turn in self._turns if turn.sent is not None or turn.done > self.now]
        return found

    # ---- saving ------------------------------------------------------------------------------------------------------

    def state(self, fetch: Callable[[Vector], Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything to save: what JSON can say, and tensors."""
        tensors: dict[str, Tensor] = {}
        turns = []
        for i, turn in enumerate(self._turns):
            for part, vectors in (("sent", turn.sent or {}), ("kept", turn.kept)):
                tensors |= {f"{i}/{part}/{name}": fetch(vector) for name, vector in vectors.items()}
            times = (turn.version, turn.arrival, turn.done, turn.sent is not None)
            turns.append([list(turn.work), *times, turn.report, turn.trained_parameters])
        return {"turns": turns, **{name: getattr(self, name) for name in _SAVED}}, tensors

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""
        self._turns = []
        for i, (work, version, arrival, done, flying, report, trained) in enumerate(state["turns"]):
            found: dict[str, dict[str, Vector]] = {"sent": {}, "kept": {}}
            for name, tensor in tensors.items():
                number, part, vector = name.split("/", 2)
                if int(number) == i:
                    found[part][vector] = tensor
            sent = found["sent"] if flying else None
            self._turns.append(Flying(Work(*work), version, arrival, done, sent, found["kept"], report, trained))
        for name in _SAVED:
            setattr(self, name, state[name])


_SAVED = ("now", "_places", "_out", "_begun", "_draws")
