r"""A linear layer and ReLU as one, for the small batches of local training.

:func:`linear_relu` computes

.. math:: y = \max(0, x w^T + b)

With a batch of ten every weight is used ten times only, and a general product of matrices is at half its speed. The
kernels here read the weights where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._arguments import describe
from ._declare import declare
from ._layers import NO_KERNEL, fused

__all__ = ["linear_relu"]

_MOST_ROWS = 10
"""More rows than these a general product of matrices multiplies as fast, with AVX2 at least."""
_FEWEST_WEIGHTS = 2**16
"""With fewer the call would take longer than the product."""


# ---- the ops ---------------------------------------------------------------------------------------------------------


def _forward_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.linear(x, weight, bias))


def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


_forward = declare(
    "linear_relu_forward(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    reference=_forward_reference,
    fake=_forward_fake,
    plain_on=NO_KERNEL,
)


def _backward_reference(
    grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, for_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    masked = torch.where(y <= 0, 0, grad)
    return masked @ weight if for_x else x.new_empty(0), masked.T @ x, masked.sum(0)


def _backward_fake(grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, for_x: bool) -> tuple[Tensor, Tensor, Tensor]:
    to_x = x.new_empty(x.shape if for_x else (0,))
    return to_x, weight.new_empty(weight.shape), weight.new_empty(len(weight))


_backward = declare(
    "linear_relu_backward(Tensor grad, Tensor y, Tensor x, Tensor weight, bool for_x) -> (Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
    plain_on=NO_KERNEL,
)


# ---- the function ----------------------------------------------------------------------------------------------------


def _forward_and_kept(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = _forward(x, weight, bias)
    return y, y  # it tells the backward pass where ReLU cut


_fused = fused(_forward_reference, _forward_and_kept, _backward, torch.Tensor.contiguous, lambda x: x)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""``relu(linear(x, weight, bias))``, faster for batches of few rows.

    Result and gradients are the same sums as torch's, in an order of their own: the same bits for any number of threads
    and on every instruction set with fused multiply-add. In float32 and float64 on a CPU, for at most 10 rows and at
    least 65,536 weights, it is kernels of ours; for other sizes, without the native library, on other devices, in other
    types, inside ``torch.func``'s transforms and for gradients of gradients it is the two layers.

    Args:
        x: [rows, inputs]; with other numbers of dimensions it is the two layers as well.
        weight: [outputs, inputs].
        bias: [outputs].

    Returns:
        [rows, outputs].
    """
    try:
        fit = weight.dim() == 2 and bias.dim() == 1 and x.dim() > 0
    except AttributeError:  # no tensors
        fit = False
    if not fit:
        raise ValueError(
            "linear_relu takes rows [..., inputs], weights [outputs, inputs] and a bias [outputs]; "
            f"got {describe(x)}, {describe(weight)} and {describe(bias)}"
        )
    small = x.dim() == 2 and len(x) <= _MOST_ROWS and weight.numel() >= _FEWEST_WEIGHTS
    return (_fused if small else _forward_reference)(x, weight, bias)
