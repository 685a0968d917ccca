"""The papers' tables as data, and the command that fills them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pfl_ext.cli import main
from pfl_ext.papers import Item, Runs, item_of, papers
from pfl_ext.reports import Spread
from pfl_ext.reports.beside import number_of

ITEMS = [item for items in papers().values() for item in items.values()]


def _id(item: Item) -> str:
    return f"{item.paper}-{item.name}"


@pytest.mark.parametrize("item", ITEMS, ids=_id)
def test_every_cell_is_of_a_run_that_the_papers_file_makes(item: Item, tmp_path: Path) -> None:
    runs = {name: Runs(path, tmp_path, item.asked()) for name, path in item.files().items()}
    for row in item.rows:
        assert len(row.get("printed", item.columns)) == len(item.columns), row["name"]
        for column in item.columns:
            cell = item.cell(row, column)
            assert runs[cell["file"]].place(cell["method"], cell["point"]) is not None, (row["name"], column["name"])


@pytest.mark.parametrize("item", ITEMS, ids=_id)
def test_every_table_has_scaled_down_files_that_fill_some_of_it(item: Item, tmp_path: Path) -> None:
    item = item_of(item.paper, item.name, small=True)
    files = item.files()
    assert all(path.is_file() for path in files.values())
    runs = {name: Runs(path, tmp_path, item.asked()) for name, path in files.items()}
    cells = [item.cell(row, column) for row in item.rows for column in item.columns]
    assert any(runs[cell["file"]].place(cell["method"], cell["point"]) is not None for cell in cells)


@pytest.mark.parametrize("name", ["table2", "table3", "table4a", "table4b", "table6"])
def test_persfls_printed_means_and_deviations_are_those_of_the_users_above_them(name: str) -> None:
    item = papers()["persfl"][name]
    printed = {row["name"]: [float(number) for number in row["printed"]] for row in item.rows}
    users = np.array([printed[f"User {k}"] for k in range(10)])
    # Printed with one digit, of users that are printed with one; one cell of Table 6 is off by more.
    off = np.abs(users.mean(0) - printed["Avg. Acc."])
    assert np.median(off) <= 0.05 and off.max() <= 0.2
    assert np.abs(users.std(0, ddof=1) - printed["Std Dev"]).max() <= 0.15


def test_numbers_are_read_off_what_is_printed() -> None:
    assert number_of("85.94 ± 8.82") == (85.94, 8.82)
    assert number_of("(80.33 ± 0.38)") == (80.33, 0.38)
    assert number_of("") is None and number_of(None) is None
    assert number_of(Spread(1.0, 2.0)) == (1.0, 2.0)
    for item in ITEMS:
        for row in item.rows:
            for text in row.get("printed", ()):
                assert text == "" or number_of(text) is not None, (item.name, row["name"], text)


TINY = ["--data", "digits", "--rounds", "2", "--clients", "4", "--server", "0", "--seeds", "0,1", "--quiet"]


def test_a_table_is_run_and_printed_with_the_papers_numbers_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["paper", "scd", "table5", "--small", "--output", str(tmp_path / "out"), *TINY]
    assert main([*arguments, "--no-plots"]) == 0
    text = (tmp_path / "out" / "table5.md").read_text(encoding="utf-8")
    header, _, *rows = text.splitlines()
    assert [cell.strip() for cell in header.split("|")[1:4]] == ["", "\u03b1 = 1 GM", "\u03b1 = 1 GM, paper"]
    assert [row.split("|")[1].strip() for row in rows] == [
        "Ours", "Ours w/o SCD-GM", "Ours w/o SCD-PM", "Ours w/o Both",
    ]  # fmt: skip
    first = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert first[2] == "86.37 ± 0.15" and "±" in first[1] and first[1] != first[2]
    assert "begin{tabular}" in (tmp_path / "out" / "table5.tex").read_text(encoding="utf-8")
    # The same table from the runs that are there, with its picture.
    pytest.importorskip("matplotlib")
    again = [word for word in arguments if word not in TINY]
    assert main([*again, "--no-run"]) == 0
    assert (tmp_path / "out" / "table5.md").read_text(encoding="utf-8") == text
    assert (tmp_path / "out" / "table5.png").stat().st_size > 1000
    assert "scd, table5: Ablation" in capsys.readouterr().out


def test_papers_are_listed_and_what_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "--list"]) == 0
    assert "table10" in capsys.readouterr().out
    assert main(["paper", "scd", "table55"]) == 1
    assert "scd has no 'table55' here (did you mean table5" in capsys.readouterr().err
    assert main(["paper", "scd"]) == 2
    assert main(["paper", "scd", "table5", "--config", "x.toml"]) == 2
