"""Who takes part in a round, and what comes of it: clients that are waited for, or clients that come by the clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .clock import PROTOCOLS, Clock, Timeline
from .engine import Engine
from .flight import Flight, Flying
from .messages import Diverged, Reply, Request, Stage, Vector, Work
from .method import Method
from .server import Server
from .settings import Schedule, Settings
from .streams import stream
from .uploads import Uploads

__all__ = ["Asynchronous", "Round", "Rounds", "Synchronous", "members", "selected_clients"]


@dataclass
class Round:
    """What the clients left to the server."""

    uploads: Uploads
    works: list[Work]
    replies: list[Reply]
    """Of everybody that received something, whether it diverged or not."""
    reports: dict[int, dict[str, float]]
    """What clients report, by their numbers."""
    trained_parameters: int
    """How many parameters a client has trained, the most of all."""
    dropped: list[int]
    """Clients that diverged."""


class Rounds(Protocol):
    """Lets the clients of a round train."""

    def round(self, t: int) -> Round:
        """Round t, until the server has what it takes for its next update."""

    def times(self, works: Sequence[Work]) -> dict[str, float]:
        """When the round that these works are of is over by the virtual clock, by protocol."""

    def identity(self) -> dict[str, Any]:
        """Protocol and clock, where they decide what models become."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything to save: what JSON can say, and tensors."""

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""


def members(schedule: Schedule, clients: int, t: int) -> int:
    """How many clients, the first ones, can be selected in a round."""
    late = schedule.new_clients and not (schedule.join_round and t >= schedule.join_round)
    return clients - (schedule.new_clients if late else 0)


def selected_clients(seed: int, round: int, clients: int, participation: float) -> list[int]:
    """The clients of a round, in order. It depends on nothing else, so all methods select the same."""
    chosen = torch.randperm(clients, generator=stream(seed, "clients", round))[: _count(participation, clients)]
    return sorted(chosen.tolist())


def _count(participation: float, clients: int) -> int:
    return max(1, math.floor(participation * clients + 0.5))  # Python's round takes 2.5 clients to 2, and 3.5 to 4


def diverged(settings: Schedule, reply: Reply) -> bool:
    """Whether the client diverged and is left out; an error where that is to stop the run."""
    if reply.error is not None and settings.diverged == "stop":
        raise reply.error
    return reply.error is not None


def received(replies: Sequence[Reply]) -> dict[str, int]:
    """What clients received, for a record."""
    return {
        "down_parameters": sum(sum(reply.received.values()) for reply in replies),
        "down_bytes": sum(reply.work.down for reply in replies),
    }


