"""What methods with class prototypes share: how large the head is, and the mean features of each class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.federation import WorkingModel

__all__ = ["class_means", "head_sizes", "pull"]


def head_sizes(model: WorkingModel, head: str, method: str) -> tuple[int, int]:
    """How many features the head takes, and how many classes it tells apart.

    Raises:
        ValueError: it has no linear layers, by which this could be told.
    """
    name = head or model.last_layer()
    linear = [m for m in model.module.get_submodule(name).modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise ValueError(f"{method} works on the inputs of linear layers, and the head {name!r} has none: name another")
    return linear[0].in_features, linear[-1].out_features


def class_means(features: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean features of each class, a row each (zero for a class without samples), and how many samples it has."""
    member = F.one_hot(targets, classes).to(features.dtype)
    counts = member.sum(0)
    return member.T @ features / counts.clamp(min=1)[:, None], counts


def pull(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """The mean squared distance, over samples and features, from the prototypes of the samples' classes.

    A sample whose class has none counts as one that is there already.
    """
    apart = (features - prototypes[targets]) * known[targets].to(features.dtype)[:, None]
    return torch.mean(apart.square())
