r"""A convolution, the largest of each 2x2 cell, and ReLU as one: the block that small networks for images are made of.

:func:`conv_pool_relu` computes

.. math:: y = \max(0, \mathrm{pool}_{2 \times 2}(w * x + b))

The convolution is pooled in registers and never written out. Behind the pooling at most one number of four in a cell
has a gradient, and none where ReLU cut it off: the backward pass sums over those alone, where the layers one by one
multiply by the zeros as well.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._arguments import describe
from ._declare import declare
from ._layers import NO_KERNEL, fused

__all__ = ["conv_pool_relu"]


# ---- the ops, on tensors [samples, height, width, channels] ----------------------------------------------------------


def _channels_second(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _channels_last(x: Tensor) -> Tensor:
    """Without a copy for what is in torch's channels-last memory format."""
    return x.permute(0, 2, 3, 1).contiguous()


def _check_images(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dim() != 4:
            raise ValueError(f"{name} is {describe(x)}; four dimensions, channels last, are accepted")


def _forward_reference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    _check_images(x=x, weight=weight)
    z = F.conv2d(_channels_second(x), _channels_second(weight), bias)
    if min(z.shape[2:]) < 2:  # torch refuses to pool what has no cell
        return _forward_fake(x, weight, bias)
    y, places = F.max_pool2d(z, 2, return_indices=True)
    rows, columns = places // z.shape[3], places % z.shape[3]
    which = torch.where(y <= 0, 4, rows % 2 * 2 + columns % 2).to(torch.uint8)
    return _channels_last(F.relu(y)), _channels_last(which)


def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = ((x.shape[i] - weight.shape[i] + 1) // 2 for i in (1, 2))
    y = x.new_empty((x.shape[0], rows, columns, weight.shape[0]))
    return y, torch.empty_like(y, dtype=torch.uint8)


_forward = declare(
    "conv_pool_relu_forward(Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor)",
    reference=_forward_reference,
    fake=_forward_fake,
    plain_on=NO_KERNEL,
)


def _backward_reference(
    grad: Tensor, which: Tensor, x: Tensor, weight: Tensor, for_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As autograd does it: the gradient of the convolution's output in full, zeros included."""
    _check_images(grad=grad, which=which, x=x, weight=weight)
    height, width = x.shape[1] - weight.shape[1] + 1, x.shape[2] - weight.shape[2] + 1
    cells = torch.stack([torch.where(which == position, grad, 0) for position in range(4)])
    samples, rows, columns, outputs = grad.shape
    full = cells.view(2, 2, samples, rows, columns, outputs).permute(2, 3, 0, 4, 1, 5)
    full = F.pad(
        full.reshape(samples, 2 * rows, 2 * columns, outputs), (0, 0, 0, width - 2 * columns, 0, height - 2 * rows)
    )
    to_x, to_weight, to_bias = torch.ops.aten.convolution_backward(
        _channels_second(full),
        _channels_second(x),
        _channels_second(weight),
        [outputs],
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [for_x, True, True],
    )
    return _channels_last(to_x) if for_x else x.new_empty(0), _channels_last(to_weight), to_bias


def _backward_fake(
    grad: Tensor, which: Tensor, x: Tensor, weight: Tensor, for_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    to_x = x.new_empty(x.shape if for_x else (0,))
    return to_x, weight.new_empty(weight.shape), weight.new_empty(len(weight))


_backward = declare(
    "conv_pool_relu_backward(Tensor grad, Tensor which, Tensor x, Tensor weight, bool for_x) -> "
    "(Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
    plain_on=NO_KERNEL,
)


# ---- the function ----------------------------------------------------------------------------------------------------


def _layer_by_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.max_pool2d(F.conv2d(x, weight, bias), 2))


_fused = fused(_layer_by_layer, _forward, _backward, _channels_last, _channels_second)


def conv_pool_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""``relu(max_pool2d(conv2d(x, weight, bias), 2))``, with a backward pass that leaves out the zeros.

    Result and gradients are the same sums as those three have, in an order of their own: the same bits for any number
    of threads, the gradients also on every instruction set, the result on those with fused multiply-add. In float32 and
    float64 on a CPU it is kernels of ours; without the native library, on other devices, in other types, inside
    ``torch.func``'s transforms and for gradients of gradients it is the three layers.

    Args:
        x: [samples, inputs, height, width].
        weight: [outputs, inputs, kernel height, kernel width]; stride 1, no padding.
        bias: [outputs].

    Returns:
        [samples, outputs, (height - kernel height + 1) // 2, (width - kernel width + 1) // 2], channels last in memory.
    """
    try:
        fit = x.dim() == 4 and weight.dim() == 4 and bias.dim() == 1
    except AttributeError:  # no tensors
        fit = False
    if not fit:
        raise ValueError(
            "conv_pool_relu takes images [samples, channels, height, width], weights [outputs, channels, height, "
            f"width] and a bias [outputs]; got {describe(x)}, {describe(weight)} and {describe(bias)}"
        )
    return _fused(x, weight, bias)
