"""Local optimisers by name or of the user's, and how the step size changes over rounds and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl_ext.options import plain_value

__all__ = ["OPTIMIZERS", "OptimizerFactory", "made_optimizer", "scheduled"]

OptimizerFactory: TypeAlias = Callable[..., Optimizer]
"""Makes an optimiser: ``factory(params, lr=..., weight_decay=...)``, as torch's own classes do."""

OPTIMIZERS: dict[str, OptimizerFactory | None] = {"sgd": None, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
"""By their names; SGD is the fused op. Those of users' files join when a command or a program names them."""


def made_optimizer(
    optimizer: str | OptimizerFactory, params: Sequence[Tensor], lr: float, weight_decay: float
) -> Optimizer | None:
    """The optimiser of these parameters; None for SGD, whose steps are the fused op's.

    Raises:
        ValueError: the user's factory cannot be called so, or makes something else.
    """
    factory: Any = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    if factory is None:
        return None
    try:
        made = factory(list(params), lr=lr, weight_decay=weight_decay)
    except TypeError as error:
        raise ValueError(
            f"the optimizer {plain_value(optimizer)} does not take (params, lr=..., weight_decay=...): {error}"
        ) from error
    if not isinstance(made, Optimizer):
        raise ValueError(
            f"the optimizer {plain_value(optimizer)} made a {type(made).__name__}; accepted is a torch optimiser"
        )
    return made


def scheduled(kind: str, at: int, total: int, warmup: int, drop_every: int, drop: float) -> float:
    r"""What the step size is multiplied with at round or step ``at``, from 0, of ``total``.

    With W of ``warmup``, first :math:`(at + 1) / W`; then ``constant`` 1, ``cosine``
    :math:`\frac12 (1 + \cos(\pi \frac{at - W}{total - W}))`, ``step`` :math:`drop^{\lfloor at / drop\_every \rfloor}`.
    """
    if at < warmup:
        return (at + 1) / warmup
    if kind == "step":
        return drop ** (at // drop_every)
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (at - warmup) / max(1, total - warmup))))
    return 1.0
