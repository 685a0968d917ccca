"""Pictures of runs: accuracy over the rounds, and how it is spread over the clients."""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Mapping, Sequence
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

# Ten colours that stay apart: Okabe and Ito's, which people with any colour vision can tell apart, without the yellow
# that is too pale for lines, and three that are darker. With as many shapes as have no common divisor with them, and
# filled, hollow and pale ones in turn, every method up to the thirtieth differs in two ways from every other.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#6A3D9A",
    "#8C510A",
    "#7F7F7F",
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
_LINES = {"personal": "-", "global": (0, (4, 2))}
_RING: dict[str, Any] = {
    "marker": "o",
    "markersize": 9,
    "markerfacecolor": "none",
    "markeredgewidth": 1.6,
    "linestyle": "",
}
_TOGETHER = 4  # methods whose models are drawn into one picture; of more each model has a picture of its own
_MARKED = 8  # methods whose best round is marked
_FEW = 10  # curves of which each is a little wider than the next
_ROWS = 18  # of a column of the legend
_SAME = 0.004  # of the height of a picture: curves that are nowhere further apart hide each other


def _style(place: int) -> dict[str, Any]:
    """The colour and the mark of the method at a place."""
    colour = _COLOURS[place % len(_COLOURS)]
    face = (colour, "white", f"{colour}55")[place // len(_COLOURS) % 3]
    return {"color": colour, "marker": _MARKERS[place % len(_MARKERS)], "markerfacecolor": face}


def accuracy_curves(
    runs: Runs,
    path: str | os.PathLike[str],
    metric: str = "accuracy",
    statistic: str = "mean",
    split: str = "test",
    group: str = "models",
    models: Sequence[str] | None = None,
) -> None:
    """Draw the local-test metric over the rounds: a colour and a mark for each method.

    Of a few methods all models are in one picture, solid for personal models, dashed for global; of more there is a
    picture for each model. A ring marks the round that is best by validation. Of several seeds the mean is drawn, with
    a band of one standard deviation around it. What clients do on their own after the last round stands beyond a line,
    as it is no round. Of curves that hide each other the lower one is the wider.

    Args:
        runs: As for `comparison`.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.
        metric: Any of the records; shares such as the accuracy are drawn in per cent.
        statistic: Over the clients: a key of `summarize`.
        split: ``"test"``, ``"validation"`` or ``"global_test"``.
        group: over which clients: all, or the ``"participants"`` of each round.
        models: which ones; None: all that were evaluated.

    Raises:
        ImportError: without matplotlib.
        ValueError: no run was evaluated.
    """
    histories = {name: [folder.records() for folder in folders_of(run)] for name, run in runs.items()}
    found = {
        (name, model): curves
        for name, seeds in histories.items()
        for model in models_of(seeds, group)
        if (models is None or model in models) and any(curves := _curves(seeds, model, split, metric, statistic, group))
    }
    if not found:
        raise ValueError(f"there is no {split} {metric} to draw: no round of {', '.join(runs) or 'no run'} has one")
    drawn = sorted({model for _, model in found}, key=lambda model: (model != "personal", model))
    groups = [drawn] if len(runs) <= _TOGETHER else [[model] for model in drawn]
    last = max((max(rounds) for rounds, _ in found.values() if rounds), default=1)
    most = max(map(len, histories.values()))
    note = f"; mean of {most} seeds, band: one standard deviation" if most > 1 else ""
    figure, panels = _figure(
        len(groups),
        height=4.6 if len(runs) <= _TOGETHER else 6.0,
        title=f"{_capital(word_of(metric))} over the rounds{note}",
    )
    labels: dict[tuple[int, str], Any] = {}
    ringed = False
    lowest, highest = _range([value for both in found.values() for curve in both for value in curve.values()])
    for axes, together in zip(panels, groups, strict=True):
        several = len(together) > 1
        shown = {key: both for key, both in found.items() if key[1] in together}
        widths = _widths([both[0] for both in shown.values()], _SAME * (highest - lowest))
        for ((name, model), (curve, after)), width in zip(shown.items(), widths, strict=True):
            place, seeds = list(runs).index(name), histories[name]
            style = {**_style(place), "linestyle": _LINES.get(model, (0, (1, 1.5))) if several else "-"}
            every = max(1, len(curve) // 6)
            line = _draw_curve(
                axes, curve, len(seeds) > 1, {**style, "linewidth": width, "markevery": (place % every, every)}
            )
            mark = _draw_after(axes, after, curve, last, len(seeds) > 1, style)
            labels.setdefault((place, model if several else ""), line or mark)
            one = len(seeds) == 1 and len(runs) <= _MARKED and group == "models" and split != "global_test"
            best = best_rounds(seeds[0], metric, statistic)[model]["best_by_validation"] if one else None
            if best is not None and best["round"] in curve and len(curve) > 1:
                axes.plot(best["round"], curve[best["round"]][0], color=style["color"], zorder=4, **_RING)
                ringed = True
        if len(groups) > 1:
            axes.set_title(f"{together[0]} model", fontsize=10, loc="left")
        _rounds_axis(axes, last, any(after for _, after in shown.values()))
    names = list(runs)
    named = {names[place] + (f", {model}" if model else ""): labels[place, model] for place, model in _in_order(labels)}
    if ringed:
        named["best by validation"] = _import("lines").Line2D([], [], color="#404040", **_RING)
    _legend(figure, named)
    whose = f"{statistic.replace('_', ' ')} over the clients' {split} sets"
    if split == "global_test":
        whose = "on the global test"
    if group == "participants":
        whose += ", those of the round"
    panels[0].set_ylabel(f"{word_of(metric)}: {whose}{_unit(metric)}")
    _save(figure, path)


def _in_order(labels: Mapping[tuple[int, str], Any]) -> list[tuple[int, str]]:
    """By method, the personal model first."""
    return sorted(labels, key=lambda key: (key[0], key[1] != "personal", key[1]))


_Curve = Mapping[int, Sequence[float]]
"""The values of each evaluated round, one a seed."""


def _curves(
    seeds: Sequence[Sequence[Mapping[str, Any]]], model: str, split: str, metric: str, statistic: str, group: str
) -> tuple[_Curve, _Curve]:
    """The values in the rounds, and those after what clients do on their own at the end."""
    rounds = [[record for record in history if "stage" not in record] for history in seeds]
    after = [[record for record in history if "stage" in record] for history in seeds]
    both = [_curve(records, model, split, metric, statistic, group) for records in (rounds, after)]
    return both[0], both[1]


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
        value = record.get(group, {}).get(model, {}).get(split, {}).get(metric)
        if isinstance(value, Mapping):  # else one model on one set of samples
            value = value.get(statistic)
        if value is not None:
            curve.setdefault(record["round"], []).append(scale_of(metric) * value)
    return curve


def _draw_curve(axes: Axes, curve: _Curve, band: bool, style: Mapping[str, Any]) -> Any:
    """The means over the rounds, of several seeds with a band of one standard deviation; None without a round."""
    if not curve:
        return None
    rounds = sorted(curve)
    mean = np.array([np.mean(curve[r]) for r in rounds])
    (line,) = axes.plot(rounds, mean, markersize=5, markeredgewidth=1.1, **style)
    if band:
        std = np.array([np.std(curve[r], ddof=1) if len(curve[r]) > 1 else 0.0 for r in rounds])
        axes.fill_between(rounds, mean - std, mean + std, color=style["color"], alpha=0.13, linewidth=0)
    return line


def _draw_after(axes: Axes, after: _Curve, curve: _Curve, last: int, bars: bool, style: Mapping[str, Any]) -> Any:
    """A mark of what came out after the last round, tied to the last round's where there is one.

    A model that is as it was has none: of several marks of a method nobody could say which is which.
    """
    values = [value for some in after.values() for value in some]
    if not values or (last in curve and np.allclose(np.mean(curve[last]), np.mean(values))):
        return None
    x, mean = last + _beyond(last), float(np.mean(values))
    if last in curve:
        tie = {"color": style["color"], "linewidth": 1.0, "linestyle": (0, (1, 1.5))}
        axes.plot([last, x], [float(np.mean(curve[last])), mean], **tie)
    std = float(np.std(values, ddof=1)) if bars and len(values) > 1 else None
    own = {**style, "linestyle": "", "markersize": 7, "zorder": 5}
    return axes.errorbar(x, mean, std, capsize=3, **own).lines[0]


def _beyond(last: int) -> float:
    """How far beyond the last round that stands."""
    return max(0.6, 0.06 * last)


def _rounds_axis(axes: Axes, last: int, after: bool) -> None:
    """Rounds and nothing else have numbers; what comes after them is shaded, and says above what it is."""
    first, margin = min(1, last), max(0.3, 0.02 * last)
    locator = _import("ticker").MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10])
    inner = [int(tick) for tick in locator.tick_values(first, last) if first + last / 15 < tick <= last - last / 25]
    right = last + margin
    if after:
        beyond = _beyond(last)
        right = last + 2 * beyond
        axes.axvspan(last + beyond / 2, right, color="#000000", alpha=0.05, linewidth=0)
        style: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "right", "va": "bottom", "fontsize": 8}
        axes.text(right, 1.005, "after the last round", **style)
    axes.set_xlim(first - margin, right)
    axes.set_xticks(sorted({first, *inner, last}))
    axes.set_xlabel("round")


