"""The models whose parameters are averaged, as lists of shapes.

Written down rather than taken from a model, so that the benchmarks run without torchvision.
"""

from __future__ import annotations

import math
from typing import TypeAlias

__all__ = ["SHAPE_SETS", "Shapes", "parameter_count"]

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


def parameter_count(shapes: Shapes) -> int:
    """The number of parameters in all tensors together."""
    return sum(math.prod(shape) for shape in shapes)


def _linear(inputs: int, outputs: int) -> Shapes:
    return (outputs, inputs), (outputs,)


def _batch_norm(planes: int) -> Shapes:
    return (planes,), (planes,)


def _lenet() -> Shapes:
    """LeNet-5 for 32 x 32 colour images in 10 classes."""
    convolutions: Shapes = ((6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,))
    return convolutions + _linear(400, 120) + _linear(120, 84) + _linear(84, 10)


def _adapters() -> Shapes:
    """What a PerAda client sends: for each of 16 convolutions a 1 x 1 adapter and two BatchNorms; stem norm; head."""
    shapes = _batch_norm(64)
    for planes in (64, 128, 256, 512):
        for _ in range(4):
            shapes += (*_batch_norm(planes), (planes, planes, 1, 1), *_batch_norm(planes))
    return shapes + _linear(512, 10)


def _resnet18() -> Shapes:
    """ResNet-18 with 10 classes; a block that widens has a 1 x 1 convolution in its shortcut."""
    shapes: Shapes = ((64, 3, 7, 7), *_batch_norm(64))
    inputs = 64
    for planes in (64, 128, 256, 512):
        for _ in range(2):
            shapes += ((planes, inputs, 3, 3), *_batch_norm(planes), (planes, planes, 3, 3), *_batch_norm(planes))
            if inputs != planes:
                shapes += ((planes, inputs, 1, 1), *_batch_norm(planes))
            inputs = planes
    return shapes + _linear(512, 10)


SHAPE_SETS: dict[str, Shapes] = {"lenet": _lenet(), "adapters": _adapters(), "resnet18": _resnet18()}
"""The sets by name, small to large: few small tensors, many small tensors, a whole network."""

assert {name: (len(s), parameter_count(s)) for name, s in SHAPE_SETS.items()} == {
    "lenet": (10, 62_006),
    "adapters": (84, 1_413_258),
    "resnet18": (62, 11_181_642),
}
