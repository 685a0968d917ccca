"""The local training that most methods share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypedDict

import torch
from torch import Tensor

from pfl_ext.ops import lwsam_perturb_, proximal_sgd_step_, restore_

from .client import Batch, Client, classification_loss
from .method import Method
from .model import WorkingModel
from .privacy import PRIVATE_STEPS, epsilon, private_gradients, sampling

__all__ = ["Perturb", "fine_tune", "local_length", "local_sgd", "loss_and_gradients"]

Perturb: TypeAlias = Callable[[list[Tensor], list[Tensor], Tensor | None], Tensor]
"""Moves parameters by their gradients; takes the backup of an earlier step, if any, and returns this step's."""


class Length(TypedDict, total=False):
    """How long a client trains, as ``client.batches`` takes it."""

    epochs: int
    steps: int


def local_length(method: Method) -> Length:
    """How long a client trains in a round of this method."""
    return {"steps": method.local_steps} if method.local_steps else {"epochs": method.local_epochs}


def loss_and_gradients(model: WorkingModel, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The loss of the labels of a batch, and its gradients in the trained parameters."""
    loss = classification_loss(model(batch.inputs), batch.targets)
    return loss.detach(), list(torch.autograd.grad(loss, model.trained, materialize_grads=True))


def _labels(logits: Tensor, batch: Batch) -> Tensor:
    return classification_loss(logits, batch.targets)


def local_sgd(
    client: Client,
    method: Method,
    *,
    loss: Callable[[Tensor, Batch], Tensor] = _labels,
    anchor: Tensor | None = None,
    lam: float = 0.0,
    epochs: int | None = None,
    lr: float | None = None,
    batches: str = "batches",
    only: Sequence[Tensor] | None = None,
    rho: float = 0.0,
    perturb: Perturb | None = None,
    clip: float = 0.0,
) -> float:
    r"""SGD on the client's loss L, plus :math:`\frac{\lambda}{2}\|v - w\|^2` where there is an anchor w.

    .. math:: v \leftarrow v - \eta\, (\nabla L(v) + \lambda (v - w))

    With a radius :math:`\rho` it is sharpness-aware: the gradient is that of the same batch at
    :math:`v + \rho\, g / \|g\|_2`, with :math:`g = \nabla L(v)`.

    Where the run is differentially private the gradients are those of :func:`~.privacy.private_gradients`; the proximal
    term, momentum and weight decay see nothing of the data but them.

    Args:
        client: its working model v is trained, from where it is.
        method: gives step size, momentum, weight decay, batch size and how long.
        loss: L as a function of the logits and the batch; by default the loss of the labels.
        anchor: w, a state of the whole model.
        lam: :math:`\lambda`.
        epochs: passes over the data in place of the method's ``local_epochs`` or ``local_steps``.
        lr: step size in place of the method's.
        batches: the stream that orders the batches.
        only: the parameters to train in place of all; needs no anchor.
        rho: :math:`\rho`; 0 is plain SGD.
        perturb: what moves v before the second gradient, in place of SAM's step of the radius ``rho``.
        clip: the largest norm of a step's gradient of L, which is shortened to it; 0: any.

    Returns:
        The mean of L(v) over the steps, NaN without any.
    """
    model = client.model
    params: list[Tensor] = list(model.trained if only is None else only)
    anchors = model.tensors(anchor) if anchor is not None and lam != 0 else []
    buffers = [torch.empty_like(p) for p in params] if method.momentum != 0 else []
    length: Length = local_length(method) if epochs is None else {"epochs": epochs}
    backup: Tensor | None = None
    total, steps = torch.zeros((), device=model.device), 0
    model.module.train()
    if client.privacy is not None and (loss is not _labels or rho != 0 or perturb is not None):
        raise ValueError("differential privacy is for plain SGD on the labels: this training has another loss or steps")
    drawn = client.batches if client.privacy is None else client.poisson_batches
    noise = client.stream(f"{batches}/noise")
    for batch in drawn(method.batch_size, name=batches, **length):
        if client.privacy is None:
            objective = loss(model(batch.inputs), batch)
            gradients = list(torch.autograd.grad(objective, params, materialize_grads=True))
        else:
            objective, gradients = private_gradients(
                model,
                params,
                batch.inputs,
                batch.targets,
                classification_loss,
                client.privacy,
                client.samples * sampling(client.samples, method.batch_size)[0],
                noise,
            )
        if rho != 0 or perturb is not None:
            if perturb is None:
                backup = lwsam_perturb_(params, gradients, rho=rho, backup=backup)
            else:
                backup = perturb(params, gradients, backup)
            worst = loss(model(batch.inputs), batch)
            gradients = list(torch.autograd.grad(worst, params, materialize_grads=True))
            restore_(params, backup)
        if clip != 0:
            norm = torch.nn.utils.get_total_norm(gradients)
            torch._foreach_mul_(gradients, (clip / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
        proximal_sgd_step_(
            params,
            gradients,
            anchors,
            method.lr if lr is None else lr,
            lam if anchors else 0.0,
            method.momentum,
            method.weight_decay,
            momentum_buffers=buffers,
            first=steps == 0,
        )
        total += objective.detach()
        steps += 1
    if client.privacy is not None:
        _account(client, method, steps)
    return float(total) / steps if steps else math.nan


def _account(client: Client, method: Method, steps: int) -> None:
    """Count these private steps, and report what all of the client's cost: one sum, whatever they trained."""
    assert client.privacy is not None
    client[PRIVATE_STEPS] = client[PRIVATE_STEPS] + steps
    rate, _ = sampling(client.samples, method.batch_size)
    client.report["epsilon"] = epsilon(rate, client.privacy.noise, int(client[PRIVATE_STEPS]), client.privacy.delta)


def fine_tune(client: Client, method: Method, state: Tensor, epochs: int) -> None:
    """Make ``client["personal"]`` from a received model: that many passes of SGD on the client's own data."""
    client.model.load(state)
    client.report["fine_tune_loss"] = local_sgd(client, method, epochs=epochs, batches="fine-tune")
    client["personal"] = client.model.state()
