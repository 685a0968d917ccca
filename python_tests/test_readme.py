"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


OPS, METHODS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_of_ops_runs():
    pytest.importorskip("torchvision")
    # Three clients show as much as twenty.
    exec(compile(OPS.replace("range(20)", "range(3)"), "README.md", "exec"), {})


def test_the_example_of_a_method_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(METHODS.replace("rounds=20", "rounds=3"), "README.md", "exec"), {})
    assert float(capsys.readouterr().out) > 0.5
    rounds = (tmp_path / "results" / "persfl" / "metrics.jsonl").read_text().splitlines()
    assert len(rounds) == 4  # the last of what clients do after the third
    assert list((tmp_path / "results" / "persfl" / "checkpoints").iterdir())


def test_the_test_command_is_the_one_that_ci_runs():
    assert "make test" in README
    assert "step test" in (ROOT / ".ci" / "run").read_text()
