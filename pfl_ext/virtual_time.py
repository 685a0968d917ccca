"""``pfl-ext virtual-time``: how long finished runs take on a virtual clock, under each protocol.

The models of a synchronous run depend on neither the protocol nor the clock, and its records say what every client
trained and sent in each round. So one run is timed under compute-and-wait and under wait-free, by as many clocks as one
likes, without being run again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .experiment import Option, settings_options
from .federation import PROTOCOLS, Clock, Settings, Span, Timeline, Work, clock_of
from .reports import ResultsFolder, table, time_to_target, timeline

__all__ = ["Timed", "main"]

_CLOCK = [name for name in settings_options() if name.startswith("clock")]


class Timed:
    """A finished run and the clock it is timed by.

    Args:
        folder: its results.
        changes: options of the clock in place of the run's own.
    """

    def __init__(self, folder: Path, changes: Mapping[str, Any]) -> None:
        """See the class."""
        self.folder = folder
        self.records = [r for r in ResultsFolder.open(folder).records() if r.get("stage") != "personalized"]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        own = {name: value for name, value in config["federation"].items() if name in (*_CLOCK, "seed")}
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
            config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            wait_free = config["federation"]["protocol"] == "wait-free"
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
        """To each target, None if it is never reached; then that of all rounds."""
        times = self.times(protocol, clock)
        return [*(time_to_target(self.records, times, target, model) for target in targets), times[-1]]


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="pfl-ext virtual-time",
        description="Virtual time of finished runs to a target accuracy, under compute-and-wait and wait-free. "
        "Asynchronous runs and those that train until the new model arrives have one time: their own.",
        allow_abbrev=False,
    )
    parser.add_argument("results", nargs="+", type=Path, help="results of run, compare or sweep")
    parser.add_argument("--target", nargs="+", type=float, default=[], help="accuracies to reach, such as 0.4 0.8")
    parser.add_argument("--model", default="personal", help="whose accuracy: personal or global (default: personal)")
    parser.add_argument(
        "--ratios", help="times of personal training to communication, such as 0.25,1,4: a table of speed-ups over them"
    )
    parser.add_argument("--against", help="speed-ups of all runs against compute-and-wait of the one with this name")
    parser.add_argument("--picture", type=Path, help="draw who does what when in the first run's first rounds")
    parser.add_argument("--rounds", type=int, default=3, help="so many of them (default: 3)")
    parser.add_argument("--style", choices=("markdown", "csv", "latex"), default="markdown")
    group = parser.add_argument_group("another clock than the runs' own")
    known = settings_options()
    for name in _CLOCK:
        group.add_argument("--" + name.replace("_", "-"), help=known[name].help, default=argparse.SUPPRESS)
    parsed = parser.parse_args(list(arguments))
    try:
        changes = {name: known[name].parse(value) for name, value in vars(parsed).items() if name in _CLOCK}
        runs = _found(parsed.results, changes)
        if parsed.ratios:
            ratios = [Option("ratios", float, 1.0, "").parse(ratio) for ratio in parsed.ratios.split(",")]
            rows = [row for label, seeds in runs.items() for row in _speedups(label, seeds, ratios, parsed)]
        else:
            rows = _seconds(runs, parsed)
        print(table(rows, style=parsed.style))
        if parsed.picture is not None:
            first = next(iter(runs.values()))[0]
            timeline({p: first.spans(p, parsed.rounds) for p in first.protocols()}, parsed.picture)
    except (ValueError, OSError, ImportError) as error:
        print(f"pfl-ext virtual-time: {error}", file=sys.stderr)
        return 1
    return 0


def _found(folders: Sequence[Path], changes: Mapping[str, Any]) -> dict[str, list[Timed]]:
    """The runs below these folders by their names, those of several seeds together."""
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


def _columns(targets: Sequence[float]) -> list[str]:
    return [*(f"to {100 * target:g} %" for target in targets), "all rounds"]


def _ratio(long: float | None, short: float | None) -> float | None:
    return None if long is None or short is None else long / short


def _seconds(runs: Mapping[str, list[Timed]], parsed: argparse.Namespace) -> list[dict[str, str]]:
    """A row a run and protocol: seconds to each target and speed-ups, means over seeds."""
    found = {
        (label, protocol): [
            _mean(values)
            for values in zip(*(seed.seconds(protocol, parsed.target, parsed.model) for seed in seeds), strict=True)
        ]
        for label, seeds in runs.items()
        for protocol in seeds[0].protocols()
    }
    rows = []
    for (label, protocol), seconds in found.items():
        base = label
        if parsed.against is not None:  # beside it, in the same folder of a sweep
            base = str(Path(label).with_name(parsed.against))
            if (base, PROTOCOLS[0]) not in found:
                raise ValueError(f"there is no compute-and-wait run {base}; known are {', '.join(runs)}")
        row = {"run": label, "protocol": protocol}
        slow = found.get((base, PROTOCOLS[0]), [None] * len(seconds))
        for column, value, reference in zip(_columns(parsed.target), seconds, slow, strict=True):
            row[f"{column} (s)"] = _shown(value)
            row[f"{column}: speed-up"] = _shown(_ratio(reference, value), "x")
        rows.append(row)
    return rows


def _speedups(
    label: str, seeds: list[Timed], ratios: Sequence[float], parsed: argparse.Namespace
) -> list[dict[str, str]]:
    """A row a ratio: how much longer compute-and-wait takes than wait-free."""
    rows = []
    for ratio in ratios if not seeds[0].fixed else ():
        clocks = [seed.of_ratio(ratio) for seed in seeds]
        columns = _columns(parsed.target)
        row = {"run": label, "training : communication": f"{ratio:g}"}
        speedups = []
        for seed, clock in zip(seeds, clocks, strict=True):
            slow, fast = (seed.seconds(p, parsed.target, parsed.model, clock) for p in PROTOCOLS[:2])
            speedups.append([_ratio(a, b) for a, b in zip(slow, fast, strict=True)])
        for column, values in zip(columns, zip(*speedups, strict=True), strict=True):
            row[column] = _shown(_mean(values), "x")
        rows.append(row)
    return rows
