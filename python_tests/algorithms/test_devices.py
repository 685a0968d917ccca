"""Every method on every device gives what it gives on the CPU, to rounding."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Record, Settings

_SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0, 5.0), "lambdas": (0.0, 0.5)},
    "fedgen": {"generator_steps": 3},
    "fedbuff": {"buffer": 2},
}


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def _records(name: str, device: str, network: nn.Module, dataset: Dataset, partition: Partition) -> list[Record]:
    method = METHODS[name](lr=0.1, batch_size=4, momentum=0.5, **_SHORT.get(name, {}))
    settings = Settings(rounds=2, participation=0.7, new_clients=1, join_round=2, device=device)
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    return Federation(method, copy.deepcopy(network), dataset, partition, settings, auxiliary=auxiliary).run()


def _losses(records: list[Record]) -> dict[tuple[int, str, str, str], float]:
    """The mean loss after each round, by whose clients, model and split they are."""
    return {
        (record["round"], whose, model, split): of["loss"]["mean"] if isinstance(of["loss"], dict) else of["loss"]
        for record in records
        for whose in ("models", "new_clients")
        for model, splits in record[whose].items()
        for split, of in splits.items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_what_it_gives_on_the_cpu(
    name: str, device_type: str, network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    if device_type == "cpu":
        pytest.skip("that is what the others are compared with")
    expected, found = (_losses(_records(name, d, network, dataset, partition)) for d in ("cpu", device_type))
    assert found.keys() == expected.keys() and expected
    # float64: a few thousand roundings of 1e-16 each, through a network that multiplies them by less than 1e4.
    for which, loss in expected.items():
        assert math.isclose(found[which], loss, rel_tol=1e-8), which
