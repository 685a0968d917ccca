from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_ext.metrics import summarize
from pfl_ext.reports import ResultsError, ResultsFolder, versions

SUMMARY = summarize([0.5, 0.75])


def record(number: int) -> dict:
    return {
        "round": number,
        "seconds": 0.5,
        "clients": [0, 3, 4],
        "communication": {"up_bytes": 100, "down_bytes": 200},
        "training": {"loss": 1 / 3},
        "models": {"personal": {"test": {"accuracy": SUMMARY}, "global_test": {"accuracy": 0.875}}},
    }


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    return ResultsFolder.create(tmp_path / "runs" / "a")


def test_records_come_back_as_they_were(folder):
    for number in range(3):
        folder.append(record(number))
    assert ResultsFolder.open(folder.path).records() == [record(number) for number in range(3)]


def test_nan_and_infinity_come_back_from_strict_json(folder):
    folder.append({"round": 0, "training": {"loss": math.nan, "worst": [math.inf, -math.inf]}})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads((folder.path / "metrics.jsonl").read_text(), parse_constant=refuse)
    training = folder.records()[0]["training"]
    assert math.isnan(training["loss"])
    assert training["worst"] == [math.inf, -math.inf]


def test_tensors_arrays_and_paths_are_written_as_plain_values(folder):
    folder.write_json(
        "versions.json", {"seed": np.int64(3), "alpha": torch.tensor([0.5]), "data": Path("a/b"), "x": None}
    )
    assert folder.read_json("versions.json") == {"seed": 3, "alpha": [0.5], "data": "a/b", "x": None}


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 200))
def test_a_run_killed_in_the_middle_of_a_line_loses_that_line_only(tmp_path_factory, cut):
    folder = ResultsFolder.create(tmp_path_factory.mktemp("killed"))
    for number in range(3):
        folder.append(record(number))
    file = folder.path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    # Only the newline is missing when one byte is cut: that record is whole.
    kept = 3 if cut == 1 else 2
    reopened = ResultsFolder.open(folder.path)
    assert reopened.records() == [record(number) for number in range(kept)]
    reopened.append(record(kept))
    assert ResultsFolder.open(folder.path).records() == [record(number) for number in range(kept + 1)]


def test_reading_a_killed_run_writes_nothing(folder):
    folder.append(record(0))
    file = folder.path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"round": 1, "sec')
    before = file.read_bytes()
    ResultsFolder.open(folder.path).records()
    assert file.read_bytes() == before


def test_a_damaged_line_in_the_middle_is_named(folder):
    folder.append(record(0))
    file = folder.path / "metrics.jsonl"
    file.write_bytes(b"garbage\n" + file.read_bytes())
    with pytest.raises(ResultsError, match="line 1 is damaged"):
        folder.records()


WRITER = """
import sys
from pfl_ext.reports import ResultsFolder
folder = ResultsFolder.create(sys.argv[1])
print("writes", flush=True)
for r in range(10**9):
    folder.append({"round": r, "x": list(range(500))})
    folder.write_clients([{"client": c, "round": r} for c in range(50)])
    if r % 20 == 19:
        folder.truncate(r - 10)
"""


