"""``pfl-ext paper NAME TABLE``: a table or figure of one of the papers, in its form, its numbers beside ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pfl_ext.configuration import Configuration
from pfl_ext.engines import kept_processes
from pfl_ext.papers import Item, Runs, items_of, papers, parameters
from pfl_ext.reports import (
    Look,
    Spread,
    accuracy_curves,
    beside,
    client_density,
    folder_name,
    lines,
    scatter,
    timeline,
)
from pfl_ext.reports.tables import in_parts
from pfl_ext.reports.virtual_time import Timed
from pfl_ext.running import write_tables

from . import compare, landscape, sweep
from .flags import known_flags
from .parser import Parser, UsageError

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """A table or figure to be made, or the parts of one; none lists what there is."""

    items: tuple[Item, ...]
    folder: Path
    run: bool
    plots: bool
    pretrained: str | None
    """Weights to begin with, that the user named."""
    arguments: tuple[str, ...]
    """What else ``compare`` and ``sweep`` are given beside the file and the folder."""


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
        "--seeds, --workers, --resume, ... With --resume what is done is not done again.",
    )
    parser.add_argument("name", nargs="?", help="the paper, such as persfl")
    parser.add_argument(
        "item", nargs="?", metavar="TABLE|FIGURE", help="such as table1 or figure5; table4 is table4a and table4b"
    )
    parser.add_argument("--list", action="store_true", help="list what there is")
    parser.add_argument("--small", action="store_true", help="the scaled-down version in place of the paper's size")
    parser.add_argument(
        "--no-run", action="store_true", help="train nothing: make the table from the runs that are there"
    )
    parser.add_argument("--output", type=Path, help="folder for runs, table and picture (default: results/NAME-TABLE)")
    parser.add_argument("--no-plots", action="store_true", help="draw no pictures")
    parser.add_argument(
        "--network-pretrained", metavar="FILE", help="weights that networks begin with, in place of those of the files"
    )
    given, rest = parser.parse_known_args(list(arguments))
    if given.list:
        return Request((), Path(), False, False, None, ())
    if given.name is None or given.item is None:
        raise UsageError(f"name a paper and a table or figure: {', '.join(papers())}; pfl-ext paper --list shows all")
    for refused in ("--config", "--vary"):
        if any(word == refused or word.startswith(f"{refused}=") for word in rest):
            raise UsageError(f"{refused}: a paper's table has files of its own; leave it out")
    items = items_of(given.name, given.item, given.small)
    folder = given.output or Path("results") / f"{given.name}-{given.item}{'-small' if given.small else ''}"
    return Request(items, folder, not given.no_run, not given.no_plots, given.network_pretrained, tuple(rest))


def execute(request: Request) -> int:
    """Make the runs that are needed; write each table in all styles and the picture, print the table in parts."""
    if not request.items:
        for paper, items in papers().items():
            print("\n".join([paper, *(f"  {name:10} {item.title}" for name, item in items.items())]))
        return 0
    if request.run:
        _run(request)
    for item in request.items:
        _make(item, request)
    return 0


def _make(item: Item, request: Request) -> None:
    folder = request.folder
    runs = {name: Runs(path, folder / name, item.asked()) for name, path in item.files().items()}
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{item.name}.png" if request.plots else None
    cells: list[_Cell] = []
    if item.kind == "landscape":
        rows = _landscape(item, runs, picture)
    else:
        rows, cells = _rows(item, runs)
    write_tables(rows, folder, item.name, Look())
    print(f"{item.paper}, {item.name}: {item.title}\n")
    print(in_parts(rows))
    if picture is not None:
        try:
            _draw(item, runs, cells, picture)
        except ImportError as error:
            print(f"no picture: {error}", file=sys.stderr)
        except ValueError as error:
            print(f"no picture of {item.name}: {error}", file=sys.stderr)
    print(f"{item.name} of {item.paper}: in {folder}")


# ---- the runs --------------------------------------------------------------------------------------------------------


def _run(request: Request) -> None:
    """Run every file; all command lines are checked before the first run begins."""
    asked = []
    files = {name: (item, path) for item in request.items for name, path in item.files().items()}
    for name, (item, path) in files.items():
        begins = _begins(item, name, request)
        if begins is None:
            print(
                f"note: {name} of {item.name} is left out: it begins with weights that only you can name, by "
                "--network-pretrained FILE",
                file=sys.stderr,
            )
            continue
        command: Any = sweep if Configuration.read(path).sweep else compare
        plots = () if request.plots else ("--no-plots",)
        folder = request.folder / name
        # What was left out before, or not come to, begins now.
        given = [word for word in request.arguments if word != "--resume" or folder.exists()]
        words = ["--config", str(path), "--output", str(folder), *plots, *given, *begins]
        asked.append((command, command.parse(words)))
    with kept_processes(lambda note: print(f"note: {note}", file=sys.stderr)):
        for command, given in asked:
            command.execute(given)


def _begins(item: Item, name: str, request: Request) -> tuple[str, ...] | None:
    """What is asked for beside a file so that its networks begin as they should; None where that is not to be had."""
    begins, own = item.begins(name), request.pretrained
    source, slash, method = begins.partition("/")
    if slash and source in item.files():
        run = f"{folder_name(method)}-seed{_first_seed(request, item.files()[source])}"
        return ("--network-pretrained", str(request.folder / source / run))
    if begins == "own":
        return ()
    if begins and own is None:
        return None if item.small else ("--network-pretrained", begins)
    return () if own is None else ("--network-pretrained", own)


def _first_seed(request: Request, path: Path) -> int:
    """The seed of the run whose model others begin with."""
    words = [*request.arguments, ""]
    asked = [word.partition("=")[2] or after for word, after in pairwise(words) if word.partition("=")[0] == "--seeds"]
    return int(asked[-1].split(",")[0]) if asked else (Configuration.read(path).seeds or (0,))[0]


# ---- the table -------------------------------------------------------------------------------------------------------

_Cell = tuple[dict[str, Any], str, str, Spread | float | None, str]
"""What decides it, its row and column, our number and what is printed."""


def _rows(item: Item, runs: dict[str, Runs]) -> tuple[list[dict[str, Any]], list[_Cell]]:
    """The table's rows, ours and the paper's in columns side by side; and its cells."""
    rows, cells = [], []
    for row in item.rows:
        shown: dict[str, Any] = {"": item.shown(row)}
        printed = row.get("printed", [""] * len(item.columns))
        for column, number in zip(item.columns, printed, strict=True):
            cell = item.cell(row, column)
            ours = _counted(cell) if cell.get("value") == "parameters" else runs[cell["file"]].value(cell)
            shown[item.shown(column)] = ours
            if any("printed" in other for other in item.rows):
                shown[f"{column['name']}, paper"] = number or None
            cells.append((cell, item.shown(row), item.shown(column), ours, number))
        rows.append(shown)
    return rows, cells


def _counted(cell: dict[str, Any]) -> float:
    """A cell of Tables 6 and 7 of PerAda, which no run fills."""
    return parameters(cell["network"], cell["classes"], cell["part"]) / 1e6


def _landscape(item: Item, runs: dict[str, Runs], picture: Path | None) -> list[dict[str, Any]]:
    """The loss around the models, of the first seed's first client, and its picture."""
    rows = []
    for row in item.rows:
        cell = item.cell(row, {})
        folders = runs[cell["file"]].of(cell["method"], cell["point"])
        if not folders:
            continue
        points = ["--points", "7", "--samples", "200"] if item.small else []
        words = [str(folders[0].path), "--models", ",".join(cell["models"]), *points]
        into = [] if picture is None else ["--output", str(picture)]
        asked = landscape.parse([*words, *into])
        try:
            rows += landscape.drawn(asked, draw=picture is not None)
        except ImportError as error:
            print(f"no picture: {error}", file=sys.stderr)
            rows += landscape.drawn(asked, draw=False)
    return rows


