"""Tensors of a description in JSON, each inside memory of its own whose every other byte is watched.

A description names shape, type, layout and kind of values, and a seed for the values. The same description gives the
same tensor for ever: the corpus relies on it.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

__all__ = ["FLOATS", "LAYOUTS", "Memory", "draw_tensor", "dtype_of"]

FLOATS = ("float32", "float64", "float16", "bfloat16")
LAYOUTS = ("contiguous", "offset", "transposed", "strided", "sliced")
VALUES = (
    "normal",
    "normal",
    "normal",
    "normal",
    "large",
    "small",
    "subnormal",
    "zeros",
    "equal",
    "nan",
    "inf",
    "mixed",
)

_GUARD = 0xA5
_MARGIN = 64  # elements before and after


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def draw_tensor(
    choice: random.Random, shape: list[int], dtype: str, values: str | None = None, layout: str | None = None
) -> dict[str, Any]:
    """A description: half of all tensors are contiguous and start at an aligned address, as in training."""
    if layout is None:
        layout = "contiguous" if choice.random() < 0.5 else choice.choice(LAYOUTS)
    return {
        "shape": shape,
        "dtype": dtype,
        "layout": layout,
        "values": values or choice.choice(VALUES),
        "seed": choice.randrange(2**31),
    }


def _values(description: dict[str, Any]) -> Tensor:
    """The numbers in float64, or integers, before they are given their type."""
    shape, dtype, kind = description["shape"], dtype_of(description["dtype"]), description["values"]
    generator = torch.Generator().manual_seed(description["seed"])
    if not (dtype.is_floating_point or dtype.is_complex):
        low, high = description.get("range", (0, 2))
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        x = torch.complex(x, torch.randn(shape, generator=generator, dtype=torch.float64))
    limits = torch.finfo(dtype)
    if kind == "large":
        x = x * limits.max**0.4
    elif kind == "small":
        x = x * limits.smallest_normal**0.4
    elif kind == "subnormal":
        x = x * limits.smallest_normal
    elif kind == "zeros":
        x = x * 0
    elif kind == "equal":
        x = torch.full_like(x, 0.5)
    elif kind in ("nan", "inf", "mixed") and x.numel():
        special = {"nan": [math.nan], "inf": [math.inf, -math.inf], "mixed": [math.nan, math.inf, -math.inf]}[kind]
        flat = x.reshape(-1)
        for i in range(1 + x.numel() // 50):
            place = int(torch.randint(x.numel(), (), generator=generator))
            flat[place] = special[i % len(special)]
        x = flat.reshape(shape)
    elif kind == "low":  # masked classes
        flat = x.reshape(-1)
        flat[torch.rand(flat.shape, generator=generator) < 0.2] = -math.inf
        x = flat.reshape(shape)
    return x


def _view(storage: Tensor, shape: list[int], layout: str) -> Tensor:
    """The tensor in its memory: dense, or with gaps that belong to nobody."""
    start = _MARGIN + (1 if layout == "offset" else 0)
    count = math.prod(shape)
    if layout == "channels last":  # of images and of the weights of convolutions, as the kernels take them
        return storage[start : start + count].view([shape[0], *shape[2:], shape[1]]).movedim(-1, 1)
    if layout == "transposed" and len(shape) >= 2:
        turned = [*shape[:-2], shape[-1], shape[-2]]
        return storage[start : start + count].view(turned).transpose(-1, -2)
    if layout == "strided" and shape:
        return storage[start : start + 2 * count].view([*shape, 2])[..., 0]
    if layout == "sliced" and shape:
        wide = [*shape[:-1], shape[-1] + 3]
        return storage[start : start + math.prod(wide)].view(wide)[..., 1 : 1 + shape[-1]]
    return storage[start : start + count].view(shape)


class Memory:
    """All tensors of one case, and what their memory was before the call."""

    def __init__(self) -> None:
        self._storages: list[tuple[Tensor, Tensor, Tensor]] = []

    def make(self, description: dict[str, Any]) -> Tensor:
        """The tensor of a description. Asked twice, it makes two."""
        shape, dtype = description["shape"], dtype_of(description["dtype"])
        extent = {"strided": 2 * math.prod(shape), "sliced": math.prod(shape) + 3 * math.prod(shape[:-1])}
        room = 2 * _MARGIN + 4 + extent.get(description["layout"], math.prod(shape))
        storage = torch.full((room * dtype.itemsize,), _GUARD, dtype=torch.uint8).view(dtype)
        tensor = _view(storage, shape, description["layout"])
        tensor.copy_(_values(description))
        self._storages.append((tensor, storage, storage.view(torch.uint8).clone()))
        return tensor

    def before(self, tensor: Tensor) -> Tensor:
        """What a tensor held when it was made."""
        for own, storage, bytes_before in self._storages:
            if own is tensor:
                copy = bytes_before.clone().view(storage.dtype)
                return copy.as_strided(own.shape, own.stride(), own.storage_offset())
        raise KeyError("the tensor is not of this memory")

    def reset(self) -> None:
        """Bring all memory back to what it was before the call."""
        for _, storage, bytes_before in self._storages:
            storage.view(torch.uint8).copy_(bytes_before)

    def changed(self, written: list[Tensor]) -> str | None:
        """What was changed that should not have been: inputs, and all memory around ``written``."""
        for number, (tensor, storage, bytes_before) in enumerate(self._storages):
            now = storage.view(torch.uint8)
            if any(tensor is out for out in written):
                now = now.clone()
                again = now.view(storage.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                again.copy_(self.before(tensor))
                if not torch.equal(now, bytes_before):
                    return f"memory around tensor {number} was written"
            elif not torch.equal(now, bytes_before):
                return f"tensor {number}, an input or what was refused, was changed"
        return None
