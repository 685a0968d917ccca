"""A picture of a table: our numbers and the printed ones, cell by cell."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

from .plots import _COLOURS, _import, _save
from .tables import Spread

__all__ = ["beside"]


def beside(cells: Sequence[tuple[str, str, Any, str]], path: str | os.PathLike[str], title: str = "") -> None:
    """Draw one panel per column, one line per row: ours filled, with bars of their spread, the printed number open.

    Args:
        cells: the name of the row and of the column, our number, a `Spread` or None, and the printed text.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.
        title: above it.

    Raises:
        ImportError: without matplotlib.
        ValueError: there is no number in it.
    """
    rows, columns = (list(dict.fromkeys(cell[place] for cell in cells)) for place in (0, 1))
    marks = [(row, column, number_of(ours), number_of(printed)) for row, column, ours, printed in cells]
    if not any(ours or printed for *_, ours, printed in marks):
        raise ValueError("there is nothing to draw: no run was made, and no number is printed")
    size = (1.6 + 2.1 * min(len(columns), 5), 1.2 + 0.24 * len(rows) * math.ceil(len(columns) / 5))
    figure = _import("figure").Figure(figsize=size, layout="constrained")
    across = min(len(columns), 5)
    panels = figure.subplots(math.ceil(len(columns) / across), across, sharey=True, squeeze=False).flatten()
    for axes, column in zip(panels, columns, strict=False):
        for row, of, ours, printed in marks:
            if of != column:
                continue
            for mark, style in ((printed, {"mfc": "white", "color": _COLOURS[1]}), (ours, {"color": _COLOURS[0]})):
                if mark is not None:
                    offset = 0.15 if mark is ours else -0.15
                    bar = None if math.isnan(mark[1]) else mark[1]
                    axes.errorbar(mark[0], rows.index(row) + offset, xerr=bar, fmt="o", ms=4, lw=1, **style)
        axes.set_title(column.replace("$", r"\$"), fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(axis="y", alpha=0.25)
    for axes in panels[len(columns) :]:
        axes.set_visible(False)
    panels[0].set_yticks(range(len(rows)), [row.replace("$", r"\$") for row in rows], fontsize=7)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.suptitle(f"{title}\nfilled: ours; open: the paper's".replace("$", r"\$"), fontsize=9)
    _save(figure, path)


def number_of(value: Any) -> tuple[float, float] | None:
    """A number and its spread, NaN for none; of a text such as ``85.94 ± 8.82`` the first two; None for no number."""
    if isinstance(value, Spread):
        return value.mean, value.std
    if isinstance(value, str):
        found = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", value)]
        return (found[0], found[1] if len(found) > 1 else math.nan) if found else None
    return None if value is None else (float(value), math.nan)
