"""LG-FedAvg: representations of the clients' own under a common head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, option

__all__ = ["LGFedAvg"]


@dataclass(frozen=True)
class LGFedAvg(Method):
    r"""LG-FedAvg (Liang et al., 2020), Algorithm 1: FedPer the other way round.

    .. math::
        (\ell_k, g_k) &\leftarrow \text{E epochs of SGD on } L_k \text{ from } (\ell_k, g) \\
        g &\leftarrow \sum_k \tfrac{n_k}{n} g_k

    Only the head :math:`g` is sent; the representation :math:`\ell_k` stays with the client, and its buffers with it.

    Readings. The representation learns from the labels alone: the paper allows for auxiliary losses of it, such as an
    adversarial one. All clients start from the common initial weights; the paper also starts from a FedAvg run's.
    """

    name = "lg-fedavg"

    head: str = option("", "module whose parameters are shared, or several with commas; empty: the last layer")

    def set_up(self, server: Server) -> None:
        """The server keeps the head g."""
        server["head"] = server.model.part(self.head).read()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its representation l_k, which starts from the common initial weights."""
        return {"representation": (~model.part(self.head)).read()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the head g."""
        return {"head": server["head"]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train both parts together, keep one, send the other."""
        head = client.model.part(self.head)
        head.write(received["head"])
        (~head).write(client["representation"])
        client.report["loss"] = Steps(client, self).train()
        client["representation"] = (~head).read()
        return {"head": head.read()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the heads, weighted by samples."""
        server["head"] = uploads.average("head")

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's representation l_k under the received head g."""
        head = client.model.part(self.head)
        return {"personal": client.model.whole((~head, client["representation"]), (head, received["head"]))}
