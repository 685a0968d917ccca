"""Checkpoints that were damaged, forged or written by others: none is lost for them, none is gone on from."""

from __future__ import annotations

import json
import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pfl_ext.algorithms import Ditto, FedAvg, FedBuff
from pfl_ext.federation import DamagedCheckpoint, Federation, ForeignCheckpoint, InProcess, Method, checkpoint

Make = Callable[..., Federation]
IDENTITY = {"method": "FedAvg"}


def _save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, IDENTITY, {"round": step}, {"server/model": torch.full((6,), float(step))})


def _names(folder: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in folder.iterdir())


# ---- which are kept --------------------------------------------------------------------------------------------------


def test_damaged_newer_files_cost_no_good_one(tmp_path: Path) -> None:
    _save(tmp_path, 3)
    _save(tmp_path, 4)
    for newer in (8, 9):
        (tmp_path / f"checkpoint-{newer:08d}.safetensors").write_bytes(b"damaged")
    written = _save(tmp_path, 5)
    assert written.exists() and {4, 5} <= set(_names(tmp_path))
    with pytest.warns(RuntimeWarning, match="0000000[89]"):
        found = checkpoint.newest(tmp_path, IDENTITY)
    assert found is not None and found[0] == {"round": 5}


def test_a_damaged_file_between_good_ones_is_not_counted(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    (tmp_path / "checkpoint-00000002.safetensors").write_bytes(b"damaged")
    _save(tmp_path, 3)
    assert _names(tmp_path) == [1, 2, 3]
    _save(tmp_path, 4)
    assert _names(tmp_path) == [3, 4]


def test_a_run_reads_none_of_its_own_files_again_unless_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda path: (read.append(path.name), load(path))[1])
    files = checkpoint.Checkpoints(tmp_path, IDENTITY)
    for step in range(1, 6):
        files.save(step, {"round": step}, {"a": torch.zeros(3)})
    assert _names(tmp_path) == [4, 5] and not read
    (tmp_path / "checkpoint-00000005.safetensors").write_bytes(b"damaged by somebody else")
    files.save(6, {"round": 6}, {"a": torch.zeros(3)})
    assert read == ["checkpoint-00000005.safetensors"] and _names(tmp_path) == [4, 5, 6]


# ---- what the digests cover ------------------------------------------------------------------------------------------


def _change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def _as_whole_numbers(header: dict[str, Any]) -> None:
    header["server/model"]["dtype"] = "I32"


def _in_two_rows(header: dict[str, Any]) -> None:
    header["server/model"]["shape"] = [2, 3]


def _by_another_name(header: dict[str, Any]) -> None:
    header["server/teacher"] = header.pop("server/model")


