"""The results below a folder as records: plain dictionaries, which ``pandas.DataFrame(records)`` takes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .results import CONFIG, ResultsFolder, flatten, folder_name, read_config, tidy

__all__ = ["load_results"]

What = Literal["metrics", "rounds", "clients"]
_SEED = re.compile(r"-seed(-?\d+)$")


def load_results(folder: str | os.PathLike[str], what: What = "metrics") -> list[dict[str, Any]]:
    """The results of a run, a comparison or a sweep, or of a folder with any of these in it, as a list of records.

    Every record begins with the run it is of: ``run``, its folder below the given one; ``method``, its name there (of a
    variant the variant's); ``seed``; and in a sweep a key for each option that was varied, None for a method without
    it. All records have the same keys. Shares such as the accuracy are between 0 and 1.

    >>> found = pandas.DataFrame(pfl_ext.load_results("results/compare-digits-ds1"))               # doctest: +SKIP
    >>> means = found.query("metric == 'accuracy' and data == 'test' and statistic == 'mean'")     # doctest: +SKIP
    >>> means.pivot_table("value", "round", ["method", "model"]).plot()                            # doctest: +SKIP

    Args:
        folder: what ``pfl-ext run``, ``compare``, ``sweep`` or ``paper`` wrote.
        what: ``"metrics"``: a record for every number of every round, as in metrics-long.csv: ``round``, ``stage``,
            ``group``, ``model``, ``data``, ``metric``, ``statistic``, ``value`` (:func:`.results.tidy`).
            ``"rounds"``: a record for every round, as in metrics.csv: ``personal/test/accuracy/mean``.
            ``"clients"``: a record for every client in the last evaluation, as in clients.csv.

    Raises:
        FileNotFoundError: there are no results in the folder.
        ValueError: ``what`` is none of the three.
    """
    read = {"metrics": _metrics, "rounds": _rounds, "clients": ResultsFolder.clients}.get(what)
    if read is None:
        raise ValueError(f"what is {what!r}; accepted is metrics, rounds or clients")
    top = Path(folder)
    paths = [path.parent for path in top.rglob("metrics.jsonl") if ".overwritten-" not in str(path.relative_to(top))]
    if not paths:
        reason = "it has no metrics.jsonl" if top.exists() else "there is no such folder"
        raise FileNotFoundError(f"{top} holds no results: {reason}")
    known: dict[Path, _Comparison | None] = {}
    runs = sorted((_place(path, known), path) for path in paths)
    records = [
        {**_identity(path, top, known), **record} for _, path in runs for record in read(ResultsFolder.open(path))
    ]
    columns = dict.fromkeys(column for record in records for column in record)
    return [{column: record.get(column) for column in columns} for record in records]


def _metrics(folder: ResultsFolder) -> Iterator[dict[str, Any]]:
    for record in folder.records():
        yield from tidy(record)


def _rounds(folder: ResultsFolder) -> list[dict[str, Any]]:
    return [flatten(record) for record in folder.records()]


class _Comparison:
    """What the ``config.toml`` of a comparison or sweep says of the folders in it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.labels = {folder_name(label): label for label in config["methods"]}
        self.order = {name: place for place, name in enumerate(self.labels)}
        each = [[name.strip() for name in names.split(",")] for names in config.get("sweep", {})]
        self.varied = [name for names in each for name in names]


def _above(path: Path, known: dict[Path, _Comparison | None]) -> _Comparison | None:
    """The comparison or sweep that a run's folder is part of: one or two folders above it."""
    for folder in path.resolve().parents[:2]:
        if folder not in known:
            config = read_config(folder) if (folder / CONFIG).is_file() else {}
            known[folder] = _Comparison(config) if config.get("methods") else None
        if known[folder] is not None:
            return known[folder]
    return None


def _place(path: Path, known: dict[Path, _Comparison | None]) -> tuple[Any, ...]:
    """What runs are sorted by: folder, the method's place in its comparison, seed."""
    name, seed = _split(path.name)
    found = _above(path, known)
    return str(path.parent), found.order.get(name, len(found.order)) if found else 0, name, seed


def _split(name: str) -> tuple[str, int]:
    match = _SEED.search(name)
    return (name[: match.start()], int(match[1])) if match else (name, 0)


def _identity(path: Path, top: Path, known: dict[Path, _Comparison | None]) -> dict[str, Any]:
    """The run that records are of."""
    try:
        config = read_config(path)
    except FileNotFoundError:  # a folder that a program of the user's own has written with ResultsFolder
        config = {}
    found, name = _above(path, known), _split(path.name)[0]
    method = config.get("method", {}).get("name")
    if found is not None:
        method = found.labels.get(name, method)
    identity = {
        "run": str(path.relative_to(top)) if path != top else path.resolve().name,
        "method": method,
        "seed": config.get("federation", {}).get("seed"),
    }
    return identity | _values(config, found.varied if found else (), method)


def _values(config: Mapping[str, Any], varied: Sequence[str], label: Any) -> dict[str, Any]:
    """The varied options of a run by the last part of their names, where that is enough to tell them apart."""
    short = [name.rpartition(".")[2] for name in varied]
    values = {}
    for name, last in zip(varied, short, strict=True):
        section, _, option = name.partition(".")
        own, _, option = option.rpartition(".")
        value = config.get(section, {}).get(option) if own in ("", label) else None
        values[last if short.count(last) == 1 else name] = value
    return values
