"""The code in docs/ runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pfl_ext.algorithms import METHODS
from pfl_ext.cli import main
from pfl_ext.federation import Method

DOCS = Path(__file__).parents[1] / "docs"
PACKAGED = dict(METHODS)  # before a test makes others known


def _blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.S)


def _executed(name: str, *blocks: str) -> dict[str, Any]:
    """The names that these blocks of a page leave."""
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        # Without this file's own __future__ imports.
        exec(compile(block, f"docs/{name}", "exec", dont_inherit=True), names)
    return names


def test_the_example_method_works_and_keeps_its_input_layer(capsys: pytest.CaptureFixture[str]) -> None:
    method, use = _blocks("methods.md")
    assert len(method.splitlines()) <= 60
    names = _executed("methods.md", method, use)
    assert float(capsys.readouterr().out) > 0.6
    run, last = names["run"], names["last"]
    layers = [run.engine.store.read(k, "input") for k in range(10)]
    assert not torch.equal(layers[0], layers[1])
    assert last["communication"]["up_parameters"] == 10 * (100 * 10 + 10)
    assert list(last["models"]) == ["personal"]


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


def _first_column(page: str, heading: str) -> list[str]:
    """The first cells of the table after a line that begins so."""
    after = (DOCS / page).read_text(encoding="utf-8").partition(f"\n{heading}")[2]
    table = re.search(r"(?:^\|.*\n)+", after, re.M)
    assert table is not None
    return [line.split("|")[1].strip() for line in table[0].splitlines()[2:]]


def test_the_table_of_methods_has_them_all() -> None:
    names = re.findall(r"^\| `(\w+)` \| `([\w-]+)` \|", (DOCS / "methods.md").read_text(encoding="utf-8"), re.M)
    assert {name: kind for kind, name in names} == {name: kind.__name__ for name, kind in PACKAGED.items()}


def test_the_table_of_hooks_has_them_all() -> None:
    functions = {name for name, value in vars(Method).items() if callable(value) and not name.startswith("_")}
    hooks = [re.sub(r"`(\w+)\(.*", r"\1", cell) for cell in _first_column("methods.md", "The hooks")]
    assert set(hooks) == functions and len(hooks) == len(functions)
    properties = {name for name, value in vars(Method).items() if isinstance(value, property)}
    said = {re.sub(r"\W.*", "", cell.strip("`")) for cell in _first_column("methods.md", "And what a method says")}
    assert said == properties | {"private", "needs_validation"}
