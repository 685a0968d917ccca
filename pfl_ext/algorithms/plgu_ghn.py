"""PLGU-GHN: pFedHN whose clients train by LWSAM."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Steps

from .layer_wise import LayerWise
from .pfedhn import PFedHN

__all__ = ["PLGUGHN"]


@dataclass(frozen=True)
class PLGUGHN(LayerWise, PFedHN):
    r"""PLGU-GHN (Qu et al., 2023): pFedHN, with LWSAM as the client's optimiser.

    .. math::
        \tilde\theta_k &\leftarrow \tilde\theta_k - \eta\, \nabla L_k(\tilde\theta_k + \epsilon),
            \quad \epsilon_l = \rho\, \xi_l\, g_l / \|g\|_2, \quad g = \nabla L_k(\tilde\theta_k) \\
        \xi_l &= \frac{r_l}{\sum_j r_j}, \quad r_l = \frac{\|\tilde\theta_{k,l} - \theta_{k,l}\|_2}{\dim(\theta_l)}

    for the E epochs from the generated :math:`\theta_k`; the rest is :class:`PFedHN`.

    The paper describes this method in a supplement that is not available, so this is our reading of its one sentence
    on it. There is no global model here to measure a layer's distance from; as in equation (10) it is measured from
    what the server sent, now to the model as the turn has trained it so far. At a turn's first step that is zero for
    all layers and all scores are equal.
    """

    name = "plgu-ghn"

    def train_generated(self, client: Client) -> float:
        """E epochs of LWSAM; returns the mean loss."""
        model = client.model
        groups = self.layers_of(model).groups
        without = self.left_out(model, model.trained, groups)
        received = [p.detach().clone() for p in model.trained]

        def perturb(params: list[Tensor], gradients: list[Tensor], backup: Tensor | None) -> Tensor:
            scores = self.scores(params, received, groups, without)
            return self.perturb(params, gradients, groups, scores, backup)

        return Steps(client, self, perturb=perturb).train()
