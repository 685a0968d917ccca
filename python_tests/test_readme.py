"""What the README shows is run, and what it says is held to the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pfl_ext
from pfl_ext.algorithms import METHODS
from pfl_ext.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGED = set(METHODS)  # before a test makes others known

OPS, RUN = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_is_one_page():
    assert len(README.splitlines()) <= 150
    assert len(OPS.splitlines()) <= 12 and len(RUN.splitlines()) <= 10


def test_the_example_of_ops_runs():
    exec(compile(OPS, "README.md", "exec"), {})


def test_the_example_of_a_run_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(RUN.replace("rounds=20", "rounds=2"), "README.md", "exec"), names)
    assert list(names["found"]) == ["persfl", "fedavg", "ditto"]
    assert sum(p.numel() for p in names["model"].parameters()) > 0
    assert "persfl" in capsys.readouterr().out
    left = {path.name for path in (tmp_path / "results" / "first").iterdir()}
    assert left >= {"comparison.md", "comparison.csv", "comparison.tex", "curves.png"}


def test_the_command_has_the_options_of_the_example(tmp_path, monkeypatch):
    """Of both the runs have the same configuration."""
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^pfl-ext (compare .*)$", README, re.MULTILINE)
    few = ["--rounds", "1", "--no-plots", "--quiet"]
    assert main([*command.replace("--rounds 20", "").split(), *few]) == 0
    told = (tmp_path / "results" / "first" / "ditto-seed0" / "config.toml").read_text()
    given = eval("dict(" + RUN.partition("for all\n")[2].partition("\n)")[0] + ")")
    again = {**given, "rounds": 1, "output": "again", "plots": False, "quiet": True}
    pfl_ext.compare(["persfl", "fedavg", "ditto"], **again)
    assert (tmp_path / "again" / "ditto-seed0" / "config.toml").read_text() == told


def test_it_names_every_method():
    table = README.partition("## Methods")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([\w-]+)`", table)) - {"pfl_ext/algorithms"} == PACKAGED


def test_the_test_command_is_the_one_that_ci_runs():
    assert "make test" in README and "make demo" in README
    assert "step test" in (ROOT / ".ci" / "run").read_text()
