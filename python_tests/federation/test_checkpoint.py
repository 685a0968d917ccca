from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pfl_ext.federation import DamagedCheckpoint, ForeignCheckpoint, checkpoint

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
