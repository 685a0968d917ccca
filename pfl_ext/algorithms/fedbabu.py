"""FedBABU: a body that is trained under one head nobody changes, then fine-tuned with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, option

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
        super().__post_init__()
        self.check("fine_tune_epochs", self.fine_tune_epochs >= 0, "not negative")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Clients fine-tune after the last round."""
        return ("finish",)

    def set_up(self, server: Server) -> None:
        """The body, and h, which is not sent."""
        head = server.model.part(self.head)
        server["body"], server["head"] = (~head).read(), head.read()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """h, which no client ever sets, and the fine-tuned model."""
        return {"head": model.part(self.head).read(), "personal": model.state()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the body; every client has the same head h."""
        return {"body": server["body"]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the body under the fixed head h, and send it."""
        head = client.model.part(self.head)
        head.write(client["head"])
        (~head).write(received["body"])
        client.report["loss"] = Steps(client, self, params=(~head).parameters).train()
        return {"body": (~head).read()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the bodies, weighted by samples."""
        server["body"] = uploads.average("body")

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """Fine-tune what the option ``fine_tune`` names, from the received body."""
        head = client.model.part(self.head)
        head.write(client["head"])
        (~head).write(received["body"])
        params = {"full": None, "head": head.parameters, "body": (~head).parameters}[self.fine_tune]
        steps = Steps(client, self, params=params)
        client.report["fine_tune_loss"] = steps.train(epochs=self.fine_tune_epochs, batches="fine-tune")
        client["personal"] = client.model.state()

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fine-tuned model once it is there."""
        return {"personal": client["personal"]} if "personal" in client else {}

    def global_model(self, server: Mapping[str, Tensor], model: WorkingModel) -> Tensor:
        """The server's body under the initial head h."""
        head = model.part(self.head)
        return model.whole((~head, server["body"]), (head, server["head"]))
