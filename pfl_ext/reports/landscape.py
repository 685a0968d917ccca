"""The loss around a model, along random directions that are scaled like the model's own filters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .plots import _import, _save, _title

if TYPE_CHECKING:
    from pfl_ext.federation import WorkingModel

__all__ = ["Surface", "draw_landscapes", "filter_direction", "loss_surface"]


class Surface(NamedTuple):
    """The loss on a grid around a model."""

    offsets: np.ndarray
    """How far each row and column of the grid is from the model, in both directions; 0 is in the middle."""
    losses: np.ndarray
    """[second direction, first direction]."""

    @property
    def centre(self) -> float:
        """The loss of the model itself."""
        middle = len(self.offsets) // 2
        return float(self.losses[middle, middle])

    def rise(self, radius: float) -> float:
        """By how much the mean loss of the grid points within ``radius`` is above that of the model; NaN for none."""
        x, y = np.meshgrid(self.offsets, self.offsets)
        inside = (x**2 + y**2 <= radius**2 * (1 + 1e-9)) & ((x != 0) | (y != 0))
        return float(self.losses[inside].mean()) - self.centre if inside.any() else float("nan")


def filter_direction(model: WorkingModel, state: Tensor, generator: torch.Generator) -> Tensor:
    r"""A random direction, normalised filter by filter (Li et al., 2018, section 4).

    .. math:: d_{ij} \leftarrow \frac{d_{ij}}{\|d_{ij}\|} \|\theta_{ij}\|, \qquad d \sim N(0, 1)

    A filter is what makes one output: a row of the tensor, of a convolution as of a linear layer. Biases and the
    parameters of normalisation, which have one dimension, and buffers stay as they are, as in Li et al.'s own pictures.

    Args:
        model: gives the shapes.
        state: theta, a state of the whole model.
        generator: decides the direction.
    """
    parts = []
    trained = set(model.layers("tensor").names)
    sizes = [shape.numel() for shape in model.shapes]
    for name, shape, weights in zip(model.names, model.shapes, state.split(sizes), strict=True):
        if name not in trained or len(shape) < 2:
            parts.append(torch.zeros_like(weights))
            continue
        drawn = torch.randn(shape[0], shape.numel() // shape[0], generator=generator, dtype=state.dtype)
        drawn = drawn.to(state.device)
        length = weights.view_as(drawn).norm(dim=1, keepdim=True)
        parts.append((drawn / drawn.norm(dim=1, keepdim=True) * length).flatten())
    return torch.cat(parts)


def loss_surface(
    model: WorkingModel,
    state: Tensor,
    loss: Callable[[], float],
    generator: torch.Generator,
    *,
    points: int = 21,
    radius: float = 1.0,
) -> Surface:
    """The loss at ``state + a d1 + b d2`` for a and b from -``radius`` to ``radius``, d1 and d2 `filter_direction`.

    Args:
        model: the working model; it is left with ``state``.
        state: the model in the middle.
        loss: the loss of the working model as it is.
        generator: decides the directions: the same for two models of one network makes their pictures comparable.
        points: of the grid in each direction; odd, so that the model itself is one of them.
        radius: how far to go; 1 is as far as the weights are long.

    Raises:
        ValueError: an even number of points, or a radius that is not above 0.
    """
    if points < 3 or points % 2 == 0:
        raise ValueError(f"points is {points}; accepted is an odd number of at least 3")
    if not radius > 0:
        raise ValueError(f"radius is {radius}; accepted is a number above 0")
    first, second = (filter_direction(model, state, generator) for _ in range(2))
    offsets = np.linspace(-radius, radius, points)
    offsets[points // 2] = 0.0
    losses = np.empty((points, points))
    for i, b in enumerate(offsets):
        for j, a in enumerate(offsets):
            model.load(state + float(a) * first + float(b) * second)
            losses[i, j] = loss()
    model.load(state)
    return Surface(offsets, losses)


def draw_landscapes(surfaces: Mapping[str, Surface], path: str | os.PathLike[str]) -> None:
    """Draw surfaces of the same radius side by side, in one scale: above in perspective, below as contours.

    Figure 7 of PLGU. What is above ten times the median of all grid points is cut off, as a diverging corner would
    flatten the rest.

    Args:
        surfaces: by title.
        path: The file to write; its ending (.png, .svg, .pdf) is the format. Written whole or not at all.

    Raises:
        ImportError: without matplotlib.
        ValueError: nothing to draw.
    """
    if not surfaces:
        raise ValueError("there is no surface to draw")
    every = np.concatenate([surface.losses.ravel() for surface in surfaces.values()])
    every = every[np.isfinite(every)]
    low, high = float(every.min()), min(float(every.max()), 10 * float(np.median(every)))
    figure = _import("figure").Figure(figsize=(1.2 + 3.4 * len(surfaces), 6.2), layout="constrained")
    _title(figure, "Loss around the models: in perspective above, as contours below")
    levels = np.linspace(low, high, 16)
    for column, (title, surface) in enumerate(surfaces.items(), start=1):
        losses = np.clip(np.nan_to_num(surface.losses, nan=high, posinf=high), low, high)
        x, y = np.meshgrid(surface.offsets, surface.offsets)
        axes = figure.add_subplot(2, len(surfaces), column, projection="3d")
        axes.plot_surface(x, y, losses, cmap="viridis", vmin=low, vmax=high, linewidth=0, rcount=60, ccount=60)
        axes.set_zlim(low, high)
        axes.view_init(elev=28, azim=-60)
        axes.set_title(title.replace("$", r"\$"), fontsize=10)
        axes.locator_params(nbins=4)
        axes.tick_params(labelsize=7)
        axes = figure.add_subplot(2, len(surfaces), len(surfaces) + column)
        filled = axes.contourf(x, y, losses, levels=levels, cmap="viridis", extend="max")
        axes.contour(x, y, losses, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
        axes.plot(0, 0, marker="+", color="#D55E00", markersize=9, markeredgewidth=1.8)
        axes.set_aspect("equal")
        axes.locator_params(nbins=5)
        axes.tick_params(labelsize=7)
        axes.set_xlabel(
            f"loss {surface.centre:.3f} at +, {surface.rise(surface.offsets[-1]):.3f} higher around", fontsize=8
        )
    figure.colorbar(filled, ax=figure.axes[1::2], label="loss", format="%.2f", shrink=0.8, pad=0.02)
    _save(figure, path)
