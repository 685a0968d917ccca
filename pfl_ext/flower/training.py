"""Steps of local training for Flower clients of your own: proximal, LWSAM, spectral co-distillation, distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.ops import SpectralTeacher, ensemble_distillation_loss, ensemble_logits, spectral_divergence
from pfl_ext.optim import LWSAM, ProximalSGD

__all__ = ["codistill", "distill", "lwsam_steps", "proximal_steps"]

Batches = Iterable[tuple[Tensor, Tensor]]
"""Inputs and targets of one step after the other, such as a DataLoader."""
Loss = Callable[[Tensor, Tensor], Tensor]


def _mean(losses: list[Tensor]) -> float:
    """What is reported; one wait for a GPU, not one a step."""
    return float(torch.stack(losses).mean()) if losses else float("nan")


def proximal_steps(
    model: nn.Module, batches: Batches, *, lr: float, lam: float, momentum: float = 0.0, loss: Loss = F.cross_entropy
) -> float:
    """A step a batch, held near where the model is now: a client of FedProx, or Ditto's personal model.

    Returns the mean loss, without the proximal term.
    """
    optimizer = ProximalSGD(model.parameters(), lr=lr, lam=lam, momentum=momentum)
    optimizer.set_anchors()
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return _mean(losses)


def lwsam_steps(
    model: nn.Module,
    batches: Batches,
    *,
    lr: float,
    rho: float = 0.05,
    scores: Sequence[float] = (),
    loss: Loss = F.cross_entropy,
) -> float:
    """A step of LWSAM a batch, perturbed by the layers' scores; without scores all layers have the same.

    :func:`pfl_ext.ops.personalization_scores` computes them. Returns the mean loss.
    """
    optimizer = LWSAM(model.named_parameters(), torch.optim.SGD, rho=rho, lr=lr)
    if len(scores):
        optimizer.scores = torch.tensor(scores, dtype=torch.float64)
    losses = []
    for inputs, targets in batches:

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            value = loss(model(inputs), targets)
            value.backward()
            return value

        losses.append(optimizer.step(closure).detach())
    return _mean(losses)


def codistill(
    model: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    *,
    lr: float,
    weight: float,
    tau: float = 1.0,
    momentum: float = 0.0,
    loss: Loss = F.cross_entropy,
) -> float:
    """A step a batch, with a model drawn towards the spectrum of another (SCD).

    Train the generic model with the personal one as ``teacher`` and its low frequencies alone (``tau=0.4``); then the
    personal one with the generic one as ``teacher``. Returns the mean of both terms.
    """
    spectrum = SpectralTeacher(teacher.parameters(), tau=tau)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    losses = []
    for inputs, targets in batches:
        value = loss(model(inputs), targets) + weight * spectral_divergence(model.parameters(), spectrum)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return _mean(losses)


def distill(
    student: nn.Module,
    teachers: Iterable[nn.Module],
    unlabelled: Tensor,
    *,
    steps: int,
    lr: float = 1e-3,
    batch_size: int = 128,
    generator: torch.Generator | None = None,
) -> float:
    """Steps of Adam towards what an ensemble of teachers makes of unlabelled samples (FedDF, PerAda).

    ``teachers`` may be made one by one: each is asked once. Returns the last step's loss.
    """
    with torch.no_grad():
        targets = ensemble_logits([teacher.eval()(unlabelled) for teacher in teachers])
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    loss = torch.full((), float("nan"))
    for _ in range(steps):
        rows = torch.randint(len(unlabelled), (min(batch_size, len(unlabelled)),), generator=generator)
        optimizer.zero_grad()
        loss = ensemble_distillation_loss(student(unlabelled[rows]), [targets[rows]])
        loss.backward()
        optimizer.step()
    return float(loss)
