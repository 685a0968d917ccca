"""The papers' tables and figures as data: which runs fill which cell, and what is printed there.

A file of ``printed/`` is a paper. A table or figure of it has ``columns`` and ``rows``; a cell is what its table, its
column and its row say together:

==============  ========================================================================================================
file            the configuration file, of ``configs/PAPER``, whose runs it is of
point           of a sweep, the values of its options there, such as ``{alpha = 0.1}``
small           other values of them in the scaled-down file
method          the method or variant of that file
value           ``result`` (default), ``user``, ``trained`` or ``communicated`` (parameters, in millions), ``rounds``,
                ``speedup``: of the virtual time to the accuracy ``target`` by the ``protocol`` (default: wait-free; an
                asynchronous run has its own) against compute-and-wait of the method ``against`` (default: itself)
model           ``personal``, ``global``, or ``own``: personal, else global; ``generic``: global, else personal
split           ``test``, ``global_test``, or an extra test set
statistic       over the clients: a key of :func:`pfl_ext.metrics.summarize`
group           ``models`` (default), or ``new_clients``: of clients that joined late
round           ``last`` (default), or ``best``: the round whose value is highest, as a paper reports it
spread          over ``seeds`` (default), or ``clients``
user, column    whose, or ``mean`` or ``std`` of the users; of which column of their results (default: the accuracy)
==============  ========================================================================================================

``printed`` of a row has the paper's numbers in the order of the columns; an empty text is one that cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .comparison import Comparison, Point, points, variant
from .configuration import Configuration
from .experiment import Experiment
from .metrics import scale_of
from .options import nearest
from .reports import ResultsFolder, Spread, folder_name, per_user, rounds_to_converge
from .reports.virtual_time import Timed
from .toml import read_toml

__all__ = ["Item", "Runs", "item_of", "papers"]

_HERE = Path(__file__).parent
_MODELS = {"own": ("personal", "global"), "generic": ("global", "personal")}
_KINDS = ("table", "option", "density", "curves", "users")


def _configs() -> Path:
    """The configuration files: in the installed package, or beside it in the tree."""
    inside = _HERE / "configs"
    return inside if inside.is_dir() else _HERE.parent / "configs"


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper."""

    paper: str
    name: str
    content: Mapping[str, Any]
    small: bool = False
    """Whether it is filled from the scaled-down files."""

    @property
    def title(self) -> str:
        """The title of the table or figure."""
        return str(self.content["title"])

    @property
    def kind(self) -> str:
        """Whether it is a table, or which kind of figure."""
        return str(self.content.get("kind", "table"))

    @property
    def columns(self) -> Sequence[Mapping[str, Any]]:
        """The columns of the table, as the file describes them."""
        found: Sequence[Mapping[str, Any]] = self.content.get("columns", ())
        return found

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of the table, as the file describes them."""
        found: Sequence[Mapping[str, Any]] = self.content.get("rows", ())
        return found

    def cell(self, row: Mapping[str, Any], column: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that decides what stands in a cell."""
        common = {
            name: value for name, value in self.content.items() if name not in ("title", "columns", "rows", "kind")
        }
        point: dict[str, Any] = {}
        for of in (common, column, row):
            point |= of.get("point", {})
            point |= of.get("small", {}) if self.small else {}
        return {**common, **column, **row, "point": point}

    def shown(self, of: Mapping[str, Any]) -> str:
        """The name of a row or column; with the values of the scaled-down file where they are others."""
        here = ", ".join(f"{name.rpartition('.')[2]} = {value}" for name, value in of.get("small", {}).items())
        return f"{of['name']} (here {here})" if self.small and here else str(of["name"])

    def asked(self) -> dict[str, list[Any]]:
        """The values of options that its cells are at."""
        found: dict[str, list[Any]] = {}
        for row in self.rows:
            for column in self.columns:
                for name, value in self.cell(row, column)["point"].items():
                    if value not in found.setdefault(name, []):
                        found[name].append(value)
        return found

    def files(self) -> dict[str, Path]:
        """The configuration files that it needs, by their names in it."""
        named = dict.fromkeys(str(self.cell(row, column)["file"]) for row in self.rows for column in self.columns)
        suffix = "-small" if self.small else ""
        return {name: _configs() / self.paper / f"{name}{suffix}.toml" for name in named}


