"""Runs as processes: signals to all of them, a parent that is killed, a folder that is taken."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pfl_ext.cli import main
from pfl_ext.experiment import Experiment
from pfl_ext.federation.mapped import scratch_folder
from pfl_ext.reports import ResultsFolder
from pfl_ext.reports.results import ResultsError
from pfl_ext.runs import run_in

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")

RUN = ["run", "fedavg", "--lr", "0.1", "--rounds", "100000", "--quiet", "--no-plots"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts runs, each in a process group of its own, and ends what is left of them."""
    started = []

    def start(folder: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pfl_ext", *RUN, "--output", str(folder), *more]
        process = subprocess.Popen(
            command,
            cwd=folder.parent,  # not the tree's: the installed package is what runs
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Under nohup it would be ignored, and a run goes on then.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _rounds(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def _children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if int(lines["PPid"]) == pid and not lines["State"].strip().startswith("Z"):
                found.append(int(status.parent.name))
    return found


def _scratch(pid: int) -> Path:
    """The folder that a run has for what its workers share: it holds a lock there."""
    files = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            files.append(Path(os.readlink(link)))
    (folder,) = {file.parent for file in files if file.name.startswith("owner.lock")}
    return folder


def _gone(processes: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_the_whole_group_ends_a_run_with_workers_after_the_round_and_saves(
    number: signal.Signals, start: Start, tmp_path: Path
) -> None:
    process = start(tmp_path, "--workers", "2", "--checkpoint-every", "100000")
    _until(lambda: _rounds(tmp_path) > 2 or process.poll() is not None)
    workers, scratch = _children(process.pid), _scratch(process.pid)
    assert len(workers) >= 2 and scratch.is_dir()
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    done = _rounds(tmp_path)
    assert error.strip().splitlines() == [
        f"finishing round {done}, then saving; again to stop now",
        f"pfl-ext run: stopped after round {done}; pfl-ext resume FOLDER goes on from the last checkpoint",
    ]
    records = ResultsFolder.open(tmp_path).records()
    assert [record["round"] for record in records] == list(range(1, done + 1)) and done > 2
    (saved,) = (tmp_path / "checkpoints").iterdir()  # none was due before
    assert saved.name == f"checkpoint-{done:08d}.safetensors"
    _until(lambda: _gone(workers), 10)
    assert not scratch.exists()


def test_a_parent_that_is_killed_leaves_no_worker_and_the_next_run_removes_its_files(
    start: Start, tmp_path: Path
) -> None:
    process = start(tmp_path, "--workers", "2")
    _until(lambda: _rounds(tmp_path) > 0 or process.poll() is not None)
    workers, scratch = _children(process.pid), _scratch(process.pid)
    assert len(workers) >= 2 and (scratch / "owner.lock").exists() and (scratch / "slots").is_dir()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _until(lambda: _gone(workers), 10)

    class Owner:
        pass

    owner = Owner()
    assert scratch_folder(owner, 1).is_dir()  # as a run with workers makes one
    assert not scratch.exists()


def test_a_group_that_is_killed_leaves_no_semaphores(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path, "--workers", "2")
    _until(lambda: _rounds(tmp_path) > 0 or process.poll() is not None)
    # Of the workers: they have opened them by the names that stay.
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in _children(process.pid))
    names = set(re.findall(r"/\S+/sem\.mp-\w+", maps))
    assert len(names) >= 4, "none are mapped: this looks at nothing"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not [name for name in names if Path(name).exists()]


def test_a_second_run_in_a_folder_is_refused_and_the_first_goes_on_undisturbed(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = start(tmp_path, "--checkpoint-every", "1")
    _until(lambda: _rounds(tmp_path) > 1 or first.poll() is not None)
    refusal = f"a run is writing to {tmp_path} (process {first.pid})"
    experiment = Experiment.from_sections({"method": {"name": "fedavg"}})
    dataset, partition = experiment.make_data()
    for more in ([], ["--resume"], ["--overwrite"]):
        before = _rounds(tmp_path)
        if more:
            assert main([*RUN, "--output", str(tmp_path), *more]) == 1, more
            message = capsys.readouterr().err
            assert refusal in message and message.count("\n") == 1, more
        else:
            with pytest.raises(ResultsError, match=re.escape(refusal)):
                run_in(tmp_path, experiment, dataset, partition, quiet=True)
        _until(lambda before=before: _rounds(tmp_path) > before or first.poll() is not None)
    os.kill(first.pid, signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert first.returncode == 130, error
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == list(range(1, len(records) + 1))
    assert (tmp_path / "checkpoints" / f"checkpoint-{len(records):08d}.safetensors").exists()
    # Once nobody has it, the folder can be gone on with.
    again = [*RUN, "--output", str(tmp_path), "--resume", "--rounds", str(len(records) + 1)]
    assert main(again) == 0
    assert _rounds(tmp_path) == len(records) + 1
