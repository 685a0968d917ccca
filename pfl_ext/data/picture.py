"""A picture of a partition: how much each client has, and of which classes."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["draw_partition"]


def _sizes(shares: Tensor) -> list[float]:
    """The areas of circles of these shares of the largest."""
    found: list[float] = (3 + 150 * shares).tolist()
    return found


def draw_partition(
    title: str,
    parts: Mapping[str, Sequence[int]],
    counts: Tensor,
    names: Sequence[str],
    path: str | os.PathLike[str],
) -> Path:
    """Write a picture, of the format that the ending of ``path`` names, with two panels over the clients.

    Above, the samples of each client, by part. Below, its training samples of each class: the area of a circle is their
    number, or, where circles would be too small to see, the darkness of a cell is.

    Args:
        title: what it is a picture of.
        parts: how many samples each client has of each part.
        counts: [clients, classes], how many training samples each client has of each class.
        names: of the classes.
        path: where it goes.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("drawing a partition needs matplotlib: pip install 'pfl_ext[plots]'") from error

    clients, classes = counts.shape
    figure = Figure(
        figsize=(min(max(2 + 0.32 * clients, 6), 16), 2.2 + min(1 + 0.26 * classes, 9)), layout="constrained", dpi=120
    )
    FigureCanvasAgg(figure)
    sizes, composition = figure.subplots(
        2, 1, sharex=True, height_ratios=(2.2, min(1 + 0.26 * classes, 9)), squeeze=True
    )

    bottom = torch.zeros(clients, dtype=torch.int64)
    for (part, samples), colour in zip(parts.items(), ("#3b6ea5", "#e0a030", "#9a9a9a"), strict=True):
        height = torch.tensor(samples)
        if int(height.sum()):
            if clients <= 200:
                sizes.bar(range(clients), height.tolist(), 0.8, bottom.tolist(), color=colour, label=part)
            else:  # one polygon; ten thousand bars take half a minute
                edges = [client - 0.5 for client in range(clients + 1)]
                top = (bottom + height).tolist()
                sizes.stairs(top, edges, baseline=bottom.tolist(), fill=True, color=colour, label=part)
            bottom += height
    sizes.set_ylabel("samples")
    # Beside what is drawn, where it hides nobody's samples and is not taken for one more client's.
    beside = {"loc": "center left", "bbox_to_anchor": (1.005, 0.5), "frameon": False, "fontsize": "small"}
    sizes.legend(**beside)
    sizes.spines[["top", "right"]].set_visible(False)

    if clients <= 50 and classes <= 30:
        at = counts.nonzero()
        area = counts[at[:, 0], at[:, 1]] / counts.max()
        composition.scatter(at[:, 0].tolist(), at[:, 1].tolist(), s=_sizes(area), color="#3b6ea5", linewidth=0)
        most = int(counts.max())
        some = sorted({most, most // 4, most // 20} - {0}, reverse=True)
        key = [
            composition.scatter(
                [], [], s=_sizes(torch.tensor([count / most])), color="#3b6ea5", linewidth=0, label=count
            )
            for count in some
        ]
        composition.legend(handles=key, title="samples", title_fontsize="small", labelspacing=1.0, **beside)
        composition.set_axisbelow(True)
        composition.grid(color="#e8e8e8", linewidth=0.6)
    else:
        shade = composition.imshow(
            counts.T.double().sqrt().numpy(), aspect="auto", origin="lower", cmap="Blues", interpolation="nearest"
        )
        bar = figure.colorbar(shade, ax=composition, label="samples")
        bar.ax.yaxis.set_major_formatter(lambda root, _: f"{root * root:.0f}")
    composition.set_xlabel("client")
    composition.set_xlim(-0.7, clients - 0.3)
    composition.set_ylim(-0.7, classes - 0.3)
    composition.xaxis.set_major_locator(MaxNLocator(integer=True))
    if classes <= 30:
        composition.set_yticks(range(classes), names, fontsize="small")
    else:
        composition.set_ylabel("class")
        composition.yaxis.set_major_locator(MaxNLocator(integer=True))

    wide = int(13 * figure.get_figwidth())  # letters of a line
    figure.suptitle(textwrap.fill(title, wide).replace("$", r"\$"), fontsize="medium", x=0.01, ha="left")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
