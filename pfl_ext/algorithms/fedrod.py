"""FedRoD: a generic head with a balanced loss, and a personal head on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import (
    Batch,
    Client,
    Method,
    Server,
    Steps,
    Uploads,
    WorkingModel,
    option,
)

from .new_clients import NewClients

__all__ = ["FedRoD"]


@dataclass(frozen=True)
class FedRoD(NewClients, Method):
    r"""FedRoD (Chen and Chao, 2022), with the linear personal head.

    With the features :math:`z` of a body :math:`\theta`, a generic linear head :math:`\psi`, a personal one
    :math:`\phi_k` and :math:`n_{kc}` training samples of class c at client k,

    .. math::
        \theta_k, \psi_k &\leftarrow \text{E epochs of SGD from } \theta, \psi \text{ on }
            \mathrm{CE}(\psi z + \gamma \log n_k) \quad\text{(balanced softmax)} \\
        \phi_k &\leftarrow \text{personal epochs of SGD on } \mathrm{CE}(\psi_k z + \phi_k z),\;
            \theta_k, \psi_k \text{ fixed} \\
        \theta, \psi &\leftarrow \sum_k \tfrac{n_k}{n} (\theta_k, \psi_k)

    The generic model is :math:`\psi z`, the personal one :math:`(\psi_k + \phi_k) z` with the body as the client's last
    turn left it.

    Readings. The paper takes a step of both lines on each batch; here all steps of the first come before those of the
    second, so that the upload can leave between them. Both heads are linear in the same features, so their sum is one
    head: the second line trains it, and :math:`\phi_k` is what it gained. With batch normalisation the features are
    those of training mode. The variant whose personal head comes from a hypernetwork is not there.
    """

    name = "fedrod"
    needs = "classes"

    head: str = option("", "module that is the generic head, a linear layer; empty: the last layer")
    gamma: float = option(1.0, "exponent of the class counts in the balanced softmax; 0: plain cross-entropy")
    personal_epochs: int = option(1, "passes over a client's data for the personal head in a round")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.check("gamma", self.gamma >= 0, "not negative")
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """phi_k, zero at first, and the personal model."""
        return {"head": torch.zeros_like(model.part(self.head).read()), "personal": model.state()}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Body and generic head, by the balanced softmax."""
        offset = (client.label_counts().to(client.model.dtype) ** self.gamma).log()

        def balanced(logits: Tensor, batch: Batch) -> Tensor:
            return client.task.loss(logits + offset, batch.targets)

        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train(balanced)
        return {"model": client.model.state()}

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """The personal head, on the body and the generic head that were sent."""
        if client.stage == "finish":
            return self.fine_tune_if_new(client, received["model"])
        model, head = client.model, client.model.part(self.head)
        generic = head.of(sent["model"])
        model.load(sent["model"])
        # Weight decay of phi alone: what is trained is the sum of both heads, which it draws to the generic one.
        anchor = [p.detach().clone() for p in head.parameters]
        head.write(generic + client["head"])
        steps = Steps(client, self, params=head.parameters, anchor=anchor, lam=self.weight_decay, weight_decay=0.0)
        client.report["personal_loss"] = steps.train(epochs=self.personal_epochs, batches="personal")
        body = (~head).of(sent["model"])
        client["head"], client["personal"] = head.read() - generic, model.whole((~head, body), (head, head.read()))

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average, weighted by samples."""
        server["model"] = uploads.average()

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The personal model."""
        return {"personal": self.personal_of(client, received["model"])}
