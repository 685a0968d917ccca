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
        v &\leftarrow \beta v + \sum_k \tfrac{n_k}{n} (w - w_k) \\
        w &\leftarrow w - v

    Buffers are averaged without momentum: a running variance that overshoots would be negative.
    """

    name = "fedavgm"

    server_momentum: float = option(0.9, "beta, momentum of the server; 0 is FedAvg")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.check("server_momentum", 0 <= self.server_momentum < 1, "from 0 to below 1")

    def set_up(self, server: Server) -> None:
        """w, and v for its parameters."""
        super().set_up(server)
        server["velocity"] = torch.zeros_like(server["model"][: server.model.parameters])

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Step by the velocity."""
        carried = self.server_momentum * server["velocity"]
        mean, parameters = uploads.average(), slice(len(carried))
        server["velocity"] = carried + (server["model"] - mean)[parameters]
        mean[parameters] -= carried  # w - v, where w - (w - mean) would not be the mean to the last bit
        server["model"] = mean
