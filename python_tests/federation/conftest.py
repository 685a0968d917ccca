from __future__ import annotations

import pytest
import torch
from torch import nn

from pfl_ext.data import PARTITIONERS, Dataset, Partition


@pytest.fixture
def dataset() -> Dataset:
    """120 points of three classes in four dimensions."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 3
    x = torch.randn(120, 4, generator=generator) + 2 * torch.eye(4)[y]
    return Dataset("points", x, y, ("a", "b", "c"), torch.zeros(120, dtype=torch.bool))


@pytest.fixture
def partition(dataset: Dataset) -> Partition:
    """Six clients with two classes each, 60 : 20 : 20."""
    return PARTITIONERS["ds1"](dataset, 6, generator=torch.Generator().manual_seed(1), k=2)


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
