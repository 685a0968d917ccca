"""FedSAM: FedAvg whose clients look for flat minima."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Steps, Uploads, option, sam

__all__ = ["FedSAM"]


@dataclass(frozen=True)
class FedSAM(Method):
    r"""FedSAM (Qu et al., 2022): sharpness-aware local training.

    .. math::
        w_k &\leftarrow w_k - \eta\, \nabla L_k(w_k + \rho\, g / \|g\|_2), \quad g = \nabla L_k(w_k), \text{ from } w \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k
    """

    name = "fedsam"

    rho: float = option(0.05, "radius of the perturbation; 0 is FedAvg")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rho", self.rho >= 0, "not negative")

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model, sharpness-aware."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self, perturb=sam(self.rho)).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models, weighted by samples."""
        server["model"] = uploads.average()
