"""A virtual clock: how long a run would take on clients' devices and links, whatever machine simulates it.

Client k trains ``compute`` seconds on a sample, sends ``up`` and receives ``down`` bytes a second, each message after
``latency`` seconds. A turn that trains g samples of the model that is sent and p of the personal one takes

==========  ============================================  ==============================
receive     download  d                                   latency + bytes / down
train       GMUpdate  g                                   compute * samples
personal    PMUpdate  p                                   compute * samples
send        upload    u                                   latency + bytes / up
==========  ============================================  ==============================

and the server aggregates in a seconds once it has what all clients of the round send. The protocols of spectral
co-distillation (Figure 2) differ in what a client does while its model travels:

- ``compute-and-wait``: d, g, p, u one after the other.
- ``wait-free``: d, g, then p beside u; the next turn begins when the new global model has arrived *and* the personal
  steps are done.
- ``until-arrival``: the same, with as many personal steps as fit before the new global model arrives, in place of
  those that were asked for. (The paper says both: Algorithm 1 has a number of steps, its Section 3.5 has this.)

In the first two a synchronous run's numbers do not depend on the protocol or on the clock, so one run has both
timelines, and :class:`Timeline` finds them afterwards from what the run recorded of its work, for any clock.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from .messages import Protocol, Work
from .settings import ClockOptions
from .streams import stream

__all__ = ["PROTOCOLS", "Clock", "Device", "Span", "Timeline", "clock_of"]

PROTOCOLS: tuple[str, ...] = get_args(Protocol)


class Device(NamedTuple):
    """A client's device and link."""

    compute: float
    """Seconds a training step takes for each of its samples."""
    up: float
    """Bytes per second from the client to the server."""
    down: float
    """Bytes per second from the server to the client."""
    latency: float
    """Seconds before the first byte arrives, either way."""


class Span(NamedTuple):
    """One thing a client did, and when."""

    client: int
    what: str
    """``"receive"``, ``"train"``, ``"personal"`` or ``"send"``."""
    begin: float
    end: float


class Clock:
    """The devices of all clients, and the server's.

    Args:
        devices: one for each client.
        aggregation: seconds the server takes for a new model.
    """

    def __init__(self, devices: Sequence[Device], aggregation: float = 0.0) -> None:
        self.devices, self.aggregation = tuple(devices), aggregation
        for k, device in enumerate(self.devices):
            _check(f"client {k}", device)

    @classmethod
    def drawn(cls, clients: int, median: Device, spread: float, seed: int, aggregation: float = 0.0) -> Clock:
        """Each quantity of each client log-normal around its median, from a stream of its own of the run's seed.

        Args:
            clients: how many.
            median: of each quantity.
            spread: standard deviation of the natural logarithm; 0: the same for all clients.
            seed: the run's.
            aggregation: seconds the server takes for a new model.
        """
        factors = [
            torch.randn(clients, generator=stream(seed, "clock", name), dtype=torch.float64).mul(spread).exp().tolist()
            for name in Device._fields
        ]
        devices = [Device(*(m * f for m, f in zip(median, row, strict=True))) for row in zip(*factors, strict=True)]
        return cls(devices, aggregation)

    @classmethod
    def trace(cls, path: Path, clients: int, aggregation: float = 0.0) -> Clock:
        """The devices of a file: CSV with the columns client, compute, up, down, latency, or a JSON list of such rows.

        Raises:
            ValueError: it does not have each client once, or a value that is no such number; the message names it.
        """
        try:
            text = path.read_text(encoding="utf-8")
            rows = json.loads(text) if path.suffix == ".json" else list(csv.DictReader(text.splitlines()))
        except OSError as error:
            raise ValueError(f"the clock's trace {path} cannot be read: {error.strerror}") from None
        except (ValueError, csv.Error, RecursionError) as error:
            raise ValueError(f"the clock's trace {path} is not {path.suffix[1:] or 'CSV'}: {error}") from None
        columns = ("client", *Device._fields)
        found: dict[int, Device] = {}
        for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
            missing = [name for name in columns if not isinstance(row, Mapping) or row.get(name) in (None, "")]
            if missing:
                raise ValueError(f"{path}, row {number} has no {missing[0]}; a row has {', '.join(columns)}")
            try:
                client, device = int(row["client"]), Device(*(float(row[name]) for name in Device._fields))
            except (TypeError, ValueError, OverflowError):
                shown = str(dict(row))
                shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
                raise ValueError(f"{path}, row {number} is {shown}; numbers are accepted") from None
            if client in found or not 0 <= client < clients:
                wrong = "is there twice" if client in found else f"is not one of 0 to {clients - 1}"
                raise ValueError(f"{path}, row {number}: client {client} {wrong}")
            _check(f"{path}, row {number}", device)
            found[client] = device
        if len(found) < clients:
            absent = next(k for k in range(clients) if k not in found)
            raise ValueError(f"{path} has {len(found)} of {clients} clients; the first that is not there is {absent}")
        return cls([found[k] for k in range(clients)], aggregation)

    def scaled(self, links: float) -> Clock:
        """The same with links that take ``links`` times as long, the server's aggregation too."""
        devices = [d._replace(up=d.up / links, down=d.down / links, latency=d.latency * links) for d in self.devices]
        return Clock(devices, self.aggregation * links)

    def receive(self, work: Work) -> float:
        """How long the client's download takes."""
        device = self.devices[work.client]
        return device.latency + work.down / device.down if work.down else 0.0

    def send(self, work: Work) -> float:
        """How long its upload takes."""
        device = self.devices[work.client]
        return device.latency + work.up / device.up if work.up else 0.0

    def train(self, client: int, samples: int) -> float:
        """How many seconds training steps on this number of samples take."""
        return samples * self.devices[client].compute

    def turn(self, work: Work, begin: float, wait_free: bool, free: float = 0.0) -> list[Span]:
        """A turn: receive, train, personal, send.

        Args:
            work: what it does.
            begin: when the server sends.
            wait_free: send beside the personal training, not after it.
            free: when the client has done what it did before; it trains from then on.
        """
        k = work.client
        arrived = begin + self.receive(work)
        ready = max(arrived, free)
        trained = ready + self.train(k, work.trained)
        personal = trained + self.train(k, work.personal)
        sending = trained if wait_free else personal
        return [
            Span(k, "receive", begin, arrived),
            Span(k, "train", ready, trained),
            Span(k, "personal", trained, personal),
            Span(k, "send", sending, sending + self.send(work)),
        ]