def _range(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    every = [value for some in values for value in some if np.isfinite(value)]
    return (min(every), max(every)) if every else (0.0, 1.0)


def _widths(curves: Sequence[_Curve], apart: float, thin: float = 1.7) -> list[float]:
    """Widths of lines that are drawn one over the other.

    Of those that hide each other the lower ones are much wider. Of a few each is a little wider than the next, so that
    one shows where it runs under another for a while.
    """
    means = [{r: float(np.mean(values)) for r, values in curve.items()} for curve in curves]

    def hides(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
        common = one.keys() & other.keys()
        return bool(common) and all(abs(one[r] - other[r]) <= apart for r in common)

    above = [sum(hides(mean, later) for later in means[place + 1 :]) for place, mean in enumerate(means)]
    step = 1.4 / len(curves) if 0 < len(curves) <= _FEW else 0.0
    return [thin + 3.2 * min(count, 4) + step * (len(curves) - 1 - place) for place, count in enumerate(above)]


def client_distribution(runs: Runs, path: str | os.PathLike[str], metric: str = "personal/test/accuracy") -> None:
    """Draw the clients of each method from the lowest to the highest result of the last evaluation.

    The horizontal axis is the share of clients, so it is the distribution function on its side, and federations of
    different sizes compare. The lowest and the highest 5 % are shaded; the marks beside them are the means over these
    clients, ``lowest5`` and ``top5`` of `summarize`. Clients of several seeds are drawn together, which the title says;
    marks and numbers are means over the seeds, as in the tables. Clients that joined late are left out, as there.

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
    figure, (axes,) = _figure(1, _of_clients(runs, quantity))
    for left in (0, 95):
        axes.axvspan(left, left + 5, color="#000000", alpha=0.06, linewidth=0)
    drawn = {}
    for place, (name, run) in enumerate(runs.items()):
        seeds = [client_values(folder, metric) for folder in folders_of(run)]
        values = np.sort(_present(seeds, quantity))
        if len(values):
            drawn[name] = (place, seeds, values)
    spread = max((float(np.ptp(values)) for *_, values in drawn.values()), default=0.0)
    widths = _widths([{k: [value] for k, value in enumerate(values)} for *_, values in drawn.values()], _SAME * spread)
    for (name, (place, seeds, values)), width in zip(drawn.items(), widths, strict=True):
        # Client k of n stands for the shares from k/n to (k+1)/n: steps, so that ten clients look like ten.
        shares, style = 100 * np.arange(len(values) + 1) / len(values), _style(place)
        axes.step(shares, np.append(values, values[-1]), where="post", color=style["color"], linewidth=width)
        summary = _summary(seeds, quantity)
        tails = [summary["lowest5"], summary["top5"]]
        (marks,) = axes.plot([-1.6, 101.6], tails, markersize=6, linestyle="", zorder=4, clip_on=False, **style)
        model = seeds[0][0].partition("/")[0]
        shown = name if seeds[0][0] == metric else f"{name}, {model}"
        between = "\n" if len(runs) <= _ROWS // 2 else ": "
        labels[f"{shown}{between}mean {summary['mean']:.2f}, std {summary['std']:.2f}"] = marks
    if not labels:
        raise ValueError(f"there is no {metric} to draw: no client of {', '.join(runs) or 'no run'} has one")
    _legend(figure, labels)
    axes.set_xlim(-3.2, 103.2)
    axes.set_xticks([5, 25, 50, 75, 95])
    axes.set_xlabel("clients from the lowest to the highest (%); marks: means of the shaded 5 %")
    axes.set_ylabel(f"{word_of(quantity)}{_unit(quantity)}")
    _save(figure, path)


def _of_clients(runs: Runs, quantity: str) -> str:
    """The title of a picture of clients: what it shows of them, and whether it has those of several seeds together."""
    most = max((len(folders_of(run)) for run in runs.values()), default=1)
    return f"{_capital(word_of(quantity))} of the clients" + (f" of {most} seeds together" if most > 1 else "")


def option_curves(
    points: Sequence[tuple[Any, Runs]],
    path: str | os.PathLike[str],
    option: str,
    metric: str = "accuracy",
    new_clients: bool = False,
) -> None:
    """Draw the last local-test metric over the values of an option: one colour per method, one line style per model.

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
    most = 1
    for place, (_, runs) in enumerate(points):
        for name, run in runs.items():
            histories = [folder.records() for folder in folders_of(run)]
            most = max(most, len(histories))
            for model in models_of(histories):
                curve = _curve(histories, model, "test", metric, "mean", group)
                if curve:
                    found.setdefault((name, model), {})[place] = curve[max(curve)]
    if not found:
        raise ValueError(f"there is no test {metric} to draw: no run at any {option} has one")
    note = f"; mean of {most} seeds, bars: one standard deviation" if most > 1 else ""
    figure, (axes,) = _figure(1, f"{_capital(word_of(metric))} after the last round by {option}{note}")
    labels: dict[str, Any] = {}
    names = list(dict.fromkeys(name for name, _ in found))
    lowest, highest = _range([values for curve in found.values() for values in curve.values()])
    widths = _widths(list(found.values()), _SAME * (highest - lowest))
    for ((name, model), values), width in zip(found.items(), widths, strict=True):
        style = {**_style(names.index(name)), "linestyle": _LINES.get(model, (0, (1, 1.5))), "linewidth": width}
        places = sorted(values)
        means = [float(np.mean(values[place])) for place in places]
        if len(places) == 1 < len(points):
            across = {key: style[key] for key in ("color", "linestyle", "linewidth")}
            labels[f"{name}, {model}"] = axes.axhline(means[0], **across)
            continue
        spread = [float(np.std(values[place], ddof=1)) if len(values[place]) > 1 else 0.0 for place in places]
        bars = spread if most > 1 else None
        labels[f"{name}, {model}"] = axes.errorbar(
            places, means, bars, markersize=6, capsize=3, elinewidth=1.2, **style
        )
    _legend(figure, labels)
    axes.set_xticks(range(len(points)), [str(value) for value, _ in points])
    axes.set_xlim(-0.3, len(points) - 0.7)
    axes.set_xlabel(option)
    axes.set_ylabel(f"{word_of(metric)}: mean over {whose} clients' test sets{_unit(metric)}")
    _save(figure, path)


def client_density(runs: Runs, path: str | os.PathLike[str], metric: str = "personal/test/accuracy") -> None:
    """Draw how many clients of each method have which result in the last evaluation: one row per method, one scale.

    Bars count clients; the curve is a Gaussian kernel estimate of the same clients by Silverman's rule. The filled mark
    is the mean, the two open ones ``lowest5`` and ``top5`` of `summarize`. Figures 1 and 6 of PLGU. Clients of several
    seeds are drawn together, which the title says; marks and numbers are means over the seeds, as in the tables.
    Clients that joined late are left out, as there.

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
    figure = _import("figure").Figure(figsize=(9.6, 1.4 + 0.62 * len(found)), layout="constrained")
    _title(figure, _of_clients(runs, quantity))
    rows = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for place, (axes, (name, values)) in enumerate(zip(rows, found.items(), strict=True)):
        colour = _style(place)["color"]
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
        # Beside the bars, so that it lies on none of them.
        text = "\n".join(
            f"{title} {summary[key]:.{digits}f}"
            for title, key in (("lowest 5 %", "lowest5"), ("mean", "mean"), ("top 5 %", "top5"))
        )
        axes.text(1.01, 0.5, text, transform=axes.transAxes, ha="left", va="center", fontsize=7.5)
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
    _title(figure, "What each client does when: above its device, below its link")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    _save(figure, path)


def _import(module: str) -> Any:
    """A module of matplotlib, which is optional and slow to import."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: pip install 'pfl_ext[plots]' ({error})") from None


def _figure(panels: int, title: str, height: float = 4.6) -> tuple[Figure, list[Axes]]:
    """A figure with panels beside each other, on one vertical axis."""
    # Not through pyplot: no window system is touched, whatever backend the user has chosen, and nothing is left open.
    size = (6.4 if panels == 1 else 4.6 * panels, height)
    figure = _import("figure").Figure(figsize=size, layout="constrained")
    _title(figure, title)
    every = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.7)
    return figure, every


