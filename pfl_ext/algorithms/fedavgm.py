"""FedAvgM: FedAvg with momentum at the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Uploads, WorkingModel, local_sgd, option

from .fedavg import average

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

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """w, and v for its parameters."""
        return {"model": model.state(), "velocity": model.state()[: model.parameters].zero_()}

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = local_sgd(client, self)
        return {"model": client.model.state()}

    def server_round(self, server: Server, uploads: Uploads) -> None:
        """Step by the velocity."""
        carried = self.server_momentum * server["velocity"]
        mean, parameters = average(uploads), slice(len(carried))
        server["velocity"] = carried + (server["model"] - mean)[parameters]
        mean[parameters] -= carried  # w - v, where w - (w - mean) would not be the mean to the last bit
        server["model"] = mean
