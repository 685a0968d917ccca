"""Ways to perturb weights and put them back, and to score layers. Each ``*_perturb`` returns what its restore needs."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "foreach_perturb",
    "foreach_restore",
    "foreach_scores",
    "per_layer_scores",
    "per_tensor_perturb",
    "per_tensor_restore",
]

Tensors: TypeAlias = list[Tensor]


def per_tensor_perturb(params: Tensors, grads: Tensors, rho: float, scores: Tensor | None = None) -> Tensors:
    """As davda54's SAM: the norm of each tensor, their norm; then clone, multiply and add tensor by tensor."""
    norm = torch.norm(torch.stack([g.norm(p=2) for g in grads]), p=2)
    scale = rho / (norm + 1e-12)
    saved = []
    for t, (w, g) in enumerate(zip(params, grads, strict=True)):
        saved.append(w.clone())
        step = (1.0 if scores is None else scores[t]) * g * scale
        w.add_(step)
    return saved


def per_tensor_restore(params: Tensors, saved: Tensors) -> None:
    """As there: another storage for the weight. Nothing is copied, and pointers to the old one are left behind."""
    for w, old in zip(params, saved, strict=True):
        w.data = old


def foreach_perturb(params: Tensors, grads: Tensors, rho: float, scores: Tensor | None = None) -> Tensors:
    """The same with the ``_foreach`` functions."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    saved = torch._foreach_add(params, 0.0)
    if scores is None:
        steps = torch._foreach_mul(grads, rho / norm)
    else:
        steps = torch._foreach_mul(grads, list((scores * (rho / norm)).unbind()))
    torch._foreach_add_(params, steps)
    return list(saved)


def foreach_restore(params: Tensors, saved: Tensors) -> None:
    """Copies back, so that the storage stays."""
    torch._foreach_copy_(params, saved)


def per_layer_scores(a: Tensors, b: Tensors) -> Tensor:
    """Layer by layer; each tensor is one."""
    raw = torch.stack([(x - y).norm() / x.numel() for x, y in zip(a, b, strict=True)])
    return raw / raw.sum()


def foreach_scores(a: Tensors, b: Tensors) -> Tensor:
    """The same with the ``_foreach`` functions."""
    raw = torch.stack(torch._foreach_norm(torch._foreach_sub(a, b))) / torch.tensor([float(x.numel()) for x in a])
    return raw / raw.sum()
