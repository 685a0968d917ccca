"""The code in docs/ runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pfl_ext.cli import main

DOCS = Path(__file__).parents[1] / "docs"


def _blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.S)


def test_the_example_method_works_and_keeps_its_input_layer(capsys: pytest.CaptureFixture[str]) -> None:
    method, use = _blocks("methods.md")
    assert len(method.splitlines()) <= 60
    names: dict[str, object] = {"__name__": "example"}
    # Without this file's own __future__ imports.
    exec(compile(method, "docs/methods.md", "exec", dont_inherit=True), names)
    exec(use.replace("last = Federation(", "run = Federation(").replace(").run()\n", ")\nlast = run.run()\n"), names)
    assert float(capsys.readouterr().out) > 0.6
    run = names["run"]
    layers = [run.store.read(k, "input") for k in range(10)]  # type: ignore[attr-defined]
    assert not torch.equal(layers[0], layers[1])
    assert run.records[0]["communication"]["up_parameters"] == 10 * (100 * 10 + 10)  # type: ignore[attr-defined]


def test_the_command_line_runs_a_method_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_input.py").write_text(_blocks("methods.md")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    arguments = ["--layer", "1", "--rounds", "2", "--quiet", "--no-plots", "--output", "out"]
    assert main(["run", "own_input.py:OwnInput", *arguments]) == 0
    assert "personal" in capsys.readouterr().out
    assert main(["run", "own_input.py:OwnInputt", *arguments]) == 2
    assert "has no method OwnInputt" in capsys.readouterr().err
    assert main(["run", "other.py:OwnInput", *arguments]) == 2
    assert "is not a file" in capsys.readouterr().err
