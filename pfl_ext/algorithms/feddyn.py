"""FedDyn: a dynamic regulariser that makes the clients' optima agree with the server's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Steps, Uploads, WorkingModel, option

__all__ = ["FedDyn"]


@dataclass(frozen=True)
class FedDyn(Method):
    r"""FedDyn (Acar et al., 2021), Algorithm 1: a dynamic regulariser at the clients.

    With m clients that can be selected, of which P are:

    .. math::
        \theta_k &\leftarrow \arg\min_v \approx L_k(v) - \langle g_k, v \rangle
            + \tfrac{\alpha}{2} \|v - \theta\|^2 \text{ by E epochs of SGD from } \theta \\
        g_k &\leftarrow g_k - \alpha (\theta_k - \theta) \\
        h &\leftarrow h - \tfrac{\alpha}{m} \sum_{k \in P} (\theta_k - \theta) \\
        \theta &\leftarrow \tfrac{1}{|P|} \sum_{k \in P} \theta_k - \tfrac{1}{\alpha} h

    :math:`g_k`, which starts at zero, is what the gradient of :math:`L_k` is at the optimum of the last turn. The norm
    is squared. Linear and quadratic term together are one proximal term with the anchor
    :math:`\theta + g_k / \alpha`. Clients count alike, as in the paper. Where m grows h stays the mean of all
    :math:`g_k`: those of clients that join are zero. Buffers are averaged, without h.
    """

    name = "feddyn"
    refuses = (("weighting", "its equations count clients alike"),)

    alpha: float = option(0.01, "weight of the dynamic regulariser")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("alpha", self.alpha > 0, "above 0 (without a regulariser use fedavg)")

    def set_up(self, server: Server) -> None:
        """The server keeps the model theta, and h for its parameters."""
        super().set_up(server)
        server["h"] = torch.zeros_like(server["model"][: server.model.parameters])

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps g_k, for parameters only, which starts at zero."""
        return {"gradient": model.state()[: model.parameters].zero_()}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model against the regulariser, and bring the gradient up to date."""
        model, theta, gradient = client.model, received["model"], client["gradient"]
        anchor = theta.clone()
        anchor[: model.parameters] += gradient / self.alpha
        model.load(theta)
        client.report["loss"] = Steps(client, self, anchor=anchor, lam=self.alpha).train()
        state = model.state()
        client["gradient"] = gradient - self.alpha * (state - theta)[: model.parameters]
        return {"model": state}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models, and take the correction by h off."""
        mean, parameters = uploads.average(equally=True), slice(len(server["h"]))
        share, before = len(uploads) / server.members, 1 - server.joined / server.members
        server["h"] = before * server["h"] - self.alpha * share * (mean - server["model"])[parameters]
        mean[parameters] -= server["h"] / self.alpha
        server["model"] = mean
