from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Method, Settings

Make = Callable[..., Federation]


@pytest.fixture
def make_run() -> Make:
    """Makes a run of four clients with few samples."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 4, generator=generator) + 2 * torch.eye(4)[y]
    dataset = Dataset("points", x, y, ("a", "b", "c"), torch.zeros(60, dtype=torch.bool))
    parts = torch.arange(60).view(4, 15)
    train, test = tuple(parts[:, :10]), tuple(parts[:, 10:])
    nothing = torch.empty(0, dtype=torch.int64)
    partition = Partition(train, (nothing,) * 4, test, nothing, torch.cat(test))

    def make(method: Method, folder: Any = None, resume: bool = False, **settings: Any) -> Federation:
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        options = {"rounds": 3, "checkpoint_every": 1, **settings}
        return Federation(method, network, dataset, partition, Settings(**options), folder=folder, resume=resume)

    return make
