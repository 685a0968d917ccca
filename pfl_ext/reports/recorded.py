"""A run whose records go to a results folder as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pfl_ext.federation import ClientResult, Federation, Record

from .results import ResultsFolder

__all__ = ["recorded"]


def recorded(run: Federation, results: ResultsFolder) -> Iterator[Record]:
    """The rounds of a run, each written to the folder before it is handed on.

    A resumed run goes on where its checkpoint is: what the folder has beyond that is removed, and comes again.
    """
    results.truncate(run.recorded)
    for record in run.rounds():
        results.append(record)
        if "models" in record:  # the last evaluation, and each one
            rows = [_row(result) for result in run.client_results]
            results.write_clients(rows)
            results.write_clients(rows, record["round"])
        yield record


def _row(result: ClientResult) -> dict[str, Any]:
    """A client's results as a row of clients.csv."""
    metrics = {
        f"{model}/{split}/{metric}": value
        for (model, split), found in result.metrics.items()
        for metric, value in found.items()
    }
    return {
        "client": result.client,
        **{f"{split}_samples": count for split, count in result.samples.items()},
        **({} if result.new is None else {"new": result.new}),
        **metrics,
        **result.report,
    }
