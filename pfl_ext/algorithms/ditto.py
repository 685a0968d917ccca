"""Ditto: a personal model beside the global one, held near it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Steps, Uploads, WorkingModel, option

from .new_clients import NewClients

__all__ = ["Ditto"]


@dataclass(frozen=True)
class Ditto(NewClients, Method):
    r"""Ditto (Li et al., 2021), Algorithm 1: a personal model held near the global one.

    .. math::
        w_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } w \\
        v_k &\leftarrow v_k - \eta\, (\nabla L_k(v_k) + \lambda (v_k - w)) \quad \text{for the personal epochs} \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k

    :math:`v_k` is held near the :math:`w` that the round began with.
    """

    name = "ditto"
    private = True

    lam: float = option(1.0, "lambda, how strongly the personal model is held near the global one")
    personal_epochs: int = option(1, "passes over a client's data for the personal model in a round")
    personal_steps: int = option(0, "steps of the personal model in a round instead of passes; 0: passes")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")
        self.check("personal_steps", self.personal_steps >= 0, "not negative")

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its personal model v_k, which starts from the common initial weights."""
        return {"personal": model.state()}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """Train the personal model near the received one; it does not see what was sent."""
        if client.stage == "finish":
            return self.fine_tune_if_new(client, received["model"])
        client.model.load(client["personal"])
        steps = Steps(client, self, anchor=received["model"], lam=self.lam)
        client.report["personal_loss"] = steps.train(
            epochs=self.personal_epochs, steps=self.personal_steps, batches="personal"
        )
        client["personal"] = client.model.state()

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models, weighted by samples."""
        server["model"] = uploads.average()

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's personal model v_k."""
        return {"personal": self.personal_of(client, received["model"])}
