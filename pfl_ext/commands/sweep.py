"""``pfl-ext sweep A B ... --vary OPTION=VALUES``: a comparison for each combination of some options' values."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_ext.comparison import Point, points
from pfl_ext.experiment import Experiment
from pfl_ext.reports import Look, Progress, Runs, on_terminal, option_curves, users
from pfl_ext.running import Output, data_name, folders_of, printed, run_all, with_config, write_tables
from pfl_ext.runs import draw

from .comparing import compared, more_columns, status_of
from .flags import known_flags
from .parser import UsageError
from .parsing import explained, output_of

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """A sweep to be made: its points with the runs that each adds, and where they go."""

    points: tuple[tuple[Point, tuple[tuple[str, Experiment], ...]], ...]
    config: Mapping[str, Any]
    """What makes the same sweep again."""
    output: Output
    look: Look


def parse(arguments: Sequence[str]) -> Request:
    """The sweep of a command line and its configuration file. All of its points are checked."""
    what = compared(
        "sweep",
        arguments,
        "Run a comparison for each combination of some options' values, and print one table.\n"
        "  pfl-ext sweep plgu-lf plgu-grep --vary method.rho=0.05,0.1,0.5\n"
        "  pfl-ext sweep fedavg ditto --vary partition.alpha=1,0.1 --partition dirichlet",
    )
    if not what.vary:
        raise UsageError("name what to vary: --vary method.rho=0.05,0.1, or a table [sweep] in the configuration")
    with explained(what.words.tables):
        found = _fresh(points(what.comparison, what.vary))
    output = output_of(what.words, f"sweep-{data_name(found[-1][1][0][1])}")
    for note in what.notes:
        print(note, file=sys.stderr)
    return Request(found, what.comparison.config(what.look, what.vary), output, what.look)


def _fresh(every: Sequence[Point]) -> tuple[tuple[Point, tuple[tuple[str, Experiment], ...]], ...]:
    """The points with what each adds: a method that has none of the options that differ is run once."""
    found, done = [], set[str]()
    for point in every:
        new = [label for label in point.comparison.labels if point.comparison.identity(label) not in done]
        done |= {point.comparison.identity(label) for label in new}
        some = tuple((label, made) for label, made in point.comparison.experiments() if label in new)
        if some:
            found.append((point, some))
    return tuple(found)


def execute(request: Request) -> int:
    """Run the points, write tables and pictures after each, print the table."""
    output, look = request.output, request.look
    every = [folder for point, some in request.points for folder in folders_of(some, output.folder / point.folder)]
    output.check(every)
    labels = [label for _, some in request.points for label, _ in some]
    with (
        with_config(output.folder, request.config),
        output.workers(),
        Progress(labels, quiet=output.quiet) as progress,
    ):
        return _run(request, output, look, progress)


def _run(request: Request, output: Output, look: Look, progress: Progress) -> int:
    rows: list[dict[str, Any]] = []
    tail_rows: list[dict[str, Any]] = []
    curves: list[tuple[Mapping[str, Any], Runs]] = []
    diverged: list[str] = []
    of_method = {name: name.startswith("method.") for name in request.points[0][0].values}
    varied = _short(of_method)
    for point, some in request.points:
        where = ", ".join(f"{name}={value}" for name, value in _short(point.values).items())
        found, dataset, partition = run_all(some, output.folder / point.folder, output, look, progress, where)
        runs, look = found.folders, found.look
        diverged += [what for some in found.diverged.values() for what in some]
        if output.plots and runs:
            draw(runs, output.folder / point.folder, dataset, partition, look)
        (output.folder / point.folder / "users.md").write_text(users(runs, look.metric or ""), encoding="utf-8")
        for row, of_tails in zip(found.rows(), found.tails(), strict=True):
            applies = point.applies[str(row["method"])]
            own = {name: value if name in applies else None for name, value in point.values.items()}
            rows.append({**_short(own), **row})
            tail_rows.append({**_short(own), **of_tails})
        if runs:
            curves.append((point.values, runs))
        write_tables(rows, output.folder, "sweep", look, varied=varied)
        write_tables(tail_rows, output.folder, "tails", look, varied=varied, whole=True)
    progress.close()
    print(on_terminal(printed(rows, look, varied=varied), sys.stdout))
    experiments = [made for _, some in request.points for _, made in some]
    if output.plots and curves:
        _draw(curves, output.folder, look.metric or "", any(made.settings.new_clients for made in experiments))
    print(f"{len(request.points)} points on {experiments[0].data}: results in {output.folder}{more_columns(look)}")
    return status_of(diverged)


def _short(values: Mapping[str, Any]) -> dict[str, Any]:
    """Swept options by the last part of their names, where that is enough to tell them apart."""
    last = [name.rpartition(".")[2] for name in values]
    return {
        short if last.count(short) == 1 else name: value
        for (name, value), short in zip(values.items(), last, strict=True)
    }


def _draw(points: Sequence[tuple[Mapping[str, Any], Runs]], folder: Path, metric: str, new_clients: bool) -> None:
    """A picture of the results over the option that has several values, if only one has; one more of new clients."""
    varied = [name for name in points[0][0] if len({str(values[name]) for values, _ in points}) > 1]
    if len(varied) != 1:
        return
    drawn = [(values[varied[0]], runs) for values, runs in points]
    try:
        option_curves(drawn, folder / "sweep.png", varied[0], metric)
        if new_clients:
            option_curves(drawn, folder / "new-clients.png", varied[0], metric, new_clients=True)
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
