"""FedAvgM: FedAvg with momentum at the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Steps, Uploads, option

__all__ = ["FedAvgM"]


@dataclass(frozen=True)
class FedAvgM(Method):
    r"""FedAvgM (Hsu et al., 2019): momentum at the server.

    .. math::
        w_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } w \\
        g &= \sum_k \tfrac{n_k}{n} (w - w_k) \\
        v &\leftarrow \beta v + g \\
        w &\leftarrow w - \eta_s v, \quad \text{or } w - \eta_s (g + \beta v) \text{ (Nesterov, as in the paper)}

    Buffers are averaged without momentum: a running variance that overshoots would be negative.
    """

    name = "fedavgm"

    server_momentum: float = option(0.9, "beta, momentum of the server; 0 is FedAvg")
    server_lr: float = option(1.0, "eta_s, step size of the server")
    nesterov: bool = option(False, "Nesterov's form of the momentum")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("server_momentum", 0 <= self.server_momentum < 1, "from 0 to below 1")
        self.check("server_lr", self.server_lr > 0, "above 0")

    def set_up(self, server: Server) -> None:
        """The server keeps the model w, and a velocity v for its parameters."""
        super().set_up(server)
        server["velocity"] = torch.zeros_like(server["model"][: server.model.parameters])

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Move the server's model by the velocity, which takes up the clients' mean change."""
        carried = self.server_momentum * server["velocity"]
        mean, parameters = uploads.average(), slice(len(carried))
        w = server["model"][parameters]
        g = w - mean[parameters]
        server["velocity"] = carried + g
        beyond = self.server_momentum * server["velocity"] if self.nesterov else carried
        if self.server_lr == 1:
            mean[parameters] -= beyond  # w - g is the mean: computed, it would not be to the last bit
        else:
            mean[parameters] = w - self.server_lr * (g + beyond)
        server["model"] = mean
