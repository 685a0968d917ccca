"""The page about Flower says what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed here: make flower makes an environment with it")

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from pfl_ext import flower
from pfl_ext.cli import main

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs/flower.md").read_text(encoding="utf-8")


def test_its_code_makes_two_apps() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, object] = {}
    exec(compile(block, "docs/flower.md", "exec", dont_inherit=True), names)
    assert isinstance(names["server"], ServerApp) and isinstance(names["client"], ClientApp)


def test_its_command_writes_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^pfl-ext (flower new .*)$", PAGE, re.M)
    assert main(command.split()) == 0
    assert (tmp_path / "ditto-app/pyproject.toml").is_file()


def test_the_tests_and_functions_that_it_names_exist() -> None:
    code = "\n".join(path.read_text() for path in HERE.glob("*.py"))
    for name in re.findall(r"`(test_\w+?)(?:_\.\.\.)?(?:\[\w+\])?`", PAGE):
        assert f"def {name}" in code, name
    for how in re.findall(r"\[(raises|late|nan|name|dtype|shape|pickle|claim|json)\]`", PAGE):
        assert f'"{how}"' in code
    for name in ("read_arrays", "save_kept", "proximal_steps", "lwsam_steps", "codistill", "distill", "FusedFedAvg"):
        assert f"`{name}`" in PAGE and name in flower.__all__
