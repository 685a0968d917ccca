"""FedAvg, and its two ways to a personal model: fine-tuning after it, and no federation at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Uploads, WorkingModel, fine_tune, local_sgd, option
from pfl_ext.ops import weighted_average

__all__ = ["FedAvg", "FedAvgFT", "Standalone", "average"]


def average(uploads: Uploads, name: str = "model", *, equally: bool = False) -> Tensor:
    r""":math:`\sum_k \frac{n_k}{n} w_k` over the clients that sent something, or their plain mean."""
    weights = [1] * len(uploads) if equally else uploads.samples
    pieces = [weighted_average([[part] for part in parts], weights)[0] for parts in uploads.pieces(name)]
    return torch.cat(pieces)


@dataclass(frozen=True)
class FedAvg(Method):
    r"""Federated averaging (McMahan et al., 2017).

    .. math::
        w_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } w \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k
    """

    name = "fedavg"
    private = True

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = local_sgd(client, self)
        return {"model": client.model.state()}

    def server_round(self, server: dict[str, Tensor], uploads: Uploads) -> None:
        """Average, weighted by samples."""
        server["model"] = average(uploads)


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg, then each client fine-tunes the last global model on its own data."""

    name = "fedavg-ft"
    private = True

    fine_tune_epochs: int = option(5, "passes over a client's data after the last round")

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """The fine-tuned model."""
        return {"personal": model.state()}

    def personalize(self, client: Client, received: Mapping[str, Tensor]) -> None:
        """Fine-tune."""
        fine_tune(client, self, received["model"], self.fine_tune_epochs)

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The global model, and the fine-tuned one once it is there."""
        found = {"global": received["model"]}
        return found | {"personal": client["personal"]} if "personal" in client else found


@dataclass(frozen=True)
class Standalone(Method):
    """Each client trains a model of its own; nothing is sent. A round is E epochs of each selected client."""

    name = "standalone"
    private = True

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """Nothing: there is no server."""
        return {}

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client's model, from the common initial weights."""
        return {"personal": model.state()}

    def received(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Go on training."""
        client.model.load(client["personal"])
        client.report["loss"] = local_sgd(client, self)
        client["personal"] = client.model.state()
        return {}

    def server_round(self, server: dict[str, Tensor], uploads: Uploads) -> None:
        """Nothing."""

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's model."""
        return {"personal": client["personal"]}