def _title(figure: Figure, text: str) -> None:
    fit = int(figure.get_figwidth() / 0.085)  # inches of a character
    figure.suptitle(textwrap.fill(text.replace("$", r"\$"), fit), fontsize=11, x=0.01, ha="left")


def _capital(word: str) -> str:
    return word[0].upper() + word[1:].replace("_", " ")


def _legend(figure: Figure, labels: dict[str, Any]) -> None:
    """Beside the axes, in columns: inside it hides curves as soon as there are many. The figure grows by it."""
    names = [name.replace("$", r"\$") for name in labels]  # a name is no formula
    lines = sum(1 + name.count("\n") for name in names)
    columns = -(-lines // _ROWS)
    size = figure.get_size_inches()
    width = 0.75 + 0.075 * max(len(part) for name in names for part in name.split("\n"))
    figure.set_size_inches(size[0] + columns * width, max(size[1], 0.9 + 0.215 * -(-lines // columns)))
    style = {"frameon": False, "fontsize": 9, "handlelength": 2.6, "columnspacing": 1.2}
    figure.legend(list(labels.values()), names, loc="outside right center", ncols=columns, **style)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    path = Path(path)
    with ResultsFolder(path.parent).replacing(path.name) as temporary:
        figure.savefig(temporary, dpi=150)


def _unit(metric: str) -> str:
    return " (%)" if scale_of(metric) == 100 else ""
