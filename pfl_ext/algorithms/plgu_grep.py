"""PLGU-GRep: FedRep whose representation is trained by LWSAM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Steps, WorkingModel, local_length, mean_loss, option
from pfl_ext.ops import restore_

from .fedrep import FedRep
from .layer_wise import LayerWise

__all__ = ["PLGUGRep"]


@dataclass(frozen=True)
class PLGUGRep(LayerWise, FedRep):
    r"""PLGU-GRep (Qu et al., 2023), Algorithm 3, with K = ``head_epochs``.

    .. math::
        h_k &\leftarrow \text{K epochs of SGD on } F(\cdot, \phi) \text{ from } h_k \\
        \phi_k &\leftarrow \phi_k - \eta\, \nabla F(h_k, \phi_k) \\
        \xi_l &= \frac{r_l}{\sum_j r_j}, \quad r_l = \frac{\|\phi_{k,l} - \phi_l\|_2}{\dim(\phi_l)} \\
        \phi_k &\leftarrow \phi_k - \eta\, \nabla F(h_k, \phi_k + \epsilon),
            \quad \epsilon_l = \rho\, \xi_l\, g_l / \|g\|_2, \quad g = \nabla F(h_k, \phi_k) \\
        \phi &\leftarrow \sum_k \tfrac{n_k}{n} \phi_k

    The second to fourth line are equations (11), (10), (12) and (13), on one batch and from :math:`\phi_k = \phi`.
    Algorithm 3 does them once a round (``local_steps = 1``, the default); with ``local_steps = 0`` they are done for
    every batch of ``local_epochs`` passes, as FedRep trains its representation, always with the scores' distance to the
    received :math:`\phi`.

    Readings: (13) prints the step by g where the gradient at the perturbed point is meant. (12) takes g at
    :math:`\phi_k` after the first step: three gradients in all. Layers are those of the representation. The server's
    mean is weighted by samples like FedRep's; the paper's clients have equally many.
    """

    name = "plgu-grep"

    local_steps: int = option(1, "two-step updates of the representation in a round; 0: local_epochs passes of them")

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Lines 7 to 12 of Algorithm 3."""
        head = client.model.part(self.head)
        head.write(client["head"])
        (~head).write(received["representation"])
        steps = Steps(client, self, params=head.parameters)
        client.report["head_loss"] = steps.train(epochs=self.head_epochs, batches="head")
        client.report["loss"] = self._train_representation(client, (~head).parameters)
        client["head"] = head.read()
        return {"representation": (~head).read()}

    def _groups(self, model: WorkingModel, params: list[Tensor]) -> list[int]:
        """The layer of each of these parameters, counted among them."""
        layer_of = dict(zip(map(id, model.trained), self.layers_of(model).groups, strict=True))
        numbers: dict[int, int] = {}
        return [numbers.setdefault(layer_of[id(p)], len(numbers)) for p in params]

    def _train_representation(self, client: Client, params: list[Tensor]) -> float:
        received, groups = [p.detach().clone() for p in params], self._groups(client.model, params)
        without = self.left_out(client.model, params, groups)
        steps, losses, backup = Steps(client, self, params=params), [], None
        client.model.module.train()
        for batch in client.batches(self.batch_size, **local_length(self)):
            loss, g = steps.gradients(batch)
            steps.step(g)  # (11)
            scores = self.scores(params, received, groups, without)  # (10)
            _, g = steps.gradients(batch)
            backup = self.perturb(params, g, groups, scores, backup)  # (12)
            _, g = steps.gradients(batch)
            restore_(params, backup)
            steps.step(g)  # (13)
            losses.append(loss)
        return mean_loss(losses)
