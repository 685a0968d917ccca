"""No local step and no evaluated batch waits for the GPU: a longer turn waits as often as a short one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gpu_waits import counted_waits
from torch import nn

from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, InProcess, Request, Settings, client

_SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0,), "lambdas": (0.5,)},
    "fedgen": {"generator_steps": 3},
    "fedbuff": {"buffer": 2},
}


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def _run(
    name: str, device: str, network: nn.Module, dataset: Dataset, partition: Partition, **changed: Any
) -> Federation:
    given: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "momentum": 0.5, **_SHORT.get(name, {}), **changed}
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    settings = Settings(rounds=2, device=device)
    run = Federation(METHODS[name](**given), copy.deepcopy(network), dataset, partition, settings, auxiliary=auxiliary)
    run.engine.publish(run.server)
    return run


def _waits(run: Federation, *requests: Request) -> int:
    assert isinstance(run.engine, InProcess)
    with counted_waits() as waits:
        for request in requests:
            reply = run.engine.runtime(request)
            assert reply.error is None
    return waits.count


@pytest.mark.parametrize("name", METHODS)
def test_a_local_step_waits_for_nothing(
    name: str, device_type: str, network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    if device_type == "cpu":
        pytest.skip("nobody waits for the CPU")
    found = []
    for epochs in (1, 3):
        run = _run(name, device_type, network, dataset, partition, local_epochs=epochs)
        _waits(run, Request(0, 1, "train"))  # what is made at the first turn
        found.append(_waits(run, Request(1, 1, "train")))
    assert found[0] == found[1]


def test_an_evaluated_batch_waits_for_nothing(
    device_type: str, network: nn.Module, dataset: Dataset, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_type == "cpu":
        pytest.skip("nobody waits for the CPU")
    found = []
    for size in (128, 1):
        monkeypatch.setattr(client, "_EVALUATION_BATCH", size)
        found.append(_waits(_run("fedavg", device_type, network, dataset, partition), Request(0, 1, "evaluate")))
    assert found[0] == found[1]


@pytest.mark.parametrize("augmentation", ["flip", "flip-crop"])
def test_batches_and_augmentation_wait_for_nothing(device_type: str, augmentation: str) -> None:
    if device_type == "cpu":
        pytest.skip("nobody waits for the CPU")
    images = Dataset(
        "images", torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8), torch.arange(64) % 2, ("a", "b"),
        torch.zeros(64, dtype=torch.bool), mean=torch.zeros(3), std=torch.ones(3),
    )  # fmt: skip
    rows, none = torch.arange(64), torch.empty(0, dtype=torch.int64)
    partition = Partition((rows,), (none,), (none,), none, none)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    settings = Settings(rounds=1, device=device_type, augmentation=augmentation)
    run = Federation(METHODS["fedavg"](lr=0.1), network, images, partition, settings)
    assert isinstance(run.engine, InProcess)
    run.engine.publish(run.server)
    turn, _ = run.engine.runtime.begin(Request(0, 1, "train"))
    with counted_waits() as waits:
        batches = list(turn.batches(8, epochs=2))
    assert len(batches) == 16 and all(batch.inputs.device.type == device_type for batch in batches)
    assert waits.count == 0
