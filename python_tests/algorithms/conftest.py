from __future__ import annotations

import copy

import pytest
import torch
from by_hand import Turn
from torch import nn

from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, ClientRuntime, Method, Plan, Request, Server, Settings, Stage
from pfl_ext.federation.client import Rows
from pfl_ext.tasks import task_of


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
def turn(dataset: Dataset, partition: Partition, network: nn.Module) -> Turn:
    """A client at the beginning of its turn, without an engine, and the runtime that it is in."""

    def make(method: Method, client: int = 0, round: int = 2, stage: Stage = "train") -> tuple[ClientRuntime, Client]:
        settings = Settings(seed=7)
        rows = {k: Rows(partition.train[k], partition.validation[k], partition.test[k]) for k in range(3)}
        plan = Plan(method, task_of(dataset), copy.deepcopy(network), dataset, rows, settings)
        runtime = ClientRuntime(plan, plan.store())
        server = Server(task_of(dataset), network, settings, len(rows))
        method.set_up(server)
        runtime.server = server
        return runtime, runtime.begin(Request(client, round, stage))[0]

    return make


@pytest.fixture
def by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are taken by autograd: a method that needs it can be compared to the bit with one that does not."""
    monkeypatch.setattr("pfl_ext.federation.steps.is_native", lambda dtype: False)