def test_a_process_killed_at_any_moment_leaves_whole_records(tmp_path):
    environment = {**os.environ, "PFL_EXT_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"writes\n"
        patience = time.monotonic() + 60
        while len(ResultsFolder.open(tmp_path / "run").records()) < 25:  # meanwhile others read
            assert time.monotonic() < patience, "the process does not write"
        process.kill()
    folder = ResultsFolder.open(tmp_path / "run")
    records = folder.records()
    assert len(records) > 1
    assert [r["round"] for r in records] == sorted({r["round"] for r in records})
    assert all(r["x"] == list(range(500)) for r in records)
    assert len(folder.clients()) == 50


def test_truncate_drops_the_rounds_after_the_checkpoint(folder):
    for number in range(5):
        folder.append(record(number))
    folder.write_csv()
    folder.truncate(2)
    assert [r["round"] for r in folder.records()] == [0, 1, 2]
    assert (folder.path / "metrics.csv").read_text().count("\n") == 4
    folder.append(record(3))
    folder.truncate(-1)
    assert folder.records() == []


def test_a_round_that_was_recorded_is_refused(folder):
    folder.append(record(4))
    with pytest.raises(ValueError, match=r"round 3 cannot follow round 4.*truncate\(2\)"):
        folder.append(record(3))
    with pytest.raises(ValueError, match="round 4 cannot follow"):
        ResultsFolder.open(folder.path).append(record(4))
    assert [r["round"] for r in folder.records()] == [4]


def test_metrics_csv_has_a_line_a_round_with_flat_names(folder):
    folder.append({"round": 0, "seconds": 0.25, "clients": [1, 2]})
    folder.append(record(1))
    folder.write_csv()
    header, first, second = (line.split(",") for line in (folder.path / "metrics.csv").read_text().splitlines())
    assert header[:5] == ["round", "seconds", "clients", "communication/up_bytes", "communication/down_bytes"]
    assert first[:5] == ["0", "0.25", "2", "", ""]
    cells = dict(zip(header, second, strict=True))
    assert cells["personal/test/accuracy/mean"] == "0.625"
    assert cells["personal/global_test/accuracy"] == "0.875"
    assert float(cells["training/loss"]) == 1 / 3


def test_client_rows_come_back_with_numbers_and_text(folder):
    rows = [
        {"client": 0, "name": 'Zoë, "the first"\nclient', "personal/test/accuracy": 1 / 3},
        {"client": 1, "personal/test/accuracy": math.nan, "lambda": torch.tensor(0.25)},
    ]
    assert folder.clients() == []
    folder.write_clients(rows)
    first, second = ResultsFolder.open(folder.path).clients()
    assert first == rows[0]
    assert math.isnan(second.pop("personal/test/accuracy"))
    assert second == {"client": 1, "lambda": 0.25}


def test_a_new_run_never_writes_over_an_old_one(folder):
    again = ResultsFolder.create(folder.path)  # nothing was recorded yet
    again.append(record(0))
    with pytest.raises(FileExistsError, match="resume that run, or name another folder"):
        ResultsFolder.create(folder.path)
    assert folder.records() == [record(0)]


def test_a_folder_without_results_is_not_opened(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no results"):
        ResultsFolder.open(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ResultsError, match="a file has that name"):
        ResultsFolder.create(tmp_path / "run")
    with pytest.raises(ResultsError, match="cannot make the results folder"):
        ResultsFolder.create(tmp_path / "run" / "below")
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where not even root can make a file")
def test_an_unwritable_folder_is_reported_at_once():
    with pytest.raises(ResultsError, match=r"cannot write /proc/self/metrics.jsonl: .*; nothing was written"):
        ResultsFolder.create("/proc/self")
    with pytest.raises(ResultsError, match="cannot make the results folder /proc/self/run"):
        ResultsFolder.create("/proc/self/run")


@pytest.fixture
def small_disk():
    """Files of this process may not grow beyond a limit, as on a full disk: a part is written, then it fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_takes_no_record_that_was_there(folder, small_disk):
    folder.append(record(0))
    folder.write_json("versions.json", {"seed": 1})
    folder.write_clients([{"client": 0}])
    content = (folder.path / "metrics.jsonl").read_bytes()
    small_disk(len(content) + 50)
    with pytest.raises(ResultsError, match=r"cannot write .*metrics.jsonl: .*; it is as it was before"):
        folder.append(record(1))
    assert (folder.path / "metrics.jsonl").read_bytes() == content
    with pytest.raises(ResultsError, match=r"versions\.json"):
        folder.write_json("versions.json", list(range(5000)))
    with pytest.raises(ResultsError, match=r"clients\.csv"):
        folder.write_clients([{"client": c} for c in range(5000)])
    with pytest.raises(ResultsError, match=r"new.json.*nothing was written"):
        folder.write_json("new.json", list(range(5000)))
    assert folder.read_json("versions.json") == {"seed": 1}
    assert folder.clients() == [{"client": 0}]
    small_disk(10 * len(content))
    with (folder.path / "metrics.jsonl").open("ab") as file:  # as if the part that was written could not be taken back
        file.write(b'{"round": 1, "sec')
    folder.append(record(1))
    assert folder.records() == [record(0), record(1)]
    assert sorted(p.name for p in folder.path.iterdir()) == ["clients.csv", "metrics.jsonl", "versions.json"]


def test_what_cannot_be_json_changes_nothing(folder):
    folder.write_json("versions.json", 1)
    with pytest.raises(TypeError):
        folder.write_json("versions.json", object())
    with pytest.raises(TypeError):
        folder.append({"round": 0, "x": object()})
    assert folder.read_json("versions.json") == 1
    assert folder.records() == []


def test_a_block_that_fails_replaces_nothing(folder):
    folder.write_json("a.json", 1)
    with pytest.raises(RuntimeError, match="mine"), folder.replacing("a.json") as path:
        path.write_text("2")
        raise RuntimeError("mine")
    assert folder.read_json("a.json") == 1
    assert not list(folder.path.glob(".tmp*"))


def test_missing_and_damaged_json_is_named(folder):
    with pytest.raises(ResultsError, match=r"cannot read .*versions.json"):
        folder.read_json("versions.json")
    (folder.path / "versions.json").write_text("{")
    with pytest.raises(ResultsError, match="is not JSON"):
        folder.read_json("versions.json")


def test_versions_name_what_ran(folder):
    folder.write_json("versions.json", versions())
    assert folder.read_json("versions.json")["torch"] == torch.__version__
