"""``pfl-ext virtual-time FOLDER ...``: how long finished runs take on a virtual clock, under each protocol."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_ext.options import Option
from pfl_ext.reports import table, timeline
from pfl_ext.reports.tables import Style
from pfl_ext.reports.virtual_time import CLOCK, seconds, speedups, timed_below
from pfl_ext.sections import settings_options

from .flags import flag, refuse_unknown
from .parser import Parser

__all__ = ["Request", "execute", "flags", "parse"]


@dataclass(frozen=True)
class Request:
    """The finished runs to time, and the accuracies they are to reach."""

    folders: tuple[Path, ...]
    targets: tuple[float, ...]
    model: str
    ratios: tuple[float, ...]
    against: str | None
    picture: Path | None
    rounds: int
    style: Style
    clock: Mapping[str, Any]
    """Options of the clock in place of the runs' own."""


def flags() -> dict[str, str]:
    """How names in messages are spelled on this command line."""
    return {name: flag("federation", name) for name in CLOCK}


def parse(arguments: Sequence[str]) -> Request:
    """Read from the command line which runs to time."""
    parser = Parser(
        "virtual-time",
        " FOLDER ...",
        description="Print the virtual time that finished runs take to a target accuracy, on simulated devices and\n"
        "links: with personal training before the upload (compute-and-wait) and during it (wait-free).\n"
        "Asynchronous runs, and those that train until the new model arrives, have one time: their own.",
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="FOLDER", help="results of run, compare or sweep")
    parser.add_argument(
        "--target",
        nargs="+",
        type=float,
        default=[],
        help="values of the runs' metric to reach, such as accuracies 0.4 0.8",
    )
    parser.add_argument(
        "--model", default="personal", help="whose results have to reach it: personal or global (default: personal)"
    )
    parser.add_argument(
        "--ratios",
        help="ratios of personal training time to communication time, such as 0.25,1,4: print the speed-up at each",
    )
    parser.add_argument(
        "--against",
        help="name of the run to compare with: print how much faster all runs are than it is under compute-and-wait",
    )
    parser.add_argument("--picture", type=Path, help="draw who does what when in the first run's first rounds")
    parser.add_argument("--rounds", type=int, default=3, help="how many rounds the picture shows (default: 3)")
    parser.add_argument("--style", choices=("markdown", "csv", "latex"), default="markdown", help="format of the table")
    group = parser.add_argument_group("devices and links in place of the runs' own")
    known = settings_options()
    for name in CLOCK:
        group.add_argument(flag("federation", name), help=known[name].help, default=argparse.SUPPRESS)
    parsed, unknown = parser.parse_known_args(list(arguments))
    refuse_unknown(parser, unknown, {})
    return Request(
        folders=tuple(parsed.results),
        targets=tuple(parsed.target),
        model=parsed.model,
        ratios=Option("--ratios", tuple[float, ...], (), "").parse(parsed.ratios or ()),
        against=parsed.against,
        picture=parsed.picture,
        rounds=parsed.rounds,
        style=parsed.style,
        clock={name: known[name].parse(value) for name, value in vars(parsed).items() if name in CLOCK},
    )


def _beside(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Speed-ups in the cells of the times that they are of: half as many columns fit a terminal."""
    found = []
    for row in rows:
        cells = {name: value for name, value in row.items() if not name.endswith(_SPEEDUP)}
        for name, value in row.items():
            if name.endswith(_SPEEDUP) and value != "-":
                cells[name.removesuffix(_SPEEDUP) + " (s)"] += f" ({value})"
        found.append(cells)
    return found


_SPEEDUP = ": speed-up"


def execute(request: Request) -> int:
    """Print the table, draw the picture."""
    runs = timed_below(request.folders, request.clock)
    if request.ratios:
        rows = speedups(runs, request.ratios, request.targets, request.model)
    else:
        rows = seconds(runs, request.targets, request.model, request.against)
    print(table(_beside(rows) if request.style == "markdown" else rows, style=request.style))
    if request.picture is not None:
        first = next(iter(runs.values()))[0]
        timeline({p: first.spans(p, request.rounds) for p in first.protocols()}, request.picture)
    return 0
