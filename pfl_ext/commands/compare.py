"""``pfl-ext compare A B ...``: several methods on the same partitions, clients and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pfl_ext.experiment import Experiment
from pfl_ext.reports import ResultsFolder, comparison, per_user, table, tails, transpose
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
    (output.folder / "users.md").write_text(_users(runs), encoding="utf-8")
    print(table(rows, style=look.style))
    if output.plots:
        draw(runs, output.folder, dataset, partition)
    print(f"compared on {request.experiments[0][1].data}: results in {output.folder}")
    return 0


def _users(runs: Mapping[str, Sequence[ResultsFolder]]) -> str:
    """PersFL's Tables 2 to 6: a row a user, for the accuracy and for what clients chose where they chose something."""
    text = "Accuracy of each user's personal model (global where a method has none), per cent\n\n"
    text += table(transpose(per_user(runs), "user"))
    for metric, title in (
        ("temperature", "Temperature T that each user chose"),
        ("lambda", "Imitation lambda that each user chose"),
        ("teacher_round", "Round of each user's optimal teacher"),
    ):
        chosen = {name: folders for name, folders in runs.items() if metric in folders[0].clients()[0]}
        if chosen:
            text += f"\n{title}\n\n" + table(transpose(per_user(chosen, metric), "user"))
    return text
