"""FedBN: FedAvg of everything but batch normalisation, which is each client's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from pfl_ext.federation import Client, Method, Server, Uploads, WorkingModel, joined, local_sgd

from .fedavg import average

__all__ = ["FedBN"]


def _norms(model: WorkingModel) -> Tensor:
    """Which numbers of a state are of batch normalisation. By type: `downsample.1` is one, whatever it is called."""
    if not model.has_batch_norm:
        raise ValueError("FedBN keeps batch normalisation with the clients, and this network has none: use fedavg")
    return model.entries(nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class FedBN(Method):
    r"""FedBN (Li et al., 2021): batch normalisation stays with the client.

    .. math::
        (w_k, b_k) &\leftarrow \text{E epochs of SGD on } L_k \text{ from } (w, b_k) \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k

    :math:`b_k` are scale, shift and running statistics of every batch normalisation of the network; never sent.
    """

    name = "fedbn"

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """w."""
        return {"shared": model.state()[~_norms(model)]}

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """b_k, from the common initial weights."""
        return {"norms": model.state()[_norms(model)]}

    def received(self) -> tuple[str, ...]:
        """w."""
        return ("shared",)

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train both parts together, keep one, send the other."""
        norms = _norms(client.model)
        client.model.load(joined(norms, client["norms"], received["shared"]))
        client.report["loss"] = local_sgd(client, self)
        state = client.model.state()
        client["norms"] = state[norms]
        return {"shared": state[~norms]}

    def server_round(self, server: Server, uploads: Uploads) -> None:
        """Average, weighted by samples."""
        server["shared"] = average(uploads, "shared")

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(w, b_k)."""
        return {"personal": joined(_norms(client.model), client["norms"], received["shared"])}
