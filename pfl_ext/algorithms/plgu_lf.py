"""PLGU-LF: the layers that differ most from the global model stay personal, the global model is trained for all."""

from __future__ import annotations

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
from pfl_ext.ops import restore_

from .layer_wise import LayerWise

__all__ = ["PLGULF"]


@dataclass(frozen=True)
class PLGULF(LayerWise, Method):
    r"""PLGU-LF (Qu et al., 2023), Algorithms 1 and 2, with K = ``local_epochs``, D = ``personal_layers``.

    .. math::
        \xi_l &= \frac{L r_l}{\sum_k r_k}, \quad r_l = \frac{\|\theta_l - w_l\|_2}{\dim(w_l)} \\
        \theta_l &\leftarrow w_l \quad \text{for all layers but the D with the largest } \xi_l \\
        \theta &\leftarrow \theta - \eta\, g, \quad g = \nabla F(\theta) \\
        w_k &\leftarrow w_k - \eta\, \nabla F(w_k + \epsilon), \quad \epsilon_l = \rho\, \xi_l\, g_l / \|g\|_2 \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k

    The third and fourth line are one local step of Algorithm 1, on one batch. :math:`\epsilon` is :class:`LayerWise`'s.

    Readings:

    * As printed in (5) and in line 6, :math:`\epsilon` follows the personal model's gradient g, which line 5 has
      anyway: two gradients per step. ``ascent="global"`` takes that at :math:`w_k`, as SAM does, for a third one.
      Line 7 prints the loss of :math:`\theta + \epsilon` but the gradient at :math:`w_k + \epsilon`, which is meant.
    * D = 0 is FedSAM, as the paper says: no layer is personal, so there is no personal model, no score, and
      :math:`\epsilon` follows the gradient at :math:`w_k`. Its radius is :math:`\rho` (:class:`LayerWise`).
    * D = L leaves each client with a model of its own that takes nothing from the server after its first turn.
      The paper says FedAvg of it; :math:`w_k` is still perturbed, as Algorithm 1 has no exception.
    * A client's first turn begins with :math:`\theta = w`, which makes all scores equal.
    * The server's mean is weighted by samples like that of the methods it is compared with; the paper's clients have
      equally many.
    """

    name = "plgu-lf"

    personal_layers: int | None = option(
        None, "D, how many layers stay personal; 0 is FedSAM (default: the paper's 5 of 23, in proportion, at least 1)"
    )
    ascent: str = option("personal", "whose gradient the perturbation follows", choices=("personal", "global"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("personal_layers", self.personal_layers is None or self.personal_layers >= 0, "not negative")

    def _count(self, model: WorkingModel) -> int:
        """The number D of personal layers in this network."""
        layers = len(self.layers_of(model).names)
        if self.personal_layers is None:
            return max(1, round(layers * 5 / 23))
        self.check("personal_layers", self.personal_layers <= layers, f"up to {layers}, the layers of this network")
        return self.personal_layers

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps theta, if any layer is personal."""
        return {"personal": model.state()} if self._count(model) else {}

    def _theta(self, client: Client, w: Tensor) -> Tensor:
        """The client's personal model, the global one before its first turn."""
        if "personal" in client:
            return client["personal"]
        return w

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Lines 6 to 10 of Algorithm 2."""
        model, w = client.model, received["model"]
        layers = self.layers_of(model)
        count = self._count(model)
        if count == 0:
            model.load(w)
            steps = Steps(
                client, self, perturb=lambda params, g, backup: self.perturb(params, g, layers.groups, None, backup)
            )
            client.report["loss"] = steps.train()
            return {"model": model.state()}
        theta = self._theta(client, w)
        without = self.left_out(model, model.trained, layers.groups)
        scores = self.scores(model.tensors(theta), model.tensors(w), layers.groups, without)
        personal = scores.argsort(descending=True, stable=True)[:count]
        theta = torch.where(torch.isin(layers.entries, personal), theta, w)
        client["personal"], trained = self._local_steps(client, theta, w, layers.groups, scores)
        return {"model": trained}

    def _local_steps(
        self, client: Client, theta: Tensor, w: Tensor, groups: list[int], scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Algorithm 1: theta and w_k after the local steps."""
        model = client.model
        model.load(w)
        other = model.second()  # w_k; the working model is theta, and both change places for the second gradient
        model.load(theta)
        steps_of_theta, steps_of_w = Steps(client, self), Steps(client, self)
        params, backup = steps_of_w.params, None
        personal, perturbed = [], []
        model.module.train()
        for batch in client.batches(self.batch_size, **local_length(self)):
            loss, gradients = steps_of_theta.gradients(batch)
            steps_of_theta.step(gradients)
            model.exchange(other)
            if self.ascent == "global":
                _, gradients = steps_of_w.gradients(batch)
            backup = self.perturb(params, gradients, groups, scores, backup)
            worst, gradients = steps_of_w.gradients(batch)
            restore_(params, backup)
            steps_of_w.step(gradients)
            model.exchange(other)
            personal.append(loss)
            perturbed.append(worst)
        client.report["personal_loss"], client.report["perturbed_loss"] = mean_loss(personal), mean_loss(perturbed)
        theta = model.state()
        model.exchange(other)
        return theta, model.state()

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Line 11 of Algorithm 2: adding the mean of the differences is taking the mean of the models."""
        server["model"] = uploads.average()

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """theta, which is w for a client that never took part."""
        return {} if self.personal_layers == 0 else {"personal": self._theta(client, received["model"])}
