"""FedAS: the received layers are aligned to the client before they are trained, and count by what they learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Batch, Client, Features, Method, Server, Stage, Steps, Uploads, WorkingModel, option

from .prototypes import class_means, pull

__all__ = ["FedAS"]


@dataclass(frozen=True)
class FedAS(Method):
    r"""FedAS (Yang, Huang and Ye, 2024): alignment of the federated parameters, and synchronisation of the clients.

    With a representation :math:`\phi` that is shared, a head :math:`h_k` that stays, and :math:`P_{kc}` the mean
    features of class c under the client's own last :math:`\phi_k`:

    .. math::
        \phi_k &\leftarrow \text{alignment epochs of SGD on } \mathrm{mean}_x \tfrac1d \|z(x) - P_{k, y(x)}\|^2
            \text{ from } \phi \\
        (\phi_k, h_k) &\leftarrow \text{E epochs of SGD on } L_k \text{ from } (\phi_k, h_k) \\
        F_k &= \sum_{\text{batches } b} \|\nabla L_b(\phi_k, h_k)\|^2 \\
        \phi &\leftarrow \sum_k \frac{F_k}{\sum_j F_j} \phi_k

    :math:`F_k` stands for the trace of the Fisher information. Evaluated is :math:`(\phi_k, h_k)` as the last turn left
    it; for a client that never took part, :math:`\phi` under the initial head.

    Readings. As in the authors' code a batch's gradient is squared, not that of each sample, and sums over batches let
    larger clients count for more. The alignment takes a mean over the samples of a batch; theirs adds up the means of
    its classes. In a client's first turn there is no own representation to align to. Buffers belong to the part whose
    modules they are in.

    In PFLlib, the authors' version, all clients of a round align one and the same global model, one after the other.
    It also computes :math:`F_k` of clients that do not take part, for nothing. FL-bench aligns the means of a batch's
    classes.
    """

    name = "fedas"
    needs = "classes"
    refuses = (("weighting", "its weights are those of what clients have learnt"),)

    head: str = option("", "module that stays with the client; empty: the last layer")
    align_epochs: int = option(1, "passes over a client's data for the alignment")
    align_lr: float = option(0.01, "step size of the alignment")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("align_epochs", self.align_epochs >= 0, "not negative")
        self.check("align_lr", self.align_lr > 0, "above 0")

    def set_up(self, server: Server) -> None:
        """The server keeps the representation phi."""
        server["representation"] = (~server.model.part(self.head)).read()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """(phi_k, h_k), from the common initial weights."""
        return {"personal": model.state()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the representation phi."""
        return {"representation": server["representation"]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Align the received representation, train with one's own head, and tell what that was worth."""
        model, head = client.model, client.model.part(self.head)
        model.load(client["personal"])
        prototypes, counts = class_means(*client.features(client.train, self.head), classes=len(client.label_counts()))
        (~head).write(received["representation"])
        if "personal" in client:
            client.report["alignment_loss"] = self._align(client, prototypes, counts > 0)
        client.report["loss"] = Steps(client, self).train()
        client["personal"] = model.state()
        fisher = self._fisher(client)
        client.report["fisher"] = float(fisher)
        return {"representation": (~head).read(), "fisher": fisher[None]}

    def _align(self, client: Client, prototypes: Tensor, known: Tensor) -> float:
        steps = Steps(client, self, params=(~client.model.part(self.head)).parameters, lr=self.align_lr)
        with Features(client.model, self.head) as features:

            def loss(outputs: Tensor, batch: Batch) -> Tensor:
                return pull(features.last, batch.targets, prototypes, known)

            return steps.train(loss, epochs=self.align_epochs, batches="alignment")

    def _fisher(self, client: Client) -> Tensor:
        """The trace F_k, found in evaluation mode."""
        client.model.module.eval()
        steps, total = Steps(client, self), torch.zeros((), dtype=torch.float64)
        for batch in client.batches(self.batch_size, name="fisher"):
            _, gradients = steps.gradients(batch)
            total += float(torch.stack([g.square().sum() for g in gradients]).sum())
        return total

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the representations, weighted by what the clients have learnt."""
        worth = torch.cat(uploads.each("fisher"))
        if not bool(worth.any()):  # nothing is left to learn anywhere
            worth = torch.ones_like(worth)
        server["representation"] = uploads.sum("representation", (worth / worth.sum()).tolist())

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(phi_k, h_k); phi under the initial head for a client that never took part."""
        if "personal" in client:
            return {"personal": client["personal"]}
        head = client.model.part(self.head)
        own = head.of(client["personal"])
        return {"personal": client.model.whole((~head, received["representation"]), (head, own))}
