"""Pictures in panels that papers have: lines over the values of an option, and results over what they cost."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .beside import number_of
from .plots import _import, _legend, _save, _style, _title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["lines", "scatter"]

_ACROSS = 4
_CHARACTER = 0.07  # inches of a label at the axis


def lines(
    panels: Mapping[str, Mapping[str, Sequence[tuple[str, Any]]]], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draw a line for each row over the columns of a table, with bars of the spread: Figures 3 to 8 of PersFL, say.

    Args:
        panels: by the panel's title and the line's name the columns and numbers: a number, a `Spread`, or None, which
            is left out. The panel of a name such as ``User 3, T = 5`` is not said again in the legend.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.
        title: above it.

    Raises:
        ImportError: without matplotlib.
        ValueError: there is no number in it.
    """
    numbers = {
        (panel, name.removeprefix(f"{panel}, ")): [(x, number) for x, y in points if (number := number_of(y))]
        for panel, rows in panels.items()
        for name, points in rows.items()
    }
    if not any(numbers.values()):
        raise ValueError("there is nothing to draw: no run was made")
    columns = list(dict.fromkeys(x for rows in panels.values() for points in rows.values() for x, _ in points))
    names = list(dict.fromkeys(name for _, name in numbers))
    figure, every = _panels(list(panels), title)
    handles: dict[str, Any] = {}
    for panel, axes in every.items():
        for name in names:
            points = numbers.get((panel, name), [])
            if not points:
                continue
            bars = [0.0 if math.isnan(spread) else spread for _, (_, spread) in points]
            places = [columns.index(x) for x, _ in points]
            style = {**_style(names.index(name)), "markersize": 4, "linewidth": 1.3, "capsize": 2}
            handles[name] = axes.errorbar(places, [y for _, (y, _) in points], bars if any(bars) else None, **style)
        fit = round(figure.get_figwidth() / min(len(every), _ACROSS) / len(columns) / _CHARACTER)
        shown = [textwrap.fill(x.replace("$", r"\$"), max(fit, 6), break_long_words=False) for x in columns]
        axes.set_xticks(range(len(columns)), shown, fontsize=7)
    _legend(figure, handles)
    _save(figure, path)


def scatter(
    panels: Mapping[str, Sequence[tuple[str, Any, Any]]],
    path: str | os.PathLike[str],
    title: str = "",
    lengthwise: str = "",
) -> None:
    """Draw each result over what it costs: Figure 1 of PerAda.

    Args:
        panels: by title the name, the number across and the number upwards of each mark; either may be None, which is
            left out, and the latter a `Spread`.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.
        title: above it.
        lengthwise: what is drawn across.

    Raises:
        ImportError: without matplotlib.
        ValueError: there is no number in it.
    """
    marks = {(panel, name): (number_of(x), number_of(y)) for panel, rows in panels.items() for name, x, y in rows}
    if not any(x and y for x, y in marks.values()):
        raise ValueError("there is nothing to draw: no run was made")
    names = list(dict.fromkeys(name for _, name in marks))
    figure, every = _panels(list(panels), title)
    handles: dict[str, Any] = {}
    for (panel, name), (x, y) in marks.items():
        if x and y:
            style = {**_style(names.index(name)), "linestyle": "", "markersize": 6, "capsize": 2}
            handles[name] = every[panel].errorbar(x[0], y[0], None if math.isnan(y[1]) else y[1], **style)
    for axes in every.values():
        axes.set_xlabel(lengthwise, fontsize=8)
    _legend(figure, handles)
    _save(figure, path)


def _panels(titles: Sequence[str], title: str) -> tuple[Figure, dict[str, Axes]]:
    """A figure with a panel for each title, in rows."""
    across = min(len(titles), _ACROSS)
    down = math.ceil(len(titles) / across)
    width = 6.4 if across == 1 else 1.0 + 3.0 * across
    figure = _import("figure").Figure(figsize=(width, 0.9 + (3.2 if across == 1 else 2.4) * down), layout="constrained")
    _title(figure, title)
    every = list(figure.subplots(down, across, squeeze=False).flatten())
    for axes, text in zip(every, titles, strict=False):
        axes.set_title(text.replace("$", r"\$"), fontsize=9, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.7)
    for axes in every[len(titles) :]:
        axes.set_visible(False)
    return figure, dict(zip(titles, every, strict=False))
