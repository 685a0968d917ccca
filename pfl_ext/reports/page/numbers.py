"""The numbers that the page's charts and its table of clients are made of, as JSON can say them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pfl_ext.metrics import digits_of, scale_of, sign_of, word_of

from ..tables import deviation
from .found import Cut, Found, Run, several
from .settings import differing, flat

__all__ = ["numbers"]

_STATISTICS = ("mean", "weighted_mean", "lowest5", "top5", "std")
_POINTS = 400
"""Of a curve at most: more cannot be seen, and a page of many long runs would be large."""


def numbers(found: Found) -> dict[str, Any]:
    """Everything that the page's script gets."""
    runs = found.runs
    cuts = list({run.cut.fingerprint: run.cut for run in runs if run.cut is not None}.values())
    place = {cut.fingerprint: index for index, cut in enumerate(cuts)}
    names = list(found.groups)
    metrics = dict.fromkeys([found.metric])
    for run in runs:
        metrics |= dict.fromkeys(key.split("/")[2] for key, _ in _last(run))
    return {
        "metric": found.metric,
        "statistic": found.statistic,
        "metrics": {
            name: {
                "scale": scale_of(name),
                "digits": digits_of(name),
                "word": word_of(name),
                "lower": sign_of(name) < 0,
            }
            for name in metrics
        },
        "groups": [_group(name, group) for name, group in found.groups.items()],
        "runs": [
            {
                "name": found.name(run),
                "group": names.index(run.label),
                "partition": None if run.cut is None else place[run.cut.fingerprint],
                "clients": _columns(run.rows),
            }
            for run in runs
        ],
        "partitions": [_cut(cut, found) for cut in cuts],
        "options": _options(found),
    }


def _short(value: Any) -> Any:
    """A number in six digits, None where JSON and a chart have none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _last(run: Run) -> list[tuple[str, float]]:
    """The metrics of the last round that has any."""
    return next((list(_values(record)) for record in reversed(run.history) if "models" in record), [])


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Every result of a record by ``model/data/metric/statistic``."""
    for group, more in (("models", ""), ("new_clients", ", new clients"), ("participants", ", participants")):
        for model, splits in record.get(group, {}).items():
            for split, metrics in splits.items():
                for metric, value in metrics.items():
                    if not isinstance(value, Mapping):  # one model on one set of samples
                        yield f"{model}/{split}{more}/{metric}/mean", value
                        continue
                    for statistic in _STATISTICS:
                        if statistic in value:
                            yield f"{model}/{split}{more}/{metric}/{statistic}", value[statistic]


def _measured(history: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """For each record what it took and reports of training, and all that was taken until then."""
    sent = received = seconds = 0.0
    times: dict[str, float] = {}
    for record in history:
        traffic = record.get("communication", {})
        sent += traffic.get("up_bytes", 0) / 1e6
        received += traffic.get("down_bytes", 0) / 1e6
        seconds += record.get("seconds", 0.0)
        times |= {f"virtual seconds, {protocol}": time for protocol, time in record.get("clock", {}).items()}
        yield {
            "megabytes, up and down": sent + received,
            "megabytes up": sent,
            "megabytes down": received,
            **times,
            "seconds measured": seconds,
            **{f"training: {name.replace('_', ' ')}": value for name, value in record.get("training", {}).items()},
        }


def _group(label: str, runs: Sequence[Run]) -> dict[str, Any]:
    """The curves of a label: in each round the mean over its seeds and the standard deviation."""
    taken = [list(_measured(run.history)) for run in runs]
    curves: dict[str, dict[int, list[float]]] = {}
    measured: dict[str, dict[int, list[float]]] = {}
    stage = None
    for run, steps in zip(runs, taken, strict=True):
        for record, step in zip(run.history, steps, strict=True):
            if "stage" in record:
                stage = record["round"]
            for key, value in _values(record):
                curves.setdefault(key, {}).setdefault(record["round"], []).append(value)
            for key, value in step.items():
                measured.setdefault(key, {}).setdefault(record["round"], []).append(value)
    return {
        "name": label,
        "seeds": [run.seed for run in runs],
        "stage": stage,
        "curves": {key: _over_seeds(rounds) for key, rounds in curves.items()},
        "measured": {key: _over_seeds(rounds) for key, rounds in measured.items()},
    }


def _over_seeds(rounds: Mapping[int, Sequence[Any]]) -> dict[str, list[Any]]:
    """Round by round the mean and the standard deviation of the sample, and over how many."""
    order = sorted(rounds)
    if len(order) > _POINTS:
        order = [order[place] for place in np.linspace(0, len(order) - 1, _POINTS).round().astype(int)]
    found: dict[str, list[Any]] = {"round": order, "mean": [], "std": [], "seeds": []}
    for number in order:
        values = np.array([v for v in rounds[number] if isinstance(v, int | float)], dtype=np.float64)
        values = values[np.isfinite(values)]
        found["mean"].append(_short(float(values.mean())) if len(values) else None)
        found["std"].append(_short(deviation(values)) if len(values) > 1 else None)
        found["seeds"].append(len(values))
    return found


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The table of clients, one list per column."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: [value if isinstance(value := row.get(name), str) and name != "client" else _cell(value) for row in rows]
        for name in names
    }


def _cell(value: Any) -> Any:
    return value if isinstance(value, str) else _short(value)


def _cut(cut: Cut, found: Found) -> dict[str, Any]:
    """A partition; of each client the classes that it holds, as places and counts in turn."""
    held = None
    if cut.counts is not None:
        held = [[int(n) for place in np.flatnonzero(row) for n in (place, row[place])] for row in cut.counts]
    of = [found.name(r) for r in found.runs if r.cut is not None and r.cut.fingerprint == cut.fingerprint]
    return {
        "name": f"{cut.name}; {several(of)}",
        "sizes": {part: list(sizes) for part, sizes in cut.sizes.items()},
        "classes": list(cut.classes),
        "held": held,
    }


def _options(found: Found) -> list[dict[str, Any]]:
    """The options that several labels have with different values: in each of them its value and what else differs."""
    settings = {label: flat(runs[0].config) for label, runs in found.groups.items()}
    varied = differing(settings)
    options = []
    for option in varied:
        labels = [label for label, own in settings.items() if option in own]
        # A line joins those that differ in this option alone, not in method or another one.
        rest = {
            label: tuple((other, repr(settings[label].get(other))) for other in settings[label] if other != option)
            for label in labels
        }
        if option == "method.name" or len(set(rest.values())) == len(labels):
            continue
        names = list(found.groups)
        options.append(
            {
                "name": option,
                "values": sorted({settings[label][option] for label in labels}, key=_by_value),
                "lines": [
                    {str(settings[label][option]): names.index(label) for label in labels if rest[label] == same}
                    for same in dict.fromkeys(rest.values())
                ],
            }
        )
        options[-1]["values"] = [str(value) for value in options[-1]["values"]]
    return options


def _by_value(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return (not number, float(value) if number else 0.0, str(value))
