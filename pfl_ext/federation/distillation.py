"""The loss of a model that learns from labels and from a teacher's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.ops import distillation_loss
from pfl_ext.ops.distillation import Soft
from pfl_ext.tasks import Classification, MultiLabel, NextToken, Pixels, Task

from .client import Batch

__all__ = ["Distillation"]

_FUSED = {Classification.loss, MultiLabel.loss, NextToken.loss, Pixels.loss}  # what the op has as its hard term


@dataclass(frozen=True, eq=False)
class Distillation:
    r"""A loss for :meth:`Steps.train <pfl_ext.federation.Steps.train>`: labels, and a teacher whose logits are known.

    .. math:: \mathrm{hard}\; L(y, z)
              + \mathrm{soft}\; T^2\, \mathrm{KL}(\mathrm{softmax}(o / T) \,\|\, \mathrm{softmax}(z / T))

    L is the loss of the task, z are the network's logits. Steps of plain SGD on it are native calls where those on the
    loss of the task are.

    Args:
        task: what is learned; its outputs are logits.
        teacher: o, the outputs of the teacher for each of the client's training samples, in their order.
        hard, soft: weights of the terms, not negative, not both 0.
        temperature: T.
        divergence: ``"kl"``, or ``"ce"`` for the cross-entropy in its place, which has the same gradient.

    Raises:
        ValueError: a weight or the temperature is none of these.
    """

    task: Task
    teacher: Tensor
    hard: float
    soft: float
    temperature: float = 1.0
    divergence: Soft = "kl"

    def __post_init__(self) -> None:
        """Refuse numbers with which there is nothing to learn."""
        if not (0 <= self.hard < math.inf and 0 <= self.soft < math.inf and self.hard + self.soft > 0):
            raise ValueError(
                f"hard is {self.hard} and soft is {self.soft}; accepted are finite weights that are not negative, and "
                "not both 0"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; accepted is a finite number above 0")

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch."""
        task, several = self.task, isinstance(self.task, MultiLabel)
        student, teacher = task.rows(outputs), task.rows(self.teacher[batch.rows])
        numbers = batch.targets if several else batch.targets.flatten()
        if type(task).loss in _FUSED:
            # The op has 1 - lam and lam: the weights are `total` times those.
            total = self.hard + self.soft
            smoothing = task.label_smoothing if isinstance(task, Classification) else 0.0
            return total * distillation_loss(
                student, teacher, numbers, self.soft / total, self.temperature, self.divergence,
                label_smoothing=smoothing, multilabel=several,
            )  # fmt: skip
        imitation = distillation_loss(
            student, teacher, numbers, 1.0, self.temperature, self.divergence, multilabel=several
        )
        return self.hard * task.loss(outputs, batch.targets) + self.soft * imitation
