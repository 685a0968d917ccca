"""``pfl-ext compare A B ...``: several methods on the same partitions, clients and batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pfl_ext.experiment import Experiment
from pfl_ext.reports import Look, on_terminal
from pfl_ext.running import Output, compare_all, data_name

from .comparing import compared, more_columns, status_of
from .flags import known_flags
from .parser import UsageError
from .parsing import explained, output_of

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """A comparison to be made: every run by its label, and where it goes."""

    experiments: tuple[tuple[str, Experiment], ...]
    config: Mapping[str, Any]
    """What makes the same comparison again."""
    output: Output
    look: Look


def parse(arguments: Sequence[str]) -> Request:
    """The comparison of a command line and its configuration file."""
    what = compared(
        "compare",
        arguments,
        "Run several methods on the same clients' data and the same random numbers, and print one table.",
    )
    if what.vary:
        raise UsageError(f"the configuration sweeps over {', '.join(what.vary)}: run it with pfl-ext sweep")
    with explained(what.words.tables):
        experiments = tuple(what.comparison.experiments())
    output = output_of(what.words, f"compare-{data_name(experiments[0][1])}")
    for note in what.notes:
        print(note, file=sys.stderr)
    return Request(experiments, what.comparison.config(what.look), output, what.look)


def execute(request: Request) -> int:
    """Run it, write tables and pictures, print the table."""
    found = compare_all(request.experiments, request.config, request.output, request.look)
    print(on_terminal(str(found), sys.stdout))
    where = f"results in {request.output.folder}{more_columns(request.look)}"
    print(f"compared on {request.experiments[0][1].data}: {where}")
    return status_of([what for some in found.diverged.values() for what in some])
