"""The plot of a family's results: one panel per case, one bar per contestant, a line at the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .report import Row, by_case, ms_text, ratio_text

__all__ = ["draw"]

_COLOURS = {"ours": "#0b6e4f", "skilled": "#8da0b6", "naive": "#d9a066"}
_FORMATS = (".png", ".svg")


def draw(rows: Sequence[Row], path: Path, counted: str = "clients") -> None:
    """Draw the first op with all threads in float32 (or the file's first dtype): shape sets down, clients across.

    Args:
        rows: of one CSV file.
        path: the picture, a .png or .svg.
        counted: what the family calls its clients.

    Raises:
        ImportError: without matplotlib.
        ValueError: a file name that does not end in .png or .svg.
    """
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path}: a plot is written as {' or '.join(_FORMATS)}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: pip install 'pfl_ext[plots]' ({error})") from None

    op, threads = rows[0].op, max(row.threads for row in rows)
    dtypes = [row.dtype for row in rows]
    dtype = "float32" if "float32" in dtypes else dtypes[0]
    cases = [c for c in by_case(rows) if (c[0].op, c[0].dtype, c[0].threads) == (op, dtype, threads)]
    shape_sets = list(dict.fromkeys(case[0].shapes for case in cases))
    clients = sorted({case[0].clients for case in cases})
    kinds = {row.contestant: row.kind for case in cases for row in case}
    names = sorted(kinds, key=lambda name: list(_COLOURS).index(kinds[name]))
    height = 0.21 * len(names) + 0.75
    figure = Figure(figsize=(max(8.0, 1.9 + 3.4 * len(clients)), height * len(shape_sets) + 1.0), layout="constrained")
    panels = figure.subplots(len(shape_sets), len(clients), squeeze=False, sharey=True)
    for panel in panels.flat:
        panel.set_visible(False)

    for case in cases:
        panel = panels[shape_sets.index(case[0].shapes)][clients.index(case[0].clients)]
        panel.set_visible(True)
        panel.set_title(f"{case[0].shapes}, {case[0].clients} {counted}", fontsize=10, loc="left")
        limit = case[0].limit_ms
        low = min(limit, *(row.q25_ms for row in case)) / 2
        high = max(row.q75_ms for row in case)
        for row in case:
            place = names.index(row.contestant)
            spread = [[row.median_ms - row.q25_ms], [row.q75_ms - row.median_ms]]
            panel.barh(
                place,
                row.median_ms - low,
                left=low,
                height=0.72,
                color=_COLOURS[row.kind],
                xerr=spread,
                error_kw={"elinewidth": 0.9, "ecolor": "#333333"},
            )
            label = f"{ms_text(row.median_ms)} ms" if row is case[0] else ratio_text(row.ratio_to_ours)
            panel.text(row.q75_ms * 1.12, place, label, va="center", fontsize=7.5)
        panel.axvline(limit, color="#b3123b", linewidth=1.1, linestyle="--")
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter("")
        panel.set_xlim(low, high * (high / low) ** 0.28)
        panel.tick_params(labelsize=8)
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    for panel in panels[-1]:
        panel.set_xlabel("ms (log scale)", fontsize=8)

    first = rows[0]
    figure.suptitle(
        f"{first.family}: {op} in {dtype}, {threads} thread{'' if threads == 1 else 's'}; our time, multiples of it\n"
        f"{first.machine}, torch {first.torch}, pfl_ext {first.pfl_ext} {first.commit}",
        fontsize=10,
    )
    labels = {"ours": "pfl_ext", "skilled": "skilled user", "naive": "naive peer"}
    handles: list[Patch | Line2D] = [Patch(color=_COLOURS[kind], label=label) for kind, label in labels.items()]
    handles.append(
        Line2D([], [], color="#b3123b", linestyle="--", label="limit: bytes that must move / read bandwidth")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)