# ---- the picture -----------------------------------------------------------------------------------------------------


def _draw(item: Item, runs: dict[str, Runs], cells: list[_Cell], path: Path) -> None:
    """The picture: as the paper's figure is, or the table's cells with the printed ones."""
    match item.kind:
        case "density":
            client_density(_named(item, runs), path)
        case "curves":
            _curves(item, runs, path)
        case "option" | "grid":
            panels: dict[str, dict[str, list[tuple[str, Any]]]] = {}
            for cell, row, column, ours, _ in cells:
                panels.setdefault(cell.get("panel", ""), {}).setdefault(row, []).append((column, ours))
            lines(panels, path, item.title)
        case "scatter":
            _scatter(item, cells, path)
        case "timeline":
            cell = cells[0][0]
            folders = runs[cell["file"]].of(cell["method"], cell["point"])
            if folders:
                timed = Timed(folders[0].path, {})
                timeline({str(cell["protocol"]): timed.spans(cell["protocol"], 3) for cell, *_ in cells}, path)
        case "landscape":
            pass  # with its table
        case _:
            beside([(row, column, ours, printed) for _, row, column, ours, printed in cells], path, item.title)


def _named(item: Item, runs: dict[str, Runs]) -> dict[str, Any]:
    """The runs of each row."""
    found = {}
    for row in item.rows:
        cell = item.cell(row, item.columns[0])
        folders = runs[cell["file"]].of(cell["method"], cell["point"])
        if folders:
            found[str(row["name"])] = folders
    return found


def _curves(item: Item, runs: dict[str, Runs], path: Path) -> None:
    """A picture for each column: the first one has the item's name, the others that of their data too."""
    named = _named(item, runs)
    metric = next(iter(runs.values())).metric
    for column in item.columns:
        cell = item.cell(item.rows[0], column)
        split = cell.get("split", "test")
        here = path if column is item.columns[0] else path.with_name(f"{path.stem}-{split}{path.suffix}")
        accuracy_curves(named, here, metric, split=split, group=cell.get("group", "models"), models=(cell["model"],))


def _scatter(item: Item, cells: list[_Cell], path: Path) -> None:
    """Every column that has a panel over the one of its runs that is the horizontal axis."""
    across = {(cell["file"], row): ours for cell, row, _, ours, _ in cells if cell.get("across")}
    panels: dict[str, list[tuple[str, Any, Any]]] = {}
    for cell, row, column, ours, _ in cells:
        if not cell.get("across"):
            panels.setdefault(column, []).append((row, across[cell["file"], row], ours))
    lengthwise = next(column for cell, _, column, _, _ in cells if cell.get("across"))
    scatter(panels, path, item.title, lengthwise.rpartition(": ")[2])
