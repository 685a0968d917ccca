"""``pfl-ext compare A B ...``: several methods on the same partitions, clients and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pfl_ext.experiment import Experiment
from pfl_ext.reports import comparison, table, tails, users
from pfl_ext.runs import draw

from .comparing import Look, compared, folders_of, run_all, write_tables
from .flags import known_flags
from .parser import UsageError
from .parsing import Output, data_name, explained, output_of

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """A comparison to be made: every run by its label, and where it goes."""

    experiments: tuple[tuple[str, Experiment], ...]
    output: Output
    look: Look


def parse(arguments: Sequence[str]) -> Request:
    """The comparison of a command line and its configuration file."""
    what = compared(
        "compare", arguments, "Run several methods on identical partitions and random streams, and print one table."
    )
    if what.vary:
        raise UsageError(f"the configuration sweeps over {', '.join(what.vary)}: run it with pfl-ext sweep")
    with explained(what.words.tables):
        experiments = tuple(what.comparison.experiments())
    return Request(experiments, output_of(what.words, f"compare-{data_name(experiments[0][1])}"), what.look)


def execute(request: Request) -> int:
    """Run it, write tables and pictures, print the table."""
    output, look = request.output, request.look
    output.check(folders_of(request.experiments, output.folder))
    runs, dataset, partition = run_all(request.experiments, output.folder, output)
    rows = comparison(runs, look.metric, look.statistic)
    write_tables(rows, output.folder, "comparison")
    write_tables(tails(runs, look.metric), output.folder, "tails")
    (output.folder / "users.md").write_text(users(runs, look.metric), encoding="utf-8")
    print(table(rows, style=look.style))
    if output.plots:
        draw(runs, output.folder, dataset, partition)
    print(f"compared on {request.experiments[0][1].data}: results in {output.folder}")
    return 0
