"""Everything that changes in a run, and how it becomes a checkpoint and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_ext.metrics import summarize

from .engine import Engine
from .restored import check_clients, check_plain, check_reports, check_rounds, check_vectors, parts_of
from .rounds import Rounds
from .server import Server

__all__ = ["ClientReports", "RunState"]


class ClientReports:
    """What each client's method has reported of it, the newest of each number."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self._of: list[dict[str, float]] = [{} for _ in range(clients)]

    def __getitem__(self, client: int) -> dict[str, float]:
        """All numbers that one client has reported, by name."""
        return self._of[client]

    def update(self, client: int, report: Mapping[str, float]) -> None:
        """Take over what a turn reported."""
        self._of[client].update(report)

    def means(self, clients: Sequence[int]) -> dict[str, float]:
        """The mean of each number over those of some clients that have it."""
        names = sorted({name for k in clients for name in self._of[k]})
        return {name: summarize([self._of[k].get(name, math.nan) for k in clients])["mean"] for name in names}

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save: for each name [2, clients], the values and whether a client has one."""
        return {
            name: torch.tensor(
                [[of.get(name, 0.0) for of in self._of], [float(name in of) for of in self._of]], dtype=torch.float64
            )
            for name in sorted({name for of in self._of for name in of})
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set them to what :meth:`tensors` gave."""
        for k, of in enumerate(self._of):
            of.clear()
            of.update({name: float(saved[0, k]) for name, saved in tensors.items() if saved[1, k]})


class RunState:
    """Everything that changes in a run.

    Args:
        server, engine, rounds: the run's.
        clients: how many.

    Attributes:
        round: how many rounds are done.
        personalized: how many clients have done their part after the last round.
        recorded: the round of the last record.
        received_last: what clients received after the last round, for its record.
        dropped_last: clients that diverged after it.
        reports: what clients report.
    """

    def __init__(self, server: Server, engine: Engine, rounds: Rounds, clients: int) -> None:
        self.server, self.engine, self.rounds = server, engine, rounds
        self.round = self.personalized = self.recorded = 0
        self.received_last = {"down_parameters": 0, "down_bytes": 0}
        self.dropped_last: list[int] = []
        self.reports = ClientReports(clients)

    def content(self, clients: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint holds: what JSON can say, of a size that does not grow with the rounds, and tensors.

        Without ``clients`` what these keep is left out: the engine has written it.
        """
        rounds, in_flight = self.rounds.state()
        parts = {
            "server": dict(self.server),
            "clients": self.engine.state() if clients else {},
            "rounds": in_flight,
            "reports": self.reports.tensors(),
        }
        tensors = {f"{part}/{name}": tensor for part, some in parts.items() for name, tensor in some.items()}
        return {**{name: getattr(self, name) for name in _PLAIN}, "rounds": rounds}, tensors

    def restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`content` gave.

        Raises:
            DamagedCheckpoint: it is not of such a run; nothing is changed then.
        """
        parts, clients, kept = parts_of(tensors), self.reports.clients, self.engine.state()
        check_plain(state, clients)
        check_vectors("server", parts["server"], self.server)
        check_clients(parts["clients"], kept, clients)
        own, round = self.rounds.state(), state["round"]
        check_rounds(state.get("rounds"), parts["rounds"], own, round, clients, self.server, kept)
        check_reports(parts["reports"], clients)
        self.rounds.restore(state["rounds"], parts["rounds"])
        self.engine.restore(parts["clients"])
        for name in self.server:
            # A copy: what was read from a file may begin at an odd address, where a matrix product rounds differently.
            self.server[name] = parts["server"][name].to(self.server[name].device, copy=True)
        self.reports.restore(parts["reports"])
        for name in _PLAIN:
            setattr(self, name, state[name])


_PLAIN = ("round", "personalized", "recorded", "received_last", "dropped_last")
