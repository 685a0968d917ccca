"""The runs below some folders as the page shows them, and what of them is missing."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pfl_ext.data import Partition

from ..results import CONFIG, ResultsFolder, read_config

__all__ = ["Cut", "Found", "Reader", "Run", "several", "table_of"]

_SEED = re.compile(r"-seed(-?\d+)$")
# What a run writes that the page reads: when one of them changes, the run is read again.
_READ = ("metrics.jsonl", "clients.csv", CONFIG, "versions.json", "partition.safetensors", "classes.csv")


@dataclass(frozen=True)
class Cut:
    """Which client holds how much of which class."""

    fingerprint: str
    description: Mapping[str, Any]
    sizes: Mapping[str, Sequence[int]]
    """For each part (train, validation, test) the samples of each client."""
    server: int
    global_test: int
    classes: Sequence[str] = ()
    counts: np.ndarray | None = None
    """Training samples, [clients, classes]; None where the run has not written them."""

    @property
    def name(self) -> str:
        """How it was made, in a few words."""
        how = self.description
        words = [str(how.get("dataset", "data")), str(how.get("partitioner", "partition"))]
        return ", ".join([*words, *(f"{key} {how[key]}" for key in ("alpha", "k", "sigma") if key in how)])


@dataclass(frozen=True)
class Run(ResultsFolder):
    """A run as its folder has it, read once."""

    path: Path
    label: str
    seed: int | None
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]
    cut: Cut | None
    missing: Sequence[str]

    def records(self) -> list[dict[str, Any]]:
        """The records of all rounds; see :meth:`ResultsFolder.records`."""
        return [dict(record) for record in self.history]

    def clients(self) -> list[dict[str, Any]]:
        """The results of all clients; see :meth:`ResultsFolder.clients`."""
        return [dict(row) for row in self.rows]

    @property
    def rounds(self) -> int:
        """How many are over. What clients do on their own after the last round is a record too, and no round."""
        return sum(record["round"] > 0 and "stage" not in record for record in self.history)

    @property
    def planned(self) -> int | None:
        """How many there will be, if the folder says so."""
        rounds = table_of(self.config, "federation").get("rounds")
        return rounds if isinstance(rounds, int) else None


@dataclass(frozen=True)
class Found:
    """All runs of a page."""

    groups: Mapping[str, Sequence[Run]]
    """The runs of a label, one a seed."""
    problems: Sequence[str]
    """What is missing or damaged, a sentence each."""
    title: str
    metric: str = "accuracy"
    statistic: str = "mean"

    @property
    def runs(self) -> list[Run]:
        """All of them, label by label."""
        return [run for runs in self.groups.values() for run in runs]

    def name(self, run: Run) -> str:
        """What tells a run from all others."""
        group = self.groups[run.label]
        if len(group) == 1 or run.seed is None:
            return run.label if len(group) == 1 else f"{run.label}, {run.path.name}"
        return f"{run.label}, seed {run.seed}"

    @property
    def comparable(self) -> bool:
        """Whether all labels were run on the same partitions."""
        cuts = [{run.cut.fingerprint for run in group if run.cut is not None} for group in self.groups.values()]
        return all(cut == cuts[0] for cut in cuts)


@dataclass
class Reader:
    """Reads what is below some folders, and again what has changed since.

    Args:
        folders: of runs, comparisons or sweeps, or with any of these in them.
    """

    folders: Sequence[Path]
    _known: dict[Path, tuple[object, Run]] = field(default_factory=dict, repr=False)
    _cuts: dict[tuple[str, str | None], Cut] = field(default_factory=dict, repr=False)

    def state(self) -> object:
        """Differs when a file differs that the page is made of."""
        return [(path, _stamp(path)) for _, path in self._paths()]

    def read(self) -> Found:
        """All runs.

        Raises:
            FileNotFoundError: there are none.
            ValueError: all of them are damaged; the message says how.
        """
        places = self._paths()
        runs, problems = list[Run](), list[str]()
        for label, path in places:
            try:
                run = self._run(label, path)
            except (OSError, ValueError) as error:
                problems.append(f"{path} is left out: {error}")
                continue
            runs.append(run)
        if not runs:
            raise ValueError("no run can be read: " + "; ".join(problems))
        groups: dict[str, list[Run]] = {}
        for run in runs:
            groups.setdefault(run.label, []).append(run)
        for group in groups.values():
            group.sort(key=lambda run: (run.seed is None, run.seed or 0, str(run.path)))
        metrics = [run.config["metric"] for run in runs if isinstance(run.config.get("metric"), str)]
        means = [run.config["statistic"] for run in runs if run.config.get("statistic") in ("mean", "weighted_mean")]
        found = Found(
            groups,
            problems,
            ", ".join(dict.fromkeys(folder.resolve().name for folder in self.folders)),
            max(metrics, key=metrics.count, default="accuracy"),
            max(means, key=means.count, default="mean"),
        )
        missing: dict[str, list[str]] = {}
        for run in found.runs:
            for text in run.missing:
                missing.setdefault(text, []).append(found.name(run))
        problems += [f"{several(names, len(runs))}: {text}" for text, names in missing.items()]
        return found

    def _paths(self) -> list[tuple[str, Path]]:
        """The folders of all runs with their labels."""
        found: dict[Path, tuple[Path, str]] = {}
        for folder in self.folders:
            if not folder.exists():
                raise FileNotFoundError(
                    f"there is no folder {folder}; name one that pfl-ext run, compare or sweep wrote"
                )
            paths = [path.parent for path in folder.rglob("metrics.jsonl")]
            paths = [path for path in paths if ".overwritten-" not in str(path.relative_to(folder))]
            if not paths:
                raise FileNotFoundError(f"{folder} holds no results: there is no metrics.jsonl in it or below it")
            for path in sorted(paths, key=_order(folder)):
                own = _own_label(path) if path == folder else path.relative_to(folder).as_posix()
                found.setdefault(path.resolve(), (folder, _SEED.sub("", own)))
        # Two folders may have runs of one name: then the folder tells them apart.
        labels = [(label, folder) for folder, label in set(found.values())]
        shared = {label for label, _ in labels if sum(label == other for other, _ in labels) > 1}
        return [
            (f"{_SEED.sub('', folder.resolve().name)}/{label}" if label in shared else label, path)
            for path, (folder, label) in found.items()
        ]

    def _run(self, label: str, path: Path) -> Run:
        stamp = _stamp(path)
        known = self._known.get(path)
        if known is not None and known[0] == (label, stamp):
            return known[1]
        folder, missing = ResultsFolder.open(path), list[str]()
        history = folder.records()

        def optional(what: str, read: Callable[[], Any], default: Any) -> Any:
            try:
                return read()
            except FileNotFoundError:
                missing.append(f"{what} is missing")
            except (OSError, ValueError) as error:
                missing.append(f"{what} is missing: {error}")
            return default

        config = optional(f"its configuration ({CONFIG})", lambda: read_config(path), {})
        known_versions = optional("what it ran with (versions.json)", lambda: folder.read_json("versions.json"), {})
        if not isinstance(known_versions, Mapping):
            known_versions = {}
        cut = optional("its partition (partition.safetensors)", lambda: self._cut(path), None)
        if cut is not None:
            classes = optional("its table of classes (classes.csv)", lambda: self._classes(path, cut), None)
            cut = cut if classes is None else classes
        rows = optional("the clients' table (clients.csv)", folder.clients, [])
        if any("models" in record for record in history) and not rows:
            missing.append("the clients' table (clients.csv) is missing or empty")
        seed, named = table_of(config, "federation").get("seed"), _SEED.search(path.name)
        if not isinstance(seed, int):
            seed = int(named[1]) if named else None
        run = Run(path, label, seed, config, known_versions, history, rows, cut, missing)
        if run.planned is not None and run.rounds < run.planned:
            missing.append(f"unfinished, {run.rounds} of {run.planned} rounds are over")
        elif not any("models" in record for record in history):
            missing.append("no round was evaluated")
        self._known[path] = ((label, stamp), run)
        return run

    def _cut(self, path: Path) -> Cut:
        """The partition of a run without its classes; those of many runs are one."""
        partition = Partition.load(path / "partition.safetensors")
        made = Cut(
            partition.fingerprint,
            partition.description,
            {part: [len(own) for own in getattr(partition, part)] for part in ("train", "validation", "test")},
            len(partition.server),
            len(partition.global_test),
        )
        return self._cuts.setdefault((made.fingerprint, None), made)

    def _classes(self, path: Path, cut: Cut) -> Cut:
        """The same with its classes.

        Raises:
            FileNotFoundError: the run has not written them.
            ValueError: they are damaged.
        """
        text = (path / "classes.csv").read_bytes()
        key = (cut.fingerprint, hashlib.sha256(text).hexdigest())
        if key not in self._cuts:
            self._cuts[key] = replace(cut, **_counted(path / "classes.csv", text.decode(), len(cut.sizes["train"])))
        return self._cuts[key]


def table_of(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """A table of a configuration, empty where it has none."""
    table = config.get(section)
    return table if isinstance(table, Mapping) else {}


def several(names: Sequence[str], all: int = 0) -> str:
    """Many runs in a few words.

    Args:
        names: theirs.
        all: how many there are in all, if that is to be said.
    """
    if len(names) < 4:
        return ", ".join(names)
    return "all runs" if len(names) == all else f"{names[0]} and {len(names) - 1} more runs"


def _stamp(path: Path) -> list[tuple[int, int] | None]:
    """Of each file that is read the time and size."""
    found: list[tuple[int, int] | None] = []
    for name in _READ:
        try:
            status = os.stat(path / name)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size))
    return found


def _own_label(path: Path) -> str:
    """What a run is called whose folder was given: its method, else the folder's name."""
    try:
        method = table_of(read_config(path), "method").get("name")
    except (OSError, ValueError):
        method = None
    return str(method).rpartition(":")[2] if method else path.resolve().name


