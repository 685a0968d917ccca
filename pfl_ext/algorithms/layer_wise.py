"""What the PLGU methods share: the options of LWSAM, and its perturbation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from pfl_ext.federation import Options, WorkingModel, option
from pfl_ext.federation.model import Each, Layers
from pfl_ext.ops import lwsam_perturb_, personalization_scores
from pfl_ext.ops.sharpness import Norm

__all__ = ["LayerWise"]


@dataclass(frozen=True)
class LayerWise(Options):
    r"""Layer-wise sharpness-aware minimisation (LWSAM; Qu et al., 2023), equation (5).

    .. math:: \epsilon_l = \rho\, \xi_l\, \mathrm{sign}(g_l) \frac{|g_l|^{q-1}}{(\|g\|_q^q)^{1/p}},
              \qquad \frac1p + \frac1q = 1

    Readings: the printed exponent p - 1 is an option (:func:`pfl_ext.ops.lwsam_perturb_` says why 1/p is the default).
    The scores :math:`\xi_l` add up to 1, as the paper states, so L equal ones are SAM of the radius :math:`\rho / L`;
    with ``full_radius`` they have the mean 1 and equal ones are SAM of the radius :math:`\rho`.

    :math:`\xi_l \propto \|\theta_l - w_l\| / \dim`, as printed, is largest for the smallest layers, whatever has
    changed in them: where all weights change alike, it falls with the root of the layer's size. ``score="root"``
    divides by that root, so that such layers score alike.
    """

    rho: float = option(0.05, "radius of the perturbation")
    p: float = option(2.0, "norm of the ball that the perturbation stays in, 1 to infinity (inf)")
    norm: str = option(
        "global", "divide by the norm of the whole gradient or of each layer's", choices=("global", "layer")
    )
    literal_exponent: bool = option(False, "take the exponent p - 1 of the denominator, as printed, in place of 1/p")
    full_radius: bool = option(False, "scores with the mean 1 in place of the sum 1, so that equal ones are SAM")
    score: str = option("size", "a layer's distance by its size, as printed, or by its root", choices=("size", "root"))
    layers: str = option(
        "module", "what a layer is: weight and bias of a module, or each tensor", choices=("module", "tensor")
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.check("rho", self.rho >= 0, "not negative")
        if not self.p >= 1:
            raise ValueError(f"p is {self.p!r}; accepted is a value of at least 1, infinity (inf) included")
        between = 1 < self.p < float("inf")
        self.check("literal_exponent", between or not self.literal_exponent, "false where p is 1 or infinity")

    def layers_of(self, model: WorkingModel) -> Layers:
        """The network's layers."""
        return model.layers(cast(Each, self.layers))

    def scores(self, personal: Sequence[Tensor], server: Sequence[Tensor], groups: Sequence[int]) -> Tensor:
        """:math:`\\xi` of two models, one a layer; their sum is 1, and they are equal where the models are."""
        scores = personalization_scores(personal, server, groups)
        if self.score == "root" and not bool((scores == scores[0]).all()):
            sizes = scores.new_zeros(len(scores))
            for tensor, group in zip(personal, groups, strict=True):
                sizes[group] += tensor.numel()
            scores = scores * sizes.sqrt()
            scores = scores / scores.sum()
        return scores

    def perturb(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        groups: Sequence[int],
        scores: Tensor | None,
        backup: Tensor | None,
    ) -> Tensor:
        """Move ``params`` by :math:`\\epsilon`; returns the backup that ``restore_`` takes.

        Args:
            params, gradients: the tensors and their gradients.
            groups: the layer of each tensor.
            scores: :math:`\\xi`, whose sum is 1, one a layer; None: equal ones.
            backup: of an earlier step, to be overwritten.
        """
        count = max(groups) + 1
        rho = self.rho
        if scores is None:  # as SAM computes it, to the bit
            rho = rho if self.full_radius else rho / count
        elif self.full_radius:
            scores = scores * count
        return lwsam_perturb_(
            params,
            gradients,
            scores,
            rho,
            self.p,
            cast(Norm, self.norm),
            groups=groups,
            literal_exponent=self.literal_exponent,
            backup=backup,
        )
