"""What the ops that stand for several layers of a network share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ._declare import OPS, Op

__all__ = ["NO_KERNEL", "gradients_with_graph", "takes"]

NO_KERNEL = {"cuda": "small batches are trained on CPUs; a GPU has the layers one by one"}
"""Why there is no kernel, by device."""


@functools.cache
def _has_kernel(name: str) -> bool:
    # Asked at the first call: the library is loaded after the ops are declared.
    return OPS[name].has_kernel("CPU")


def takes(op: Op, x: Tensor, weight: Tensor) -> bool:
    """Whether an op has a kernel for these; where it has none the layers one by one are faster than its reference."""
    ours = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and _has_kernel(op.name)
    return ours and not is_functorch_wrapped_tensor(weight) and not is_functorch_wrapped_tensor(x)


def gradients_with_graph(
    layers: Callable[..., Tensor], given: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, by the layers one by one: those of ``given`` that are needed."""
    asked = [tensor for tensor, need in zip(given, needed, strict=True) if need]
    found = iter(torch.autograd.grad(layers(*given), asked, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)
