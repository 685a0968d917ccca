"""What a method sees of the server during its part of a round."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pfl_ext.data import Dataset
from pfl_ext.nn import Networks
from pfl_ext.tasks import Task

from .model import WorkingModel
from .settings import Settings
from .streams import stream

__all__ = ["Server"]


class Server(dict[str, Tensor]):
    """The server's vectors by their names, and what it may train with.

    Most methods use it as the dictionary it is. One that trains at the server has a working model of the server's own
    and random streams that depend on the run's seed, their name and the round alone.

    Args:
        task: what is learned.
        module: the network, or several; a copy becomes the working model when that is first asked for.
        settings: the run's.
        clients: how many clients the federation has.
        auxiliary, held_out: see below.

    Attributes:
        clients: as given.
        partial: whether a client may never be selected: not all are in a round, or some join late or never.
        members: how many of them, the first ones, can be selected in this round: others join later or never.
        joined: how many of these could not be in the round before.
        round: the round, from 1.
        report: numbers that the method reports of this round, for the tables of the run.
        auxiliary: unlabelled data, None where the run has none. Its targets say nothing.
        held_out: labelled samples that the partition leaves to the server, None where there are none.
        networks: the number of each client's network: 0 for all, unless there are several.
    """

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        settings: Settings,
        clients: int,
        auxiliary: Dataset | None = None,
        held_out: Dataset | None = None,
    ) -> None:
        super().__init__()
        self.task = task
        self.clients = self.members = clients
        self.joined = 0
        self.partial = settings.participation < 1 or settings.new_clients > 0
        self.round = 0
        self.report: dict[str, float] = {}
        self.auxiliary, self.held_out = auxiliary, held_out
        self._module, self._settings = module, settings
        self._models: list[WorkingModel] | None = None
        networks = Networks.of(module)
        self.networks = tuple(networks.network(k) for k in range(clients))

    def begin(self, round: int, members: int, joined: int = 0) -> None:
        """A new round (the loop says so)."""
        self.round, self.members, self.joined = round, members, joined
        self.report.clear()

    @property
    def model(self) -> WorkingModel:
        """The working model of the first network. It holds whatever the last round left: load a state first."""
        return self.models[0]

    @property
    def models(self) -> list[WorkingModel]:
        """The working model of each network."""
        if self._models is None:
            s, each = self._settings, Networks.of(copy.deepcopy(self._module)).each
            self._models = [WorkingModel(m, s.local_buffers, s.server_buffers, n) for n, m in enumerate(each)]
        return self._models

    def stream(self, name: str) -> torch.Generator:
        """A random stream of this round, at its beginning."""
        return stream(self._settings.seed, f"server/{name}", self.round)
