"""Turns side by side on a GPU's streams give the bits of turns one after the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import EngineOptions, InProcess, Streams, make_engine
from pfl_ext.federation import Federation, Settings

_SHORT: dict[str, dict[str, Any]] = {"fedbuff": {"buffer": 2}}


@pytest.fixture
def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(80) % 3
    x = torch.randn(80, 4, generator=generator) + 2 * torch.eye(4)[y]
    return Dataset("points", x, y, ("a", "b", "c"), torch.zeros(80, dtype=torch.bool))


@pytest.fixture
def partition() -> Partition:
    none = torch.empty(0, dtype=torch.int64)
    train, test = (tuple(torch.arange(16 * k + a, 16 * k + b) for k in range(5)) for a, b in ((0, 12), (12, 16)))
    return Partition(train, (none,) * 5, test, none, none)


def _network(dropout: bool = False) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), *([nn.Dropout()] if dropout else []), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def _run(name: str, dataset: Dataset, partition: Partition, engine: InProcess) -> tuple[list[Any], dict[str, Tensor]]:
    method = METHODS[name](lr=0.1, batch_size=4, momentum=0.5, **_SHORT.get(name, {}))
    settings = Settings(rounds=2, participation=0.8, device="cuda")
    run = Federation(method, copy.deepcopy(_network()), dataset, partition, settings, engine=engine)
    records = [record["models"] for record in run.run()]
    return records, {**run.server, **run.engine.state()}


@pytest.mark.parametrize("name", ["fedavg", "ditto", "scd", "plgu-lf", "fedbuff", "scaffold", "apfl"])
def test_turns_on_streams_on_cuda_give_the_same_bits(
    name: str, device_type: str, dataset: Dataset, partition: Partition
) -> None:
    if device_type == "cpu":
        pytest.skip("streams are a GPU's")
    (expected_records, expected), (records, found) = (
        _run(name, dataset, partition, engine) for engine in (InProcess(), Streams(3))
    )
    assert records == expected_records and found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_turns_on_cuda_are_on_several_streams(device_type: str, dataset: Dataset, partition: Partition) -> None:
    fakegpu = pytest.importorskip("fakegpu", reason="which stream a kernel ran on is known of a simulated GPU")
    with fakegpu.Recording() as record:
        _run("fedavg", dataset, partition, Streams(3))
    assert len({launch.stream for launch in record.launches}) > 3 and record.findings == 0


def test_dropout_is_refused_on_cuda_streams(device_type: str, dataset: Dataset, partition: Partition) -> None:
    if device_type == "cpu":
        pytest.skip("streams are a GPU's")
    with pytest.raises(ValueError, match=r"streams is 2, and the network has dropout \(3\)"):
        settings = Settings(device="cuda")
        Federation(METHODS["fedavg"](), _network(True), dataset, partition, settings, engine=Streams(2))


def test_streams_are_refused_on_a_cpu_and_beside_workers(dataset: Dataset, partition: Partition) -> None:
    with pytest.raises(ValueError, match="streams is 2 on cpu; streams are a GPU's"):
        Federation(METHODS["fedavg"](), _network(), dataset, partition, Settings(), engine=Streams(2))
    with pytest.raises(ValueError, match="streams is 2"):
        EngineOptions(streams=2, workers=2)
    assert isinstance(make_engine(EngineOptions(streams=2)), Streams)
