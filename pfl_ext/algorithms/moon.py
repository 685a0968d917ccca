"""MOON: features are drawn to those of the global model, and away from those of the client's last one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.federation import Batch, Client, Features, Method, Server, Steps, Uploads, WorkingModel, option

__all__ = ["MOON", "contrast"]


@dataclass(frozen=True)
class MOON(Method):
    r"""MOON (Li, He and Song, 2021), Algorithm 1: model-contrastive federated learning.

    A selected client takes E epochs of SGD from w on

    .. math:: L_k(w_k) + \mu\, \mathrm{mean}_x -\log
        \frac{e^{\cos(z, z_{glob}) / \tau}}{e^{\cos(z, z_{glob}) / \tau} + e^{\cos(z, z_{prev}) / \tau}}

    with the features z of :math:`w_k`, :math:`z_{glob}` of the received w and :math:`z_{prev}` of what the client's
    last turn ended with. The server takes :math:`w \leftarrow \sum_k \frac{n_k}{n} w_k`.

    Readings. Features are what enters the head; the paper's networks have a projection of two layers there, which is a
    part of the network and no part of the method. Both other models are in evaluation mode and see the batch as the
    trained one does. In a client's first turn :math:`z_{prev}` would be :math:`z_{glob}` and the term a constant: it is
    left out.

    PFLlib and FL-bench leave the other two models in training mode, so that dropout and batch normalisation blur what
    is compared, and the batch changes their running statistics.
    """

    name = "moon"

    head: str = option("", "module whose inputs are the features; empty: the last layer")
    mu: float = option(1.0, "mu, weight of the contrast; 0 is FedAvg")
    tau: float = option(0.5, "tau, temperature of the contrast")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("mu", self.mu >= 0, "not negative")
        self.check("tau", self.tau > 0, "above 0")

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps the model that its last turn ended with."""
        return {"previous": model.state()}

    def _other(self, client: Client, state: Tensor) -> Features:
        """Makes features by another model, which is not trained."""
        model = WorkingModel(copy.deepcopy(client.model.module))
        model.load(state)
        model.module.eval()
        return Features(model, self.head)

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model, with the contrast from the second turn on."""
        model = client.model
        model.load(received["model"])
        if "previous" in client and self.mu > 0:
            others = [self._other(client, state) for state in (received["model"], client["previous"])]
            with Features(model, self.head) as own, others[0] as received_ones, others[1] as previous_ones:

                def loss(outputs: Tensor, batch: Batch) -> Tensor:
                    with torch.no_grad():
                        near, far = received_ones(batch.inputs), previous_ones(batch.inputs)
                    away = contrast(own.last, near, far, self.tau)
                    return client.task.loss(outputs, batch.targets) + self.mu * away

                client.report["loss"] = Steps(client, self).train(loss)
        else:
            client.report["loss"] = Steps(client, self).train()
        client["previous"] = model.state()
        return {"model": model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models, weighted by samples."""
        server["model"] = uploads.average()


def contrast(z: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """How much more alike features are to the far ones than to the near ones: a mean over samples."""
    likeness = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)], 1) / tau
    return -F.log_softmax(likeness, 1)[:, 0].mean()
