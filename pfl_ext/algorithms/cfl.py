"""CFL: a federation that comes to rest while its clients do not is cut in two, by the directions they pull in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, option

from .components import kept_buffers

__all__ = ["CFL", "bipartition"]


@dataclass(frozen=True)
class CFL(Method):
    r"""CFL (Sattler, Müller and Samek, 2020): clustered federated learning.

    All clients begin in one cluster c with a model :math:`\theta_c`. In each round

    .. math::
        \Delta_k &= (\text{E epochs of SGD on } L_k \text{ from } \theta_c) - \theta_c, \quad k \in c \\
        \text{if } &\Big\|\sum_{k \in c} \tfrac{n_k}{n_c} \Delta_k\Big\| < \epsilon_1 \text{ and }
            \max_{k \in c} \|\Delta_k\| > \epsilon_2: \text{ cut c in } c_1, c_2 \text{ such that }
            \max_{i \in c_1, j \in c_2} \cos(\Delta_i, \Delta_j) \text{ is smallest} \\
        \theta_c &\leftarrow \theta_c + \sum_{k \in c} \tfrac{n_k}{n_c} \Delta_k

    for each cluster, after it was cut.

    Readings. The cut joins the most similar pairs until two groups are left, which is the smallest such maximum. The
    norms are those of parameters. The paper has all clients in each round: a cluster is cut only in a round in which
    all its members took part. A client that joins later begins in the first cluster. Before round ``first_cut`` nothing
    is cut, as :math:`\epsilon` are absolute and the first rounds are the largest.

    The authors' code weighs clients alike, in the norm and in the average, and leaves the cut to agglomerative
    clustering by complete linkage, which joins by the least similar pair of two groups: another cut than that of the
    equation. The defaults of :math:`\epsilon_1` and :math:`\epsilon_2` are its values.

    FL-bench joins by the least similar pair too, and takes positions in a cluster for
    clients' numbers, so that its second cut is of the wrong ones. PFLlib does not have the method.
    """

    name = "cfl"
    private = True
    refuses = (("weighting", "its clusters weigh clients by their samples"),)

    eps1: float = option(0.4, "epsilon_1: a cluster is at rest where its mean step is shorter")
    eps2: float = option(1.6, "epsilon_2: and its clients are not where one's step is longer")
    first_cut: int = option(20, "the first round in which a cluster may be cut")
    smallest: int = option(2, "clusters of no more clients than this stay whole")
    most: int = option(16, "how many clusters there may be")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("eps1", self.eps1 >= 0, "not negative")
        self.check("eps2", self.eps2 >= 0, "not negative")
        self.check("first_cut", self.first_cut >= 1, "at least 1")
        self.check("smallest", self.smallest >= 1, "at least 1")
        self.check("most", self.most >= 1, "at least 1")

    def set_up(self, server: Server) -> None:
        """theta_c, a row for each cluster that there may be, each client's cluster, and how many there are."""
        server["models"] = server.model.state().repeat(min(self.most, server.clients), 1)
        server["cluster"] = torch.zeros(server.clients, dtype=torch.int64)
        server["clusters"] = torch.ones(1, dtype=torch.int64)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the model of the client's cluster."""
        return {"model": server["models"][int(server["cluster"][client])]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the cluster's model."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Cut what is at rest; average each cluster."""
        for cluster in range(int(server["clusters"])):
            members = (server["cluster"][: server.members] == cluster).nonzero().flatten().tolist()
            there = set(members) <= set(uploads.clients) and int(server["clusters"]) < len(server["models"])
            if there and len(members) > self.smallest and server.round >= self.first_cut:
                self._cut(server, uploads, cluster, members)
        models = server["models"].clone()
        for cluster in range(int(server["clusters"])):
            weights = self._weights(server, uploads, cluster)
            if any(weights):
                models[cluster] = kept_buffers(server, models[cluster], uploads.sum("model", weights))
        server["models"] = models
        server.report["clusters"] = float(server["clusters"])

    def _weights(self, server: Server, uploads: Uploads, cluster: int) -> list[float]:
        """n_k / n_c of the cluster's clients, 0 of all others."""
        inside = [
            n * int(server["cluster"][k] == cluster) for k, n in zip(uploads.clients, uploads.weights(), strict=True)
        ]
        return [n / max(sum(inside), 1) for n in inside]

    def _cut(self, server: Server, uploads: Uploads, cluster: int, members: list[int]) -> None:
        """Cut a cluster in two, if it is at rest and its clients are not."""
        parameters, theta = slice(server.model.parameters), server["models"][cluster]
        mean = uploads.sum("model", self._weights(server, uploads, cluster)) - theta
        steps = {k: (w - theta)[parameters] for k, w in uploads.one_by_one("model") if k in members}
        longest = max(float(step.norm()) for step in steps.values())
        if not (float(mean[parameters].norm()) < self.eps1 and longest > self.eps2):
            return
        rows = torch.nn.functional.normalize(torch.stack([steps[k] for k in members]).double(), eps=1e-30)
        second = bipartition(rows @ rows.T)
        clusters, models, new = server["cluster"].clone(), server["models"].clone(), int(server["clusters"])
        clusters[torch.tensor(members)[second]], models[new] = new, theta
        server |= {"cluster": clusters, "models": models, "clusters": server["clusters"] + 1}

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's personal model is the model of its cluster."""
        return {"personal": received["model"]}


def bipartition(similarity: Tensor) -> Tensor:
    """Which rows are in another group than the first row, such that the largest similarity across is smallest."""
    count = len(similarity)
    group = list(range(count))
    pairs = [(float(similarity[i, j]), i, j) for i in range(count) for j in range(i)]
    for _, i, j in sorted(pairs, reverse=True):
        if len(set(group)) == 2:
            break
        group = [group[i] if g == group[j] else g for g in group]
    return torch.tensor([g != group[0] for g in group])
