"""Values and files that cannot work: one line that says what was given and what is accepted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import reliable_process
import torch
from torch import Tensor, nn

from pfl_ext import _native
from pfl_ext.cli import main
from pfl_ext.federation import Clock
from pfl_ext.nn import load_pretrained

RUN = ["run", "fedavg", "--rounds", "1", "--clients", "2", "--partition", "iid", "--quiet", "--no-plots"]


# ---- clocks ----------------------------------------------------------------------------------------------------------

_ROW = {"client": 0, "compute": 1.0, "up": 1.0, "down": 1.0, "latency": 0.0}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("long.csv", "client,compute,up,down,latency\n0,1,1,1," + "1" * 5_000_000, "is not csv: field larger than"),
        ("deep.json", "[" * 200_000, "is not json: "),
        ("long.json", json.dumps([_ROW | {"client": "x" * 5_000_000}]), "numbers are accepted"),
        ("infinite.json", json.dumps([_ROW | {"client": 1e999}]), "numbers are accepted"),
        ("huge.json", json.dumps([_ROW | {"up": 10**400}]), "numbers are accepted"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        Clock.trace(path, 1)
    assert len(str(error.value)) < 500
    command = [*RUN, "--clock", "trace", "--clock-trace", str(path), "--output", str(tmp_path / "run")]
    assert main(command) == 1
    assert capsys.readouterr().err.count("\n") == 1


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--device", "meta", "device"), ("--threads", "1000000000", "from 1 to 1024"), ("--threads", "0", "from 1")],
)
def test_settings_that_no_process_survives_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    status = main([*RUN, option, value, "--output", str(tmp_path / "run")])
    told = capsys.readouterr().err
    assert status in (1, 2) and told.count("\n") == 1 and message in told and value in told


@pytest.mark.skipif(_native.isa() is None, reason="no CPU library")
def test_an_unknown_instruction_set_is_a_line_and_no_traceback(tmp_path: Path) -> None:
    environment = os.environ | {"PFL_EXT_ISA": "avx9"}
    command = [sys.executable, "-m", "pfl_ext", "info"]
    told: dict[str, Any] = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **told)
    assert done.returncode == 1
    assert done.stderr.startswith("PFL_EXT_ISA: instruction set 'avx9' is not") and done.stderr.count("\n") == 1
    caught = "try:\n import pfl_ext\nexcept ValueError as error:\n print('caught', error)"
    done = subprocess.run([sys.executable, "-c", caught], check=True, **told)
    assert done.stdout.startswith("caught PFL_EXT_ISA")


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main([*RUN, "--clock", "constant", "--output", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"round": "x"},
        {"round": None},
        {"round": True},
        {"work": 3},
        {"work": [[0, 1]]},
        {"work": [["a", 1, 1, 1, 1, 0.0]]},
        {"models": []},
        {"models": {"global": {"test": {"accuracy": "high"}}}},
        {"models": {"global": {"test": 0.5}}},
        {"clock": {"wait-free": "soon"}},
        {"training": 1},
    ],
    ids=str,
)
def test_a_record_that_is_none_is_named_in_a_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.toml", "versions.json", "clients.csv"):
        (folder / name).write_bytes((finished / name).read_bytes())
    record = json.loads((finished / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(json.dumps(record | change) + "\n")
    capsys.readouterr()
    assert main(["virtual-time", str(folder)]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "metrics.jsonl, line 1 is damaged" in told


# ---- workers ---------------------------------------------------------------------------------------------------------


def test_a_killed_worker_ends_the_run_in_a_line_and_leaves_nobody_behind(tmp_path: Path) -> None:
    log, metrics = tmp_path / "log", tmp_path / "run" / "metrics.jsonl"
    common = {"rounds": 5000, "clients": 4, "partition": "iid", "workers": 2, "output": tmp_path / "run"}
    process = reliable_process.start(["run", "fedavg", *reliable_process.options(common), "--quiet", "--no-plots"], log)
    assert process.pid is not None
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert process.is_alive(), log.read_text()
        time.sleep(0.02)
    workers = reliable_process.workers(process.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    process.join(60)
    told = log.read_text()
    assert process.exitcode == 1 and told.count("\n") == 1, told
    assert "a worker process ended" in told and "--workers 1 to see the error itself" in told
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


# ---- pretrained weights ----------------------------------------------------------------------------------------------


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.int(), "0.weight is torch.int32 in place of torch.float32"),
        (lambda w: w > 0, "0.weight is torch.bool"),
        (lambda w: w.to(torch.complex64), "0.weight is torch.complex64"),
        (lambda w: w.index_fill(0, torch.tensor([1]), float("nan")), "0.weight has numbers that are not finite"),
        (lambda w: w / 0.0, "0.weight has numbers that are not finite"),
        (lambda w: w.to_sparse(), "0.weight is torch.sparse_coo in place of dense"),
    ],
)
def test_weights_that_are_no_finite_real_numbers_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    network = _network()
    weights: dict[str, Tensor] = {name: tensor + 1 for name, tensor in network.state_dict().items()}
    weights["0.weight"] = change(weights["0.weight"])
    torch.save(weights, tmp_path / "weights.pt")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_pretrained(network, tmp_path / "weights.pt")
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_precisions_are_taken(tmp_path: Path, dtype: torch.dtype) -> None:
    network = _network()
    weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in network.state_dict().items()}
    torch.save(weights, tmp_path / "weights.pt")
    assert load_pretrained(network, tmp_path / "weights.pt") == []
