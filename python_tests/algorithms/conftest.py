from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Buffers, Client, ClientStore, Method, Server, WorkingModel
from pfl_ext.federation.turns import Plan, Turns


@pytest.fixture
def dataset() -> Dataset:
    """48 points of three classes in four dimensions, float64 to the last step."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(48) % 3
    x = torch.randn(48, 4, generator=generator, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64)[y]
    return Dataset("points", x, y, ("a", "b", "c"), torch.zeros(48, dtype=torch.bool), dtype=torch.float64)


@pytest.fixture
def partition() -> Partition:
    """Three clients with 8 training, 4 validation and 4 test samples each."""

    def cut(first: int, size: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.arange(16 * k + first, 16 * k + first + size) for k in range(3))

    test = cut(12, 4)
    return Partition(cut(0, 8), cut(8, 4), test, torch.empty(0, dtype=torch.int64), torch.cat(test))


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


@pytest.fixture
def turn(dataset: Dataset, partition: Partition, network: nn.Module) -> Callable[..., tuple[Turns, Client]]:
    """A client's turn of a method, without an engine."""

    def make(method: Method, client: int = 0, round: int = 2) -> tuple[Turns, Client]:
        model = WorkingModel(copy.deepcopy(network))
        store = ClientStore(3, method.client_state(model))
        module = copy.deepcopy(network)
        server = Server(method.server_state(model), module, 7, partition.clients)
        method.prepare_server(server)
        turns = Turns(Plan(method, module, dataset, partition, store, server, 7, Buffers(), "none"))
        return turns, Client(client, round, turns.model, dataset, partition, store, 7)

    return make
