"""An optimiser of the user's: by its name on the command line, as an object in Python, in worker processes."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pfl_ext
from pfl_ext.algorithms import FedAvg
from pfl_ext.cli import main
from pfl_ext.federation.optimizers import OPTIMIZERS
from pfl_ext.reports.results import read_config

CODE = """
import torch
from pathlib import Path

def lion(params, lr, weight_decay):
    Path("ran").touch()
    return torch.optim.RMSprop(params, lr=lr, weight_decay=weight_decay)
"""
QUICK = ["--data", "digits", "--clients", "2", "--rounds", "1", "--local-steps", "2", "--quiet", "--no-plots"]


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    Path("own_steps.py").write_text(CODE, encoding="utf-8")
    before = dict(OPTIMIZERS)
    yield "own_steps.py:lion"
    OPTIMIZERS.clear()
    OPTIMIZERS.update(before)
    __import__("sys").modules.pop("own_steps", None)


def test_the_command_line_names_a_factory_and_a_file_does_not_unless_it_is_trusted(
    factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.toml").write_text(f'[method]\nname = "fedavg"\noptimizer = "{factory}"\n', encoding="utf-8")
    assert main(["run", "--config", "some.toml", *QUICK, "--output", "file"]) == 2
    assert "give --trust-code" in capsys.readouterr().err and not Path("ran").exists()
    assert main(["run", "fedavg", "--optimizer", factory, *QUICK, "--output", "line"]) == 0
    assert Path("ran").exists()
    assert read_config(Path("line"))["method"]["optimizer"] == factory
    assert main(["run", "fedavg", "--optimizer", "adma", *QUICK, "--output", "wrong"]) != 0
    assert "sgd, adam, adamw" in capsys.readouterr().err


def test_a_program_gives_the_factory_itself(factory: str) -> None:
    own = functools.partial(torch.optim.SGD, nesterov=True, momentum=0.9)
    found = []
    for name, given in (("partial", own), ("file", factory), ("named", "adam")):
        quiet = {"output": name, "quiet": True, "plots": False}
        run = pfl_ext.run(FedAvg(local_steps=2), optimizer=given, data="digits", clients=2, rounds=1, **quiet)
        found.append(torch.cat([p.flatten() for p in run.global_model().parameters()]))
    assert Path("ran").exists() and not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_a_worker_knows_the_factory_of_a_name(factory: str) -> None:
    OPTIMIZERS[factory] = torch.optim.RMSprop
    sent = pickle.dumps(FedAvg(optimizer=factory))
    del OPTIMIZERS[factory]
    assert pickle.loads(sent).optimizer == factory and OPTIMIZERS[factory] is torch.optim.RMSprop
