"""FedBABU: a body that is trained under one head nobody changes, then fine-tuned with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Uploads, WorkingModel, joined, local_sgd, option

from .fedavg import average

__all__ = ["FedBABU"]


@dataclass(frozen=True)
class FedBABU(Method):
    r"""FedBABU (Oh et al., 2022), Algorithm 1: a body under one fixed head, then fine-tuning.

    .. math::
        \theta_k &\leftarrow \text{E epochs of SGD on } L_k(\cdot, h) \text{ from } \theta \\
        \theta &\leftarrow \sum_k \tfrac{n_k}{n} \theta_k \\
        v_k &\leftarrow \text{fine-tuning epochs of SGD on } L_k \text{ from } (\theta, h), \text{ after the last round}

    The head h has the common initial weights: it is neither trained in the rounds nor sent. The whole model is
    fine-tuned unless ``fine_tune`` says otherwise.
    """

    name = "fedbabu"

    head: str = option("", "module that is trained only when fine-tuning; empty: the last layer")
    fine_tune_epochs: int = option(5, "passes over a client's data after the last round")
    fine_tune: str = option("full", "what is fine-tuned", choices=("full", "head", "body"))

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.check("fine_tune_epochs", self.fine_tune_epochs >= 0, "not negative")

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """The body."""
        return {"body": model.state()[~model.head(self.head)]}

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """h, which no client ever sets, and the fine-tuned model."""
        return {"head": model.state()[model.head(self.head)], "personal": model.state()}

    def received(self) -> tuple[str, ...]:
        """The body."""
        return ("body",)

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the body alone."""
        model, head = client.model, client.model.head(self.head)
        model.load(joined(head, client["head"], received["body"]))
        client.report["loss"] = local_sgd(client, self, only=model.parameters_in(~head))
        return {"body": model.state()[~head]}

    def server_round(self, server: Server, uploads: Uploads) -> None:
        """Average the bodies, weighted by samples."""
        server["body"] = average(uploads, "body")

    def personalize(self, client: Client, received: Mapping[str, Tensor]) -> None:
        """Fine-tune."""
        model, head = client.model, client.model.head(self.head)
        model.load(joined(head, client["head"], received["body"]))
        only = None if self.fine_tune == "full" else model.parameters_in(head if self.fine_tune == "head" else ~head)
        client.report["fine_tune_loss"] = local_sgd(
            client, self, only=only, epochs=self.fine_tune_epochs, batches="fine-tune"
        )
        client["personal"] = model.state()

    def trained_parameters(self, model: WorkingModel) -> int:
        """Those of the body."""
        return sum(p.numel() for p in model.parameters_in(~model.head(self.head)))

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The body under h, and the fine-tuned model once it is there."""
        found = {"global": joined(client.model.head(self.head), client["head"], received["body"])}
        return found | {"personal": client["personal"]} if "personal" in client else found
