"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_first_example_runs(monkeypatch):
    pytest.importorskip("torchvision")
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    # Three clients show as much as twenty.
    exec(compile(example.replace("range(20)", "range(3)"), "README.md", "exec"), {})


def test_the_test_command_is_the_one_that_ci_runs():
    assert "make test" in README
    assert "step test" in (ROOT / ".ci" / "run").read_text()