def papers() -> dict[str, dict[str, Item]]:
    """Every paper with its tables and figures."""
    found = {}
    for path in sorted((_HERE / "printed").glob("*.toml")):
        found[path.stem] = {name: Item(path.stem, name, of) for name, of in read_toml(path).items()}
    return found


def item_of(paper: str, name: str, small: bool = False) -> Item:
    """One of them, at the paper's size or scaled down.

    Raises:
        ValueError: there is none; the nearest names are suggested.
    """
    every = papers()
    if paper not in every:
        raise ValueError(f"unknown paper {paper!r}{nearest(paper, every)}; known are {', '.join(every)}")
    if name not in every[paper]:
        close = nearest(name, every[paper])
        raise ValueError(f"{paper} has no {name!r} here{close}; it has {', '.join(every[paper])}")
    return replace(every[paper][name], small=small)


class Runs:
    """The finished runs of a configuration file.

    Args:
        path: the file.
        folder: where ``pfl-ext compare`` or ``sweep`` has put them.
        asked: the values of each option that the table asks for.
    """

    def __init__(self, path: Path, folder: Path, asked: Mapping[str, Sequence[Any]]) -> None:
        """Find out which folder each of its runs has."""
        self.asked = asked
        self.configuration = Configuration.read(path)
        self.folder = folder
        comparison = Comparison(self.configuration.sections, self.configuration.methods, self.configuration.seeds)
        self._points = points(comparison, self.configuration.sweep)
        self._sections: dict[tuple[int, str], Mapping[str, Mapping[str, Any]]] = {}
        self._first: dict[str, str] = {}  # a method that has none of the options that differ is run once
        for point in self._points:
            for label in comparison.labels:
                self._first.setdefault(point.comparison.identity(label), point.folder)

    def of(self, method: str, point: Mapping[str, Any]) -> list[ResultsFolder]:
        """The runs of a method or variant at a point of the sweep, one a seed; none where they were not made."""
        place = self.place(method, point)
        found = [] if place is None else sorted(place.glob(f"{folder_name(method)}-seed*"), key=_seed)
        return [ResultsFolder.open(path) for path in found if (path / "metrics.jsonl").is_file()]

    def place(self, method: str, point: Mapping[str, Any]) -> Path | None:
        """The folder that they are in; None where the file makes no such runs."""
        for number, at in enumerate(self._points):
            if method not in at.comparison.labels:
                continue
            if (number, method) not in self._sections:
                one = Experiment.from_sections(variant(at.comparison.sections, method))
                self._sections[number, method] = one.sections()
            if _matches(at, method, self._sections[number, method], point, self.asked):
                return self.folder / self._first[at.comparison.identity(method)]
        return None

    @property
    def metric(self) -> str:
        """The metric that the file names; accuracy if it names none."""
        return self.configuration.metric or "accuracy"

    def value(self, cell: Mapping[str, Any]) -> Spread | float | None:
        """What our runs say of a cell; None where there are none."""
        folders = self.of(cell["method"], cell["point"])
        if not folders:
            return None
        if cell.get("value") == "speedup":
            return self._speedup(cell, folders)
        if cell.get("value") == "user":
            return _of_users(folders, str(cell["user"]), cell.get("column", f"personal/test/{self.metric}"))
        found = [pair for folder in folders if (pair := _one(folder, cell, self.metric)) is not None]
        if not found:
            return None
        mean = float(np.mean([value for value, _ in found]))
        if cell.get("spread") == "clients":
            return Spread(mean, float(np.mean([over_clients for _, over_clients in found])))
        return _spread([value for value, _ in found])

    def _speedup(self, cell: Mapping[str, Any], folders: Sequence[ResultsFolder]) -> Spread | float | None:
        """How much sooner the target is reached; None where a seed does not reach it."""
        slow = self.of(cell.get("against", cell["method"]), cell["point"])
        found = []
        for one, other in zip(folders, slow, strict=False):
            times = []
            for folder, protocol in ((other, "compute-and-wait"), (one, cell.get("protocol", "wait-free"))):
                timed = Timed(folder.path, {})
                times.append(timed.seconds(timed.fixed or protocol, [cell["target"]], "personal")[0])
            if None in times:
                return None
            found.append(times[0] / times[1])
        return _spread(found) if found else None


