"""FedRoD: a generic head with a balanced loss, and a personal head on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfl_ext.federation import (
    Batch,
    Client,
    Features,
    Loss,
    Method,
    Server,
    SideModule,
    Stage,
    Steps,
    Uploads,
    WorkingModel,
    option,
)

from .new_clients import NewClients
from .prototypes import head_sizes

__all__ = ["FedRoD", "FedRoDHyper"]


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
    those of training mode. The variant whose personal head comes from a hypernetwork is :class:`FedRoDHyper`.

    PFLlib takes both steps on each batch, and its personal head begins as a copy of the generic one, so that the first
    personal model is twice the generic head. In FL-bench the personal head predicts alone, without the generic one, and
    its loss trains the body too.
    """

    name = "fedrod"
    needs = "classes"

    head: str = option("", "module that is the generic head, a linear layer; empty: the last layer")
    gamma: float = option(1.0, "exponent of the class counts in the balanced softmax; 0: plain cross-entropy")
    personal_epochs: int = option(1, "passes over a client's data for the personal head in a round")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("gamma", self.gamma >= 0, "not negative")
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """phi_k, zero at first, and the personal model."""
        return {"head": torch.zeros_like(model.part(self.head).read()), "personal": model.state()}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Body and generic head, by the balanced softmax."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train(_balanced(client, self.gamma))
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
        """Average the clients' models, weighted by samples."""
        server["model"] = uploads.average()

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's personal model."""
        return {"personal": self.personal_of(client, received["model"])}


def _balanced(client: Client, gamma: float) -> Loss:
    """The loss by the balanced softmax: logits plus gamma times the logarithm of the client's class counts."""
    offset = (client.label_counts().to(client.model.dtype) ** gamma).log()
    return lambda logits, batch: client.task.loss(logits + offset, batch.targets)


@dataclass(frozen=True)
class FedRoDHyper(Method):
    r"""FedRoD (Chen and Chao, 2022) with a hypernetwork for the personal head.

    The personal head is :math:`\phi_k = H(a_k; \nu)`, made of the client's class shares :math:`a_k` by a hypernetwork
    that all share:

    .. math::
        \theta_k, \psi_k &\leftarrow \text{as in FedRoD} \\
        \nu_k &\leftarrow \text{personal epochs of SGD on } \mathrm{CE}((\psi_k + H(a_k; \nu_k))\, z),\;
            \theta_k, \psi_k \text{ fixed, from } \nu \\
        \theta, \psi, \nu &\leftarrow \sum_k \tfrac{n_k}{n} (\theta_k, \psi_k, \nu_k)

    The personal model is :math:`(\psi + H(a_k; \nu))\, z` of what the server has, also of a client that never took
    part: its class shares are all it takes.

    Readings. H is a perceptron of one hidden layer with ReLU; its last layer begins at zero, so that the first personal
    model is the generic one, and its width is our choice. As :math:`\nu_k` is sent, its training is a part of the turn
    and cannot be hidden behind the upload.

    FL-bench (``hyper=1``) asks the hypernetwork once, for the first head of a client that is selected for the first
    time, and then takes one step of it towards the head that was trained, by the sum of squares: no loss of the task
    reaches it. PFLlib does not have the variant.
    """

    name = "fedrod-h"
    needs = "classes"

    head: str = option("", "module that is the generic head, a linear layer; empty: the last layer")
    gamma: float = option(1.0, "exponent of the class counts in the balanced softmax; 0: plain cross-entropy")
    personal_epochs: int = option(1, "passes over a client's data for the hypernetwork in a round")
    hidden: int = option(16, "width of the hypernetwork")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("gamma", self.gamma >= 0, "not negative")
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")
        self.check("hidden", self.hidden >= 1, "at least 1")

    def _hypernetwork(self, model: WorkingModel) -> SideModule:
        """H, from class shares to the trained numbers of the head."""
        outputs = sum(p.numel() for p in model.part(self.head).parameters)
        classes = head_sizes(model, self.head, "FedRoD")[1]
        return SideModule(lambda: _Perceptron(classes, self.hidden, outputs))

    def set_up(self, server: Server) -> None:
        """The server keeps body, generic head and the hypernetwork's numbers nu."""
        super().set_up(server)
        server["hypernetwork"] = self._hypernetwork(server.model).drawn(server.stream("hypernetwork"), server.model)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send all that the server has: body, generic head and hypernetwork."""
        return {name: server[name] for name in ("model", "hypernetwork")}

    def _shares(self, client: Client) -> Tensor:
        counts = client.label_counts().to(client.model.dtype).to(client.model.device)
        return counts / counts.sum()

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Body and generic head, by the balanced softmax; then the hypernetwork on both."""
        model = client.model
        model.load(received["model"])
        client.report["loss"] = Steps(client, self).train(_balanced(client, self.gamma))
        sent, hypernetwork, numbers = model.state(), self._hypernetwork(model), received["hypernetwork"].clone()
        leaves, shares = hypernetwork.leaves(numbers), self._shares(client)
        name = self.head or model.last_layer()
        head = model.module.get_submodule(name)
        generic = {name: p.detach() for name, p in head.named_parameters() if p.requires_grad}
        sizes = [p.numel() for p in generic.values()]
        with Features(model, self.head) as features:

            def loss(logits: Tensor, batch: Batch) -> Tensor:
                gained = hypernetwork(leaves, shares).split_with_sizes(sizes)
                both = {n: p + more.view(p.shape) for (n, p), more in zip(generic.items(), gained, strict=True)}
                outputs = functional_call(head, both, (features.last.detach(),))
                return client.task.loss(outputs, batch.targets)

            steps = Steps(client, self, params=list(leaves.values()))
            client.report["personal_loss"] = steps.train(loss, epochs=self.personal_epochs, batches="personal")
        return {"model": sent, "hypernetwork": numbers}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the models and the hypernetworks, weighted by samples."""
        server["model"], server["hypernetwork"] = uploads.average(), uploads.average("hypernetwork")

    @torch.no_grad()
    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The generic model with what the hypernetwork adds to its head."""
        model = client.model
        model.load(received["model"])
        gained = self._hypernetwork(model)(received["hypernetwork"], self._shares(client))
        parameters = model.part(self.head).parameters
        for p, more in zip(parameters, gained.split_with_sizes([p.numel() for p in parameters]), strict=True):
            p += more.view(p.shape)
        return {"personal": model.state()}


class _Perceptron(nn.Sequential):
    """One hidden layer with ReLU, and a last layer that begins at zero."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        last = nn.Linear(hidden, outputs)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        super().__init__(nn.Linear(inputs, hidden), nn.ReLU(), last)
