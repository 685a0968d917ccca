"""Pictures of runs: accuracy over the rounds, and how it is spread over the clients."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pfl_ext.metrics import scale_of, summarize, word_of

from .results import ResultsFolder, Runs
from .rounds import best_rounds
from .tables import client_values, folders_of, models_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["accuracy_curves", "client_density", "client_distribution", "option_curves", "timeline"]

# Okabe and Ito's colours, which people with any colour vision can tell apart, without the yellow that is too pale for
# lines. Beyond seven methods they repeat, and the markers go on to differ.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
_LINES = {"personal": "-", "global": (0, (4, 2))}
_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 8,
    "markerfacecolor": "white",
    "markeredgewidth": 1.6,
    "linestyle": "",
}


def accuracy_curves(
    runs: Runs, path: str | os.PathLike[str], metric: str = "accuracy", statistic: str = "mean", split: str = "test"
) -> None:
    """Draw the local-test metric over the rounds: a colour a method, solid for personal models, dashed for global.

    A ring marks the round that is best by validation. Of several seeds the mean is drawn, with a band of one standard
    deviation around it.

    Args:
        runs: As for `comparison`.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.
        metric: Any of the records; shares such as the accuracy are drawn in per cent.
        statistic: Over the clients: a key of `summarize`.
        split: ``"test"`` or ``"validation"``.

    Raises:
        ImportError: without matplotlib.
        ValueError: no run was evaluated.
    """
    histories = {name: [folder.records() for folder in folders_of(run)] for name, run in runs.items()}
    curves = {
        (name, model): curve
        for name, seeds in histories.items()
        for model in models_of(seeds)
        if (curve := _curve(seeds, model, split, metric, statistic))
    }
    if not curves:
        raise ValueError(f"there is no {split} {metric} to draw: no round of {', '.join(runs) or 'no run'} has one")
    figure, axes = _figure()
    colour_of = dict(zip(runs, cycle(_COLOURS), strict=False))
    marker_of = dict(zip(runs, cycle(_MARKERS), strict=False))
    several = len({model for _, model in curves}) > 1
    labels: dict[str, Any] = {}
    ring = None
    for (name, model), curve in curves.items():
        rounds, colour = sorted(curve), colour_of[name]
        mean = np.array([np.mean(curve[r]) for r in rounds])
        (line,) = axes.plot(
            rounds,
            mean,
            color=colour,
            linestyle=_LINES.get(model, (0, (1, 1.5))) if several else "-",
            linewidth=1.7,
            marker=marker_of[name] if len(rounds) == 1 or len(runs) > len(_COLOURS) else None,
            markevery=max(1, len(rounds) // 8),
            markersize=5,
        )
        labels[f"{name}, {model}" if several else name] = line
        if len(histories[name]) > 1:
            std = np.array([np.std(curve[r], ddof=1) if len(curve[r]) > 1 else 0.0 for r in rounds])
            axes.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
            continue
        best = best_rounds(histories[name][0], metric, statistic)[model]["best_by_validation"]
        if best is not None and best["round"] in curve and len(curve) > 1:
            (ring,) = axes.plot(best["round"], mean[rounds.index(best["round"])], color=colour, zorder=4, **_RING)
    _legend(axes, {**labels, "best by validation": ring} if ring else labels)
    axes.set_xlabel("round")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(f"{word_of(metric)}: {statistic.replace('_', ' ')} over the clients' {split} sets{_unit(metric)}")
    _save(figure, path)


def _curve(
    seeds: Sequence[Sequence[Mapping[str, Any]]],
    model: str,
    split: str,
    metric: str,
    statistic: str,
    group: str = "models",
) -> dict[int, list[float]]:
    """The values of each evaluated round, one a seed; ``group`` is where a record has them."""
    curve: dict[int, list[float]] = {}
    for record in (record for history in seeds for record in history):
        value = record.get(group, {}).get(model, {}).get(split, {}).get(metric, {}).get(statistic)
        if value is not None:
            curve.setdefault(record["round"], []).append(scale_of(metric) * value)
    return curve


def client_distribution(runs: Runs, path: str | os.PathLike[str], metric: str = "personal/test/accuracy") -> None:
    """Draw the clients of each method from the lowest to the highest result of the last evaluation.

    The horizontal axis is the share of clients, so it is the distribution function on its side, and federations of
    different sizes compare. The lowest and the highest 5 % are shaded; the marks beside them are the means over these
    clients, ``lowest5`` and ``top5`` of `summarize`. Clients of several seeds are drawn together; marks and numbers are
    means over the seeds, as in the tables. Clients that joined late are left out, as there.

    Args:
        runs: As for `comparison`.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.
        metric: A column of the per-client results; a method without personal models is drawn with its global one.

    Raises:
        ImportError: without matplotlib.
        ValueError: a run without that column, or no client with a value.
    """
    quantity = metric.rpartition("/")[2]
    labels: dict[str, Any] = {}
    figure, axes = _figure()
    for left in (0, 95):
        axes.axvspan(left, left + 5, color="#000000", alpha=0.06, linewidth=0)
    for (name, run), colour, marker in zip(runs.items(), cycle(_COLOURS), cycle(_MARKERS), strict=False):
        seeds = [client_values(folder, metric) for folder in folders_of(run)]
        values = np.sort(_present(seeds, quantity))
        if len(values) == 0:
            continue
        # Client k of n stands for the shares from k/n to (k+1)/n: steps, so that ten clients look like ten.
        shares = 100 * np.arange(len(values) + 1) / len(values)
        axes.step(shares, np.append(values, values[-1]), where="post", color=colour, linewidth=1.7)
        summary = _summary(seeds, quantity)
        tails = [summary["lowest5"], summary["top5"]]
        (marks,) = axes.plot([-1.6, 101.6], tails, marker=marker, color=colour, markersize=6, linestyle="", zorder=4)
        model = seeds[0][0].partition("/")[0]
        shown = name if seeds[0][0] == metric else f"{name}, {model}"
        labels[f"{shown}\nmean {summary['mean']:.2f}, std {summary['std']:.2f}"] = marks
    if not labels:
        raise ValueError(f"there is no {metric} to draw: no client of {', '.join(runs) or 'no run'} has one")
    _legend(axes, labels)
    axes.set_xlim(-3.2, 103.2)
    axes.set_xticks([5, 25, 50, 75, 95])
    axes.set_xlabel("clients from the lowest to the highest (%); marks: means of the shaded 5 %")
    axes.set_ylabel(f"{word_of(quantity)}{_unit(quantity)}")
    _save(figure, path)


def option_curves(
    points: Sequence[tuple[Any, Runs]],
    path: str | os.PathLike[str],
    option: str,
    metric: str = "accuracy",
    new_clients: bool = False,
) -> None:
    """Draw the last local-test metric over the values of an option: a colour a method, a line style a model.

    Bars are one standard deviation over the seeds. A method that was run at one value only is a line across.

    Args:
        points: The option's values with the runs at each, in order; they stand at equal distances.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.
        option: What to write at the axis.
        metric: Any of the records; shares such as the accuracy are drawn in per cent.
        new_clients: Of the clients that joined late, not of the others.

    Raises:
        ImportError: without matplotlib.
        ValueError: no run was evaluated, or has such clients.
    """
    group, whose = ("new_clients", "new") if new_clients else ("models", "the")
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for place, (_, runs) in enumerate(points):
        for name, run in runs.items():
            histories = [folder.records() for folder in folders_of(run)]
            for model in models_of(histories):
                curve = _curve(histories, model, "test", metric, "mean", group)
                if curve:
                    found.setdefault((name, model), {})[place] = curve[max(curve)]
    if not found:
        raise ValueError(f"there is no test {metric} to draw: no run at any {option} has one")
    figure, axes = _figure()
    labels: dict[str, Any] = {}
    names = list(dict.fromkeys(name for name, _ in found))
    for (name, model), values in found.items():
        colour = _COLOURS[names.index(name) % len(_COLOURS)]
        style: dict[str, Any] = {"color": colour, "linestyle": _LINES.get(model, (0, (1, 1.5))), "linewidth": 1.7}
        places = sorted(values)
        means = [float(np.mean(values[place])) for place in places]
        if len(places) == 1 < len(points):
            labels[f"{name}, {model}"] = axes.axhline(means[0], **style)
            continue
        spread = [float(np.std(values[place], ddof=1)) if len(values[place]) > 1 else 0.0 for place in places]
        marker = _MARKERS[names.index(name) % len(_MARKERS)]
        labels[f"{name}, {model}"] = axes.errorbar(
            places, means, spread, marker=marker, markersize=5, capsize=3, **style
        )
    _legend(axes, labels)
    axes.set_xticks(range(len(points)), [str(value) for value, _ in points])
    axes.set_xlabel(option)
    axes.set_ylabel(f"{word_of(metric)}: mean over {whose} clients' test sets{_unit(metric)}")
    _save(figure, path)


def client_density(runs: Runs, path: str | os.PathLike[str], metric: str = "personal/test/accuracy") -> None:
    """Draw how many clients of each method have which result in the last evaluation: a row a method, one scale.

    Bars count clients; the curve is a Gaussian kernel estimate of the same clients by Silverman's rule. The filled mark
    is the mean, the two open ones ``lowest5`` and ``top5`` of `summarize`. Figures 1 and 6 of PLGU. Clients of several
    seeds are drawn together; marks and numbers are means over the seeds, as in the tables. Clients that joined late are
    left out, as there.

    Args:
        runs: As for `comparison`.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.
        metric: A column of the per-client results; a method without personal models is drawn with its global one.

    Raises:
        ImportError: without matplotlib.
        ValueError: a run without that column, or no client with a value.
    """
    quantity = metric.rpartition("/")[2]
    found: dict[str, Any] = {}
    summaries: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        seeds = [client_values(folder, metric) for folder in folders_of(run)]
        values = _present(seeds, quantity)
        if len(values):
            model = seeds[0][0].partition("/")[0]
            shown = name if seeds[0][0] == metric else f"{name}, {model}"
            found[shown], summaries[shown] = values, _summary(seeds, quantity)
    if not found:
        raise ValueError(f"there is no {metric} to draw: no client of {', '.join(runs) or 'no run'} has one")
    everyone = np.concatenate(list(found.values()))
    low, high = float(everyone.min()), float(everyone.max())
    margin = max(0.04 * (high - low), 1e-3 * max(abs(low), abs(high), 1e-6))
    edges = np.linspace(low - margin, high + margin, 33)
    grid = np.linspace(edges[0], edges[-1], 400)
    figure = _import("figure").Figure(figsize=(8.4, 1.1 + 0.62 * len(found)), layout="constrained")
    rows = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, values), colour in zip(rows, found.items(), cycle(_COLOURS), strict=False):
        counts, _ = np.histogram(values, edges)
        axes.stairs(counts, edges, fill=True, color=colour, alpha=0.3)
        axes.plot(grid, len(values) * (edges[1] - edges[0]) * _density(values, grid), color=colour, linewidth=1.6)
        summary, height = summaries[name], axes.get_ylim()[1]
        axes.plot(summary["mean"], 0, marker="^", color=colour, markersize=7, clip_on=False, zorder=4)
        tails = [summary["lowest5"], summary["top5"]]
        style: dict[str, Any] = {"marker": "^", "markersize": 7, "markerfacecolor": "white", "linestyle": ""}
        axes.plot(tails, [0, 0], color=colour, clip_on=False, zorder=4, **style)
        axes.set_ylim(0, height)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_ylabel(name.replace("$", r"\$"), rotation=0, ha="right", va="center", fontsize=9)
        digits = 1 if scale_of(quantity) == 100 else 3
        text = "   ".join(
            f"{title} {summary[key]:.{digits}f}"
            for title, key in (("lowest 5 %", "lowest5"), ("mean", "mean"), ("top 5 %", "top5"))
        )
        label: dict[str, Any] = {"transform": axes.transAxes, "ha": "left", "va": "top", "fontsize": 8}
        axes.text(0.01, 0.98, text, **label)
    rows[-1].set_xlabel(f"{word_of(quantity)}{_unit(quantity)}; marks: lowest 5 %, mean, top 5 % of the clients")
    _save(figure, path)


_Values = Sequence[tuple[str, Mapping[object, float]]]
"""A column's name and its values by client, for each seed."""


