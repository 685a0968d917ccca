"""FedAMP: the server mixes each client a model of its own, the more of another client's the nearer that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, option
from pfl_ext.ops import squared_distance, weighted_average

__all__ = ["FedAMP"]


@dataclass(frozen=True)
class FedAMP(Method):
    r"""FedAMP (Huang et al., 2021), Algorithm 1: attentive message passing.

    With :math:`A(x) = 1 - e^{-x / \sigma}` client k receives its cloud model :math:`u_k` and trains its own:

    .. math::
        u_k &= \sum_j \xi_{kj} w_j, \quad
            \xi_{kj} = \alpha A'(\|w_k - w_j\|^2) = \tfrac{\alpha}{\sigma} e^{-\|w_k - w_j\|^2 / \sigma}
            \text{ for } j \ne k, \quad \xi_{kk} = 1 - \sum_{j \ne k} \xi_{kj} \\
        w_k &\leftarrow \arg\min_v \approx L_k(v) + \tfrac{\lambda}{2 \alpha} \|v - u_k\|^2
            \text{ by E epochs of SGD from } u_k

    There is no global model.

    Readings. The paper wants :math:`\alpha` small enough that :math:`u_k` is a convex combination; where the
    :math:`\xi_{kj}` of others add up to more than 1 they are divided by their sum. Distances are those of the
    parameters; buffers are mixed by the same weights. All clients take part in the paper: here the server mixes the
    newest model of each that ever did, and one that never did receives, and is evaluated with, the plain mean of them.
    :math:`\alpha` stays what it is; with the defaults no :math:`\xi_{kk}` can fall to 0 with up to ten clients. At
    PFLlib's :math:`\alpha = \sigma = 1` two others that are near are enough for it to be negative.

    The server has the only copy of :math:`w_k` that the run keeps, so that there are not two for each client: the
    steps begin at :math:`u_k`, and the model that is evaluated is handed out by the server, which is not counted.

    PFLlib begins at :math:`w_k`; its proximal term takes the root of the squared norm, of parameters without a
    gradient: it has no effect. Its :math:`\xi_{kk}` may be negative, and it mixes the models of the round before alone.
    FL-bench does not have the method.
    """

    name = "fedamp"
    private = True
    refuses = (("weighting", "its weights are those of how alike clients' models are"),)

    alpha: float = option(0.1, "alpha, step size of the message passing")
    sigma: float = option(1.0, "sigma: squared distances far above it count as no likeness at all")
    lam: float = option(0.1, "lambda; lam / alpha, below 2 / lr, is how strongly a model is held near its cloud model")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("alpha", self.alpha > 0, "above 0")
        self.check("sigma", self.sigma > 0, "above 0")
        # Beyond it the proximal term alone makes each step overshoot further than the last.
        most = 2 * self.alpha / self.lr
        self.check("lam", 0 <= self.lam < most, f"from 0 to below 2 alpha / lr = {most:g}")

    def set_up(self, server: Server) -> None:
        """A row for each client: w_k, squared distances to the others, xi_k; and who has sent something so far."""
        clients, state = server.clients, server.model.state()
        server["models"] = state.repeat(clients, 1)
        server["distances"] = torch.zeros(clients, clients, dtype=torch.float64)
        server["attention"] = torch.eye(clients, dtype=torch.float64)
        server["known"] = torch.zeros(clients, dtype=torch.bool)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """u_k; for the evaluation w_k, which a client has that took part."""
        if stage == "evaluate" and server["known"][client]:
            return {"model": server["models"][client]}
        weights = server["attention"][client]
        mixed = weights.nonzero().flatten().tolist()
        models = [[server["models"][j]] for j in mixed]
        return {"model": weighted_average(models, weights[mixed].tolist(), normalize=False)[0]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train near the cloud model, from it."""
        u = received["model"]
        client.model.load(u)
        client.report["loss"] = Steps(client, self, anchor=u, lam=self.lam / self.alpha).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Take over the new models, and pay attention anew."""
        models, distances, known = server["models"], server["distances"], server["known"]
        parameters = server.model.parameters
        for k, w in uploads.one_by_one("model"):
            # Buffers that the clients do not send stay as they are.
            models[k] = torch.where(server.model.stays, models[k], w)
            known[k] = True
        for k in uploads.clients:
            for j in known.nonzero().flatten().tolist():
                distance = squared_distance([models[k, :parameters]], [models[j, :parameters]])
                distances[k, j] = distances[j, k] = float(distance)
        server["attention"] = self.attention(distances, known)

    def attention(self, distances: Tensor, known: Tensor) -> Tensor:
        r""":math:`\xi` of the squared distances between those clients that are known; the others' rows are a mean."""
        others = self.alpha / self.sigma * torch.exp(-distances / self.sigma) * known
        others.fill_diagonal_(0.0)
        others /= others.sum(1, keepdim=True).clamp(min=1.0)
        own = torch.diag(1 - others.sum(1)).clamp(min=0.0)  # what rounding leaves may be below 0
        return torch.where(known[:, None], others + own, known / known.sum())

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's model w_k, which the server has the only copy of."""
        return {"personal": received["model"]}
