r"""Whole local steps in one call: layers, loss, gradients and steps of SGD.

:func:`train_steps_` takes, for a network of layers in a row and the cross-entropy L of each of some batches, the step

.. math:: v \leftarrow v - \eta\, (\nabla L(v) + \delta v + \lambda (v - w))

with momentum as in :func:`~pfl_ext.ops.proximal_sgd_step_`. For a small network autograd takes as long as the kernels
that it calls, and gradients are written to memory to be read once. Here neither is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ._arguments import check_lists, check_memory, describe, without_gradients
from ._declare import declare
from ._layers import NO_KERNEL, has_kernel
from .proximal import _step_reference

__all__ = ["LAYERS", "is_native", "train_steps_"]

LAYERS = ("conv_pool_relu", "linear_relu", "linear")
"""What a network may be made of: convolutions first, and one ``linear`` at the end."""


def _outputs(params: list[Tensor], x: Tensor, layers: Sequence[int]) -> Tensor:
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2)
    for weight, bias, layer in zip(params[::2], params[1::2], layers, strict=True):
        if LAYERS[layer] == "conv_pool_relu":
            x = F.relu(F.max_pool2d(F.conv2d(x, weight, bias), 2))
        else:
            x = F.linear(x.flatten(1), weight, bias)
            x = F.relu(x) if LAYERS[layer] == "linear_relu" else x
    return x


def _check(
    params: list[Tensor],
    momentum_buffers: list[Tensor],
    anchors: list[Tensor],
    x: Tensor,
    targets: Tensor,
    layers: Sequence[int],
    batch_size: int,
    lr: float,
    lam: float,
    momentum: float,
    weight_decay: float,
    first: bool,
) -> None:
    for number, layer in enumerate(layers):
        if not 0 <= layer < len(LAYERS):
            raise ValueError(f"layer {number} is {layer}; 0, 1 and 2 are accepted")
    if not layers or LAYERS[layers[-1]] != "linear" or len(params) != 2 * len(layers):
        raise ValueError(
            f"{len(params)} params for the layers {[LAYERS[i] for i in layers]}; a weight and a bias for each are "
            "expected, the last layer linear"
        )
    lists = {"params": params}
    lists |= {"anchors": anchors} if lam != 0 else {}
    check_lists(**(lists | ({"momentum_buffers": momentum_buffers} if momentum != 0 else {})))
    for what, some in (("x", x), ("targets", targets)):
        if not isinstance(some, Tensor):
            raise TypeError(f"{what} is {describe(some)}; a tensor is accepted")
    if x.dim() not in (2, 4) or x.dtype != params[0].dtype or len(x) == 0:
        raise ValueError(f"x is {describe(x)}; [samples, inputs] or [samples, height, width, channels] are accepted")
    if targets.dtype != torch.int64 or targets.shape != x.shape[:1]:
        raise ValueError(f"targets are {describe(targets)}; an int64 class for each of {len(x)} samples is accepted")
    if batch_size < 0:
        raise ValueError(f"batch_size is {batch_size}; 1 and more are accepted, 0: all samples")


def _reference(
    params: list[Tensor],
    momentum_buffers: list[Tensor],
    anchors: list[Tensor],
    x: Tensor,
    targets: Tensor,
    layers: Sequence[int],
    batch_size: int,
    lr: float,
    lam: float,
    momentum: float,
    weight_decay: float,
    first: bool,
) -> Tensor:
    _check(params, momentum_buffers, anchors, x, targets, layers, batch_size, lr, lam, momentum, weight_decay, first)
    check_memory({"params": params, "momentum_buffers": momentum_buffers}, {"anchors": anchors if lam != 0 else []})
    losses: list[Tensor] = []
    for inputs, classes in zip(x.split(batch_size or len(x)), targets.split(batch_size or len(x)), strict=True):
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in params]
            loss = F.cross_entropy(_outputs(leaves, inputs, layers), classes)
            grads = list(torch.autograd.grad(loss, leaves))
        numbers = (lr, lam, momentum, 0.0, weight_decay, False, False, first and not losses)
        _step_reference(params, momentum_buffers, grads, anchors, *numbers)
        losses.append(loss.detach())
    return torch.stack(losses)


def _fake(
    params: list[Tensor],
    momentum_buffers: list[Tensor],
    anchors: list[Tensor],
    x: Tensor,
    targets: Tensor,
    layers: Sequence[int],
    batch_size: int,
    lr: float,
    lam: float,
    momentum: float,
    weight_decay: float,
    first: bool,
) -> Tensor:
    _check(params, momentum_buffers, anchors, x, targets, layers, batch_size, lr, lam, momentum, weight_decay, first)
    return x.new_empty(-(-len(x) // (batch_size or len(x))))


_train_steps = declare(
    "train_steps_(Tensor(a!)[] params, Tensor(b!)[] momentum_buffers, Tensor[] anchors, Tensor x, Tensor targets, "
    "int[] layers, int batch_size, float lr, float lam, float momentum, float weight_decay, bool first) -> Tensor",
    reference=_reference,
    fake=_fake,
    plain_on=NO_KERNEL,
)


def is_native(dtype: torch.dtype) -> bool:
    """Whether tensors of this type on a CPU are stepped by kernels of ours."""
    return dtype in (torch.float32, torch.float64) and has_kernel("train_steps_")


def train_steps_(
    params: list[Tensor],
    x: Tensor,
    targets: Tensor,
    layers: Sequence[str],
    lr: float,
    *,
    batch_size: int = 0,
    anchors: list[Tensor] | None = None,
    lam: float = 0.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    momentum_buffers: list[Tensor] | None = None,
    first: bool = False,
) -> Tensor:
    r"""Steps of SGD of a small network, each on the mean cross-entropy of a batch, in place, without autograd.

    Losses and gradients are the sums that autograd computes, in an order of their own: the same bits for any number of
    threads, and whether steps are taken in one call or in several. Native for float32 and float64 on CPUs; otherwise
    it is autograd and :func:`~pfl_ext.ops.proximal_sgd_step_`.

    Args:
        params: weight and bias of each layer in turn. Weights of convolutions are channels-last in memory.
        x: the samples, [samples, inputs], or images [samples, channels, height, width].
        targets: the class of each sample, int64.
        layers: what the layers are, of :data:`LAYERS`: convolutions as :func:`~pfl_ext.ops.conv_pool_relu` has them,
            then linear layers with ReLU, and at the end one without.
        lr, lam, momentum, weight_decay: as in :func:`~pfl_ext.ops.proximal_sgd_step_`.
        batch_size: how many samples a step is taken on, one step after the other; of the last one what is left. 0: one
            step on all.
        anchors: w, a tensor for each parameter; needed with ``lam``.
        momentum_buffers: a tensor for each parameter; needed with ``momentum``, overwritten.
        first: begins with the first step of the buffers, whatever they hold.

    Returns:
        The loss where each step began, [steps], without a graph.

    Raises:
        ValueError, RuntimeError: tensors that do not fit each other or the layers, a class that is not there, a number
            out of range. Nothing has been changed then.

    >>> weight, bias = torch.zeros(2, 3), torch.zeros(2)
    >>> train_steps_([weight, bias], torch.ones(2, 3), torch.tensor([1, 1]), ["linear"], lr=2.0, batch_size=1)
    tensor([6.9315e-01, 3.3541e-04])
    >>> bias
    tensor([-1.0007,  1.0007])
    """
    for what, given in (("x", x), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{what} is {describe(given)}; a tensor is accepted")
    for what, some in (("params", params), ("anchors", anchors or []), ("momentum_buffers", momentum_buffers or [])):
        if not isinstance(some, list) or not all(isinstance(x, Tensor) for x in some):
            raise TypeError(f"{what} is not a list of tensors")
    unknown = [layer for layer in layers if layer not in LAYERS]
    if unknown:
        raise ValueError(f"layer {unknown[0]!r} is not known; accepted: {', '.join(map(repr, LAYERS))}")
    if x.dim() == 4:
        x = x.permute(0, 2, 3, 1)
    buffers = momentum_buffers or []
    numbers = [LAYERS.index(layer) for layer in layers]
    arguments = (numbers, batch_size, lr, lam, momentum, weight_decay, first)
    try:
        with without_gradients():
            losses: Tensor = _train_steps(params, buffers, anchors or [], x.contiguous(), targets, *arguments)
    except RuntimeError:
        _check(params, buffers, anchors or [], x, targets, *arguments)
        raise
    torch.autograd.graph.increment_version([*params, *buffers])
    return losses
