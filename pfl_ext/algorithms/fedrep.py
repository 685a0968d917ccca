"""FedRep: a common representation under heads of the clients' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, option

__all__ = ["FedRep"]


@dataclass(frozen=True)
class FedRep(Method):
    r"""FedRep (Collins et al., 2021), Algorithm 1, with E local epochs for the representation.

    .. math::
        h_k &\leftarrow \text{head epochs of SGD on } L_k(\cdot, \phi) \text{ from } h_k \\
        \phi_k &\leftarrow \text{E epochs of SGD on } L_k(h_k, \cdot) \text{ from } \phi \\
        \phi &\leftarrow \sum_k \tfrac{n_k}{n} \phi_k

    The head's numbers are never sent. Buffers belong to the part whose modules they are in.
    """

    name = "fedrep"

    head: str = option("", "module whose parameters stay with the client; empty: the last layer")
    head_epochs: int = option(5, "passes over a client's data for the head in a round")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("head_epochs", self.head_epochs >= 0, "not negative")

    def set_up(self, server: Server) -> None:
        """The server keeps the representation, all but the head."""
        server["representation"] = (~server.model.part(self.head)).read()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The head, from the common initial weights."""
        return {"head": model.part(self.head).read()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the representation, all but the head."""
        return {"representation": server["representation"]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The head under the received representation, then the representation under the new head."""
        head = client.model.part(self.head)
        head.write(client["head"])
        (~head).write(received["representation"])
        steps = Steps(client, self, params=head.parameters)
        client.report["head_loss"] = steps.train(epochs=self.head_epochs, batches="head")
        client.report["loss"] = Steps(client, self, params=(~head).parameters).train()
        client["head"] = head.read()
        return {"representation": (~head).read()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the representations, weighted by samples."""
        server["representation"] = uploads.average("representation")

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's head on the common representation."""
        head = client.model.part(self.head)
        return {"personal": client.model.whole((~head, received["representation"]), (head, client["head"]))}
