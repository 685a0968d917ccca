"""What the ops that stand for several layers of a network share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ._declare import OPS, Op

__all__ = ["NO_KERNEL", "fused", "has_kernel"]

NO_KERNEL = {"cuda": "small batches are trained on CPUs; a GPU has the layers one by one"}
"""Why there is no kernel, by device."""


@functools.cache
def has_kernel(name: str) -> bool:
    """Whether the CPU library has a kernel for this op."""
    # Asked at the first call: the library is loaded after the ops are declared.
    return OPS[name].has_kernel("CPU")


def fused(
    layers: Callable[[Tensor, Tensor, Tensor], Tensor],
    kernel: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    gradient: Op,
    lay_out: Callable[[Tensor], Tensor],
    lay_back: Callable[[Tensor], Tensor],
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of input, weight and bias: the kernels where they take these, otherwise the layers one by one.

    Args:
        layers: the same in plain torch, layer by layer; faster than the ops' references, and differentiable twice.
        kernel: from input, weight and bias to the result and what ``gradient`` needs of it.
        gradient: the op ``(grad, what was kept, x, weight, for_x)``.
        lay_out: input, weight and gradient as the kernels take them.
        lay_back: what the kernels give, as torch has it.
    """

    class Fused(torch.autograd.Function):
        # Not by register_autograd: this is called in every step, and its wrappers in Python would show.

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y, kept = kernel(lay_out(x), lay_out(weight), bias.contiguous())
            ctx.save_for_backward(x, weight, bias, kept)
            return lay_back(y)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, bias, kept = ctx.saved_tensors
            needed = ctx.needs_input_grad
            if torch.is_grad_enabled():  # create_graph=True: the gradient is to be differentiated again
                given = (x, weight, bias)
                asked = [tensor for tensor, need in zip(given, needed, strict=True) if need]
                found = iter(torch.autograd.grad(layers(*given), asked, grad, create_graph=True))
                return tuple(next(found) if need else None for need in needed)
            to_x, to_weight, to_bias = gradient(lay_out(grad), kept, lay_out(x), lay_out(weight), needed[0])
            return lay_back(to_x) if needed[0] else None, lay_back(to_weight), to_bias

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ours = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and has_kernel(gradient.name)
        if not ours or is_functorch_wrapped_tensor(weight) or is_functorch_wrapped_tensor(x):
            return layers(x, weight, bias)
        result: Tensor = Fused.apply(x, weight, bias)
        return result

    return run
