"""One call of an op with everything that is to be known about it, and the comparison with float64 definitions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from guarded_tensors import Memory
from torch import Tensor

from pfl_ext import _native

__all__ = ["DRAWN", "NATIVE", "Call", "bits", "compare", "covers", "leaf", "unit"]

NATIVE = _native.status()["cpu"].loaded
"""Whether the kernels are ours: what torch adds up itself depends on the number of threads."""


@dataclass
class Call:
    """What to call, what it may write, and what is wrong with a result (None: nothing)."""

    function: Callable[..., Any]
    arguments: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    written: list[Tensor] = field(default_factory=list)
    writable: list[Tensor] = field(default_factory=list)
    """What another value of an argument lets it write too."""
    check: Callable[[Any], str | None] = lambda result: None
    may_refuse: bool = False
    """The arguments are ones that the op is free to refuse, such as a layout that a raw op does not take."""
    again: bool = True
    """Whether the same arguments must give the same bits with another number of threads."""


@dataclass(frozen=True)
class Drawn:
    """How cases of some ops are drawn and built."""

    name: str
    covers: tuple[str, ...]
    draw: Callable[[random.Random], dict[str, Any]]
    build: Callable[[dict[str, Any], Memory], Call]


DRAWN: dict[str, Drawn] = {}


def covers(*names: str, draw: Callable[[random.Random], dict[str, Any]]) -> Callable[..., Any]:
    """Register a function that builds calls of these ops (``ops.x`` for a public, ``raw.x`` for a raw one)."""

    def register(build: Callable[[dict[str, Any], Memory], Call]) -> Callable[[dict[str, Any], Memory], Call]:
        DRAWN[build.__name__] = Drawn(build.__name__, names, draw, build)
        return build

    return register


def bits(x: Tensor) -> bytes:
    """All bits of a tensor's elements, in their order. One NaN is as good as another: hardware chooses their sign."""
    if not x.numel():
        return b""
    dense = x.detach().clone(memory_format=torch.contiguous_format).view(-1)
    if dense.is_complex():
        dense = torch.view_as_real(dense).view(-1)
    if dense.is_floating_point():
        dense = torch.where(dense.isnan(), torch.nan, dense)
    return dense.view(torch.uint8).numpy().tobytes()


def leaf(x: Any) -> Any:
    """A tensor to differentiate by; anything else is the op's to refuse."""
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def unit(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def compare(
    what: str, got: Tensor, truth: Tensor, magnitude: Tensor | float, terms: float, accumulate: torch.dtype
) -> str | None:
    """What is wrong with ``got``, computed in ``accumulate`` and rounded to its own type; None if nothing is.

    The bound of an element is ``terms`` roundings of its ``magnitude`` (the sum of the absolute values that were
    added), one rounding to the type of the result, and what is lost below the smallest numbers. Where the magnitude
    leaves the range of ``accumulate``, an intermediate value may have overflowed and nothing can be said. Where it is
    not finite an input was not, and NaN must be NaN and infinity that infinity.
    """
    if got.shape != truth.shape:
        return f"{what}: shape {list(got.shape)} instead of {list(truth.shape)}"
    value, truth = got.detach().double(), truth.detach().double()
    size = torch.as_tensor(magnitude, dtype=torch.float64).detach().expand(truth.shape)
    out, limits = torch.finfo(got.dtype), torch.finfo(accumulate)
    lost = 4 * (limits.tiny * limits.eps + out.tiny * out.eps) * (1 + terms)
    bound = terms * unit(accumulate) * size + 1.01 * unit(got.dtype) * truth.abs() + lost
    fine = (value - truth).abs() <= bound
    # Nearly always: the rest is for what is not finite or too large. A finite bound is one of finite numbers.
    if bool(fine.all()) and (not bound.numel() or bool(bound.amax().isfinite())):
        return None
    unknown = size.isfinite() & (size >= limits.max / 4)
    too_large = truth.abs() + bound >= out.max * (1 - unit(got.dtype))
    # Infinity or the largest number is right, whichever side of the limit the sum came to lie on.
    overflowed = too_large & (value.abs() >= out.max * (1 - 4 * unit(got.dtype)) - bound) & (value * truth > 0)
    same = (value == truth) | (value.isnan() & truth.isnan())
    wrong = ~torch.where(size.isfinite() & truth.isfinite(), fine | overflowed, same | overflowed) & ~unknown
    if not bool(wrong.any()):
        return None
    place = int(wrong.reshape(-1).nonzero()[0])
    return (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; element {place} is "
        f"{float(value.reshape(-1)[place])!r} instead of {float(truth.reshape(-1)[place])!r} "
        f"(bound {float(bound.reshape(-1)[place]):.3g}, {got.dtype})"
    )
