"""pFedMe: personal models by Moreau envelopes, a global model that descends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import (
    Client,
    Method,
    Server,
    Stage,
    Steps,
    Uploads,
    WorkingModel,
    local_length,
    mean_loss,
    option,
)
from pfl_ext.ops import proximal_sgd_step_

__all__ = ["PFedMe"]


@dataclass(frozen=True)
class PFedMe(Method):
    r"""pFedMe (Dinh et al., 2020), Algorithm 1: personal models by Moreau envelopes.

    For each batch of a selected client's epochs, from :math:`w_k = w`:

    .. math::
        \theta_k &\leftarrow \theta_k - \eta_\theta\, (\nabla L_k(\theta_k) + \lambda (\theta_k - w_k))
            \quad \text{K times, for } \arg\min_\theta L_k(\theta) + \tfrac{\lambda}{2} \|\theta - w_k\|^2 \\
        w_k &\leftarrow w_k - \eta \lambda (w_k - \theta_k)

    and then :math:`w \leftarrow (1 - \beta) w + \beta \frac{1}{|S|} \sum_{k \in S} w_k`. The personal model is the last
    :math:`\theta_k`.

    Readings. :math:`\theta_k` starts at w in each round and at the previous batch's :math:`\theta_k` within one, as in
    the authors' code: started at :math:`w_k` each time it would hardly move where K and the step size are small.
    Clients count alike, and only selected ones train; in the paper all do, and those selected are averaged
    (``everyone``). Momentum and weight decay are those of the steps of :math:`\theta_k`. Buffers are those that
    :math:`\theta_k` saw, averaged without :math:`\beta`.
    """

    name = "pfedme"

    lr: float = option(0.005, "eta, step size of w_k")
    personal_lr: float = option(0.05, "eta_theta, step size of the personal model, below 2 / lam")
    lam: float = option(15.0, "lambda, how strongly the personal model is held near w_k")
    inner_steps: int = option(5, "K, steps of the personal model on a batch")
    beta: float = option(1.0, "how far the server goes towards the clients' mean, and beyond it if above 1")
    everyone: bool = option(False, "let all clients train in each round; those that were not selected send nothing")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("personal_lr", self.personal_lr > 0, "above 0")
        self.check("lam", self.lam > 0, "above 0")
        # Beyond it the proximal term alone makes each inner step overshoot further than the last.
        self.check("personal_lr", self.personal_lr * self.lam < 2, f"below 2 / lam = {2 / self.lam:g}")
        self.check("inner_steps", self.inner_steps >= 1, "at least 1")
        self.check("beta", self.beta > 0, "above 0")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of clients that were not selected too, where everyone trains."""
        return ("rest",) if self.everyone else ()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its personal model theta_k."""
        return {"personal": model.state()}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On each batch solve the inner problem, then step w_k towards the solution."""
        model = client.model
        model.load(received["model"])
        w = [p.detach().clone() for p in model.trained]
        client.trains(w)
        inner = self.inner_steps * client.steps_of(self.batch_size, **local_length(self))
        theta = Steps(client, self, lr=self.personal_lr, anchor=w, lam=self.lam, expected=inner)
        losses = []
        model.module.train()
        for batch in client.batches(self.batch_size, **local_length(self)):
            for _ in range(self.inner_steps):
                loss = theta.take(batch)
            # w - eta lambda (w - theta): a proximal step without a gradient.
            proximal_sgd_step_(
                w, [torch.zeros_like(p) for p in w], [p.detach() for p in model.trained], self.lr, self.lam
            )
            losses.append(loss)
        client.report["loss"] = mean_loss(losses)
        client["personal"] = model.state()
        with torch.no_grad():
            for p, local in zip(model.trained, w, strict=True):
                p.copy_(local)
        return {"model": model.state()}

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """The same turn, of which nothing is sent."""
        self.train(client, received)

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Move the server's model towards the clients' mean, by the share beta."""
        mean = uploads.average(equally=True)
        if self.beta != 1:
            parameters = slice(server.model.parameters)
            mean[parameters] = (1 - self.beta) * server["model"][parameters] + self.beta * mean[parameters]
        server["model"] = mean

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """theta_k; w for a client that never took part."""
        return {"personal": client["personal"] if "personal" in client else received["model"]}
