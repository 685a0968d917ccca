"""FedPAC: features are aligned by class centroids, heads combined by what they are worth to each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Batch, Client, Features, Method, Server, Stage, Steps, Uploads, option

from .prototypes import class_means, head_sizes, pull

__all__ = ["FedPAC", "combination"]

_SMALL = 1e-3  # weights below it are none, as in the authors' code


@dataclass(frozen=True)
class FedPAC(Method):
    r"""FedPAC (Xu, Tong and Huang, 2023), Algorithm 1: feature alignment and classifier collaboration.

    With features z of the representation :math:`\phi`, a head :math:`h_k`, class shares :math:`p_{kc}` and
    :math:`\mu_{kc}` the mean features of class c under the received :math:`\phi`:

    .. math::
        V_k &= \tfrac{1}{n_k} \Big(\sum_c p_{kc}\, \mathrm{mean}_{x \text{ of } c} \|z(x)\|^2
            - \sum_c p_{kc}^2 \|\mu_{kc}\|^2\Big), \quad H_{kc} = p_{kc}\, \mu_{kc} \\
        h_k &\leftarrow \text{head epochs of SGD on } L_k(\phi, \cdot) \text{ from } h_k \\
        \phi_k &\leftarrow \text{E epochs of SGD on } L_k(\cdot, h_k)
            + \lambda\, \mathrm{mean}_x \tfrac1d \|z(x) - \bar c_{y(x)}\|^2 \text{ from } \phi \\
        \phi &\leftarrow \sum_k \tfrac{n_k}{n} \phi_k, \quad
            \bar c_j \leftarrow \sum_k \tfrac{n_{kj}}{n_j} \mu_j(\phi_k) \\
        h_k &\leftarrow \sum_j \alpha_{kj} h_j, \quad \alpha_k = \arg\min_{\alpha \ge 0,\, \sum \alpha = 1}
            \sum_j \alpha_j^2 V_j + \sum_c \Big\|\sum_j \alpha_j (H_{kc} - H_{jc})\Big\|^2

    Readings. The distance to a centroid is a mean over features, as in the authors' code, and a class that nobody has
    sent has none. The quadratic programme is solved exactly, by active sets. Heads are combined among the clients of a
    round; the others keep theirs, and one that never took part has the mean of the last round's. Evaluated is the
    global representation under the client's combined head. Buffers belong to the part whose modules they are in.

    PFLlib averages centroids over clients alike, and where its solver fails takes a head by the client's number in
    place of its position in the round.
    """

    name = "fedpac"
    needs = "classes"

    head: str = option("", "module that is the head; empty: the last layer")
    lam: float = option(1.0, "lambda, how strongly features are drawn to the centroids")
    head_epochs: int = option(1, "passes over a client's data for the head in a round")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")
        self.check("head_epochs", self.head_epochs >= 0, "not negative")

    def set_up(self, server: Server) -> None:
        """phi; a head for each client, the mean head; a centroid for each class, and whether there is one."""
        head = server.model.part(self.head)
        features, classes = head_sizes(server.model, self.head, "FedPAC")
        server["representation"], server["head"] = (~head).read(), head.read()
        server["heads"] = head.read().repeat(server.clients, 1)
        server["has_head"] = torch.zeros(server.clients, dtype=torch.bool)
        server["centroids"] = head.read().new_zeros(classes, features)
        server["known"] = head.read().new_zeros(classes)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """phi, the client's head, and to those that train the centroids."""
        head = server["heads"][client] if server["has_head"][client] else server["head"]
        sent = {"representation": server["representation"], "head": head}
        return sent | ({name: server[name] for name in ("centroids", "known")} if stage == "train" else {})

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Statistics of the received features; the head; the representation towards the centroids."""
        head, known = client.model.part(self.head), received["known"] > 0
        head.write(received["head"])
        (~head).write(received["representation"])
        variance, shares = self.statistics(client, len(known))
        steps = Steps(client, self, params=head.parameters)
        client.report["head_loss"] = steps.train(epochs=self.head_epochs, batches="head")
        with Features(client.model, self.head) as features:

            def loss(outputs: Tensor, batch: Batch) -> Tensor:
                away = pull(features.last, batch.targets, received["centroids"], known)
                return client.task.loss(outputs, batch.targets) + self.lam * away

            client.report["loss"] = Steps(client, self, params=(~head).parameters).train(loss)
        means, counts = class_means(*client.features(client.train, self.head), classes=len(known))
        return {
            "representation": (~head).read(), "head": head.read(), "centroids": means, "counts": counts,
            "variance": variance, "shares": shares,
        }  # fmt: skip

    def statistics(self, client: Client, classes: int) -> tuple[Tensor, Tensor]:
        """V_k and H_k of the working model's features."""
        z, targets = client.features(client.train, self.head)
        means, counts = class_means(z, targets, classes)
        shares = counts / counts.sum()
        variance = z.square().sum(1).mean() - (shares.square() * means.square().sum(1)).sum()
        return variance[None] / len(z), shares[:, None] * means

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the representations and centroids; combine heads for each client."""
        server["representation"] = uploads.average("representation")
        server["head"] = uploads.average("head", equally=True)
        counts = torch.stack(uploads.each("counts"))
        total = sum(n[:, None] * c for n, c in zip(counts, uploads.each("centroids"), strict=True))
        sent = counts.sum(0) > 0
        server["centroids"] = torch.where(
            sent[:, None], total / counts.sum(0).clamp(min=1)[:, None], server["centroids"]
        )
        server["known"] = torch.where(sent, 1.0, server["known"])
        variances, shares = torch.cat(uploads.each("variance")), torch.stack(uploads.each("shares")).flatten(1)
        heads = server["heads"].clone()
        for place, k in enumerate(uploads.clients):
            apart = shares[place] - shares
            weights = combination(torch.diag(variances) + apart @ apart.T)
            heads[k] = uploads.sum("head", weights)
            server["has_head"][k] = True
        server["heads"] = heads

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The received representation phi under the client's head h_k."""
        head = client.model.part(self.head)
        return {"personal": client.model.whole((~head, received["representation"]), (head, received["head"]))}


