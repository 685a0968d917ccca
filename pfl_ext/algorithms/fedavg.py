"""FedAvg, and its two ways to a personal model: fine-tuning after it, and no federation at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, fine_tune, option

__all__ = ["FedAvg", "FedAvgFT", "Standalone"]


@dataclass(frozen=True)
class FedAvg(Method):
    r"""Federated averaging (McMahan et al., 2017).

    .. math::
        w_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } w \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k
    """

    name = "fedavg"
    private = True

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models, weighted by samples."""
        server["model"] = uploads.average()


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg, then each client fine-tunes the last global model on its own data."""

    name = "fedavg-ft"
    private = True

    fine_tune_epochs: int = option(5, "passes over a client's data after the last round")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Clients fine-tune after the last round."""
        return ("finish",)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps the model it fine-tuned."""
        return {"personal": model.state()}

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """Fine-tune the received model on the client's own data."""
        fine_tune(client, self, received["model"], self.fine_tune_epochs)

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fine-tuned model once it is there."""
        return {"personal": client["personal"]} if "personal" in client else {}


@dataclass(frozen=True)
class Standalone(Method):
    """Each client trains a model of its own; nothing is sent. A round is E epochs of each selected client."""

    name = "standalone"
    private = True
    several_networks = True
    refuses = (("weighting", "it averages no models"),)

    def set_up(self, server: Server) -> None:
        """Set nothing: there is no server."""

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client's model, from the common initial weights."""
        return {"personal": model.state()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send nothing: there is no server."""
        return {}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the client's own model further, from where its last turn ended."""
        client.model.load(client["personal"])
        client.report["loss"] = Steps(client, self).train()
        client["personal"] = client.model.state()
        return {}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Do nothing: there is no server."""

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's own model, as trained so far."""
        return {"personal": client["personal"]}
