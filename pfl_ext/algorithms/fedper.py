"""FedPer: common base layers under personal ones, trained together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Uploads, WorkingModel, joined, local_sgd, option

from .fedavg import average

__all__ = ["FedPer"]


@dataclass(frozen=True)
class FedPer(Method):
    r"""FedPer (Arivazhagan et al., 2019), Algorithms 1 and 2: the last layers stay with the client.

    .. math::
        (B_k, P_k) &\leftarrow \text{E epochs of SGD on } L_k \text{ from } (B, P_k) \\
        B &\leftarrow \sum_k \tfrac{n_k}{n} B_k

    The personal layers :math:`P_k` are never sent. Buffers belong to the part whose modules they are in. FedRep differs
    in that it trains the two parts one after the other.
    """

    name = "fedper"

    head: str = option("", "module whose parameters stay with the client; empty: the last layer")

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """B."""
        return {"base": model.state()[~model.head(self.head)]}

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """P_k, from the common initial weights."""
        return {"head": model.state()[model.head(self.head)]}

    def received(self) -> tuple[str, ...]:
        """B."""
        return ("base",)

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train both parts together, keep one, send the other."""
        head = client.model.head(self.head)
        client.model.load(joined(head, client["head"], received["base"]))
        client.report["loss"] = local_sgd(client, self)
        state = client.model.state()
        client["head"] = state[head]
        return {"base": state[~head]}

    def server_round(self, server: Server, uploads: Uploads) -> None:
        """Average the bases, weighted by samples."""
        server["base"] = average(uploads, "base")

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(B, P_k)."""
        return {"personal": joined(client.model.head(self.head), client["head"], received["base"])}
