"""Per-FedAvg: a global model from which one gradient step leads to a good personal one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import (
    Client,
    Method,
    Server,
    Steps,
    Uploads,
    local_length,
    mean_loss,
    option,
)

__all__ = ["PerFedAvg"]


@dataclass(frozen=True)
class PerFedAvg(Method):
    r"""Per-FedAvg (Fallah et al., 2020), Algorithm 1: a global model from which one step leads to a personal one.

    It is FedAvg of :math:`F_k(w) = L_k(w - \alpha \nabla L_k(w))`. Each step of a selected client takes three
    independent batches :math:`D, D', D''`:

    .. math::
        u &= w_k - \alpha \nabla L_k(w_k; D), \qquad g = \nabla L_k(u; D') \\
        w_k &\leftarrow w_k - \beta\, (I - \alpha \nabla^2 L_k(w_k; D''))\, g

    The first-order variant (FO) leaves the Hessian out; the Hessian-free one (HF) has

    .. math:: \nabla^2 L_k(w_k; D'')\, g \approx
        \frac{1}{2 \delta} (\nabla L_k(w_k + \delta g; D'') - \nabla L_k(w_k - \delta g; D'')).

    The server takes :math:`w \leftarrow \frac{1}{|S|} \sum_{k \in S} w_k`. The personal model is :math:`w` after one
    step of size :math:`\alpha`, or more, on batches of the client's training data.

    Readings. An epoch is one of the batches :math:`D'`. Clients count alike, as in the paper. Every evaluation takes
    the personal steps anew, for all clients: they need no place to be kept.
    """

    name = "per-fedavg"

    lr: float = option(0.001, "beta, step size of w_k")
    alpha: float = option(0.01, "step size of the personal steps; 0 is FedAvg")
    variant: str = option("hf", "first-order, or Hessian-free", choices=("fo", "hf"))
    delta: float = option(0.001, "delta, step of the Hessian-free difference")
    personal_steps: int = option(1, "steps on training data that make the personal model")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("alpha", self.alpha >= 0, "not negative")
        self.check("delta", self.delta > 0, "above 0")
        self.check("personal_steps", self.personal_steps >= 0, "not negative")

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train from w by the steps of the chosen variant."""
        model = client.model
        model.load(received["model"])
        params: list[Tensor] = list(model.trained)
        steps, losses = Steps(client, self), []
        model.module.train()
        names = ("inner", "batches", "hessian") if self.variant == "hf" else ("inner", "batches")
        for inner, outer, *third in zip(
            *(client.batches(self.batch_size, name=name, **local_length(self)) for name in names), strict=True
        ):
            w = [p.detach().clone() for p in params]
            _add(params, w, -self.alpha, steps.gradients(inner)[1])
            loss, g = steps.gradients(outer)
            meta = g
            for hessian in third:
                _add(params, w, self.delta, g)
                ahead = steps.gradients(hessian)[1]
                _add(params, w, -self.delta, g)
                behind = steps.gradients(hessian)[1]
                scale = self.alpha / (2 * self.delta)
                meta = [x - scale * (a - b) for x, a, b in zip(g, ahead, behind, strict=True)]
            _add(params, w, 0.0, g)
            steps.step(meta)
            losses.append(loss)
        client.report["loss"] = mean_loss(losses)
        return {"model": model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models; each counts alike."""
        server["model"] = uploads.average(equally=True)

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the personal steps on training data make of w."""
        model = client.model
        model.load(received["model"])
        model.module.train()
        steps = Steps(client, self)
        for batch in client.batches(self.batch_size, steps=self.personal_steps, name="personal"):
            before = [p.detach().clone() for p in steps.params]
            _add(steps.params, before, -self.alpha, steps.gradients(batch)[1])
        return {"personal": model.state()}


@torch.no_grad()
def _add(params: list[Tensor], w: list[Tensor], scale: float, direction: list[Tensor]) -> None:
    """Set the parameters to w + scale direction."""
    for p, x, d in zip(params, w, direction, strict=True):
        p.copy_(x + scale * d)
