"""The papers' tables and figures as data: which runs fill which cell, and what is printed there.

A file of ``printed/`` is a paper. A table or figure of it has ``columns`` and ``rows``; a cell is what its table, its
column and its row say together:

==============  ========================================================================================================
file            the configuration file, of ``configs/PAPER``, whose runs it is of; or a name in ``runs``
point           of a sweep, the values of its options there, such as ``{alpha = 0.1}``
small           other values of them in the scaled-down file
method          the method or variant of that file
value           ``result`` (default), ``user``, ``trained`` or ``communicated`` (parameters, in millions), ``rounds``;
                ``speedup``: of the virtual time to the accuracy ``target`` by the ``protocol`` (default: wait-free; an
                asynchronous run has its own) against compute-and-wait of the method ``against`` (default: itself);
                ``seconds``: the virtual time of the whole run by the ``protocol``;
                ``reported``: the ``column`` of the clients' results, its mean and spread over them;
                ``server`` or ``training``: the number ``of`` that the server, or the clients in the mean, reported;
                ``parameters``: how many the ``part`` of a ``network`` for ``classes`` has, in millions, without a run
model           ``personal``, ``global``, or ``own``: personal, else global; ``generic``: global, else personal
split           ``test``, ``global_test``, or an extra test set
statistic       over the clients: a key of :func:`pfl_ext.metrics.summarize`
group           ``models`` (default); ``new_clients``: of clients that joined late; ``participants``: of the round's
round           ``last`` (default); ``best``: the round whose value is highest, as a paper reports it; ``mean`` of all
spread          over ``seeds`` (default), or ``clients``
user, column    whose, or ``mean`` or ``std`` of the users; of which column of their results (default: the accuracy)
==============  ========================================================================================================

``printed`` of a row has the paper's numbers in the order of the columns; an empty text is one that cannot be read.

Where a file is run more than once, or with other weights to begin with, ``runs`` names its runs: the ``file``, and
``pretrained``: ``own``, what the file says; weights by name; or ``RUN/METHOD``, the global model that a method of
another one ended with. What the user names by ``--network-pretrained`` takes the place of weights by name alone.

``kind`` is the picture: ``table`` (default), ours beside the paper's; ``option``, a line for each row over the columns;
``grid``, the same for every user of PersFL's grid, whose rows and columns are made of ``users``, ``temperatures`` and
``lambdas``; ``scatter``, every other column over those that are ``across``; ``density`` and ``curves`` of the runs;
``landscape`` around their models; ``timeline`` of their first rounds. ``panel`` of a row says in which part of the
picture it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .comparison import Comparison, Point, points, variant
from .configuration import Configuration
from .experiment import Experiment
from .metrics import scale_of
from .nn.adapters import adapter_parameters, head_of
from .nn.networks import build
from .options import nearest
from .reports import ResultsFolder, Spread, folder_name, per_user, read_config, rounds_to_converge
from .reports.virtual_time import Timed
from .toml import read_toml

__all__ = ["Item", "Runs", "items_of", "papers", "parameters"]

_HERE = Path(__file__).parent
_MODELS = {"own": ("personal", "global"), "generic": ("global", "personal")}
_OF_ITEM = ("title", "columns", "rows", "kind", "runs", "users", "temperatures", "lambdas")  # and of no cell


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
        if self.kind == "grid":
            return [{"name": f"\u03bb = {x:g}", "lambda": x} for x in self.content["lambdas"]]
        found: Sequence[Mapping[str, Any]] = self.content.get("columns", ())
        return found

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of the table, as the file describes them."""
        if self.kind == "grid":
            return [
                {"name": f"User {k}, T = {x:g}", "panel": f"User {k}", "user": str(k), "temperature": x}
                for k in range(self.content["users"])
                for x in self.content["temperatures"]
            ]
        found: Sequence[Mapping[str, Any]] = self.content.get("rows", ())
        return found

    def cell(self, row: Mapping[str, Any], column: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that decides what stands in a cell."""
        common = {name: value for name, value in self.content.items() if name not in _OF_ITEM}
        point: dict[str, Any] = {}
        for of in (common, column, row):
            point |= of.get("point", {})
            point |= of.get("small", {}) if self.small else {}
        return {**common, **column, **row, "point": point}

    def cells(self) -> list[dict[str, Any]]:
        """All of them, row by row."""
        return [self.cell(row, column) for row in self.rows for column in self.columns]

    def shown(self, of: Mapping[str, Any]) -> str:
        """The name of a row or column; with the values of the scaled-down file where they are others."""
        here = ", ".join(f"{name.rpartition('.')[2]} = {value}" for name, value in of.get("small", {}).items())
        return f"{of['name']} (here {here})" if self.small and here else str(of["name"])

    def asked(self) -> dict[str, list[Any]]:
        """The values of options that its cells are at."""
        found: dict[str, list[Any]] = {}
        for cell in self.cells():
            for name, value in cell["point"].items():
                if value not in found.setdefault(name, []):
                    found[name].append(value)
        return found

    def files(self) -> dict[str, Path]:
        """The configuration files that it needs, by their names in it, in the order in which they are to be run."""
        runs = self.content.get("runs", {})
        named = dict.fromkeys([*runs, *(str(cell["file"]) for cell in self.cells() if "file" in cell)])
        folder, suffix = _configs() / self.paper, "-small" if self.small else ""
        return {name: folder / f"{runs.get(name, {}).get('file', name)}{suffix}.toml" for name in named}

    def begins(self, name: str) -> str:
        """What the networks of these runs begin with, where that is said; see ``pretrained`` above."""
        return str(self.content.get("runs", {}).get(name, {}).get("pretrained", ""))


def papers() -> dict[str, dict[str, Item]]:
    """Every paper with its tables and figures."""
    found = {}
    for path in sorted((_HERE / "printed").glob("*.toml")):
        found[path.stem] = {name: Item(path.stem, name, of) for name, of in read_toml(path).items()}
    return found


def items_of(paper: str, name: str, small: bool = False) -> tuple[Item, ...]:
    """A table or figure, at the paper's size or scaled down; of one that has parts (table4a, table4b) all of them.

    Raises:
        ValueError: there is none; the nearest names are suggested.
    """
    every = papers()
    if paper not in every:
        raise ValueError(f"unknown paper {paper!r}{nearest(paper, every)}; known are {', '.join(every)}")
    known = every[paper]
    names = [name] if name in known else [part for part in known if part[:-1] == name and part[-1].isalpha()]
    if not names:
        raise ValueError(f"{paper} has no {name!r} here{nearest(name, known)}; it has {', '.join(known)}")
    return tuple(replace(known[part], small=small) for part in names)


def parameters(network: str, classes: int, part: str) -> int:
    """How many parameters a part of a network has, as PerAda's Tables 6 and 7 count them.

    Args:
        network: a ResNet by its name.
        classes: how many it tells apart.
        part: ``full``; ``input``: all convolutions called conv1, which are the tables' numbers; ``features``: all but
            the head; ``norm``: normalisation, but for that on the shortcuts; ``output``: the head; ``adapter``: what
            PerAda trains, of the network with adapters.
    """
    made = build(network, (3, 224, 224), classes, torch.Generator().manual_seed(0), adapters=part == "adapter")
    sizes = {name: p.numel() for name, p in made.named_parameters()}
    trained, head = set(adapter_parameters(made)), {name for name in sizes if name.startswith(f"{head_of(made)}.")}
    chosen = {
        "full": sizes.keys(),
        "input": {name for name in sizes if name.split(".")[-2] == "conv1"},
        "features": sizes.keys() - head,
        "norm": trained - head,
        "output": head,
        "adapter": trained,
    }
    return sum(sizes[name] for name in chosen[part])


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
        self._over: dict[Path, bool] = {}  # whether it is over; asked for each cell
        self._first: dict[str, str] = {}  # a method that has none of the options that differ is run once
        for point in self._points:
            for label in comparison.labels:
                self._first.setdefault(point.comparison.identity(label), point.folder)

    def of(self, method: str, point: Mapping[str, Any]) -> list[ResultsFolder]:
        """The runs of a method or variant at a point of the sweep, one a seed; those that came to their end."""
        place = self.place(method, point)
        found = [] if place is None else sorted(place.glob(f"{folder_name(method)}-seed*"), key=_seed)
        self._over |= {path: _is_over(path) for path in found if path not in self._over}
        return [ResultsFolder.open(path) for path in found if self._over[path]]

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
        match cell.get("value"):
            case "speedup":
                return self._speedup(cell, folders)
            case "seconds":
                return _spread([Timed(folder.path, {}).times(cell["protocol"])[-1] for folder in folders])
            case "user":
                return _of_users(folders, str(cell["user"]), cell.get("column", f"personal/test/{self.metric}"))
            case "reported":
                both = [_of_users(folders, which, cell["column"]) for which in ("mean", "std")]
                return None if both[0] is None or both[1] is None else Spread(both[0], both[1])
            case "grid":
                # With lambda = 0 there is no temperature: that point is run once, as T = 1.
                t, lam = cell["temperature"] if cell["lambda"] else 1.0, cell["lambda"]
                found = _of_users(folders, str(cell["user"]), f"test_{self.metric}, T = {t:g}, lambda = {lam:g}")
                return None if found is None else scale_of(self.metric) * found
        pairs = [pair for folder in folders if (pair := _one(folder, cell, self.metric)) is not None]
        if not pairs:
            return None
        mean = float(np.mean([value for value, _ in pairs]))
        if cell.get("spread") == "clients":
            return Spread(mean, float(np.mean([over_clients for _, over_clients in pairs])))
        return _spread([value for value, _ in pairs])

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


def _is_over(folder: Path) -> bool:
    """Whether a folder has a run that did not diverge, nor was killed, before its last round."""
    if not (folder / "metrics.jsonl").is_file():
        return False
    last = ResultsFolder.open(folder).records()[-1:]
    return bool(last) and last[0]["round"] >= read_config(folder)["federation"]["rounds"]


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
    if not column.startswith("personal/") and not any(column in row for folder in folders for row in folder.clients()):
        return None  # no point of the scaled-down grid, no privacy
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
    if kind in ("server", "training"):
        found = [(float(r[kind][cell["of"]]), math.nan) for r in history if cell["of"] in r.get(kind, {})]
    else:
        found = _results(history, cell, cell.get("metric", metric))
    if not found:
        return None
    match cell.get("round", "last"):
        case "best":
            return max(found)
        case "mean":
            return float(np.mean([value for value, _ in found])), math.nan
        case _:
            return found[-1]


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
