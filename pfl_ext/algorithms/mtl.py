"""MTL: personal models that are drawn to their mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, option

__all__ = ["MTL"]


@dataclass(frozen=True)
class MTL(Method):
    r"""Mean-regularised multi-task learning, each client one task (Evgeniou and Pontil, 2004; Smith et al., 2017).

    .. math::
        \min_{v_1, \dots, v_m} \sum_k L_k(v_k) + \tfrac{\lambda}{2} \|v_k - \bar v\|^2,
            \qquad \bar v = \tfrac{1}{m} \sum_k v_k

    A client of a round takes E epochs of steps by the gradient of this sum in :math:`v_k`,

    .. math:: v_k \leftarrow v_k - \eta\, (\nabla L_k(v_k) + \lambda (v_k - \bar v)),

    with the :math:`\bar v` it received. It sends that mean plus the change of its own model; the server moves the mean
    over all m clients that can be selected by the changes of those that were. Where clients join, their initial models
    come into it.

    Readings. Smith et al. learn which tasks are related, for convex losses; this mean is the simplest relation.
    PerAda's table has MTL train and send one full model a client and says no more. There is no global model.
    """

    name = "mtl"
    refuses = (("weighting", "its equations count clients alike"),)

    lam: float = option(0.1, "lambda, how strongly a client's model is drawn to the mean; 0 is standalone")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")

    def set_up(self, server: Server) -> None:
        """The server keeps the mean of all clients' models, and the one that all begin with."""
        server["mean"] = server["initial"] = server.model.state()

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its own model v_k, which starts from the common initial weights."""
        return {"personal": model.state()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the mean of all clients' models."""
        return {"mean": server["mean"]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Go on training, drawn to the mean."""
        before = client["personal"]
        client.model.load(before)
        client.report["loss"] = Steps(client, self, anchor=received["mean"], lam=self.lam).train()
        client["personal"] = client.model.state()
        return {"mean": received["mean"] + (client["personal"] - before)}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Move the mean by the changes of all m models, of which those of clients not selected are zero."""
        change = uploads.average("mean", equally=True) - server["mean"]
        mean = torch.lerp(server["mean"], server["initial"], server.joined / server.members)
        server["mean"] = mean + len(uploads) / server.members * change

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's own model v_k."""
        return {"personal": client["personal"]}
