r"""Whole local steps in one call: layers, loss, gradients and steps of SGD.

:func:`train_steps_` takes, for a network of layers in a row and the cross-entropy L of each of some batches, the step

.. math:: v \leftarrow v - \eta\, (\nabla L(v) + \delta v + \lambda (v - w))

or the same for the distillation of a teacher's logits, with momentum as in :func:`~pfl_ext.ops.proximal_sgd_step_`. For
a small network autograd takes as long as the kernels that it calls, and gradients are written to memory to be read
once. Here neither is there.

:func:`loss_and_gradients` gives L and its gradients alone, for what is no such step: sharpness-aware steps, differences
of gradients, other optimisers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ._arguments import check_lists, check_memory, describe, one_of, without_gradients
from ._declare import declare
from ._layers import NO_KERNEL, has_kernel
from .distillation import Soft
from .proximal import _step_reference

__all__ = ["LAYERS", "is_native", "loss_and_gradients", "train_steps_"]

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


def _check_network(
    params: list[Tensor], x: Tensor, targets: Tensor, layers: Sequence[int], **lists: list[Tensor]
) -> None:
    """Raise unless a network of these layers, and lists like its parameters, can be trained on this batch."""
    for number, layer in enumerate(layers):
        if not 0 <= layer < len(LAYERS):
            raise ValueError(f"layer {number} is {layer}; 0, 1 and 2 are accepted")
    if not layers or LAYERS[layers[-1]] != "linear" or len(params) != 2 * len(layers):
        raise ValueError(
            f"{len(params)} params for the layers {[LAYERS[i] for i in layers]}; a weight and a bias for each are "
            "expected, the last layer linear"
        )
    check_lists(params=params, **lists)
    for what, some in (("x", x), ("targets", targets)):
        if not isinstance(some, Tensor):
            raise TypeError(f"{what} is {describe(some)}; a tensor is accepted")
    if x.dim() not in (2, 4) or x.dtype != params[0].dtype or len(x) == 0:
        raise ValueError(f"x is {describe(x)}; [samples, inputs] or [samples, height, width, channels] are accepted")
    if targets.dtype != torch.int64 or targets.shape != x.shape[:1]:
        raise ValueError(f"targets are {describe(targets)}; an int64 class for each of {len(x)} samples is accepted")


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
    teacher: Tensor | None,
    temperature: float,
    soft_scale: float,
    hard_scale: float,
    cross_entropy: bool,
) -> None:
    lists = {"anchors": anchors} if lam != 0 else {}
    _check_network(
        params, x, targets, layers, **(lists | ({"momentum_buffers": momentum_buffers} if momentum != 0 else {}))
    )
    if batch_size < 0:
        raise ValueError(f"batch_size is {batch_size}; 1 and more are accepted, 0: all samples")
    if not (math.isfinite(soft_scale) and math.isfinite(hard_scale)):
        raise ValueError(
            f"the scales of the soft and the hard term are {soft_scale} and {hard_scale}; finite numbers are accepted"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; a finite number above 0 is accepted")
    if soft_scale == 0:
        return
    expected = (len(x), params[-1].numel())
    if teacher is None or teacher.shape != expected or teacher.dtype != x.dtype:
        raise ValueError(
            f"soft_scale is {soft_scale} and the teacher {describe(teacher)}; logits of the params' type are accepted, "
            f"{expected[1]} for each of {expected[0]} samples"
        )


_Objective: TypeAlias = Callable[[Tensor], Tensor]


def _loss_and_gradients(
    params: list[Tensor], x: Tensor, layers: Sequence[int], objective: _Objective
) -> tuple[Tensor, list[Tensor]]:
    with torch.enable_grad():
        leaves = [p.detach().requires_grad_() for p in params]
        loss = objective(_outputs(leaves, x, layers))
        return loss.detach(), list(torch.autograd.grad(loss, leaves))


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
    teacher: Tensor | None,
    temperature: float,
    soft_scale: float,
    hard_scale: float,
    cross_entropy: bool,
) -> Tensor:
    more = (momentum, weight_decay, first, teacher, temperature, soft_scale, hard_scale, cross_entropy)
    _check(params, momentum_buffers, anchors, x, targets, layers, batch_size, lr, lam, *more)
    read = {
        "anchors": anchors if lam != 0 else [],
        "teacher": [teacher] if teacher is not None and soft_scale != 0 else [],
    }
    check_memory({"params": params, "momentum_buffers": momentum_buffers}, read)
    losses: list[Tensor] = []
    for rows in torch.arange(len(x), device=x.device).split(batch_size or len(x)):

        def objective(logits: Tensor, rows: Tensor = rows) -> Tensor:
            loss = hard_scale * F.cross_entropy(logits, targets[rows])
            if teacher is None or soft_scale == 0:
                return loss
            known, learned = F.softmax(teacher[rows] / temperature, 1), F.log_softmax(logits / temperature, 1)
            apart = -known * learned if cross_entropy else F.kl_div(learned, known, reduction="none")
            return loss + soft_scale * apart.sum(1).mean()

        loss, grads = _loss_and_gradients(params, x[rows], layers, objective)
        numbers = (lr, lam, momentum, 0.0, weight_decay, False, False, first and not losses)
        _step_reference(params, momentum_buffers, grads, anchors, *numbers)
        losses.append(loss)
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
    teacher: Tensor | None,
    temperature: float,
    soft_scale: float,
    hard_scale: float,
    cross_entropy: bool,
) -> Tensor:
    more = (momentum, weight_decay, first, teacher, temperature, soft_scale, hard_scale, cross_entropy)
    _check(params, momentum_buffers, anchors, x, targets, layers, batch_size, lr, lam, *more)
    return x.new_empty(-(-len(x) // (batch_size or len(x))))


_train_steps = declare(
    "train_steps_(Tensor(a!)[] params, Tensor(b!)[] momentum_buffers, Tensor[] anchors, Tensor x, Tensor targets, "
    "int[] layers, int batch_size, float lr, float lam, float momentum, float weight_decay, bool first, "
    "Tensor? teacher, float temperature, float soft_scale, float hard_scale, bool cross_entropy) -> Tensor",
    reference=_reference,
    fake=_fake,
    plain_on=NO_KERNEL,
)


def _gradients_reference(
    gradients: list[Tensor], params: list[Tensor], x: Tensor, targets: Tensor, layers: Sequence[int]
) -> Tensor:
    _check_network(params, x, targets, layers, gradients=gradients)
    check_memory({"gradients": gradients}, {"params": params})
    loss, found = _loss_and_gradients(params, x, layers, lambda logits: F.cross_entropy(logits, targets))
    torch._foreach_copy_(gradients, found)
    return loss.view(1)


def _gradients_fake(
    gradients: list[Tensor], params: list[Tensor], x: Tensor, targets: Tensor, layers: Sequence[int]
) -> Tensor:
    _check_network(params, x, targets, layers, gradients=gradients)
    return x.new_empty(1)


_gradients = declare(
    "loss_and_gradients_(Tensor(a!)[] gradients, Tensor[] params, Tensor x, Tensor targets, int[] layers) -> Tensor",
    reference=_gradients_reference,
    fake=_gradients_fake,
    plain_on=NO_KERNEL,
)


def is_native(dtype: torch.dtype) -> bool:
    """Whether tensors of this type on a CPU are stepped by kernels of ours."""
    return dtype in (torch.float32, torch.float64) and has_kernel("train_steps_")


def _arguments(x: Tensor, targets: Tensor, layers: Sequence[str], **lists: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The samples and the layers as the ops take them, if all is of the right kind."""
    for what, given in (("x", x), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{what} is {describe(given)}; a tensor is accepted")
    for what, some in lists.items():
        if not isinstance(some, list) or not all(isinstance(t, Tensor) for t in some):
            raise TypeError(f"{what} is not a list of tensors")
    unknown = [layer for layer in layers if layer not in LAYERS]
    if unknown:
        raise ValueError(f"layer {unknown[0]!r} is not known; accepted: {', '.join(map(repr, LAYERS))}")
    if x.dim() == 4:
        x = x.permute(0, 2, 3, 1)
    return x.contiguous(), [LAYERS.index(layer) for layer in layers]


def loss_and_gradients(
    params: list[Tensor], x: Tensor, targets: Tensor, layers: Sequence[str]
) -> tuple[Tensor, list[Tensor]]:
    r"""The mean cross-entropy of a batch and its gradients in the parameters of a small network, without autograd.

    The numbers are those along which :func:`train_steps_` steps, to the bit. Native for float32 and float64 on CPUs.

    Args:
        params, x, targets, layers: as in :func:`train_steps_`; nothing is changed.

    Returns:
        The loss, and a gradient for each parameter, laid out as it is; without a graph.

    Raises:
        ValueError, RuntimeError: tensors that do not fit each other or the layers, a class that is not there.

    >>> weight, bias = torch.zeros(2, 3), torch.zeros(2)
    >>> loss, (of_weight, of_bias) = loss_and_gradients([weight, bias], torch.ones(1, 3), torch.tensor([1]), ["linear"])
    >>> loss, of_bias
    (tensor(0.6931), tensor([ 0.5000, -0.5000]))
    """
    x, numbers = _arguments(x, targets, layers, params=params)
    try:
        with without_gradients():
            gradients = [torch.empty_like(p) for p in params]
            loss: Tensor = _gradients(gradients, params, x, targets, numbers)
    except RuntimeError:
        _check_network(params, x, targets, numbers)
        raise
    return loss[0], gradients


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
    teacher: Tensor | None = None,
    temperature: float = 1.0,
    soft_scale: float = 0.0,
    hard_scale: float = 1.0,
    soft: Soft = "kl",
) -> Tensor:
    r"""Steps of SGD of a small network, each on the mean cross-entropy of a batch, in place, without autograd.

    With a teacher's logits o each is a step on the objective of :func:`~pfl_ext.ops.distillation_loss`, which has
    the scales :math:`s = \lambda T^2` and :math:`h = 1 - \lambda`; of the network's logits z, a mean over the batch:

    .. math:: L = h\, \mathrm{CE}(y, \sigma(z)) + s\, \mathrm{KL}(\sigma(o / T) \,\|\, \sigma(z / T))

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
        teacher: o, logits for each sample, [samples, classes]; needed with ``soft_scale``.
        temperature, soft_scale, hard_scale: T, s and h.
        soft: ``"kl"``, or ``"ce"`` for the cross-entropy in its place, which has the same gradient.

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
    buffers = momentum_buffers or []
    x, numbers = _arguments(x, targets, layers, params=params, anchors=anchors or [], momentum_buffers=buffers)
    if teacher is not None:
        if not isinstance(teacher, Tensor):
            raise TypeError(f"teacher is {describe(teacher)}; a tensor is accepted")
        teacher = teacher.contiguous()
    one_of("soft", soft, ("kl", "ce"))
    objective = (teacher, temperature, soft_scale, hard_scale, soft == "ce")
    arguments = (numbers, batch_size, lr, lam, momentum, weight_decay, first, *objective)
    try:
        with without_gradients():
            losses: Tensor = _train_steps(params, buffers, anchors or [], x, targets, *arguments)
    except RuntimeError:
        _check(params, buffers, anchors or [], x, targets, *arguments)
        raise
    torch.autograd.graph.increment_version([*params, *buffers])
    return losses
