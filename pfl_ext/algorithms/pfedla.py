"""pFedLA: a hypernetwork for each client says how much of every other client's layers is in its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.federation import Client, Method, Server, SideModule, Stage, Steps, Uploads, option

from .components import kept_buffers

__all__ = ["LayerWeights", "PFedLA"]


class LayerWeights(nn.Module):
    """From an embedding that is trained with it to weights of all clients, for each layer."""

    def __init__(self, embedding: int, width: int, layers: int, clients: int) -> None:
        super().__init__()
        self.shape = (layers, clients)
        self.embedding = nn.Parameter(torch.randn(embedding))
        layers_of = (nn.Linear(inputs, width) for inputs in (embedding, width, width))
        self.features = nn.Sequential(*(part for linear in layers_of for part in (linear, nn.ReLU())))
        self.heads = nn.Linear(width, layers * clients)
        nn.init.uniform_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)

    def forward(self) -> Tensor:
        """[layers, clients], each row with the sum 1, or all 0."""
        weights = F.relu(self.heads(self.features(self.embedding))).view(self.shape)
        return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


@dataclass(frozen=True)
class PFedLA(Method):
    r"""pFedLA (Ma et al., 2022), Algorithm 1: layer-wise aggregation by hypernetworks.

    With the newest model :math:`\theta_j` of each client and, for client k, a hypernetwork :math:`HN_k` and an
    embedding :math:`v_k`:

    .. math::
        \alpha_k &= HN_k(v_k; \psi_k), \quad
            \bar\theta_k^l = \sum_j \alpha_{kj}^l\, \theta_j^l \quad \text{for each layer l} \\
        \theta_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } \bar\theta_k \\
        (v_k, \psi_k) &\leftarrow (v_k, \psi_k) - \eta\, J_k^\top (\bar\theta_k - \theta_k), \quad
            J_k = \frac{\partial \bar\theta_k}{\partial (v_k, \psi_k)}

    There is no global model. Evaluated is :math:`\bar\theta_k`, also of a client that never took part.

    Readings. Networks and their first numbers are as FL-bench has them: three layers, then weights that ReLU keeps from
    being negative and whose sum is 1; where all are 0 the client has its own layer. A layer is a module with something
    to train; buffers are mixed as their module. The change goes through the hypernetwork as a product with the other
    clients' layers, without a graph of models.

    The step size. The weights of a layer are divided by their sum, and so is every change of them: with 8 clients on
    digits, 15 rounds at the 5e-3 of FL-bench changed a weight of 0.12 by 0.001 at most, so that every client kept the
    plain mean. At 5 clients' own weights came to 0.43 in the mean, and the accuracy from 0.75 to 0.88; at 50 models
    are nearly not mixed any more (0.84). With LeNet on 1,200 images of CIFAR-10, 10 rounds, they were 0.17, 0.37 and
    0.48. The default is 5, by these two looks; the authors' value is not known to us.

    FL-bench adds the change to the client's last model, not to the mixture that was trained, and counts tensors as
    layers. Its step has the other sign, that of :math:`\theta_k - \bar\theta_k`, which leads uphill. Its heuristic
    variant, which keeps the layers of the largest own weights, is not here. PFLlib does not have the method.
    """

    name = "pfedla"
    private = True
    refuses = (("weighting", "its weights are made by hypernetworks"),)

    embedding: int = option(100, "length of a client's embedding")
    width: int = option(100, "width of a hypernetwork")
    server_lr: float = option(5.0, "eta, step size of hypernetworks and embeddings")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("embedding", self.embedding >= 1, "at least 1")
        self.check("width", self.width >= 1, "at least 1")
        self.check("server_lr", self.server_lr > 0, "above 0")

    def _hypernetwork(self, server: Mapping[str, Tensor]) -> SideModule:
        clients, layers = len(server["models"]), int(server["layers"].max()) + 1
        return SideModule(lambda: LayerWeights(self.embedding, self.width, layers, clients))

    def set_up(self, server: Server) -> None:
        """A row for each client: its model, its hypernetwork; and the layer of each number of a state."""
        model = server.model
        server["models"] = model.state().repeat(server.clients, 1)
        server["layers"] = model.layers().entries.clamp(min=0)
        hypernetwork, stream = self._hypernetwork(server), server.stream("hypernetworks")
        server["hypernetworks"] = torch.stack([hypernetwork.drawn(stream, model) for _ in range(server.clients)])

    def _weights(self, server: Mapping[str, Tensor], client: int, weights: Tensor) -> Tensor:
        """alpha_k; a layer without any is the client's own."""
        own = F.one_hot(torch.tensor(client), weights.shape[1]).to(weights)
        return torch.where(weights.sum(1, keepdim=True) > 0, weights, own)

    @torch.no_grad()
    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the model that is mixed for this client."""
        found = self._hypernetwork(server)(server["hypernetworks"][client])
        weights = self._weights(server, client, found)
        mixed = torch.zeros_like(server["models"][0])
        for j, state in enumerate(server["models"]):
            if bool(weights[:, j].any()):
                mixed += weights[:, j][server["layers"]] * state
        return {"model": mixed}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the model that the server mixed for this client."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """A step of each client's hypernetwork, by the models that it mixed; then the new models."""
        hypernetwork, layers = self._hypernetwork(server), server["layers"][: server.model.parameters]
        models, numbers = server["models"], server["hypernetworks"].clone()
        for k, state in uploads.one_by_one("model"):
            change = (self.sends(server, k, "train")["model"] - state)[: len(layers)]
            leaves = hypernetwork.leaves(numbers[k])
            weights = hypernetwork(leaves)
            slope = torch.zeros_like(weights)
            for j, other in enumerate(server["models"]):
                slope[:, j].index_add_(0, layers, change * other[: len(layers)])
            gradients = torch.autograd.grad(weights, list(leaves.values()), slope)
            for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                leaf.data.add_(gradient, alpha=-self.server_lr)
        # Now that all mixtures are known: there is one copy of models.
        for k, state in uploads.one_by_one("model"):
            models[k] = kept_buffers(server, models[k], state)
        server["hypernetworks"] = numbers

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model that the server mixes for this client."""
        return {"personal": received["model"]}
