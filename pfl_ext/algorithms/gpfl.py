"""GPFL: features are told apart into what all clients need and what this one does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.data import Inputs
from pfl_ext.federation import (
    Batch,
    Client,
    Features,
    Method,
    Models,
    Server,
    SideModule,
    Stage,
    Steps,
    Uploads,
    WorkingModel,
    option,
)

from .prototypes import head_sizes

__all__ = ["GPFL", "ConditionalValve"]


class ConditionalValve(nn.Module):
    """Scales and shifts features by what a condition says."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.LayerNorm([features])) for _ in range(2)
        )

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        """relu((gamma + 1) z + beta), with gamma and beta of the condition."""
        return F.relu((self.scale(condition) + 1) * z + self.shift(condition))


@dataclass(frozen=True)
class GPFL(Method):
    r"""GPFL (Zhang et al., 2023): global and personalised feature information at once.

    With features :math:`z = \phi(x)`, class embeddings C, a conditional valve
    :math:`v(z; c) = \mathrm{relu}((\gamma(c) + 1) z + \beta(c))`, a head :math:`\psi_k` of the client's own and its
    class shares :math:`p_{kc}`, a client trains all of :math:`\phi, v, C, \psi_k` by E epochs of SGD on

    .. math::
        \mathrm{CE}(y, \psi_k v(z; p_k)) + \mathrm{CE}(y, \cos(v(z; g), C))
            + \lambda\, \mathrm{mean}_x \|v(z; g) - C^{received}_y\|_2, \quad
        g = \mathrm{mean}_c\, C^{received}_c, \quad p_k = \sum_c p_{kc} C^{received}_c

    The server averages :math:`\phi, v, C`, weighted by samples. The personal model is :math:`\psi_k v(\phi(x); p_k)`.

    Readings. The norm is that of each sample; in the authors' code (PFLlib) it is that of the whole batch's matrix,
    which grows with the batch. Weight decay is that of the method for all parts; theirs has an own one, mu, for valve
    and embeddings. Embeddings begin normally distributed. The outputs of the head are the network's. Buffers belong to
    the part whose modules they are in.

    PFLlib, the authors' own, makes g and :math:`p_k` of the client's own embeddings from before it takes over the
    received ones, and has zeros for both in the first round. FL-bench does not have the method.
    """

    name = "gpfl"
    needs = "classes"

    head: str = option("", "module that stays with the client; empty: the last layer")
    lam: float = option(0.01, "lambda, how strongly global features are drawn to the embeddings of their classes")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")

    def _valve(self, features: int) -> SideModule:
        return SideModule(lambda: ConditionalValve(features))

    def set_up(self, server: Server) -> None:
        """The server keeps the representation phi, the valve v and the class embeddings C."""
        model = server.model
        features, classes = head_sizes(model, self.head, "GPFL")
        server["representation"] = (~model.part(self.head)).read()
        server["valve"] = self._valve(features).drawn(server.stream("valve"), model)
        drawn = torch.randn(classes, features, generator=server.stream("embeddings"), dtype=model.dtype)
        server["embeddings"] = drawn.to(model.device)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its head psi_k, which starts from the common initial weights."""
        return {"head": model.part(self.head).read()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the representation phi, the valve v and the class embeddings C."""
        return {name: server[name] for name in ("representation", "valve", "embeddings")}

    def _conditions(self, client: Client, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The valve's two conditions: the client's p_k, and g, which all have in common."""
        shares = client.label_counts().to(embeddings.dtype).to(embeddings.device)
        return shares @ embeddings / shares.sum(), embeddings.mean(0)

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train phi, v, C and the client's head by one sum of losses; all but the head is sent."""
        model, own, fixed = client.model, client.model.part(self.head), received["embeddings"]
        own.write(client["head"])
        (~own).write(received["representation"])
        head = model.module.get_submodule(self.head or model.last_layer())
        personal, common = self._conditions(client, fixed)
        valve, numbers = self._valve(fixed.shape[1]), received["valve"].clone()
        leaves, embeddings = valve.leaves(numbers), fixed.clone().requires_grad_()
        with Features(model, self.head) as features:

            def loss(outputs: Tensor, batch: Batch) -> Tensor:
                z = features.last
                shared = valve(leaves, z, common)
                angles = F.normalize(shared) @ F.normalize(embeddings).T
                apart: Tensor = torch.linalg.vector_norm(shared - fixed[batch.targets], dim=1).mean()
                logits = head(valve(leaves, z, personal))
                told = client.task.loss(logits, batch.targets) + F.cross_entropy(angles, batch.targets)
                return told + self.lam * apart

            steps = Steps(client, self, params=[*model.trained, *leaves.values(), embeddings])
            client.report["loss"] = steps.train(loss)
        client["head"] = own.read()
        return {"representation": (~own).read(), "valve": numbers, "embeddings": embeddings.detach()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average what is shared, weighted by samples."""
        for name in ("representation", "valve", "embeddings"):
            server[name] = uploads.average(name)

    def models(self, client: Client, received: Mapping[str, Tensor]) -> Models:
        """psi_k on the client's own view of the common features."""
        own = client.model.part(self.head)
        state = client.model.whole((~own, received["representation"]), (own, client["head"]))
        personal, _ = self._conditions(client, received["embeddings"])
        valve = self._valve(len(personal))

        def predict(model: WorkingModel, inputs: Inputs) -> Tensor:
            model.load(state)
            with Features(model, self.head) as features:
                z = features(inputs)
            head = model.module.get_submodule(self.head or model.last_layer())
            found = head(valve(received["valve"], z, personal))
            assert isinstance(found, Tensor)
            return found

        return {"personal": predict}
