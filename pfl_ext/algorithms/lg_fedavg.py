"""LG-FedAvg: representations of the clients' own under a common head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Uploads, WorkingModel, joined, local_sgd, option

from .fedavg import average

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

    head: str = option("", "module whose parameters are shared; empty: the last layer")

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """g."""
        return {"head": model.state()[model.head(self.head)]}

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """l_k, from the common initial weights."""
        return {"representation": model.state()[~model.head(self.head)]}

    def received(self) -> tuple[str, ...]:
        """g."""
        return ("head",)

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train both parts together, keep one, send the other."""
        head = client.model.head(self.head)
        client.model.load(joined(head, received["head"], client["representation"]))
        client.report["loss"] = local_sgd(client, self)
        state = client.model.state()
        client["representation"] = state[~head]
        return {"head": state[head]}

    def server_round(self, server: Server, uploads: Uploads) -> None:
        """Average the heads, weighted by samples."""
        server["head"] = average(uploads, "head")

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(l_k, g)."""
        return {"personal": joined(client.model.head(self.head), received["head"], client["representation"])}
