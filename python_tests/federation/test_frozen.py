"""What is frozen does not exist for keeping, sending and counting."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import METHODS, Ditto, FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, InProcess, Record, Settings

QUICK = {"lr": 0.1, "batch_size": 4}
SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0, 5.0), "lambdas": (0.0, 0.5), "grid": "batched"},
    "fedgen": {"generator_steps": 3},
}
FROZEN = 4 * 7 + 7


class _Constant(nn.Module):
    """What a frozen linear layer computes, with nothing in it that a network could train, keep or send."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.numbers = (layer.weight.detach().clone(), layer.bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, *self.numbers)


def _networks(batch_norm: bool) -> tuple[nn.Module, nn.Module]:
    """A network whose first layer is frozen, and the same with a constant in its place."""
    torch.manual_seed(1)
    first = nn.Linear(4, 7).requires_grad_(False)
    norm = nn.BatchNorm1d(7) if batch_norm else nn.Identity()
    rest = [norm, nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)]
    return nn.Sequential(first, *rest), nn.Sequential(_Constant(first), *rest)


def _sizes(run: Federation) -> dict[str, Any]:
    """How many numbers the server and a client have, by name."""
    assert isinstance(run.engine, InProcess)
    kept = {name: vector.numel() for name, vector in run.engine.store.initial.items()}
    return {"server": {name: vector.numel() for name, vector in run.server.items()}, "kept": kept}


def _told(records: list[Record]) -> str:
    return json.dumps([{k: v for k, v in record.items() if not k.startswith("seconds")} for record in records])


@pytest.mark.parametrize("name", list(METHODS))
def test_a_run_with_a_frozen_layer_is_the_run_with_a_constant_in_its_place(
    name: str, dataset: Dataset, partition: Partition
) -> None:
    method = METHODS[name](**{**QUICK, **SHORT.get(name, {})})
    frozen, constant = _networks(batch_norm=name == "fedbn")
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    settings = Settings(rounds=2, participation=0.7, new_clients=1)
    ours, theirs = (
        Federation(method, network, dataset, partition, settings, auxiliary=auxiliary) for network in (frozen, constant)
    )
    assert _sizes(ours) == _sizes(theirs)
    # Communication, trained parameters, work, metrics, all of it.
    assert _told(ours.run()) == _told(theirs.run())
    for vector in ours.server:
        assert torch.equal(ours.server[vector], theirs.server[vector]), vector
    assert isinstance(ours.engine, InProcess) and isinstance(theirs.engine, InProcess)
    for k in range(partition.clients):
        for vector in ours.engine.store.labels:
            assert torch.equal(ours.engine.store.read(k, vector), theirs.engine.store.read(k, vector)), vector


def test_the_numbers_of_a_frozen_layer_are_in_no_count(dataset: Dataset, partition: Partition) -> None:
    network, _ = _networks(batch_norm=False)
    every = sum(p.numel() for p in network.parameters())
    trained = every - FROZEN
    run = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=1))
    assert _sizes(run) == {"server": {"model": trained}, "kept": {"personal": trained}}
    (record,) = run.run()
    assert record["communication"] == {
        "up_parameters": 6 * trained,
        "up_bytes": 6 * 4 * trained,
        "down_parameters": 6 * trained,
        "down_bytes": 6 * 4 * trained,
    }
    assert record["training"]["trained_parameters"] == 2 * trained


class _LowRank(nn.Module):
    """A frozen linear layer with a trained change of low rank."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", [FedAvg(**QUICK), Ditto(**QUICK)], ids=["fedavg", "ditto"])
def test_a_network_with_factors_of_low_rank_sends_what_it_trains(
    method: Any, dataset: Dataset, partition: Partition
) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(_LowRank(4, 32, 2), nn.ReLU(), _LowRank(32, 3, 1))
    base = (4 * 32 + 32) + (32 * 3 + 3)
    factors = (2 * 4 + 32 * 2) + (32 + 3)
    assert sum(p.numel() for p in network.parameters()) == base + factors == 366 and factors == 107
    run = Federation(method, network, dataset, partition, Settings(rounds=2))
    *_, record = run.run()
    models = 2 if method.name == "ditto" else 1
    assert record["training"]["trained_parameters"] == models * factors
    assert record["communication"]["up_parameters"] == record["communication"]["down_parameters"] == 6 * factors
    assert record["communication"]["up_bytes"] == record["communication"]["down_bytes"] == 6 * factors * 4
    assert _sizes(run) == {"server": {"model": factors}, "kept": {"personal": factors} if models == 2 else {}}
    # What is trained is in use: the factors begin with no influence.
    start = torch.cat([p.detach().flatten() for p in network.parameters() if p.requires_grad])
    assert not torch.equal(run.server["model"], start)
    for ours, given in zip(run.engine.runtime.model.module.parameters(), network.parameters(), strict=True):  # type: ignore[attr-defined]
        assert given.requires_grad or torch.equal(ours, given)
