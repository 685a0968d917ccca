"""What two runs must have in common for one to go on where the other stopped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.algorithms import METHODS, FedAvg
from pfl_ext.data import PARTITIONERS, Dataset, Partition
from pfl_ext.federation import Federation, ForeignCheckpoint, Settings

QUICK = {"lr": 0.1, "batch_size": 4}

# Another value for every option that has an influence on what models become.
OTHERS: dict[str, dict[str, Any]] = {
    "participation": {"participation": 0.5},
    "seed": {"seed": 1},
    "new_clients": {"new_clients": 1},
    "join_round": {"join_round": 2},
    "diverged": {"diverged": "drop"},
    "personal_cap": {"personal_cap": 3},
    "augmentation": {"augmentation": "flip"},
    "drop_last": {"drop_last": True},
    "local_buffers": {"local_buffers": ("BatchNorm1d",)},
    "server_buffers": {"server_buffers": ("BatchNorm1d",)},
    "threads": {"threads": 2},
    "fused_steps": {"fused_steps": False},
    "device": {"device": "meta"},
    "dp_secure": {"dp_clip": 1.0, "dp_secure": True},
    "dp_noise": {"dp_noise": 2.0, "dp_clip": 1.0},
    "dp_clip": {"dp_clip": 2.0},
    "dp_delta": {"dp_delta": 1e-6},
}
# And for those that have none.
WITHOUT: dict[str, dict[str, Any]] = {
    "rounds": {"rounds": 3},
    "protocol": {"protocol": "compute-and-wait"},
    "evaluate_every": {"evaluate_every": 2},
    "evaluate": {"evaluate": "global"},
    "evaluate_clients_every": {"evaluate_clients_every": 2},
    "evaluate_train": {"evaluate_train": True},
    "evaluate_local": {"evaluate_local": True},
    "evaluate_participants": {"evaluate_participants": True},
    "personal_global_test": {"personal_global_test": True},
    "prediction_distance": {"prediction_distance": True},
    "store": {"store": "mapped"},
    "graphs": {"device": "cuda", "graphs": True},
    "uploads": {"device": "cuda", "uploads": "host"},
    "checkpoint_every": {"checkpoint_every": 1},
    "clock": {"clock": "constant"},
    "clock_compute": {"clock_compute": 1.0},
    "clock_up": {"clock_up": 1.0},
    "clock_down": {"clock_down": 1.0},
    "clock_latency": {"clock_latency": 1.0},
    "clock_spread": {"clock_spread": 1.0},
    "clock_aggregation": {"clock_aggregation": 1.0},
    "clock_trace": {"clock": "trace", "clock_trace": "devices.csv"},
}


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def _plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def test_these_are_all_options() -> None:
    marked = {field.name: field.metadata["identity"] for field in dataclasses.fields(Settings)}
    assert OTHERS.keys() == {name for name, identity in marked.items() if identity}
    assert WITHOUT.keys() == {name for name, identity in marked.items() if not identity}


@pytest.mark.parametrize("name", list(OTHERS))
def test_an_option_with_an_influence_is_part_of_a_runs_identity(
    name: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    base = {"dp_clip": 1.0} if name in ("dp_noise", "dp_secure") else {}
    ours, theirs = (Settings(**options) for options in (base, OTHERS[name]))
    different = {key for key, value in ours.identity().items() if theirs.identity()[key] != value}
    assert different == {name}
    if name == "device":
        return  # no run on another device can be made here
    module = _plain() if name.startswith("dp_") else network
    if name == "augmentation":  # for images alone
        dataset = dataclasses.replace(dataset, inputs=dataset.inputs.view(-1, 1, 2, 2))
        partition = PARTITIONERS["ds1"](dataset, 6, generator=torch.Generator(), k=2)
        module = nn.Sequential(nn.Flatten(), network)
    runs = [Federation(FedAvg(**QUICK), module, dataset, partition, settings).identity for settings in (ours, theirs)]
    first, second = (json.loads(json.dumps(identity)) for identity in runs)
    assert {key for key in first if first[key] != second[key]} == {name}


@pytest.mark.parametrize("name", list(WITHOUT))
def test_an_option_without_an_influence_is_not(
    name: str,
    dataset: Dataset,
    partition: Partition,
    network: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "device" in WITHOUT[name]:  # no run on another device can be made here
        assert Settings(device="cuda").identity() == Settings(**WITHOUT[name]).identity()
        return
    monkeypatch.chdir(tmp_path)
    devices = "".join(f"{k},1,1,1,1\n" for k in range(partition.clients))
    Path("devices.csv").write_text(f"client,compute,up,down,latency\n{devices}")
    ours, theirs = (
        Federation(FedAvg(**QUICK), network, dataset, partition, Settings(**options)).identity
        for options in ({}, WITHOUT[name])
    )
    assert ours == theirs


@pytest.mark.parametrize("policy", ["local_buffers", "server_buffers"])
def test_a_run_is_not_resumed_with_another_policy_for_buffers(
    policy: str, dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    method = FedAvg(**QUICK)
    Federation(method, network, dataset, partition, Settings(rounds=1), folder=tmp_path).run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = Settings(rounds=2, **{policy: ("BatchNorm1d",)})  # type: ignore[arg-type]
    with pytest.raises(ForeignCheckpoint, match=rf"{policy}: \[\] there, \['BatchNorm1d'\] here"):
        Federation(method, network, dataset, partition, other, folder=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    Federation(method, network, dataset, partition, Settings(rounds=2), folder=tmp_path, resume=True).run()


@pytest.mark.parametrize("policy", ["local_buffers", "server_buffers"])
def test_a_run_with_a_policy_for_buffers_is_resumed_to_the_bit(
    policy: str, dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    method, options = FedAvg(**QUICK), {policy: ("BatchNorm1d",)}
    whole = Federation(method, network, dataset, partition, Settings(rounds=3, **options))  # type: ignore[arg-type]
    records = whole.run()
    Federation(method, network, dataset, partition, Settings(rounds=1, **options), folder=tmp_path).run()  # type: ignore[arg-type]
    settings = Settings(rounds=3, **options)  # type: ignore[arg-type]
    resumed = Federation(method, network, dataset, partition, settings, folder=tmp_path, resume=True)
    assert [r["models"] for r in resumed.run()] == [r["models"] for r in records[1:]]
    assert torch.equal(resumed.server["model"], whole.server["model"])


@pytest.mark.parametrize("name", list(METHODS))
def test_every_option_of_a_method_is_part_of_its_identity(name: str) -> None:
    method = METHODS[name]()
    fields = {field.name: field.metadata["identity"] for field in dataclasses.fields(method)}
    identity = method.identity()
    assert identity.keys() == {option for option, marked in fields.items() if marked} >= {"lr", "batch_size"}
    assert all(identity[option] == getattr(method, option) for option in identity)