class Synchronous:
    """All selected clients begin with the server's vectors and are waited for.

    Args:
        method, settings: the run's.
        server: is asked by methods that select clients themselves.
        engine: runs the clients.
        samples: n_k of each client.
        clock: how long everything takes; the run's models depend on it where the protocol is ``until-arrival``.
    """

    def __init__(
        self, method: Method, settings: Settings, server: Server, engine: Engine, samples: Sequence[int], clock: Clock
    ) -> None:
        self.method, self.settings, self.engine, self.samples, self.clock = method, settings, engine, samples, clock
        self.server = server
        protocols: tuple[str, ...] = PROTOCOLS[:2] if settings.clock != "none" else ()
        if settings.protocol == "until-arrival":
            protocols = ("until-arrival",)
        self.timelines = {name: Timeline(clock, name) for name in protocols}

    def round(self, t: int) -> Round:
        """The selected clients; then, where the method says so, those that rest."""
        s = self.settings
        there = members(s, len(self.samples), t)
        selected = self._selected(t, there)
        replies = self._run("train", t, selected)
        arrived = [reply for reply in replies if not diverged(s, reply)]
        dropped = [reply.client for reply in replies if reply.error is not None]
        if not arrived:
            raise Diverged(dropped[0], t, "training, as that of all others selected,")
        reports = {reply.client: dict(reply.report) for reply in arrived}
        works = [reply.work for reply in arrived]
        if s.protocol == "until-arrival" and "personal" in self.method.stages:
            works = self._until_arrival(t, arrived, reports, dropped)
        if "rest" in self.method.stages:
            rested = self._run("rest", t, sorted(set(range(there)) - set(selected)))
            reports |= {reply.client: reply.report for reply in rested if not diverged(s, reply)}
            works += [reply.work for reply in rested if reply.error is None]
            replies += rested
            dropped += [reply.client for reply in rested if reply.error is not None]
        clients = [reply.client for reply in arrived]
        uploads = Uploads(
            clients,
            [self.samples[k] for k in clients],
            [reply.sent for reply in arrived],
            access=self.engine,
            weighting=self.method.weighting,
        )
        trained = max(reply.trained_parameters for reply in replies)
        return Round(uploads, works, replies, reports, trained, dropped)

    def _selected(self, t: int, there: int) -> list[int]:
        """The clients of a round, in order."""
        s = self.settings
        count = _count(s.participation, there)
        own = self.method.select(self.server, count)
        if own is None:
            return selected_clients(s.seed, t, there, s.participation)
        if len(set(own)) != count or len(own) != count or not set(own) <= set(range(there)):
            raise ValueError(
                f"{self.method.name} selects the clients {sorted(own)}; accepted are {count} different ones of 0 to "
                f"{there - 1}"
            )
        return sorted(own)

    def _run(self, stage: Stage, t: int, clients: Sequence[int]) -> list[Reply]:
        requests = [Request(k, t, stage) for k in clients]
        return list(self.engine.run(requests, [self.samples[k] for k in clients]))

    def _until_arrival(
        self, t: int, arrived: Sequence[Reply], reports: dict[int, dict[str, float]], dropped: list[int]
    ) -> list[Work]:
        """Clients train their own models until the new global one arrives."""
        works = [reply.work for reply in arrived]
        room = self.timelines["until-arrival"].room(works)
        requests = [
            Request(reply.client, t, "personal", sent=reply.sent, budget=samples)
            for reply, samples in zip(arrived, room, strict=True)
        ]
        for i, reply in enumerate(self.engine.run(requests, room)):
            if diverged(self.settings, reply):
                dropped.append(reply.client)  # what it has sent counts all the same
                continue
            works[i] = works[i]._replace(personal=reply.work.personal)
            arrived[i].trained_parameters += reply.trained_parameters
            reports[reply.client] |= reply.report
        return works

    def times(self, works: Sequence[Work]) -> dict[str, float]:
        """On every timeline of the run: two where both protocols give the same models."""
        for timeline in self.timelines.values():
            timeline.round(works)
        return {protocol: timeline.time for protocol, timeline in self.timelines.items()}

    def identity(self) -> dict[str, Any]:
        """Only how long personal models are trained may depend on the clock."""
        if self.settings.protocol != "until-arrival":
            return {}
        return {"protocol": "until-arrival", "clock": [self.clock.aggregation, *self.clock.devices]}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The timelines, for a checkpoint."""
        tensors = {name: torch.tensor(line.state(), dtype=torch.float64) for name, line in self.timelines.items()}
        return {}, tensors

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """The timelines; one that the saved run did not have cannot be gone on with."""
        for name, timeline in self.timelines.items():
            if name not in tensors:
                raise ValueError(
                    "the saved run has no virtual times to go on from: it ran with clock=none. Go on without; "
                    "pfl-ext virtual-time finds them afterwards"
                )
            timeline.restore(tensors[name].tolist())


class Asynchronous:
    """Clients begin and end by the clock, until the server has as many uploads as it takes for an update.

    The arguments are those of :class:`Synchronous`.
    """

    def __init__(
        self, method: Method, settings: Settings, server: Server, engine: Engine, samples: Sequence[int], clock: Clock
    ) -> None:
        if settings.protocol == "until-arrival":
            raise ValueError(f"{method.name} is asynchronous; its protocol is compute-and-wait or wait-free")
        self.method, self.settings, self.engine, self.samples, self.clock = method, settings, engine, samples, clock
        self.flight = Flight(clock, settings.protocol == "wait-free", settings.seed)

    def round(self, t: int) -> Round:
        """The next uploads to arrive."""
        s, flight = self.settings, self.flight
        there, size = members(s, len(self.samples), t), self.method.buffer or 1
        flight.open(_count(s.participation, there))
        replies: list[Reply] = []

        def begin(clients: list[int], numbers: list[int]) -> list[Reply]:
            self._keep()
            requests = [Request(k, number, "train") for k, number in zip(clients, numbers, strict=True)]
            begun = list(self.engine.run(requests))
            replies.extend(begun)
            return begun

        arrived: list[Flying] = []
        vectors: list[Mapping[str, Vector]] = []
        dropped: list[int] = []
        reports: dict[int, dict[str, float]] = {}
        while len(arrived) < size:
            turn = flight.next(there, t - 1, begin)
            if turn is None:
                raise Diverged(dropped[0], t, "training, as that of all others that could begin,")
            if isinstance(turn, Diverged):
                if s.diverged == "stop":
                    raise turn
                assert turn.client is not None
                dropped.append(turn.client)
                continue
            arrived.append(turn)
            vectors.append(flight.take(turn))
            reports.setdefault(turn.client, {}).update(turn.report)
        self._keep()
        clients = [turn.client for turn in arrived]
        samples, staleness = [self.samples[k] for k in clients], [t - 1 - turn.version for turn in arrived]
        uploads = Uploads(clients, samples, vectors, staleness, self.engine, self.method.weighting)
        trained = max(turn.trained_parameters for turn in arrived)
        return Round(uploads, [turn.work for turn in arrived], replies, reports, trained, dropped)

    def _keep(self) -> None:
        """Let clients keep what they have trained by now."""
        due = self.flight.due()
        list(self.engine.run([Request(client, 0, "keep", sent=kept) for client, kept in due]))
        for _, kept in due:
            for vector in kept.values():
                self.engine.release(vector)

    def times(self, works: Sequence[Work]) -> dict[str, float]:
        """The time of the last upload."""
        return {"asynchronous": self.flight.now}

    def identity(self) -> dict[str, Any]:
        """The order of uploads is by the clock."""
        return {"protocol": self.settings.protocol, "clock": [self.clock.aggregation, *self.clock.devices]}

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The turns that have begun and not ended, for a checkpoint."""
        return self.flight.state(self.engine.fetch)

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on with the turns that had begun when the checkpoint was written."""
        self.flight.restore(state, tensors)
