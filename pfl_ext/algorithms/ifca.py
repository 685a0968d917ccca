"""IFCA: several models, of which each client trains the one that suits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, option

from .components import drawn_states, kept_buffers, sent_states, states

__all__ = ["IFCA"]


@dataclass(frozen=True)
class IFCA(Method):
    r"""IFCA (Ghosh et al., 2020), Algorithm 1 with model averaging: iterative federated clustering.

    .. math::
        \hat\jmath_k &= \arg\min_j L_k(\theta_j) \\
        \tilde\theta_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } \theta_{\hat\jmath_k} \\
        \theta_j &\leftarrow \mathrm{mean}\, \{\tilde\theta_k : \hat\jmath_k = j\}

    All models are sent to every client of a round. A model that no client chose stays as it is.

    Readings. Clients count alike, as in the paper. The models begin as different draws of the network's weights, the
    first as the network came. :math:`L_k` is taken over all training data of the client, in evaluation mode. The
    evaluated model of a client, also of one that never took part, is the one it would choose now.

    The authors' code (MNIST) takes full-batch steps, chooses on all training data too and has the same mean; on test
    data it lets the loss of these very data choose the model, so that their labels are used. Neither PFLlib nor
    FL-bench has the method.
    """

    name = "ifca"
    refuses = (("weighting", "its equations count clients alike"),)

    clusters: int = option(2, "how many models there are; 1 is FedAvg with clients that count alike")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("clusters", self.clusters >= 1, "at least 1")

    def set_up(self, server: Server) -> None:
        """The server keeps the clusters' models theta_j as the rows of one tensor."""
        server["models"] = drawn_states(server, self.clusters)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send every cluster's model."""
        return sent_states(server["models"])

    def _choice(self, client: Client, models: list[Tensor]) -> int:
        losses = []
        for state in models:
            client.model.load(state)
            losses.append(client.loss(client.train))
        return losses.index(min(losses))

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Choose the model with the lowest loss on the client's data, and train it."""
        models = states(received)
        j = self._choice(client, models)
        client.model.load(models[j])
        client.report |= {"loss": Steps(client, self).train(), "cluster": float(j)}
        return {"model": client.model.state(), "cluster": torch.tensor([float(j)])}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """The mean of those that chose a model."""
        chosen, counts = [int(j) for j in uploads.each("cluster")], uploads.weights(equally=True)
        models = server["models"].clone()
        for j in sorted(set(chosen)):
            inside = [n * int(c == j) for n, c in zip(counts, chosen, strict=True)]
            weights = [n / sum(inside) for n in inside]
            models[j] = kept_buffers(server, models[j], uploads.sum("model", weights))
        server["models"] = models

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model that the client would choose now."""
        models = states(received)
        return {"personal": models[self._choice(client, models)]}
