"""FedProx: FedAvg whose clients are held near the global model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Steps, Uploads, option

__all__ = ["FedProx"]


@dataclass(frozen=True)
class FedProx(Method):
    r"""FedProx (Li et al., 2020): local training held near the global model.

    .. math::
        w_k &\leftarrow \arg\min_v \approx L_k(v) + \tfrac{\mu}{2} \|v - w\|^2 \text{ by E epochs of SGD from } w \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k
    """

    name = "fedprox"
    private = True

    mu: float = option(0.01, "weight of the proximal term; 0 is FedAvg")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("mu", self.mu >= 0, "not negative")

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model, held near it."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self, anchor=received["model"], lam=self.mu).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models, weighted by samples."""
        server["model"] = uploads.average()
