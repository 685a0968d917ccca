"""How long finished runs take on a virtual clock, under each protocol (``pfl-ext virtual-time``).

The models of a synchronous run depend on neither the protocol nor the clock, and its records say what every client
trained and sent in each round. So one run is timed under compute-and-wait and under wait-free, by as many clocks as one
likes, without being run again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pfl_ext.federation import PROTOCOLS, Clock, Settings, Span, Timeline, Work, clock_of
from pfl_ext.metrics import scale_of

from .results import ResultsFolder, read_config
from .rounds import time_to_target

__all__ = ["CLOCK", "Timed", "seconds", "speedups", "timed_below"]

CLOCK = tuple(field.name for field in dataclasses.fields(Settings) if field.name.startswith("clock"))
"""The options of a run's clock."""


class Timed:
    """A finished run and the clock it is timed by.

    Args:
        folder: its results.
        changes: options of the clock in place of the run's own.
    """

    def __init__(self, folder: Path, changes: Mapping[str, Any]) -> None:
        self.folder = folder
        self.records = [r for r in ResultsFolder.open(folder).records() if r.get("stage") != "personalized"]
        self._config = config = read_config(folder)
        self.metric: str = config.get("metric", "accuracy")
        own = {name: value for name, value in config["federation"].items() if name in (*CLOCK, "seed")}
        if not any("work" in record for record in self.records):
            raise ValueError(f"{folder} says nothing of its clients' work: it was made by an earlier version")
        settings = Settings(**(own | dict(changes)))
        self.clock = clock_of(settings, config["partition"]["clients"], settings.seed)
        # A run whose models depend on the clock has its times already.
        self.fixed = next((p for p in self.records[-1].get("clock", {}) if p not in PROTOCOLS[:2]), None)
        if self.fixed and changes:
            raise ValueError(
                f"{folder} is {self.fixed}: its models depend on the clock, so no other can time it; run it again"
            )

    @property
    def works(self) -> list[Work]:
        """What all clients did in all rounds."""
        return [Work(*work) for record in self.records for work in record["work"]]

    def protocols(self) -> tuple[str, ...]:
        """Those that its models may have come from."""
        return (self.fixed,) if self.fixed else PROTOCOLS[:2]

    def times(self, protocol: str, clock: Clock | None = None) -> list[float]:
        """When each round was over."""
        if self.fixed:
            return [float(record["clock"][self.fixed]) for record in self.records]
        line = Timeline(clock or self.clock, protocol)
        found = []
        for record in self.records:
            line.round(record["work"])
            found.append(line.time)
        return found

    def spans(self, protocol: str, rounds: int) -> list[Span]:
        """What everybody does in the first rounds."""
        records = self.records[:rounds]
        if protocol == "asynchronous":
            wait_free = self._config["federation"]["protocol"] == "wait-free"
            works = [Work(*work) for record in records for work in record["work"]]
            spans = [span for work in works for span in self.clock.turn(work, work.begin, wait_free)]
            return [span for span in spans if span.end > span.begin]
        line = Timeline(self.clock, protocol)
        return [span for record in records for span in line.round(record["work"])]

    def of_ratio(self, ratio: float) -> Clock:
        """Its clock with the links such that personal training takes ``ratio`` times as long as communication.

        Both are means over all turns; communication is an upload, the server's aggregation and a download.
        """
        works = [work for work in self.works if work.up]
        training = mean(self.clock.train(work.client, work.personal) for work in works)
        links = mean(self.clock.send(work) + self.clock.receive(work) for work in works) + self.clock.aggregation
        if training == 0:
            raise ValueError(f"{self.folder} has no personal training: there is no ratio to communication")
        return self.clock.scaled(training / ratio / links)

    def seconds(self, protocol: str, targets: Sequence[float], model: str, clock: Clock | None = None) -> list[Any]:
        """To each target of the run's metric, None if it is never reached; then that of all rounds."""
        times = self.times(protocol, clock)
        return [*(time_to_target(self.records, times, target, model, self.metric) for target in targets), times[-1]]