def clock_of(options: ClockOptions, clients: int, seed: int) -> Clock:
    """The clock for this number of clients; ``none`` gives that of equal clients, which only orders events."""
    if options.clock == "trace":
        return Clock.trace(Path(options.clock_trace), clients, options.clock_aggregation)
    median = Device(options.clock_compute, options.clock_up, options.clock_down, options.clock_latency)
    spread = options.clock_spread if options.clock == "log-normal" else 0.0
    return Clock.drawn(clients, median, spread, seed, options.clock_aggregation)


class Timeline:
    """The rounds of a synchronous run on a clock, one after the other.

    Attributes:
        time: when the last round was over: the server has its new model, and the clients have theirs.
    """

    def __init__(self, clock: Clock, protocol: str) -> None:
        """At time 0, with the server about to send the initial model."""
        self.clock, self.wait_free = clock, protocol != "compute-and-wait"
        self.time = 0.0
        self._sends = 0.0  # when the server has its newest model
        self._free = [0.0] * len(clock.devices)  # when each client has done its personal steps

    def round(self, done: Iterable[Sequence[Any]]) -> list[Span]:
        """What everybody does in the next round, and when, from its :class:`Work` (or a list that JSON made of it)."""
        works = [Work(*work) for work in done]
        spans = self._spans(works)
        self._sends = self._aggregated(works, spans)
        for work, (_, _, personal, _) in zip(works, spans, strict=True):
            self._free[work.client] = personal.end
            self.time = max(self.time, personal.end)
        self.time = max(self.time, self._sends)
        return [span for turn in spans for span in turn if span.end > span.begin]

    def room(self, works: Sequence[Work]) -> list[int]:
        """How many samples each of these clients can train its own model on before the new model arrives.

        Args:
            works: the coming round's, without their personal part.
        """
        spans = self._spans(works)
        aggregated = self._aggregated(works, spans)
        found = []
        for work, (_, train, _, _) in zip(works, spans, strict=True):
            idle = aggregated + self.clock.receive(work) - train.end
            # The last bit of a quotient must not cost a sample.
            found.append(math.floor(idle / self.clock.devices[work.client].compute * (1 + 1e-12)))
        return found

    def state(self) -> list[float]:
        """The timeline as numbers, from which :meth:`restore` goes on."""
        return [self.time, self._sends, *self._free]

    def restore(self, state: Sequence[float]) -> None:
        """Go on from the numbers that :meth:`state` gave."""
        self.time, self._sends, *self._free = state

    def _spans(self, works: Sequence[Work]) -> list[list[Span]]:
        return [self.clock.turn(work, self._sends, self.wait_free, self._free[work.client]) for work in works]

    def _aggregated(self, works: Sequence[Work], spans: Sequence[Sequence[Span]]) -> float:
        """When the server has its next model: all uploads have come."""
        uploads = [send.end for work, (_, _, _, send) in zip(works, spans, strict=True) if work.up]
        return max(uploads) + self.clock.aggregation if uploads else self._sends


def _check(where: str, device: Device) -> None:
    for name, value in device._asdict().items():
        accepted = "0 or more" if name == "latency" else "above 0"
        if not (math.isfinite(value) and (value >= 0 if name == "latency" else value > 0)):
            raise ValueError(f"{name} of {where} is {value}; accepted is a number {accepted}")
