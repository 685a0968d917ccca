"""A full disk, or a limit on the size of files: the first error is the one that is told, and it names the file."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import reliable_process

from pfl_ext.experiment import Experiment
from pfl_ext.federation import checkpoint
from pfl_ext.reports import ResultsError, ResultsFolder
from pfl_ext.runs import run_in


def _full(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def _run(folder: Path) -> None:
    tables = {"partition": {"name": "iid", "clients": 2}, "federation": {"rounds": 2}, "method": {"name": "fedavg"}}
    experiment = Experiment.from_sections(tables)
    run_in(folder, experiment, *experiment.make_data(), quiet=True)


def _no_csv(_: object) -> NoReturn:
    raise ResultsError("cannot write metrics.csv")


def test_what_is_written_at_the_end_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save_file", _full)
    monkeypatch.setattr(ResultsFolder, "write_csv", _no_csv)
    with pytest.raises(OSError, match=r"checkpoint-00000002\.safetensors could not be written"):
        _run(tmp_path)


def test_what_cannot_be_written_at_the_end_of_a_good_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultsFolder, "write_csv", _no_csv)
    with pytest.raises(ResultsError, match=r"metrics\.csv"):
        _run(tmp_path)


@pytest.mark.parametrize(
    ("store", "size", "name"),
    [
        ("memory", 1_000, "config.toml"),
        ("memory", 2_000, "partition.safetensors"),
        ("memory", 20_000, "checkpoint-00000001.safetensors"),
        ("mapped", 20_000, "personal.rows"),
    ],
)
def test_a_file_that_is_too_large_is_named(tmp_path: Path, store: str, size: int, name: str) -> None:
    log = tmp_path / "log"
    common = {"rounds": 1, "lr": 0.1, "clients": 4, "partition": "iid", "store": store, "output": tmp_path / "run"}
    command = ["run", "ditto", *reliable_process.options(common), "--quiet", "--no-plots"]
    process = reliable_process.start(command, log, size)
    process.join(60)
    told = log.read_text().splitlines()
    assert process.exitcode == 1 and len(told) == 1, told
    assert name in told[0] and "File too large" in told[0]