def timed_below(folders: Sequence[Path], changes: Mapping[str, Any]) -> dict[str, list[Timed]]:
    """The finished runs below these folders by their names, those of several seeds together.

    Args:
        folders: results of a run, a comparison or a sweep.
        changes: as of `Timed`.

    Raises:
        ValueError: there are none in one of the folders.
    """
    runs: dict[str, list[Timed]] = {}
    for folder in folders:
        paths = sorted(path.parent for path in folder.rglob("metrics.jsonl"))
        if not paths:
            raise ValueError(f"{folder} holds no results: there is no metrics.jsonl in it")
        for path in paths:
            name = folder.name if path == folder else str(path.relative_to(folder))
            runs.setdefault(re.sub(r"-seed\d+$", "", name), []).append(Timed(path, changes))
    return runs


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one of the seeds has none."""
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _shown(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.4g}{unit}"


def _columns(targets: Sequence[float], runs: Mapping[str, Sequence[Timed]]) -> list[str]:
    share = all(scale_of(seed.metric) == 100 for seeds in runs.values() for seed in seeds)
    return [*(f"to {100 * target:g} %" if share else f"to {target:g}" for target in targets), "all rounds"]


def _ratio(long: float | None, short: float | None) -> float | None:
    return None if long is None or short is None else long / short


def seconds(
    runs: Mapping[str, Sequence[Timed]], targets: Sequence[float], model: str, against: str | None = None
) -> list[dict[str, str]]:
    """A row a run and protocol: seconds to each target and speed-ups, means over seeds.

    Args:
        runs: as `timed_below` finds them.
        targets: values of the runs' metric to reach, such as accuracies.
        model: whose.
        against: speed-ups are against compute-and-wait of the run with this name beside each; None: of itself.

    Raises:
        ValueError: there is no such run.
    """
    found = {
        (label, protocol): [
            _mean(values) for values in zip(*(seed.seconds(protocol, targets, model) for seed in seeds), strict=True)
        ]
        for label, seeds in runs.items()
        for protocol in seeds[0].protocols()
    }
    rows = []
    for (label, protocol), times in found.items():
        base = label
        if against is not None:  # beside it, in the same folder of a sweep
            base = str(Path(label).with_name(against))
            if (base, PROTOCOLS[0]) not in found:
                raise ValueError(f"there is no compute-and-wait run {base}; known are {', '.join(runs)}")
        row = {"run": label, "protocol": protocol}
        slow = found.get((base, PROTOCOLS[0]), [None] * len(times))
        for column, value, reference in zip(_columns(targets, runs), times, slow, strict=True):
            row[f"{column} (s)"] = _shown(value)
            row[f"{column}: speed-up"] = _shown(_ratio(reference, value), "x")
        rows.append(row)
    return rows


def speedups(
    runs: Mapping[str, Sequence[Timed]], ratios: Sequence[float], targets: Sequence[float], model: str
) -> list[dict[str, str]]:
    """A row a run and ratio of personal training to communication: how much longer compute-and-wait takes.

    That is than wait-free, to each target and in all. Runs whose models depend on the clock have none.
    """
    rows = []
    for label, seeds in runs.items():
        for ratio in ratios if not seeds[0].fixed else ():
            row = {"run": label, "training : communication": f"{ratio:g}"}
            found = []
            for seed in seeds:
                clock = seed.of_ratio(ratio)
                slow, fast = (seed.seconds(protocol, targets, model, clock) for protocol in PROTOCOLS[:2])
                found.append([_ratio(a, b) for a, b in zip(slow, fast, strict=True)])
            for column, values in zip(_columns(targets, runs), zip(*found, strict=True), strict=True):
                row[column] = _shown(_mean(values), "x")
            rows.append(row)
    return rows
