"""Mean and standard deviation of channels, by which inputs are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .nests import Inputs, named
from .stored import StoredTensor

__all__ = ["Statistics", "as_statistics", "by_name", "channel_statistics", "statistics_of"]

Statistics: TypeAlias = Tensor | Mapping[str, Tensor]
"""A number for each channel; of a nest by the names of those of its tensors that have any (see :mod:`.nests`)."""


def channel_statistics(inputs: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, ``inputs[:, c]``, in units of ``inputs``.

    A constant channel has the standard deviation 1, so that dividing by it is harmless. For the training images of
    MNIST and CIFAR these are the constants in common use, times 255.
    """
    if inputs.dtype == torch.uint8:
        # Through a histogram: exact, and without a floating-point copy of all images.
        values = torch.arange(256, dtype=torch.float64)
        histogram = torch.zeros(inputs.shape[1], 256, dtype=torch.float64)
        for part in inputs.parts() if isinstance(inputs, StoredTensor) else (inputs,):
            histogram += _histogram(part).cpu()  # kept one by one they would part the memory that large parts leave
        count = float(histogram[0].sum())
        mean = histogram @ values / count
        variance = (histogram * (values - mean[:, None]) ** 2).sum(1) / count
    else:
        variance, mean = torch.var_mean(inputs.transpose(0, 1).flatten(1).double(), dim=1, correction=0)
    std = variance.sqrt()
    return mean.float(), torch.where(std > 0, std, 1.0).float()


def _histogram(part: Tensor) -> Tensor:
    """How often each byte is in each channel."""
    return torch.stack([torch.bincount(channel, minlength=256) for channel in part.transpose(0, 1).flatten(1)])


def by_name(given: Statistics | None) -> dict[str, Tensor]:
    """The statistics of each tensor that has some; of one that is no nest under the name ""."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


def as_statistics(given: Any) -> Statistics | None:
    """Numbers of the user's as tensors."""
    if isinstance(given, Mapping):
        return {name: torch.as_tensor(numbers, dtype=torch.float32) for name, numbers in given.items()}
    return None if given is None else torch.as_tensor(given, dtype=torch.float32)


def statistics_of(inputs: Inputs) -> tuple[Statistics | None, Statistics | None]:
    """Mean and standard deviation of what is uint8."""
    found = {
        name: channel_statistics(leaf) for name, leaf in named(inputs) if leaf.dtype == torch.uint8 and leaf.ndim > 1
    }
    if not found:
        return None, None
    if "" in found:
        return found[""]
    return tuple({name: both[i] for name, both in found.items()} for i in range(2))  # type: ignore[return-value]