def _spread(values: Sequence[float]) -> Spread | float:
    """The mean of the seeds, with their spread where there are several."""
    mean = float(np.mean(values))
    return mean if len(values) == 1 else Spread(mean, float(np.std(values, ddof=1)))


def _matches(
    at: Point,
    method: str,
    sections: Mapping[str, Mapping[str, Any]],
    wanted: Mapping[str, Any],
    asked: Mapping[str, Sequence[Any]],
) -> bool:
    """Whether the runs of a method at a point of the sweep have these values, of the options that it has.

    Of an option that the file does not vary, the one of the asked values that is nearest to the file's is taken: a
    scaled-down file has one participation, say, and other clients than the paper.
    """
    for name, value in wanted.items():
        section, _, rest = name.rpartition(".")
        section, _, label = section.partition(".")
        if label and label != method:
            continue
        tables = [section] if section else ["data", "partition", "federation", "method"]
        found = [sections[table][rest] for table in tables if rest in sections[table]]
        varied = any(option.rpartition(".")[2] == rest for option in at.values)
        if found and not (found[0] == value if varied else value == _nearest(found[0], asked[name])):
            return False
    return True


def _nearest(value: Any, asked: Sequence[Any]) -> Any:
    """The value, or of numbers the nearest one that is asked for."""
    if value in asked or isinstance(value, str):
        return value
    return min(asked, key=lambda one: abs(one - value))


def _seed(path: Path) -> int:
    number = path.name.rpartition("-seed")[2]
    return int(number) if number.isdigit() else 0


def _of_users(folders: Sequence[ResultsFolder], user: str, column: str) -> float | None:
    (row,) = per_user({"": list(folders)}, column)
    found = row.get(user if user in ("mean", "std") else f"user {user}")
    return float(found) if isinstance(found, float) else None


def _one(folder: ResultsFolder, cell: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    """A cell's value in one run, and its standard deviation over the clients."""
    history = folder.records()
    kind = cell.get("value", "result")
    if kind == "trained":
        counts = [r["training"]["trained_parameters"] for r in history if "trained_parameters" in r.get("training", {})]
        return (max(counts) / 1e6, math.nan) if counts else None
    if kind == "communicated":  # by one client in one round
        sent = [r["communication"]["up_parameters"] / len(r["clients"]) for r in history if r.get("clients")]
        return (float(np.median(sent)) / 1e6, math.nan) if sent else None
    if kind == "rounds":
        model = "global" if any("global" in r.get("models", {}) for r in history) else "personal"
        reached = rounds_to_converge([r for r in history if "stage" not in r], model)
        return None if reached is None else (float(reached), math.nan)
    found = _results(history, cell, cell.get("metric", metric))
    if not found:
        return None
    return found[-1] if cell.get("round", "last") == "last" else max(found)


def _results(history: Sequence[Mapping[str, Any]], cell: Mapping[str, Any], metric: str) -> list[tuple[float, float]]:
    """The cell's result in every round that has one."""
    scale, statistic = scale_of(metric), cell.get("statistic", "mean")
    for model in _MODELS.get(cell["model"], (cell["model"],)):
        found = []
        for record in history:
            models = record.get(cell.get("group", "models"), {})
            value = models.get(model, {}).get(cell.get("split", "test"), {}).get(metric)
            if isinstance(value, Mapping):
                found.append((scale * value[statistic], scale * value["std"]))
            elif value is not None:  # one model on one test set has no clients
                found.append((scale * value, math.nan))
        if found:
            return found
    return []
