"""FML: a personal model and a copy of the global one learn from the data and from each other."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import (
    Client,
    Method,
    Server,
    Steps,
    Uploads,
    WorkingModel,
    local_length,
    mean_loss,
    option,
)
from pfl_ext.ops import distillation_loss

__all__ = ["FML"]


@dataclass(frozen=True)
class FML(Method):
    r"""FML (Shen et al., 2020): federated mutual learning.

    A client has a personal model v and a copy of the global one, the meme w. With their probabilities on a batch, each
    step is of both, by the outputs from before it:

    .. math::
        v &\leftarrow v - \eta\, \nabla_v (\alpha\, \mathrm{CE}(y, p_v) + (1 - \alpha)\, \mathrm{KL}(p_w \| p_v)) \\
        w &\leftarrow w - \eta\, \nabla_w (\beta\, \mathrm{CE}(y, p_w) + (1 - \beta)\, \mathrm{KL}(p_v \| p_w))

    The server averages the memes, weighted by samples. In the paper personal models may be of any shape; here they have
    the network's (FedMD, FedProto and FedDF take others). A client that never took part is evaluated with the global
    model.

    PFLlib's divergences are a mean over classes too, a tenth of it with ten classes; no gradient is stopped there, so
    that each model is also stepped by the other's loss; and norms of gradients are cut at 10. FL-bench does not have
    the method.
    """

    name = "fml"
    needs = "classes"

    alpha: float = option(0.5, "alpha, weight of the labels for the personal model; 1: it learns by itself")
    beta: float = option(0.5, "beta, weight of the labels for the global model; 1 is FedAvg")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("alpha", 0 <= self.alpha <= 1, "from 0 to 1")
        self.check("beta", 0 <= self.beta <= 1, "from 0 to 1")

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """v, from the common initial weights."""
        return {"personal": model.state()}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A step of both models on each batch."""
        meme, own = client.model, WorkingModel(copy.deepcopy(client.model.module))
        meme.load(received["model"])
        own.load(client["personal"])
        steps = (Steps(client, self), Steps(client, self, params=own.trained))
        losses: tuple[list[Tensor], list[Tensor]] = ([], [])
        meme.module.train()
        own.module.train()
        for batch in client.batches(self.batch_size, **local_length(self)):
            w, v = meme(batch.inputs), own(batch.inputs)
            pairs = ((w, v, self.beta), (v, w, self.alpha))
            objectives = [
                distillation_loss(learner, other.detach(), batch.targets, 1 - weight, 1.0)
                for learner, other, weight in pairs
            ]
            gradients = [
                list(torch.autograd.grad(objective, step.params, materialize_grads=True))
                for objective, step in zip(objectives, steps, strict=True)
            ]
            for step, found, objective, seen in zip(steps, gradients, objectives, losses, strict=True):
                step.step(found)
                seen.append(objective.detach())
        client.report |= {"loss": mean_loss(losses[0]), "personal_loss": mean_loss(losses[1])}
        client["personal"] = own.state()
        return {"model": meme.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the memes, weighted by samples."""
        server["model"] = uploads.average()

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """v; w for a client that never took part."""
        return {"personal": client["personal"] if "personal" in client else received["model"]}
