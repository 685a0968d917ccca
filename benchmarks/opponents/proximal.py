"""Ways to take a step of SGD that is held near an anchor."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["autograd_step", "foreach_lerp_step", "foreach_sgd_step", "foreach_step"]

Tensors: TypeAlias = list[Tensor]


def autograd_step(params: Tensors, anchors: Tensors, lam: float, optimizer: torch.optim.Optimizer) -> Tensors:
    """The proximal term as a loss. The gradients of the data's loss are in ``grad`` already, and it adds to them."""
    with torch.enable_grad():
        loss = lam / 2 * sum((p - w).norm() ** 2 for p, w in zip(params, anchors, strict=True))
        assert isinstance(loss, Tensor)
        loss.backward()
    optimizer.step()
    return params


def foreach_step(params: Tensors, grads: Tensors, anchors: Tensors, lr: float, lam: float) -> Tensors:
    """The formula, written out with the ``_foreach`` functions."""
    steps = torch._foreach_sub(params, anchors)
    torch._foreach_mul_(steps, lam)
    torch._foreach_add_(steps, grads)
    torch._foreach_add_(params, steps, alpha=-lr)
    return params


def foreach_lerp_step(params: Tensors, grads: Tensors, anchors: Tensors, lr: float, lam: float) -> Tensors:
    """Two calls and no temporary: towards the anchor, then along the gradient."""
    torch._foreach_lerp_(params, anchors, lr * lam)
    torch._foreach_add_(params, grads, alpha=-lr)
    return params


def foreach_sgd_step(params: Tensors, grads: Tensors, lr: float) -> Tensors:
    """A step without an anchor: one call."""
    torch._foreach_add_(params, grads, alpha=-lr)
    return params
