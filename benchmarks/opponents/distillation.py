"""Ways to compute a distillation loss and its gradient in the student. All return both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LossAndGradient", "compiled", "hard_and_soft", "loop_over_teachers", "stack_and_mean", "with_gradient"]

LossAndGradient = tuple[Tensor, Tensor]


def with_gradient(loss: Callable[[Tensor], Tensor], student: Tensor) -> LossAndGradient:
    """Forward and backward, as a training step does them; ``student`` is a leaf."""
    student.grad = None
    with torch.enable_grad():  # the harness races without gradients
        value = loss(student)
    value.backward()
    assert student.grad is not None
    return value, student.grad


def loop_over_teachers(student: Tensor, teachers: Sequence[Tensor]) -> Tensor:
    """The naive peer: teachers' logits divided and added one by one, then ``kl_div`` of both softmaxes."""
    mean = torch.zeros_like(teachers[0])
    for logits in teachers:
        mean = mean + logits / len(teachers)
    return F.kl_div(F.log_softmax(student, 1), F.softmax(mean, 1), reduction="batchmean")


def stack_and_mean(student: Tensor, teachers: Sequence[Tensor]) -> Tensor:
    """The skilled user: one mean over the stacked logits."""
    mean = torch.stack(list(teachers)).mean(0)
    return F.kl_div(F.log_softmax(student, 1), F.softmax(mean, 1), reduction="batchmean")


def hard_and_soft(student: Tensor, teacher: Tensor, target: Tensor, lam: float, temperature: float) -> Tensor:
    """PersFL's objective from torch's own losses."""
    hard = F.cross_entropy(student, target)
    log_p, q = F.log_softmax(student / temperature, 1), F.softmax(teacher / temperature, 1)
    return (1 - lam) * hard + lam * temperature**2 * F.kl_div(log_p, q, reduction="batchmean")


def compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.compile`` of a loss, for one set of shapes."""
    return torch.compile(loss, dynamic=False)