@pytest.mark.parametrize("change", [_as_whole_numbers, _in_two_rows, _by_another_name])
def test_the_same_bytes_as_other_numbers_are_damage(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = _save(tmp_path, 1)
    _change_header(path, change)
    with pytest.raises(DamagedCheckpoint, match="server/"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "content", ["[]", "{}", "[" * 100_000, '{"identity": 1, "state": {}, "tensors": {}}', "nonsense"]
)
def test_a_header_with_a_good_digest_that_is_no_header_is_damage(tmp_path: Path, content: str) -> None:
    path = _save(tmp_path, 1)

    def change(header: dict[str, Any]) -> None:
        digest = checkpoint.hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        header["__metadata__"] |= {"content": content, "digest": digest}

    _change_header(path, change)
    with pytest.raises(DamagedCheckpoint, match=r"its header|server/model is damaged"):  # a table without tensors
        checkpoint.load(path)


# ---- versions --------------------------------------------------------------------------------------------------------


def test_another_format_is_refused_and_not_taken_for_damage(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    save_file({"x": torch.zeros(2)}, tmp_path / "checkpoint-00000002.safetensors", {"format": "pfl_ext checkpoint 9"})
    with pytest.raises(ForeignCheckpoint, match="format 'pfl_ext checkpoint 9', this version"):
        checkpoint.newest(tmp_path, IDENTITY)


def test_another_torch_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.newest(tmp_path, IDENTITY) is not None
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with pytest.warns(RuntimeWarning, match=r"written with torch .*, this is torch 9\.9\.9: the run goes on"):
        assert checkpoint.newest(tmp_path, IDENTITY) is not None


# ---- forgeries with good digests -------------------------------------------------------------------------------------

_METHODS: dict[str, tuple[Method, dict[str, Any]]] = {
    "ditto": (Ditto(lr=0.1, batch_size=5), {}),
    "timed": (FedAvg(lr=0.1, batch_size=5), {"clock": "log-normal"}),
    "flight": (FedBuff(lr=0.1, batch_size=5, buffer=2), {"clock": "log-normal", "participation": 0.75}),
}
Saved = dict[str, Any]
Forge = Callable[[Saved, Saved], object]


def _set(name: str, value: Any) -> Forge:
    return lambda state, tensors: state.update({name: value})


def _with(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Forge:
    return lambda state, tensors: tensors.update({name: make(tensors[name])})


def _turn(place: int, value: Any) -> Forge:
    return lambda state, tensors: state["rounds"]["turns"][0].__setitem__(place, value)


def _first(tensors: Saved, part: str) -> str:
    return next(name for name in tensors if f"/{part}/" in name)


def _twice(state: Saved, tensors: Saved) -> None:
    state["rounds"]["turns"].append(state["rounds"]["turns"][0])


_FORGED: list[tuple[str, Forge, str]] = [
    *(
        ("ditto", forge, message)
        for forge, message in [
            (_set("round", -1), "round is -1; a whole number"),
            (_set("round", True), "round is True"),
            (_set("recorded", 7), "recorded is 7 after round 3"),
            (_set("recorded", "3"), "recorded is '3'"),
            (lambda state, tensors: state.pop("recorded"), "recorded is None"),
            (_set("personalized", 9), "personalized is 9; a whole number from 0 to 4"),
            (_set("personalized", 1.5), "personalized is 1.5"),
            (_set("received_last", []), "received_last is []"),
            (_set("received_last", {"down_parameters": -1, "down_bytes": 0}), "down_parameters is -1"),
            (_set("dropped_last", None), "dropped_last is None"),
            (_set("dropped_last", [4]), "a client of dropped_last is 4"),
            (lambda state, tensors: state.pop("rounds"), "rounds is None"),
            (_set("rounds", {"turns": []}), "rounds has ['turns']"),
            (lambda state, tensors: tensors.pop("server/model"), "server/model is not in it"),
            (lambda state, tensors: tensors.update({"server/more": torch.zeros(2)}), "server/more is in it"),
            (lambda state, tensors: tensors.update({"elsewhere": torch.zeros(2)}), "tensor 'elsewhere'"),
            (_with("server/model", lambda t: t[:-1]), "server/model is [42]"),
            (_with("server/model", lambda t: t.double()), "of torch.float64, this run has [43] of torch.float32"),
            (_with("server/model", lambda t: t.view(1, -1)), "server/model is [1, 43]"),
            (_with("clients/personal/clients", lambda t: t - 1), "has the client -1; this run has clients 0 to 3"),
            (_with("clients/personal/clients", lambda t: t + 1), "has the client 4"),
            (_with("clients/personal/clients", lambda t: t * 0), "names a client twice"),
            (_with("clients/personal/clients", lambda t: t.double()), "of torch.float64"),
            (_with("clients/personal/rows", lambda t: t[:, :-1]), "clients/personal/rows is [4, 42]"),
            (_with("clients/personal/rows", lambda t: t[:-1]), "clients/personal/rows is [3, 43]"),
            (_with("clients/personal/rows", lambda t: t.int()), "of torch.int32"),
            (lambda state, tensors: tensors.pop("clients/personal/rows"), "clients/personal/rows is not in it"),
            (_with("reports/loss", lambda t: t[:, :2]), "reports/loss is [2, 2]"),
            (_with("reports/loss", lambda t: t + 5), "neither that it has a value nor"),
        ]
    ),
    *(
        ("timed", forge, message)
        for forge, message in [
            (_with("rounds/wait-free", lambda t: t[:-1]), "rounds/wait-free is [5]"),
            (_with("rounds/wait-free", lambda t: -1 - t), "not finite or below 0"),
            (lambda state, tensors: tensors.pop("rounds/wait-free"), "rounds/wait-free is not in it"),
            (lambda state, tensors: tensors.update({"rounds/x": torch.zeros(6)}), "there is no such protocol"),
        ]
    ),
    *(
        ("flight", forge, message)
        for forge, message in [
            (_set("rounds", {}), "rounds has []"),
            (lambda state, tensors: state["rounds"].update(turns=3), "the turns in flight are 3"),
            (lambda state, tensors: state["rounds"]["turns"][0].pop(), "the turns in flight are"),
            (_turn(0, [9, 1, 1, 1, 1, 0.0]), "client of turn 0 in flight is 9; a whole number from 0 to 3"),
            (_turn(0, [0, 1, 1]), "the work of turn 0"),
            (_turn(1, 99), "the version of turn 0"),
            (_turn(2, float("nan")), "the arrival of turn 0"),
            (_turn(3, "soon"), "the end of turn 0"),
            (_turn(4, 1), "whether turn 0 in flight is on its way is 1"),
            (_turn(5, {"loss": "x"}), "the report of turn 0"),
            (_turn(6, -2), "trained_parameters of turn 0"),
            (_twice, "a client is in flight twice"),
            (lambda state, tensors: state["rounds"].update(_begun=[1]), "_begun is [1]"),
            (lambda state, tensors: state["rounds"].update(_draws=-1), "_draws is -1"),
            (lambda state, tensors: state["rounds"].update(_places=["x"]), "_places is 'x'"),
            (lambda state, tensors: state["rounds"].update(now=float("inf")), "now is inf"),
            (lambda state, tensors: tensors.pop(_first(tensors, "sent")), "the uploads on their way have"),
            (lambda state, tensors: tensors.update({"rounds/77/sent/x": torch.zeros(2)}), "belongs to no turn"),
            (lambda state, tensors: tensors.update({"rounds/0/kept/x": torch.zeros(2)}), "nothing that clients keep"),
            (lambda state, tensors: tensors.update({_first(tensors, "sent"): torch.zeros(2)}), "[2] of torch.float32"),
            (lambda state, tensors: tensors.update({_first(tensors, "kept"): torch.zeros(2)}), "[2] of torch.float32"),
        ]
    ),
]  # fmt: skip


@pytest.fixture(scope="session")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tmp_path_factory.mktemp(kind) for kind in _METHODS}


@pytest.mark.parametrize(("kind", "forge", "message"), _FORGED, ids=[f"{k}-{m}" for k, _, m in _FORGED])
def test_what_does_not_fit_the_run_is_refused_in_one_line_and_changes_nothing(
    make_run: Make, saved_runs: dict[str, Path], tmp_path: Path, kind: str, forge: Forge, message: str
) -> None:
    method, settings = _METHODS[kind]
    if not (saved_runs[kind] / "checkpoints").exists():
        make_run(method, saved_runs[kind], **settings).run()
    found = sorted((saved_runs[kind] / "checkpoints").iterdir())[-1]
    identity, state, tensors = checkpoint.load(found)
    if kind == "flight":
        assert len(state["rounds"]["turns"]) >= 2 and state["rounds"]["turns"][0][4]
    forge(state, tensors)
    checkpoint.save(tmp_path / "checkpoints", 3, identity, state, tensors)
    run = make_run(method, **settings)
    assert isinstance(run.engine, InProcess)
    before = {name: vector.clone() for name, vector in run.server.items()}
    with pytest.raises(DamagedCheckpoint, match=re.escape(message)) as error:
        run.read(tmp_path)
    assert "\n" not in str(error.value)
    assert run.round == 0 and all(torch.equal(run.server[name], vector) for name, vector in before.items())
    assert not any(run.engine.store.written(k, name) for k in range(4) for name in run.engine.store.labels)
    with pytest.raises(DamagedCheckpoint, match=re.escape(message)):
        make_run(method, tmp_path, resume=True, **settings)


def test_a_state_without_a_round_is_damage(make_run: Make, tmp_path: Path) -> None:
    run = make_run(FedAvg(lr=0.1), tmp_path)
    run.run()
    identity, state, tensors = checkpoint.load(sorted((tmp_path / "checkpoints").iterdir())[-1])
    del state["round"]
    checkpoint.save(tmp_path / "other" / "checkpoints", 3, identity, state, tensors)
    with pytest.warns(RuntimeWarning, match="after which round"), pytest.raises(DamagedCheckpoint):
        make_run(FedAvg(lr=0.1)).read(tmp_path / "other")
