"""Samples as tensors with a row for each: the user's, and images in another shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .nests import Inputs, joined, mapped, named

__all__ = ["as_inputs", "as_sample", "check_alike", "pair", "scaled", "stacked"]


def as_inputs(given: Any) -> Inputs:
    """Arrays, or a nest of them, as tensors."""
    found: Inputs = mapped(torch.as_tensor, given)
    return found


def as_sample(given: Any) -> Inputs:
    """One sample: a tensor, an array, a PIL image, numbers; or a tuple, a list or a dictionary of such."""
    if isinstance(given, Mapping):
        return {str(key): as_sample(part) for key, part in given.items()}
    if isinstance(given, (tuple, list)) and not _is_numbers(given):
        return tuple(as_sample(part) for part in given)
    if isinstance(given, Tensor):
        return given
    array = np.asarray(given)
    if array.dtype == np.uint8 and array.ndim in (2, 3) and not isinstance(given, np.ndarray):
        # A PIL image: height, width and, for colour, channels last.
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(np.array(array, order="C"))


def _is_numbers(given: Any) -> bool:
    """Whether that is a vector or a matrix, written as lists."""
    if isinstance(given, (tuple, list)):
        return all(map(_is_numbers, given))
    return isinstance(given, (bool, int, float, np.generic))


def stacked(items: Any) -> tuple[Inputs, Tensor]:
    """All samples and all targets of a torch dataset.

    Raises:
        ValueError: it is empty, or two samples have different forms.
    """
    if not len(items):
        raise ValueError("the torch dataset is empty")
    samples, targets = [], []
    for i in range(len(items)):
        sample, target = pair(items[i], i)
        samples.append(sample)
        targets.append(target)
        check_alike(i, sample, samples[0])
    return joined(torch.stack, samples), torch.stack(targets)


def pair(item: Any, i: int) -> tuple[Inputs, Tensor]:
    """Sample and target of an item."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        kind = f"a {type(item).__name__}" + (f" of {len(item)}" if hasattr(item, "__len__") else "")
        raise ValueError(f"item {i} of the torch dataset is {kind}; (sample, target) is accepted")
    return as_sample(item[0]), torch.as_tensor(item[1])


def check_alike(i: int, sample: Inputs, first: Inputs) -> None:
    """Refuse a sample of another form than the first."""
    forms = [[(name, leaf.dtype, tuple(leaf.shape)) for name, leaf in named(nest)] for nest in (sample, first)]
    if forms[0] != forms[1]:
        said = [", ".join(f"{name} {dtype} {shape}".strip() for name, dtype, shape in form) for form in forms]
        raise ValueError(f"sample {i} is {said[0]}, sample 0 {said[1]}; samples of one shape and dtype are accepted")


def scaled(inputs: Tensor, shape: Sequence[int]) -> Tensor:
    """Images [n, channels, height, width] of another shape, in their own type."""
    parts = []
    for part in inputs.split(4096):  # a floating-point copy of all images would be large
        x = part.float()
        if x.shape[1] != shape[0]:
            x = x.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
        if x.shape[2:] != tuple(shape[1:]):
            size = (shape[1], shape[2])
            x = torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
        parts.append(x.round().clamp(0, 255).to(torch.uint8) if inputs.dtype == torch.uint8 else x.to(inputs.dtype))
    return torch.cat(parts)
