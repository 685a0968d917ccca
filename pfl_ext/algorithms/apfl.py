"""APFL: a personal model that is a mixture of the global and of a local one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import (
    Batch,
    Client,
    Method,
    Server,
    Steps,
    Uploads,
    WorkingModel,
    local_length,
    mean_loss,
    option,
)
from pfl_ext.tasks import Task

__all__ = ["APFL"]


@dataclass(frozen=True)
class APFL(Method):
    r"""APFL (Deng et al., 2020), Algorithm 1: a mixture of a local model and the global one, with a learnt weight.

    For each batch of a selected client's epochs, from :math:`w_k = w`:

    .. math::
        \bar v_k &= \alpha_k v_k + (1 - \alpha_k) w_k \\
        w_k &\leftarrow w_k - \eta\, \nabla L_k(w_k) \\
        v_k &\leftarrow v_k - \eta\, \nabla_{v} L_k(\bar v_k) = v_k - \eta \alpha_k \nabla L_k(\bar v_k)

    and with the first batch of a round, unless the weight is fixed,

    .. math:: \alpha_k \leftarrow \alpha_k - \eta\, \langle \nabla L_k(\bar v_k), v_k - w_k \rangle,
        \text{ kept within } [0, 1].

    The server takes :math:`w \leftarrow \frac{1}{|S|} \sum_{k \in S} w_k`.

    Readings. The weight changes once a round, before that batch's steps. Clients count alike, as in the paper. What is
    evaluated mixes :math:`v_k` with the global model: weights, not outputs. The mixture has buffers of its own, which
    the client keeps.
    """

    name = "apfl"

    alpha: float = option(0.5, "mixing weight of the local model, at first; 0 is FedAvg, 1 is standalone")
    adaptive: bool = option(True, "learn each client's mixing weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("alpha", 0 <= self.alpha <= 1, "from 0 to 1")

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """v_k with the mixture's buffers, from the common initial weights, and alpha_k."""
        return {"local": model.state(), "alpha": torch.full((1,), self.alpha, dtype=torch.float64)}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Step the copy of the global model and the local one, each batch for both."""
        model = client.model
        mixture = WorkingModel(copy.deepcopy(model.module))
        model.load(received["model"])
        mixture.load(client["local"])
        w: list[Tensor] = list(model.trained)
        v = [p.detach().clone() for p in mixture.trained]
        alpha = float(client["alpha"])
        steps_of_w, steps_of_v = Steps(client, self), Steps(client, self, params=v)
        losses: list[Tensor] = []
        personal_losses: list[Tensor] = []
        model.module.train()
        mixture.module.train()
        for batch in client.batches(self.batch_size, **local_length(self)):
            loss, gradients = steps_of_w.gradients(batch)
            if not losses and self.adaptive:
                _mix(mixture, v, w, alpha)
                along = _gradients(client.task, mixture, batch)[1]
                slope = sum(float(torch.sum(g * (p - q.detach()))) for g, p, q in zip(along, v, w, strict=True))
                alpha = min(max(alpha - self.lr * slope, 0.0), 1.0)
            _mix(mixture, v, w, alpha)
            personal_loss, personal = _gradients(client.task, mixture, batch)
            steps_of_w.step(gradients)
            steps_of_v.step([alpha * g for g in personal])
            losses.append(loss)
            personal_losses.append(personal_loss)
        client.report["loss"], client.report["personal_loss"] = mean_loss(losses), mean_loss(personal_losses)
        client.report["alpha"] = alpha
        client["alpha"] = torch.tensor([alpha], dtype=torch.float64)
        _mix(mixture, v, v, 1.0)
        client["local"] = mixture.state()
        return {"model": model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models; each counts alike."""
        server["model"] = uploads.average(equally=True)

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mixture of w with v_k; w for a client that never took part."""
        if "local" not in client:
            return {"personal": received["model"]}
        parameters, alpha = slice(client.model.parameters), float(client["alpha"])
        mixed = client["local"].clone()
        mixed[parameters] = alpha * mixed[parameters] + (1 - alpha) * received["model"][parameters]
        return {"personal": mixed}


def _gradients(task: Task, mixture: WorkingModel, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The loss of a batch and its gradients in the mixture."""
    loss = task.loss(mixture(batch.inputs), batch.targets)
    return loss.detach(), list(torch.autograd.grad(loss, mixture.trained, materialize_grads=True))


@torch.no_grad()
def _mix(mixture: WorkingModel, v: list[Tensor], w: list[Tensor], alpha: float) -> None:
    """Set the mixture's trained parameters to alpha v + (1 - alpha) w."""
    for p, own, common in zip(mixture.trained, v, w, strict=True):
        p.copy_(alpha * own + (1 - alpha) * common)
