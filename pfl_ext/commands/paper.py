"""``pfl-ext paper NAME TABLE``: a table or figure of one of the papers, in its form, its numbers beside ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_ext.configuration import Configuration
from pfl_ext.engines import kept_processes
from pfl_ext.papers import Item, Runs, item_of, papers
from pfl_ext.reports import Look, accuracy_curves, beside, client_density
from pfl_ext.reports.tables import in_parts
from pfl_ext.running import write_tables

from . import compare, sweep
from .flags import known_flags
from .parser import Parser, UsageError

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """A table or figure to be made; None lists what there is."""

    item: Item | None
    folder: Path
    run: bool
    plots: bool
    arguments: tuple[str, ...]
    """What ``compare`` and ``sweep`` are given beside the file and the folder."""


def parse(arguments: Sequence[str]) -> Request:
    """The table or figure of a command line."""
    parser = Parser(
        "paper",
        " NAME TABLE|FIGURE",
        description="Make the runs of a table or figure of a paper, and print our results in the paper's rows and\n"
        "columns, beside what the paper prints.\n"
        "  pfl-ext paper --list\n"
        "  pfl-ext paper persfl table3 --small --data-root DATA\n"
        "All options of compare and sweep are accepted too, and go to every file that the table needs: --data-root,\n"
        "--seeds, --workers, --resume, --network-pretrained, ... With --resume what is done is not done again.",
    )
    parser.add_argument("name", nargs="?", help="the paper, such as persfl")
    parser.add_argument("item", nargs="?", metavar="TABLE|FIGURE", help="such as table1 or figure5")
    parser.add_argument("--list", action="store_true", help="list what there is")
    parser.add_argument("--small", action="store_true", help="the scaled-down version in place of the paper's size")
    parser.add_argument(
        "--no-run", action="store_true", help="train nothing: make the table from the runs that are there"
    )
    parser.add_argument("--output", type=Path, help="folder for runs, table and picture (default: results/NAME-TABLE)")
    parser.add_argument("--no-plots", action="store_true", help="draw no pictures")
    given, rest = parser.parse_known_args(list(arguments))
    if given.list:
        return Request(None, Path(), False, False, ())
    if given.name is None or given.item is None:
        raise UsageError(f"name a paper and a table or figure: {', '.join(papers())}; pfl-ext paper --list shows all")
    for refused in ("--config", "--vary"):
        if any(word == refused or word.startswith(f"{refused}=") for word in rest):
            raise UsageError(f"{refused}: a paper's table has files of its own; leave it out")
    item = item_of(given.name, given.item, given.small)
    folder = given.output or Path("results") / f"{item.paper}-{item.name}{'-small' if given.small else ''}"
    return Request(item, folder, not given.no_run, not given.no_plots, tuple(rest))


def execute(request: Request) -> int:
    """Make the runs that it needs, write the table in all styles and the picture, print the table in parts that fit."""
    if request.item is None:
        for paper, items in papers().items():
            print("\n".join([paper, *(f"  {name:9} {item.title}" for name, item in items.items())]))
        return 0
    item, folder = request.item, request.folder
    files = item.files()
    if request.run:
        _run(request, files)
    runs = {name: Runs(path, folder / name, item.asked()) for name, path in files.items()}
    rows, drawn = _rows(item, runs)
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(rows, folder, item.name, Look())
    print(f"{item.paper}, {item.name}: {item.title}\n")
    print(in_parts(rows))
    if request.plots:
        _draw(item, runs, drawn, folder / f"{item.name}.png")
    print(f"{item.name} of {item.paper}: in {folder}")
    return 0


def _run(request: Request, files: dict[str, Path]) -> None:
    """Run every file; all command lines are checked before the first run begins."""
    asked = []
    for name, path in files.items():
        command: Any = sweep if Configuration.read(path).sweep else compare
        plots = () if request.plots else ("--no-plots",)
        words = ["--config", str(path), "--output", str(request.folder / name), *plots, *request.arguments]
        asked.append((command, command.parse(words)))
    with kept_processes(lambda note: print(f"note: {note}", file=sys.stderr)):
        for command, given in asked:
            command.execute(given)


def _rows(item: Item, runs: dict[str, Runs]) -> tuple[list[dict[str, Any]], list[tuple[str, str, Any, str]]]:
    """The table's rows, ours and the paper's in columns side by side; and (row, column, ours, printed) of each cell."""
    rows, cells = [], []
    for row in item.rows:
        shown: dict[str, Any] = {"": item.shown(row)}
        printed = row.get("printed", [""] * len(item.columns))
        for column, number in zip(item.columns, printed, strict=True):
            cell = item.cell(row, column)
            ours = runs[cell["file"]].value(cell)
            shown[item.shown(column)] = ours
            if any("printed" in other for other in item.rows):
                shown[f"{column['name']}, paper"] = number or None
            cells.append((item.shown(row), item.shown(column), ours, number))
        rows.append(shown)
    return rows, cells


def _draw(item: Item, runs: dict[str, Runs], cells: list[tuple[str, str, Any, str]], path: Path) -> None:
    """The picture: as the paper's figure is, or the table's cells with the printed ones."""
    try:
        if item.kind in ("density", "curves"):
            named = {}
            for row in item.rows:
                cell = item.cell(row, item.columns[0])
                folders = runs[cell["file"]].of(cell["method"], cell["point"])
                if folders:
                    named[str(row["name"])] = folders
            (client_density if item.kind == "density" else accuracy_curves)(named, path)
        else:
            beside(cells, path, item.title)
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
