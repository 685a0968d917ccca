"""FedBuff: the server takes a step when a buffer of differences is full; personal models as in Ditto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Server, Steps, Uploads, option

from .ditto import Ditto

__all__ = ["FedBuff"]


@dataclass(frozen=True)
class FedBuff(Ditto):
    r"""FedBuff (Nguyen et al., 2022), combined with Ditto as in Table 9 of spectral co-distillation.

    A client trains :math:`w_k` from the w it received and sends :math:`\Delta_k = w_k - w`. With K of them the server,
    which has changed its model :math:`\tau_k` times since it sent w to client k, takes

    .. math:: w \leftarrow w + \eta_g \frac{1}{K} \sum_k \frac{1}{\sqrt{1 + \tau_k}} \Delta_k

    A round is one such step. A client that has sent begins anew at once, full buffer or not. Personal epochs 0 is
    FedBuff alone. Buffers of the network, such as running variances, are sent as they are and averaged: sums of old
    differences would make them negative.
    """

    name = "fedbuff"
    refuses = (("weighting", "its weights are those of staleness"),)

    buffer: int = option(10, "K, how many differences the server takes a step with")
    server_lr: float = option(1.0, "eta_g, the server's step size")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("buffer", self.buffer >= 1, "of 1 or more")
        self.check("server_lr", self.server_lr > 0, "above 0")

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model; its difference to it is sent."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        change, parameters = client.model.state(), slice(client.model.parameters)
        change[parameters] -= received["model"][parameters]
        return {"change": change}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """A step along the mean of the differences, each the shorter the older it is."""
        weights = [self.server_lr / len(uploads) / (1 + age) ** 0.5 for age in uploads.staleness]
        model, parameters = server["model"] + uploads.sum("change", weights), server.model.parameters
        if parameters < len(model):
            # Those that the clients do not send stay as they are.
            buffers = torch.where(server.model.stays, server["model"], uploads.average("change", equally=True))
            model[parameters:] = buffers[parameters:]
        server["model"] = model
