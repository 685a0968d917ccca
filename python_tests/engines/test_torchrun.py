"""Runs on ranks that torchrun starts: the bits of one process, whatever their number, and what a lost rank leads to."""

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
import torch
from ranks_process import federation, outcome

from pfl_ext.algorithms import METHODS
from pfl_ext.engines import InProcess
from pfl_ext.federation import Settings

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without torch.distributed")

SUPPORT = Path(__file__).parents[1] / "support"
Start = Callable[..., "subprocess.Popen[str]"]
_LIMIT = 120.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts torchrun with some ranks, and ends what is left of them."""
    started: list[subprocess.Popen[str]] = []

    def start(ranks: int, *command: object, restarts: int = 0, **variables: str) -> subprocess.Popen[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        process = subprocess.Popen(
            [*torchrun, "--max-restarts", str(restarts), *map(str, command)],
            cwd=tmp_path,  # not the tree's: the installed package is what runs
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def answers(start: Start, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What came of scenarios of ``ranks_process.py``."""

    def answers(ranks: int, *scenarios: str) -> dict[str, Any]:
        answer = tmp_path / "answer.json"
        process = start(ranks, SUPPORT / "ranks_process.py", answer, tmp_path, *scenarios)
        output, _ = process.communicate(timeout=_LIMIT)
        assert process.returncode == 0, output
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    return answers


def _run(folder: Path, method: str = "ditto", **options: object) -> list[str]:
    common = {"rounds": 6, "lr": 0.1, "clients": 5, "checkpoint_every": 1, "output": folder}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (common | options).items()]
    return ["run", method, *flags, "--quiet", "--no-plots"]


def _until(condition: Callable[[], Any], what: Callable[[], str] = str, seconds: float = _LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def _rounds(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _ranks(torchrun: int) -> dict[int, int]:
    """The processes of torchrun by rank, as their environments have it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            parent = re.search(r"^PPid:\s+(\d+)$", (folder / "status").read_text(), re.MULTILINE)
            variables = dict(
                entry.split("=", 1) for entry in (folder / "environ").read_text().split("\0") if "=" in entry
            )
            if parent is not None and int(parent[1]) == torchrun:
                found[int(variables["RANK"])] = int(folder.name)
    return found


# ---- the same bits ---------------------------------------------------------------------------------------------------


def test_every_method_gives_the_bits_of_one_process_on_two_ranks(answers: Callable[..., dict[str, Any]]) -> None:
    found = answers(2, "every_method")["every_method"]
    assert found == dict.fromkeys(METHODS, True)


def test_three_ranks_with_uneven_clients_stores_protocols_and_faults_are_as_one_process(
    answers: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    found = answers(3, "stores_and_protocols", "faults_of_clients", "saved", "fast")
    assert all(found["stores_and_protocols"].values()), found
    faults = found["faults_of_clients"]
    assert faults["dropped"] and faults["after"], faults
    assert faults["nan"][0] == "Diverged" and "client 2 diverged in round 2" in faults["nan"][1]
    assert faults["raise"][:2] == ["ZeroDivisionError", "a fault in the method"]
    assert re.match(r"at rank \d:\nTraceback .*in train", faults["raise"][2], re.DOTALL) or faults["raise"][2] == "None"
    _check_traffic(found["fast"])
    _check_saved(found["saved"], tmp_path)


def _check_traffic(found: dict[str, Any]) -> None:
    """5 clients on 3 ranks; an all-reduce sends less, and has another order of sums."""
    model = found["model"]
    slice_size = -(-model // 4 // 3) * 4
    for rank, (exact, fast) in enumerate(zip(found["exact"], found["fast"], strict=True)):
        # A client's upload goes to two others in slices; the last slice may be shorter.
        clients = exact["uploads"] / (2 * slice_size)
        assert 1 - 0.1 < clients <= 2, (rank, exact)
        assert exact["averages"] == 2 * slice_size
        assert "uploads" not in fast and fast["averages"] == 2 * 2 * model // 3
    total = sum(exact["uploads"] for exact in found["exact"])
    assert 5 * 2 * model / 3 * 0.95 < total <= 5 * 2 * slice_size
    # Five terms of rounding 2 ** -24 each in three rounds, which training amplifies a little.
    assert 0 <= found["apart"] < 1e-4 * found["largest"]


def _check_saved(found: dict[str, Any], folder: Path) -> None:
    """Each rank has written a part; one process goes on from them."""
    parts = [f"clients-{rank}-of-3.safetensors" for rank in range(3)]
    steps = ("checkpoint-00000001", "checkpoint-00000002")
    assert found["ditto"] == [f"{step}.{part}" for step in steps for part in (*parts, "safetensors")]
    settings = Settings(rounds=4, checkpoint_every=1, clock="log-normal")
    for name in ("ditto", "fedbuff", "fedbabu"):
        if name == "fedbabu":  # it has personalised its clients: more rounds are refused, as of one process
            with pytest.raises(ValueError, match="cannot be given more rounds"):
                federation(name, InProcess(), settings, folder=folder / name, resume=True)
            continue
        whole = json.loads(outcome(name, InProcess(), settings))
        rest = json.loads(outcome(name, InProcess(), settings, folder=folder / name, resume=True))
        assert rest["digests"] == whole["digests"], name
        assert rest["records"] == whole["records"][2:], name


def test_a_run_goes_on_with_another_number_of_ranks(answers: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    settings = Settings(rounds=2, checkpoint_every=1, clock="log-normal")
    for name in ("ditto", "fedbuff"):
        federation(name, InProcess(), settings, folder=tmp_path / name).run()
    found = answers(2, "resumed")["resumed"]
    whole = Settings(rounds=4, checkpoint_every=1, clock="log-normal")
    for name in ("ditto", "fedbuff"):
        ours, theirs = json.loads(found[name]), json.loads(outcome(name, InProcess(), whole))
        assert ours["digests"] == theirs["digests"] and ours["records"] == theirs["records"][2:], name
