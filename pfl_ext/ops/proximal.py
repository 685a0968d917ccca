r"""SGD that is held near an anchor, and the squared distance of two models.

* :func:`proximal_sgd_step_`: :math:`v \leftarrow v - \eta\, (g + \lambda (v - w))`, with momentum and weight decay
* :func:`squared_distance`: :math:`\sum_t \|a_t - b_t\|_2^2`, with gradient

Which anchor makes which method:

========  ============================================================================================================
PerAda    w is the server's adapter; the step is line 10 of Algorithm 1
Ditto     w is the global model
FedProx   w is the global model that the round began with; lambda is mu
pFedMe    w is the local model; the step solves its inner problem
FedDyn    w is the round's first model plus :math:`h / \alpha`, with lambda = alpha and h the client's gradient state:
          :math:`\alpha (v - w) = \alpha (v - \theta) - h`
========  ============================================================================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._arguments import accumulate_type, check_lists, check_memory, describe, without_gradients
from ._declare import declare
from .prepared import Prepared, handed, plain_eager, written

__all__ = ["proximal_sgd_step_", "squared_distance"]


# ---- the ops -------------------------------------------------------------------------------------------------------


def _step_check(
    params: list[Tensor],
    momentum_buffers: list[Tensor],
    grads: list[Tensor],
    anchors: list[Tensor],
    lr: float,
    lam: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    for name, value in (("lr", lr), ("lam", lam), ("momentum", momentum), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}; a finite number that is not negative is accepted")
    if nesterov and (momentum == 0 or dampening != 0):
        raise ValueError(f"nesterov needs momentum and no dampening; momentum is {momentum}, dampening {dampening}")
    if bool(momentum_buffers) != (momentum != 0) and params:
        raise ValueError(f"{len(momentum_buffers)} momentum buffers with momentum {momentum}")
    lists = {"params": params, "grads": grads}
    if lam != 0:
        lists["anchors"] = anchors
    if momentum != 0:
        lists["momentum_buffers"] = momentum_buffers
    check_lists(**lists)


def _step_memory(
    params: list[Tensor], momentum_buffers: list[Tensor], grads: list[Tensor], anchors: list[Tensor], lam: float
) -> None:
    read = {"grads": grads, "anchors": anchors if lam != 0 else []}
    check_memory({"params": params, "momentum_buffers": momentum_buffers}, read)


def _step_reference(
    params: list[Tensor],
    momentum_buffers: list[Tensor],
    grads: list[Tensor],
    anchors: list[Tensor],
    lr: float,
    lam: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    numbers = (lr, lam, momentum, dampening, weight_decay, nesterov, maximize, first)
    _step_check(params, momentum_buffers, grads, anchors, *numbers)
    _step_memory(params, momentum_buffers, grads, anchors, lam)
    for t, (v, g) in enumerate(zip(params, grads, strict=True)):
        accumulate = accumulate_type(v.dtype)
        weight = v.to(accumulate)
        d = -g.to(accumulate) if maximize else g.to(accumulate)
        if weight_decay != 0:
            d = d + weight_decay * weight
        if lam != 0:
            d = d + lam * (weight - anchors[t].to(accumulate))
        if momentum != 0:
            buffer = d if first else momentum * momentum_buffers[t].to(accumulate) + (1 - dampening) * d
            momentum_buffers[t].copy_(buffer)
            d = d + momentum * buffer if nesterov else buffer
        v.copy_(weight - lr * d)


_step = declare(
    "proximal_sgd_step_(Tensor(a!)[] params, Tensor(b!)[] momentum_buffers, Tensor[] grads, Tensor[] anchors, "
    "float lr, float lam, float momentum, float dampening, float weight_decay, bool nesterov, bool maximize, "
    "bool first) -> ()",
    reference=_step_reference,
    fake=_step_check,
)


def _no_call(call: Tensor) -> None:
    raise ValueError(f"the call is {describe(call)}; pfl_ext.ops makes these for prepared lists on the CPU")


_step_again = declare(
    "proximal_sgd_step_again_(Tensor call) -> ()",
    reference=_no_call,
    fake=_no_call,
    plain_on={"cuda": "lists are prepared on the CPU alone"},
)
_step_again_at_once = _step_again.at_once


def _sum_type(tensors: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _distance_check(a: list[Tensor], b: list[Tensor]) -> None:
    if not a:
        raise ValueError("no tensors given")
    check_lists(a=a, b=b)


def _distance_reference(a: list[Tensor], b: list[Tensor]) -> Tensor:
    _distance_check(a, b)
    parts = [(x.double() - y.double()).square().sum() for x, y in zip(a, b, strict=True)]
    return torch.stack(parts).sum().to(_sum_type(a))


def _distance_fake(a: list[Tensor], b: list[Tensor]) -> Tensor:
    _distance_check(a, b)
    return a[0].new_empty((), dtype=_sum_type(a))


def _gradient_like(x: Tensor) -> Tensor:
    """In the layout of ``x``, contiguous where ``x`` has gaps: empty_like keeps the order of dimensions then."""
    gradient = torch.empty_like(x)
    return gradient if gradient.stride() == x.stride() else gradient.new_empty(x.shape)


def _distance_backward_reference(
    grad: Tensor, a: list[Tensor], b: list[Tensor], for_a: bool, for_b: bool
) -> list[Tensor]:
    def half(sign: float) -> list[Tensor]:
        result = []
        for x, y in zip(a, b, strict=True):
            accumulate = accumulate_type(x.dtype)
            scale = (2.0 * sign * grad.double()).to(accumulate)
            result.append(_gradient_like(x).copy_(scale * (x.to(accumulate) - y.to(accumulate))))
        return result

    return (half(1.0) if for_a else []) + (half(-1.0) if for_b else [])


def _distance_backward_fake(grad: Tensor, a: list[Tensor], b: list[Tensor], for_a: bool, for_b: bool) -> list[Tensor]:
    return [_gradient_like(x) for _ in range(for_a + for_b) for x in a]


def _no_second_gradient(ctx: Any, grads: list[Tensor]) -> None:
    raise RuntimeError("the gradient of squared_distance cannot be differentiated again")


_distance_backward = declare(
    "squared_distance_backward(Tensor grad, Tensor[] a, Tensor[] b, bool for_a, bool for_b) -> Tensor[]",
    reference=_distance_backward_reference,
    fake=_distance_backward_fake,
    backward=_no_second_gradient,
)


def _distance_setup(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: Tensor) -> None:
    a, b = inputs
    ctx.tensors = len(a)
    ctx.save_for_backward(*a, *b)


def _distance_gradient(ctx: Any, grad: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
    a, b = list(ctx.saved_tensors[: ctx.tensors]), list(ctx.saved_tensors[ctx.tensors :])
    for_a, for_b = any(x.requires_grad for x in a), any(x.requires_grad for x in b)
    out = _distance_backward(grad, a, b, for_a, for_b)
    none: list[Tensor | None] = [None] * ctx.tensors
    return out[: ctx.tensors] if for_a else none, out[-ctx.tensors :] if for_b else none


_distance = declare(
    "squared_distance(Tensor[] a, Tensor[] b) -> Tensor",
    reference=_distance_reference,
    fake=_distance_fake,
    setup_context=_distance_setup,
    backward=_distance_gradient,
)


# ---- what users call -----------------------------------------------------------------------------------------------


def _as_list(tensors: Any, what: str) -> list[Tensor] | Prepared:
    if type(tensors) is list or type(tensors) is Prepared:
        return tensors
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"{what} is {describe(tensors)}; a list of tensors is accepted")
    return list(tensors)


def _call_of(lists: tuple[Prepared, Prepared | None, Prepared, Prepared | None], numbers: tuple[Any, ...]) -> Tensor:
    """All arguments of a step as ``proximal_sgd_step_again_`` takes them; empty where a list has no ticket."""
    tickets = [None if some is None else some.ticket for some in lists]
    if any(some is not None and ticket is None for some, ticket in zip(lists, tickets, strict=True)):
        return torch.empty(0, dtype=torch.int64)
    assert tickets[0] is not None
    words = [0 if ticket is None else int(ticket[1]) for ticket in tickets]
    try:
        bits = struct.unpack("=5q", struct.pack("=5d", *numbers[:5]))
    except struct.error:
        raise TypeError(f"lr, lam, momentum, dampening and weight_decay are {numbers[:5]}; they are numbers") from None
    return torch.tensor([int(tickets[0][0]), *words, *bits, *map(bool, numbers[5:])], dtype=torch.int64)


def _stepped_again(params: Prepared, grads: Any, anchors: Any, buffers: Any, numbers: tuple[Any, ...]) -> bool:
    """Take the step in one word, if all lists are prepared. It is made ready once for the same arguments."""
    if not plain_eager():
        return False
    known = params.again
    # By identity: lists are compared element by element otherwise. Each word here counts: a step of LeNet takes 5 us.
    if (
        known is None
        or known[0] is not grads
        or not (known[1] is anchors or (known[1] is None and not anchors))
        or not (known[2] is buffers or (known[2] is None and not buffers))
        or known[3] != numbers
    ):
        anchors, buffers = anchors or None, buffers or None
        if any(x is not None and type(x) is not Prepared for x in (grads, anchors, buffers)):
            return False
        call = _call_of((params, buffers, grads, anchors), numbers)
        params.again = known = (grads, anchors, buffers, numbers, call if call.numel() else None)
    if known[4] is None:
        return False
    try:
        _step_again_at_once(known[4])
    except RuntimeError:  # what is wrong is said where all arguments are at hand
        return False
    written(params)
    if known[2] is not None:
        written(known[2])
    return True


def proximal_sgd_step_(
    params: Iterable[Tensor],
    grads: Iterable[Tensor],
    anchors: Iterable[Tensor],
    lr: float,
    lam: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    dampening: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    momentum_buffers: Iterable[Tensor] = (),
    first: bool = False,
) -> None:
    r"""One step of SGD on :math:`L(v) + \frac{\lambda}{2} \|v - w\|^2`, in place and in one pass over all tensors.

    .. math::
        d &= g + \delta v + \lambda (v - w) \\
        m &\leftarrow \mu m + (1 - \tau) d \qquad (m \leftarrow d \text{ in the first step}) \\
        v &\leftarrow v - \eta\, m \qquad (v - \eta (d + \mu m) \text{ with nesterov})

    with :math:`\eta` = ``lr``, :math:`\lambda` = ``lam``, :math:`\mu` = ``momentum``, :math:`\tau` = ``dampening``,
    :math:`\delta` = ``weight_decay``. Without momentum :math:`v \leftarrow v - \eta d`. This is PerAda's step; its
    official code has :math:`\lambda \|v - w\|^2`, so twice this ``lam``. With ``lam=0`` it is the step of
    :class:`torch.optim.SGD`, and the anchors are not read. Computed in float32 (float64 for float64) and rounded once,
    each product rounded before it is added: the same bits for any number of threads and any instruction set.

    Infinity and NaN propagate, as in torch's SGD. Not differentiable.

    Args:
        params: the tensors :math:`v` to update; float32, float64, float16 or bfloat16, also mixed, on one device.
        grads, anchors: :math:`g` and :math:`w`, of the same shapes and types. In a loop, give all lists as
            :func:`~pfl_ext.ops.prepare` makes them.
        lr, lam, momentum, weight_decay: not negative.
        dampening, nesterov, maximize: as in :class:`torch.optim.SGD`.
        momentum_buffers: :math:`m`, like ``params``; needed with momentum, overwritten.
        first: this is the first step of the buffers, whatever they hold.

    Raises:
        ValueError, TypeError: tensors that do not fit each other, that overlap in memory, or a number out of range.
            Nothing has been changed then.

    >>> v = torch.tensor([2.0])
    >>> proximal_sgd_step_([v], [torch.tensor([1.0])], [torch.tensor([0.0])], lr=0.1, lam=0.5)
    >>> v
    tensor([1.8000])
    """
    numbers = (lr, lam, momentum, dampening, weight_decay, nesterov, maximize, first)
    if type(params) is Prepared and _stepped_again(params, grads, anchors, momentum_buffers, numbers):
        return
    params, grads, anchors = _as_list(params, "params"), _as_list(grads, "grads"), _as_list(anchors, "anchors")
    buffers = _as_list(momentum_buffers, "momentum_buffers")
    lists = handed(params, buffers, grads, anchors)
    try:
        with without_gradients():
            _step(*lists, *numbers)
    except (RuntimeError, TypeError):
        given = (list(params), list(buffers), list(grads), list(anchors))
        _step_check(given[0], given[1], given[2], given[3], *numbers)
        _step_memory(*given, lam)
        raise
    written(params, buffers)


def squared_distance(a: Iterable[Tensor], b: Iterable[Tensor]) -> Tensor:
    r"""The squared distance :math:`\sum_t \|a_t - b_t\|_2^2` of two lists of tensors, in one pass.

    Differences and sums are float64 and in fixed order: the same bits for any number of threads. The gradients
    :math:`\pm 2 (a - b)` are computed in one pass too; they cannot be differentiated again. Infinity and NaN propagate.

    Args:
        a, b: tensors of the same shapes and types, on one device; either or both may require gradients.

    Returns:
        A number: float64 if a tensor is float64, otherwise float32.

    Raises:
        ValueError, TypeError: no tensors, or tensors that do not fit each other.

    >>> squared_distance([torch.tensor([1.0, 2.0]), torch.tensor(3.0)], [torch.zeros(2), torch.tensor(1.0)])
    tensor(9.)
    """
    a, b = list(_as_list(a, "a")), list(_as_list(b, "b"))
    try:
        return _distance(a, b)
    except (RuntimeError, TypeError):
        _distance_check(a, b)
        raise