def combination(p: Tensor) -> list[float]:
    r""":math:`\arg\min \alpha^\top P \alpha` over :math:`\alpha \ge 0,\, \sum \alpha = 1`, small weights left out.

    Up to its scale it is the solution of :math:`\min_{x \ge 0} \frac12 x^\top P x - \sum x`, whose active sets are
    searched as by Lawson and Hanson: x moves towards the solution on the free set until a number would be negative.
    """
    p = p.double().cpu()
    # Equal clients without a variance would be singular.
    p = p + torch.eye(len(p), dtype=p.dtype) * (1e-12 * float(p.diagonal().mean()) + 1e-30)
    x, free = torch.zeros(len(p), dtype=p.dtype), torch.zeros(len(p), dtype=torch.bool)
    for _ in range(10 * len(p)):
        slope = 1 - p @ x
        if bool(free.all()) or float(slope[~free].max()) <= 1e-9:
            break
        free[torch.where(free, -torch.inf, slope).argmax()] = True
        while True:
            target = torch.zeros_like(x)
            target[free] = torch.linalg.solve(p[free][:, free], torch.ones(int(free.sum()), dtype=p.dtype))
            negative = free & (target <= 0)
            if not bool(negative.any()):
                x = target
                break
            reach = (x[negative] / (x[negative] - target[negative])).min()
            x = x + reach * (target - x)
            free &= x > 1e-15 * float(x.max())
            x[~free] = 0
            if not bool(free.any()):
                break
    weights = x / x.sum()
    weights = torch.where(weights > _SMALL, weights, 0.0)
    return (weights / weights.sum()).tolist()
