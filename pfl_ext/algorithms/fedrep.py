"""FedRep: a common representation under heads of the clients' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Uploads, WorkingModel, joined, local_sgd, option

from .fedavg import average

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
        """Check the options."""
        super().__post_init__()
        self.check("head_epochs", self.head_epochs >= 0, "not negative")

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """The representation."""
        return {"representation": model.state()[~model.head(self.head)]}

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """The head, from the common initial weights."""
        return {"head": model.state()[model.head(self.head)]}

    def received(self) -> tuple[str, ...]:
        """The representation."""
        return ("representation",)

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The head under the received representation, then the representation under the new head."""
        model, head = client.model, client.model.head(self.head)
        model.load(joined(head, client["head"], received["representation"]))
        client.report["head_loss"] = local_sgd(
            client, self, only=model.parameters_in(head), epochs=self.head_epochs, batches="head"
        )
        client.report["loss"] = local_sgd(client, self, only=model.parameters_in(~head))
        state = model.state()
        client["head"] = state[head]
        return {"representation": state[~head]}

    def server_round(self, server: dict[str, Tensor], uploads: Uploads) -> None:
        """Average the representations, weighted by samples."""
        server["representation"] = average(uploads, "representation")

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's head on the common representation."""
        return {"personal": joined(client.model.head(self.head), client["head"], received["representation"])}
