"""Sharpness-aware minimisation around any optimiser: SAM for the whole model, LWSAM by layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl_ext.ops.prepared import Repeated
from pfl_ext.ops.sharpness import Norm, backup_bytes, layer_groups, lwsam_perturb_, personalization_scores, restore_

__all__ = ["LWSAM", "SAM"]


@dataclass
class _Perturbation:
    """The weights as they were before the first step, and the parameters that it moved; None when it moved none.

    An object of its own: torch.compile does not bring back what is set on an optimiser itself.
    """

    backup: Tensor | None = None
    moved: Sequence[Tensor] | None = None
    repeated: Repeated = field(default_factory=Repeated)


class SAM(Optimizer):
    r"""Steps by the gradient at :math:`w + \epsilon`, the point of the largest loss within ``rho`` of the weights w.

    In two steps, each after a backward pass::

        loss(model(x), y).backward()
        optimizer.first_step(zero_grad=True)      # to w + epsilon
        loss(model(x), y).backward()
        optimizer.second_step(zero_grad=True)     # back to w to the bit, then the base optimiser's step

    or with a closure that clears the gradients, computes the loss, its gradients, and returns it::

        optimizer.step(closure)                   # calls it twice, and returns the loss at w

    Args:
        params: parameters, named parameters or parameter groups; a group may have its own ``rho``, and all options of
            the base optimiser.
        base_optimizer: an optimiser class, which gets the further keyword arguments, such as ``torch.optim.SGD``.
        rho, p, norm, literal_exponent: as in :func:`pfl_ext.ops.lwsam_perturb_`. The norm is taken over the gradients
            of all groups together; ``norm="layer"`` takes one for each parameter.
        **base_options: for the base optimiser.

    Parameter groups and state are the base optimiser's, so learning-rate schedulers and ``state_dict`` work as on it.
    A copy of the weights is kept from step to step. Parameters without a gradient are left alone.
    """

    def __init__(
        self,
        params: Any,
        base_optimizer: Callable[..., Optimizer],
        *,
        rho: float = 0.05,
        p: float = 2.0,
        norm: Norm = "global",
        literal_exponent: bool = False,
        **base_options: Any,
    ) -> None:
        if isinstance(base_optimizer, Optimizer) or not callable(base_optimizer):
            raise TypeError(f"base_optimizer is {base_optimizer!r}; a class such as torch.optim.SGD is accepted")
        if norm not in ("global", "layer"):
            raise ValueError(f"norm={norm!r} is not known; accepted: 'global', 'layer'")
        if not p >= 1:
            raise ValueError(f"p is {p}; 1 or more is accepted, infinity included")
        super().__init__(params, {"rho": rho, **base_options})
        for group in self.param_groups:
            if not 0 <= group["rho"] < float("inf"):
                raise ValueError(f"rho is {group['rho']}; a finite number that is not negative is accepted")
        self.p, self.norm, self.literal_exponent = p, norm, literal_exponent
        self.base_optimizer = base_optimizer(self.param_groups, **base_options)
        self.state = self.base_optimizer.state  # which may hold something from the beginning, such as anchors
        self._share()
        self._perturbation = _Perturbation()

    def _share(self) -> None:
        """One set of groups and one state for both."""
        self.base_optimizer.param_groups = self.param_groups
        self.base_optimizer.state = self.state
        self.defaults.update(self.base_optimizer.defaults)

    def _layers(self) -> tuple[list[int] | None, Tensor | None]:
        """The layer of each parameter and the layers' scores; None for one layer a parameter, and for scores of 1."""
        return None, None

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Move the weights to where the loss is largest, by the gradients they have."""
        if self._perturbation.moved is not None:
            raise RuntimeError("first_step was called twice; second_step comes after it")
        layer_of, layer_scores = self._layers()
        params: list[Tensor] = []
        grads: list[Tensor] = []
        groups: list[int] = []
        radii: list[float] = []
        index = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    params.append(param)
                    grads.append(param.grad)
                    groups.append(index if layer_of is None else layer_of[index])
                    radii.append(group["rho"])
                index += 1
        rho = radii[0] if radii else 0.0
        scores: Tensor | list[float] | None = layer_scores
        if len(set(radii)) > 1:
            # The op knows one radius: give each parameter its own layer, and the layer its radius times its score.
            # The norm of a layer is over its parameters, so that is only the same for the global norm.
            if self.norm == "layer" and layer_of is not None:
                raise ValueError("norm='layer' needs one rho for all parameter groups")
            rho, scores = 1.0, radii
            if layer_scores is not None:
                # Nothing here waits for a GPU: an index that is a list would.
                own = torch.tensor(radii, dtype=torch.float64).to(layer_scores.device, non_blocking=True)
                layer_index = torch.tensor(groups).to(layer_scores.device, non_blocking=True)
                scores = own * layer_scores.index_select(0, layer_index)
            groups = list(range(len(params)))
        elif layer_of is None:
            groups = list(range(len(params)))
        moved = self._perturbation.repeated("params", params)
        self._perturbation.backup = lwsam_perturb_(
            moved,
            self._perturbation.repeated("grads", grads),
            scores,
            rho,
            self.p,
            self.norm,
            groups=groups,
            literal_exponent=self.literal_exponent,
            backup=self._reusable(params),
        )
        self._perturbation.moved = moved
        if zero_grad:
            self.zero_grad()

    def _reusable(self, params: Sequence[Tensor]) -> Tensor | None:
        backup = self._perturbation.backup
        if backup is None or not params or backup.device != params[0].device:
            return None
        return backup if backup.numel() >= backup_bytes(params) else None

    def _restore(self) -> None:
        if self._perturbation.moved is None or self._perturbation.backup is None:
            raise RuntimeError("second_step was called without first_step before it")
        restore_(self._perturbation.moved, self._perturbation.backup)
        self._perturbation.moved = None

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        """Move the weights back and let the base optimiser step by the gradients that were computed in between."""
        self._restore()
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Both steps; ``closure`` is called before each. If it raises, the weights are as they were before."""
        if closure is None:
            raise ValueError(
                "SAM evaluates the loss twice: give step() a closure, or call first_step() and second_step()"
            )
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        try:
            with torch.enable_grad():
                closure()
        except BaseException:
            self._restore()
            raise
        self.second_step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state and groups of the base optimiser, ``rho`` included."""
        if self._perturbation.moved is not None:
            raise RuntimeError("the weights are perturbed: save the state after second_step, not between the steps")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        super().load_state_dict(state_dict)
        self._share()


class LWSAM(SAM):
    r"""SAM whose perturbation is scaled layer by layer, by how personal each layer is (PLGU).

    :math:`\epsilon_l` is that of :func:`pfl_ext.ops.lwsam_perturb_` with the scores :math:`\xi_l`. They are set once a
    round, by :meth:`update_scores` or as ``optimizer.scores = ...``; until then all L layers have 1/L.

    Args:
        params, base_optimizer, rho, p, literal_exponent: as in :class:`SAM`.
        norm: ``"global"``, as printed, or ``"layer"``: divide by the norm of each layer's gradient.
        groups: the layer of each parameter, numbers from 0 on, in the order of the parameters. By default a module is a
            layer where ``params`` are ``model.named_parameters()``, otherwise each parameter is one.
        **base_options: for the base optimiser.
    """

    def __init__(
        self,
        params: Any,
        base_optimizer: Callable[..., Optimizer],
        *,
        groups: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, base_optimizer, **options)
        count = sum(len(group["params"]) for group in self.param_groups)
        if groups is None:
            if all("param_names" in group for group in self.param_groups):
                groups = layer_groups([name for group in self.param_groups for name in group["param_names"]])
            else:
                groups = range(count)
        self.groups = list(groups)
        """The layer of each parameter."""
        if len(self.groups) != count or min(self.groups, default=0) < 0:
            raise ValueError(
                f"{len(self.groups)} groups for {count} parameters; one number from 0 on a parameter is expected"
            )
        self._scores: Tensor | None = None

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return max(self.groups, default=-1) + 1

    @property
    def scores(self) -> Tensor:
        """The score of each layer, float64."""
        if self._scores is None:
            params = self.param_groups[0]["params"]
            device = params[0].device if params else None
            self._scores = torch.full((self.layers,), 1 / max(self.layers, 1), dtype=torch.float64, device=device)
        return self._scores

    @scores.setter
    def scores(self, scores: Tensor | Sequence[float]) -> None:
        vector = torch.as_tensor(scores, dtype=torch.float64).detach()
        if vector.shape != (self.layers,):
            raise ValueError(
                f"scores of shape {list(vector.shape)} for {self.layers} layers; one number per layer is expected"
            )
        self._scores = vector.to(self.param_groups[0]["params"][0].device)

    def update_scores(self, personal: Sequence[Tensor], server: Sequence[Tensor]) -> Tensor:
        """Set the scores to :func:`pfl_ext.ops.personalization_scores` of two lists like the parameters."""
        self._scores = personalization_scores(list(personal), list(server), self.groups)
        return self._scores

    def _layers(self) -> tuple[list[int] | None, Tensor | None]:
        return self.groups, self.scores

    def state_dict(self) -> dict[str, Any]:
        """As of :class:`SAM`, with the scores."""
        return {**super().state_dict(), "scores": self.scores.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        super().load_state_dict(state_dict)
        if "scores" in state_dict:
            self.scores = state_dict["scores"]
