from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pfl_ext.algorithms import Ditto, FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import DamagedCheckpoint, Federation, ForeignCheckpoint, Settings, checkpoint

IDENTITY = {"method": "FedAvg", "seed": 0}


def _save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, IDENTITY, {"round": step}, {"server/model": torch.full((5,), float(step))})


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.empty(0), "c": torch.tensor([float("nan")])}
    path = checkpoint.save(tmp_path, 1, IDENTITY, {"history": [1.5, None, "x"]}, tensors)
    identity, state, loaded = checkpoint.load(path)
    assert identity == IDENTITY and state == {"history": [1.5, None, "x"]}
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].nan_to_num(-1), tensor.nan_to_num(-1)) and loaded[name].dtype == tensor.dtype


def test_the_newest_is_taken_and_one_before_it_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        _save(tmp_path, step)
    found = checkpoint.newest(tmp_path, IDENTITY)
    assert found is not None and found[0] == {"round": 10}
    assert len(list(tmp_path.iterdir())) == 2


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path, IDENTITY) is None
    assert checkpoint.newest(tmp_path / "absent", IDENTITY) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "header", "foreign file", "partial"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path: Path, damage: str) -> None:
    _save(tmp_path, 1)
    path = _save(tmp_path, 2)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-3])
    elif damage == "flipped":
        content[-2] ^= 1
        path.write_bytes(content)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "header":
        place = content.index(b"FedAvg")
        content[place : place + 6] = b"FedAvh"
        path.write_bytes(content)
    elif damage == "foreign file":
        save_file({"x": torch.zeros(2)}, path)
    elif damage == "partial":
        path.rename(path.with_suffix(".partial"))
    if damage == "partial":  # a write that was cut is not even looked at
        found = checkpoint.newest(tmp_path, IDENTITY)
    else:
        with pytest.warns(RuntimeWarning, match="checkpoint-00000002"):
            found = checkpoint.newest(tmp_path, IDENTITY)
    assert found is not None and found[0] == {"round": 1}


def test_when_all_are_damaged_nothing_is_begun_anew_silently(tmp_path: Path) -> None:
    _save(tmp_path, 1).write_bytes(b"x")
    with pytest.warns(RuntimeWarning), pytest.raises(DamagedCheckpoint, match="no checkpoint"):
        checkpoint.newest(tmp_path, IDENTITY)


def test_a_checkpoint_of_another_run_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    with pytest.raises(ForeignCheckpoint, match="seed: 0 there, 1 here"):
        checkpoint.newest(tmp_path, {"method": "FedAvg", "seed": 1})


def test_a_write_that_fails_leaves_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _save(tmp_path, 1).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="earlier ones are as they were"):
        _save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001.safetensors"]
    assert next(tmp_path.iterdir()).read_bytes() == before


def test_the_file_holds_json_and_numbers_only(tmp_path: Path) -> None:
    content = _save(tmp_path, 1).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert set(header) == {"__metadata__", "server/model"} and len(content) == 8 + size + 20


# ---- of a run --------------------------------------------------------------------------------------------------------


def _header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


@pytest.mark.parametrize(
    ("method", "clock"),
    [(FedAvg(lr=0.1), "none"), (FedAvg(lr=0.1), "log-normal"), (Ditto(lr=0.1), "none")],
    ids=["fedavg", "fedavg-clock", "ditto"],
)
def test_a_header_does_not_grow_with_rounds_and_has_no_records(
    method: FedAvg | Ditto, clock: str, tmp_path: Path
) -> None:
    clients, last = 1000, 60
    torch.manual_seed(0)
    dataset = Dataset.from_tensors(torch.randn(clients, 3), torch.arange(clients) % 2)
    none = torch.empty(0, dtype=torch.int64)
    partition = Partition(torch.arange(clients).split(1), (none,) * clients, (none,) * clients, none, none)
    settings = Settings(rounds=last, participation=0.05, clock=clock, checkpoint_every=1, evaluate_every=1000)
    run = Federation(method, torch.nn.Linear(3, 2), dataset, partition, settings, folder=tmp_path)
    sizes, headers = {}, {}
    for record in run.rounds():  # the checkpoint of the round before is there
        t = record["round"] - 1
        if t in (10, last - 1):
            path = tmp_path / "checkpoints" / f"checkpoint-{t:08d}.safetensors"
            sizes[t], headers[t] = path.stat().st_size, _header(path)
    early, late = headers[10], headers[last - 1]
    assert early.keys() == late.keys() and late["__metadata__"].keys() == {"format", "content", "digest"}
    assert len(early["__metadata__"]["content"]) == len(late["__metadata__"]["content"])
    if isinstance(method, FedAvg):  # elsewhere more clients keep something
        assert sizes[10] == sizes[last - 1]
    content = json.loads(late["__metadata__"]["content"])
    assert content.keys() == {"versions", "identity", "state", "shards", "tensors"}
    assert content["state"]["round"] == last - 1
    text = json.dumps(content["state"])
    assert len(text) < 300 and not any(word in text for word in ("communication", "seconds", "training", "work"))
    assert "loss" not in text and "reports/loss" in content["tensors"]  # by client, as a tensor