def _order(folder: Path) -> Callable[[Path], tuple[Any, ...]]:
    """As a comparison names its methods; numbers in names by their values."""
    try:
        methods = read_config(folder).get("methods")
    except (OSError, ValueError):
        methods = None
    known = [str(method) for method in methods] if isinstance(methods, list) else []

    def key(path: Path) -> tuple[Any, ...]:
        *above, name = path.relative_to(folder).parts or ("",)
        label = _SEED.sub("", name)
        place = known.index(label) if label in known else len(known)
        return _natural("/".join(above)), place, _natural(name)

    return key


def _natural(text: str) -> list[tuple[int, float, str]]:
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(0, float(part), "") if index % 2 else (1, 0.0, part) for index, part in enumerate(parts)]


def _counted(path: Path, text: str, clients: int) -> dict[str, Any]:
    """The classes and how many training samples of each the clients have."""
    names: dict[int, str] = {}
    found: list[tuple[int, int, int]] = []
    try:
        for row in csv.DictReader(io.StringIO(text, newline="")):
            client, place, count = int(row["client"]), int(row["class"]), int(row["train"])
            if not 0 <= client < clients or place < 0 or count < 0:
                raise ValueError(f"it has {count} samples of class {place} at client {client} of {clients}")
            names[place] = row["name"]
            found.append((client, place, count))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    # Only classes that a client holds are in the file, in the order of the data set's.
    order = {place: index for index, place in enumerate(sorted(names))}
    counts = np.zeros((clients, len(order)), dtype=np.int64)
    for client, place, count in found:
        counts[client, order[place]] += count
    return {"classes": [names[place] for place in order], "counts": counts}
