"""Local steps replayed from a CUDA graph give what steps give that are taken one by one."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, graphs

_SETTINGS = {"rounds": 2, "device": "cuda"}


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


@pytest.fixture
def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64)[y]
    return Dataset("points", x, y, ("a", "b", "c"), torch.zeros(60, dtype=torch.bool), dtype=torch.float64)


@pytest.fixture
def partition() -> Partition:
    """Two clients with 22 samples, of which batches of four leave a smaller one."""
    none = torch.empty(0, dtype=torch.int64)
    train, test = ((torch.arange(30 * k, 30 * k + 22) for k in range(2)), (torch.arange(22, 30), torch.arange(52, 60)))
    return Partition(tuple(train), (none, none), test, none, none)


def _models(name: str, network: nn.Module, dataset: Dataset, partition: Partition, **settings: object) -> list[Tensor]:
    method = METHODS[name](lr=0.1, batch_size=4, momentum=0.5, local_epochs=2)
    given = Settings(**{**_SETTINGS, **settings})  # type: ignore[arg-type]
    run = Federation(method, copy.deepcopy(network), dataset, partition, given)
    run.run()
    return [run.server[name] for name in run.server]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedsam", "scaffold", "fednova", "ditto"])
def test_replayed_steps_on_cuda_are_the_steps_themselves(
    name: str, device_type: str, network: nn.Module, dataset: Dataset, partition: Partition,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if device_type == "cpu":
        pytest.skip("graphs are CUDA's")
    replays = []

    def eagerly(function: Callable[[], None]) -> Callable[[], None]:
        """In place of the recording, which a simulated GPU has not for torch's own ops: all but CUDA's part of it."""
        return lambda: (replays.append(1), function())[1]

    expected = _models(name, network, dataset, partition)
    monkeypatch.setattr(graphs, "record", eagerly)
    found = _models(name, network, dataset, partition, graphs=True)
    assert replays and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_recorded_steps_on_cuda_give_the_same_numbers(
    device_type: str, network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    if device_type == "cpu":
        pytest.skip("graphs are CUDA's")
    if "FAKEGPU_BUILD" in os.environ:
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            pytest.skip("a graph needs torch's caching allocator")
        with pytest.raises(ValueError, match="graphs is true, and a step of this method cannot be recorded"):
            _models("fedavg", network, dataset, partition, graphs=True)
        pytest.skip("a simulated GPU cannot record torch's own ops; the refusal was seen")
    expected = _models("fedavg", network, dataset, partition)
    found = _models("fedavg", network, dataset, partition, graphs=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_graphs_are_refused_where_there_is_no_gpu() -> None:
    with pytest.raises(ValueError, match=r"graphs is True; .*false where device is not cuda"):
        Settings(graphs=True)
