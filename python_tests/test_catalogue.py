"""``pfl-ext methods``, and the page that it makes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from pfl_ext.algorithms import METHODS
from pfl_ext.catalogue import catalogue, put_into
from pfl_ext.cli import main

PAGE = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
PACKAGED = list(METHODS)  # before a test makes others known


def test_the_page_has_the_tables_that_the_classes_give(tmp_path: Path) -> None:
    entries = catalogue(PACKAGED)
    page = tmp_path / "methods.md"
    page.write_text(PAGE.replace("| `SCAFFOLD` |", "| `Skaffold` |"), encoding="utf-8")
    put_into(page, entries)
    assert page.read_text(encoding="utf-8") == PAGE, "make methods brings it up to date"
    page.write_text("no comments", encoding="utf-8")
    with pytest.raises(ValueError, match="are needed, once each and in this order"):
        put_into(page, entries)


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "scaffold", "ifca", "--style", "markdown"]) == 0
    told = capsys.readouterr().out
    control = "model 1.00, control 1.00"
    assert f"| control 1.00 | {control} | {control} | 1.00 | global |" in told
    assert "| model/* 2.00 | model 1.00, cluster ~0 |" in told and "`clusters` 2" in told
    assert main(["methods", "scafold"]) == 2
    assert "did you mean scaffold" in capsys.readouterr().err


def test_in_a_terminal_it_is_text_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "scaffold", "fedem", "persfl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "  a client keeps control 1.00" in lines and lines[0].startswith("scaffold: SCAFFOLD")
    assert len([line for line in lines if line.startswith("  options ")]) == 3


def test_what_corresponds_elsewhere_is_there_here() -> None:
    """Every method and option of the first and fourth column of the table of names."""
    table = re.search(r"\| here \| PFLlib .*?\n\n", PAGE, re.S)
    assert table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()[2:] if line]
    assert len(rows) > 30
    for here, pfllib, bench, options, *theirs in rows:
        names = re.findall(r"`([\w-]+)`", here)
        assert names and pfllib and bench
        for name in names:
            known = {field.name for field in fields(METHODS[name])}
            own = re.findall(r"`(\w+)`", options)
            assert set(own) <= known, name
        for other in theirs:  # as many as ours, where any are named
            assert not other or len(other.split(",")) in (len(own), 1) or name == "per-fedavg", name
