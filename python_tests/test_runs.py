"""A run in a folder: overwriting an earlier one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pfl_ext.experiment import Experiment
from pfl_ext.reports import LOCK, ResultsFolder
from pfl_ext.runs import run_in


def _experiment(**federation: int) -> Experiment:
    tables = {
        "partition": {"name": "iid", "clients": 2},
        "federation": {"rounds": 2, **federation},
        "method": {"name": "fedavg", "lr": 0.1},
    }
    return Experiment.from_sections(tables)


def _run(folder: Path, experiment: Experiment, overwrite: bool = False) -> None:
    run_in(folder, experiment, *experiment.make_data(), overwrite=overwrite, quiet=True)


def _files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_overwriting_removes_what_the_earlier_run_left_and_nothing_else(tmp_path: Path) -> None:
    _run(tmp_path, _experiment())
    (tmp_path / "notes.txt").write_text("mine")
    left = {"clients/round-00002.csv", "checkpoints/checkpoint-00000002.safetensors"}
    assert left <= _files(tmp_path).keys()
    _run(tmp_path, _experiment(rounds=1, seed=1), overwrite=True)
    files = _files(tmp_path)
    assert not left & files.keys() and files["notes.txt"] == b"mine"
    assert [record["round"] for record in ResultsFolder.open(tmp_path).records()] == [1]
    assert [path.name for path in tmp_path.glob(".*")] == [LOCK]


def test_a_run_that_cannot_begin_overwrites_nothing(tmp_path: Path) -> None:
    _run(tmp_path, _experiment())
    before = _files(tmp_path)
    with pytest.raises(ValueError, match="2 of 2 clients are to join late"):
        _run(tmp_path, _experiment(new_clients=2), overwrite=True)
    assert _files(tmp_path) == before and [path.name for path in tmp_path.glob(".*")] == [LOCK]


def test_overwriting_where_no_run_was_leaves_everything(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "mine.txt").write_text("mine")
    _run(tmp_path, _experiment(), overwrite=True)
    assert (tmp_path / "clients" / "mine.txt").read_text() == "mine"
