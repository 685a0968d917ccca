"""Ditto: a personal model beside the global one, held near it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Uploads, WorkingModel, fine_tune, local_sgd, option

from .fedavg import average

__all__ = ["Ditto"]


@dataclass(frozen=True)
class Ditto(Method):
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
    fine_tune_epochs: int = option(
        0, "passes by which clients that never took part fine-tune the global model after the last round"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")
        self.check("fine_tune_epochs", self.fine_tune_epochs >= 0, "not negative")

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """v_k, from the common initial weights."""
        return {"personal": model.state()}

    def trained_parameters(self, model: WorkingModel) -> int:
        """Those of two models."""
        return 2 * super().trained_parameters(model)

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = local_sgd(client, self)
        return {"model": client.model.state()}

    def personal_round(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """Train the personal model near the received one; it does not see what was sent."""
        client.model.load(client["personal"])
        client.report["personal_loss"] = local_sgd(
            client, self, anchor=received["model"], lam=self.lam, epochs=self.personal_epochs, batches="personal"
        )
        client["personal"] = client.model.state()

    def server_round(self, server: dict[str, Tensor], uploads: Uploads) -> None:
        """Average, weighted by samples."""
        server["model"] = average(uploads)

    @property
    def has_personal_stage(self) -> bool:
        """Whether new clients fine-tune."""
        return self.fine_tune_epochs > 0

    def personalize(self, client: Client, received: Mapping[str, Tensor]) -> None:
        """Fine-tune, where the client has no personal model yet."""
        if "personal" not in client:
            fine_tune(client, self, received["model"], self.fine_tune_epochs)

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """w and v_k."""
        return {"global": received["model"], "personal": client["personal"]}