def _present(seeds: _Values, quantity: str) -> np.ndarray:
    """The values of all clients of all seeds, as shown."""
    values = np.array([scale_of(quantity) * value for _, clients in seeds for value in clients.values()])
    present: np.ndarray = values[~np.isnan(values)]
    return present


def _summary(seeds: _Values, quantity: str) -> dict[str, float]:
    """`summarize` of each seed, and the mean over the seeds that have a value."""
    scale = scale_of(quantity)
    each = [summarize([scale * value for value in clients.values()]) for _, clients in seeds]
    return {
        name: float(np.mean([one[name] for one in each if one["count"]])) for name in ("mean", "std", "lowest5", "top5")
    }


def _density(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """A Gaussian kernel estimate; the width is Silverman's, no less than a hundredth of the grid."""
    quartiles = np.quantile(values, [0.25, 0.75])
    spread = min(float(values.std()), float(quartiles[1] - quartiles[0]) / 1.34) or float(values.std())
    width = max(0.9 * spread * len(values) ** -0.2, (grid[-1] - grid[0]) / 100)
    kernels = np.exp(-0.5 * ((grid[:, None] - values[None, :]) / width) ** 2)
    density: np.ndarray = kernels.sum(1) / (len(values) * width * np.sqrt(2 * np.pi))
    return density


_ACTIVITIES = {"train": _COLOURS[0], "personal": _COLOURS[1], "send": _COLOURS[2], "receive": _COLOURS[5]}


def timeline(panels: Mapping[str, Sequence[tuple[int, str, float, float]]], path: str | os.PathLike[str]) -> None:
    """Draw what each client does when: a panel a protocol, one above the other on the same axis of time.

    Of a client's two lanes the upper one is its device, the lower one its link.

    Args:
        panels: For each protocol ``(client, what, begin, end)``, what being train, personal, send or receive.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.

    Raises:
        ImportError: without matplotlib.
        ValueError: nobody does anything.
    """
    if not any(panels.values()):
        raise ValueError("there is no timeline to draw: no client does anything")
    clients = sorted({span[0] for spans in panels.values() for span in spans})
    row = {client: place for place, client in enumerate(clients)}
    height = min(9.0, 1.2 + len(panels) * (0.7 + 0.22 * len(clients)))
    figure = _import("figure").Figure(figsize=(9.6, height), layout="constrained")
    every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (protocol, spans) in zip(every, panels.items(), strict=True):
        for what, colour in _ACTIVITIES.items():
            lane = -0.4 if what in ("train", "personal") else 0.02
            for client in clients:
                bars = [(begin, end - begin) for k, name, begin, end in spans if k == client and name == what]
                axes.broken_barh(bars, (row[client] + lane, 0.38), color=colour, linewidth=0)
        end = max((span[3] for span in spans), default=0.0)
        axes.axvline(end, color="#000000", linewidth=1.0, linestyle=(0, (3, 2)))
        axes.set_title(f"{protocol}: {end:.4g} s", fontsize=10, loc="left")
        axes.set_ylim(len(clients) - 0.4, -0.6)
        step = -(-len(clients) // 20)
        axes.set_yticks(range(0, len(clients), step), [str(clients[i]) for i in range(0, len(clients), step)])
        axes.set_ylabel("client")
        axes.spines[["top", "right"]].set_visible(False)
    every[-1].set_xlabel("virtual time (s)")
    patch = _import("patches").Patch
    handles = [patch(color=colour, label=what) for what, colour in _ACTIVITIES.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    _save(figure, path)


def _import(module: str) -> Any:
    """A module of matplotlib, which is optional and slow to import."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: pip install 'pfl_ext[plots]' ({error})") from None


def _figure() -> tuple[Figure, Axes]:
    # Not through pyplot: no window system is touched, whatever backend the user has chosen, and nothing is left open.
    figure = _import("figure").Figure(figsize=(8.4, 4.3), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.7)
    return figure, axes


def _legend(axes: Axes, labels: dict[str, Any]) -> None:
    """Beside the axes: a legend inside hides curves as soon as there are many."""
    names = [name.replace("$", r"\$") for name in labels]  # a name is no formula
    style = {"frameon": False, "fontsize": 9, "handlelength": 2.6}
    axes.legend(list(labels.values()), names, loc="center left", bbox_to_anchor=(1.01, 0.5), **style)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    path = Path(path)
    with ResultsFolder(path.parent).replacing(path.name) as temporary:
        figure.savefig(temporary, dpi=150)


def _unit(metric: str) -> str:
    return " (%)" if scale_of(metric) == 100 else ""
