"""FedPer: common base layers under personal ones, trained together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, option

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

    head: str = option("", "module that stays with the client, or several with commas; empty: the last layer")

    def set_up(self, server: Server) -> None:
        """The server keeps the base layers B."""
        server["base"] = (~server.model.part(self.head)).read()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its personal layers P_k, which starts from the common initial weights."""
        return {"head": model.part(self.head).read()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the base layers B."""
        return {"base": server["base"]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train both parts together, keep one, send the other."""
        head = client.model.part(self.head)
        head.write(client["head"])
        (~head).write(received["base"])
        client.report["loss"] = Steps(client, self).train()
        client["head"] = head.read()
        return {"base": (~head).read()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the bases, weighted by samples."""
        server["base"] = uploads.average("base")

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base layers B under the client's personal layers P_k."""
        head = client.model.part(self.head)
        return {"personal": client.model.whole((~head, received["base"]), (head, client["head"]))}
