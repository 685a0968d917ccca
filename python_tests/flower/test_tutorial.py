"""What the tutorial on Flower says is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed here: make flower makes an environment with it")

from pages import DOCS, Kept, blocks, follow

PAGE = DOCS / "tutorials" / "flower.md"


def test_its_app_runs_in_a_simulation(tmp_path: Path) -> None:
    (code,) = (block.code for block in blocks(PAGE) if block.kind == "python")
    (tmp_path / "app.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "arrays of the result: 0.weight, 0.bias, 2.weight, 2.bias" in done.stdout


def test_its_commands_write_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Kept():
        follow(PAGE)
    assert (tmp_path / "ditto-app" / "pyproject.toml").is_file()
