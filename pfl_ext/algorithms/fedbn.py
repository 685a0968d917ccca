"""FedBN: FedAvg of everything but batch normalisation, which is each client's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from pfl_ext.federation import Client, Method, Part, Server, Stage, Steps, Uploads, WorkingModel

__all__ = ["FedBN"]


def _norms(model: WorkingModel) -> Part:
    """Batch normalisation. By type: `downsample.1` is one, whatever it is called."""
    if not model.has_batch_norm:
        raise ValueError("FedBN keeps batch normalisation with the clients, and this network has none: use fedavg")
    return model.part(nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class FedBN(Method):
    r"""FedBN (Li et al., 2021): batch normalisation stays with the client.

    .. math::
        (w_k, b_k) &\leftarrow \text{E epochs of SGD on } L_k \text{ from } (w, b_k) \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k

    :math:`b_k` are scale, shift and running statistics of every batch normalisation of the network; never sent.
    """

    name = "fedbn"

    def set_up(self, server: Server) -> None:
        """The server keeps w, all but batch normalisation."""
        server["shared"] = (~_norms(server.model)).read()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its batch normalisation b_k, which starts from the common initial weights."""
        return {"norms": _norms(model).read()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send w, all but batch normalisation."""
        return {"shared": server["shared"]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train both parts together, keep one, send the other."""
        norms = _norms(client.model)
        norms.write(client["norms"])
        (~norms).write(received["shared"])
        client.report["loss"] = Steps(client, self).train()
        client["norms"] = norms.read()
        return {"shared": (~norms).read()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average all that is sent, weighted by samples."""
        server["shared"] = uploads.average("shared")

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The shared w with the client's batch normalisation b_k."""
        norms = _norms(client.model)
        return {"personal": client.model.whole((~norms, received["shared"]), (norms, client["norms"]))}
