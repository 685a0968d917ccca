"""What targets are: numbers of classes, labels, numbers to predict."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CLASSES", "IGNORED", "as_targets", "class_names"]

CLASSES = 100_000
"""How many classes there may be: a target beyond is no class number but something else, or damaged."""

IGNORED = -100
"""The target of a pixel or a token that counts nowhere; torch's losses have the same number."""

_LABELS = (torch.uint8, torch.bool)


def class_names(targets: Tensor) -> tuple[str, ...]:
    """ "0", "1", ... up to the largest class number, or one for each label of multi-label targets; none for numbers.

    Raises:
        ValueError: the targets may be either labels or numbers, or are no class numbers.
    """
    if targets.dtype == torch.int64:
        count = int(targets.max()) + 1
    else:
        labels = targets.ndim > 1 and bool(((targets == 0) | (targets == 1)).all())
        if labels and targets.shape[1] == 1:
            raise ValueError(
                f"targets are {targets.dtype} {tuple(targets.shape)}, all 0 or 1: a label or a number to predict? Say "
                "classes=('its name',) for a label, classes=() for a number"
            )
        count = targets.shape[1] if labels else 0
    if count > CLASSES:
        raise ValueError(f"the largest target is {count - 1}; class numbers below {CLASSES:,} are accepted")
    return tuple(map(str, range(count)))


def as_targets(y: Tensor) -> Tensor:
    """Class numbers as int64, labels as they are."""
    return y.to(torch.int64) if not y.is_floating_point() and (y.ndim == 1 or y.dtype not in _LABELS) else y
