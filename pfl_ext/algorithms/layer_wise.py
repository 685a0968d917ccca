"""What the PLGU methods share: the options of LWSAM, and its perturbation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from pfl_ext.federation import Options, WorkingModel, option
from pfl_ext.federation.model import Each, Layers
from pfl_ext.ops import lwsam_perturb_, personalization_scores
from pfl_ext.ops.sharpness import Norm

__all__ = ["LayerWise"]

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class LayerWise(Options):
    r"""Layer-wise sharpness-aware minimisation (LWSAM; Qu et al., 2023), equation (5).

    .. math:: \epsilon_l = \rho\, \xi_l\, \mathrm{sign}(g_l) \frac{|g_l|^{q-1}}{(\|g\|_q^q)^{1/p}},
              \qquad \frac1p + \frac1q = 1

    Readings: the printed exponent p - 1 is an option (:func:`pfl_ext.ops.lwsam_perturb_` says why 1/p is the default).
    The mean of the scores :math:`\xi_l` is 1, so equal ones are SAM of the radius :math:`\rho`. The paper states a sum
    of 1 (``radius="sum"``), which makes L equal ones SAM of the radius :math:`\rho / L`; docs/plgu.md says how the two
    compare. With ``radius="full"`` they are scaled so that :math:`\|\epsilon\|_p = \rho` whatever they are, the
    constraint under (4).

    :math:`\xi_l \propto \|\theta_l - w_l\| / \dim`, as printed, is largest for the smallest layers, whatever has
    changed in them: where all weights change alike, it falls with the root of the layer's size. ``score="root"``
    divides by that root, so that such layers score alike. Normalisation layers are the smallest: on a ResNet-18 they
    hold two thirds of the score. With ``score_norms=False`` theirs is 0: they are neither perturbed nor personal.
    """

    rho: float = option(0.05, "radius of the perturbation")
    p: float = option(2.0, "norm of the ball that the perturbation stays in, 1 to infinity (inf)")
    norm: str = option(
        "global", "divide by the norm of the whole gradient or of each layer's", choices=("global", "layer")
    )
    literal_exponent: bool = option(False, "take the exponent p - 1 of the denominator, as printed, in place of 1/p")
    radius: str = option(
        "mean",
        "what the scores are scaled to: a sum of 1, a mean of 1, or a perturbation of the full radius rho",
        choices=("sum", "mean", "full"),
    )
    score: str = option("size", "a layer's distance by its size, as printed, or by its root", choices=("size", "root"))
    score_norms: bool = option(True, "normalisation layers have scores; false: theirs is 0")
    layers: str = option(
        "module", "what a layer is: weight and bias of a module, or each tensor", choices=("module", "tensor")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rho", self.rho >= 0, "not negative")
        if not self.p >= 1:
            raise ValueError(f"p is {self.p!r}; accepted is a value of at least 1, infinity (inf) included")
        between = 1 < self.p < float("inf")
        self.check("literal_exponent", between or not self.literal_exponent, "false where p is 1 or infinity")
        full = self.radius == "full"
        self.check("radius", not full or not self.literal_exponent, "sum or mean with literal_exponent")
        self.check("radius", not full or self.p > 1, "sum or mean where p is 1")

    def layers_of(self, model: WorkingModel) -> Layers:
        """The layers that this network is cut into, by the option ``layers``."""
        return model.layers(cast(Each, self.layers))

    def left_out(self, model: WorkingModel, params: Sequence[Tensor], groups: Sequence[int]) -> Tensor | None:
        """Which layers have no score: those of normalisation, unless they have one; None for none."""
        if self.score_norms:
            return None
        norms = {id(p) for m in model.module.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}
        found = torch.zeros(max(groups) + 1, dtype=torch.bool, device=model.device)
        found[[group for p, group in zip(params, groups, strict=True) if id(p) in norms]] = True
        self.check("score_norms", not bool(found.all()), "true for a network of normalisation alone")
        return found

    def scores(
        self,
        personal: Sequence[Tensor],
        server: Sequence[Tensor],
        groups: Sequence[int],
        left_out: Tensor | None = None,
    ) -> Tensor:
        """:math:`\\xi` of two models, one a layer; their sum is 1, and they are equal where the models are."""
        scores = personalization_scores(personal, server, groups)
        if self.score == "root" and not bool((scores == scores[0]).all()):
            sizes = scores.new_zeros(len(scores))
            for tensor, group in zip(personal, groups, strict=True):
                sizes[group] += tensor.numel()
            scores = scores * sizes.sqrt()
            scores = scores / scores.sum()
        if left_out is not None:
            scores = scores.masked_fill(left_out, 0.0)
            # Where only what is left out differs, the others differ alike: not at all.
            scores = scores if bool(scores.sum() > 0) else (~left_out).to(scores.dtype)
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
        if scores is None and not (self.radius == "full" and self.norm == "layer"):  # as SAM computes it, to the bit
            rho = rho / count if self.radius == "sum" else rho
        elif self.radius == "mean":
            scores = count * scores if scores is not None else None
        elif self.radius == "full":
            scores = gradients[0].new_full((count,), 1 / count) if scores is None else scores
            scores = self._of_full_radius(scores, gradients, groups)
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

    def _of_full_radius(self, scores: Tensor, gradients: Sequence[Tensor], groups: Sequence[int]) -> Tensor:
        r"""The scores by what makes :math:`\|\epsilon\|_p = \rho`; as they are where all gradients are zero.

        .. math:: \|\epsilon\|_p^p = \rho^p \sum_l \xi_l^p\, \|g_l\|_q^q / \|g\|_q^q
        """
        q = 1.0 if self.p == math.inf else self.p / (self.p - 1)
        layers = torch.tensor(groups, device=scores.device)
        norms = torch.stack(torch._foreach_norm(list(gradients), q)).to(scores.dtype)
        mass = torch.zeros_like(scores).index_add(0, layers, norms**q)
        if self.p == math.inf:
            length = (scores * (mass > 0)).max()
        else:
            share = (mass > 0).to(scores.dtype) if self.norm == "layer" else mass / mass.sum()
            length = (scores**self.p * share).sum() ** (1 / self.p)
        return scores / torch.where(length > 0, length, 1.0)
