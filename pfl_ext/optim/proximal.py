"""SGD that is held near an anchor, for PerAda, Ditto, FedProx, pFedMe and FedDyn (:mod:`pfl_ext.ops.proximal`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl_ext.ops._arguments import check_lists, describe
from pfl_ext.ops.prepared import Repeated
from pfl_ext.ops.proximal import proximal_sgd_step_

__all__ = ["ProximalSGD", "momentum_step_"]


class ProximalSGD(Optimizer):
    r"""SGD on :math:`L(v) + \frac{\lambda}{2} \|v - w\|^2`, the proximal term without a graph.

    The step is that of :func:`pfl_ext.ops.proximal_sgd_step_`. The anchors w are the parameters as they are when the
    optimiser is made, until :meth:`set_anchors` says otherwise; they are part of the ``state_dict``.

    Args:
        params: parameters or parameter groups; each group may have its own options.
        lr, lam, momentum, dampening, weight_decay, nesterov, maximize: as there; ``lam=0`` is :class:`torch.optim.SGD`.
        anchors: a tensor for each parameter, kept as they are: not copied, and not to be changed while in use.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        lam: float = 1.0,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        anchors: Iterable[Tensor] | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "lam": lam,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self._repeated: dict[int, Repeated] = {}
        for group in self.param_groups:
            for name in ("lr", "lam", "momentum", "weight_decay"):
                if not 0 <= group[name] < math.inf:
                    raise ValueError(f"{name} is {group[name]}; a finite number that is not negative is accepted")
            if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
                raise ValueError("nesterov needs momentum and no dampening")
        self.set_anchors(anchors)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, which makes its own lists ready."""
        super().__setstate__(state)
        self._repeated = {}

    def set_anchors(self, anchors: Iterable[Tensor] | None = None) -> None:
        """Hold each parameter near its anchor from now on; by default near where it is now."""
        params = [param for group in self.param_groups for param in group["params"]]
        chosen = [p.detach().clone() for p in params] if anchors is None else [w.detach() for w in anchors]
        if len(chosen) != len(params):
            raise ValueError(f"{len(chosen)} anchors for {len(params)} parameters")
        for t, (p, w) in enumerate(zip(params, chosen, strict=True)):
            if (p.shape, p.dtype, p.device) != (w.shape, w.dtype, w.device):
                raise ValueError(f"anchor {t} is {describe(w)}, the parameter {describe(p)}")
        for p, w in zip(params, chosen, strict=True):
            self.state[p]["anchor"] = w

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step by the gradients the parameters have, after calling ``closure``, whose value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None]
            buffers = [self.state[p].get("momentum_buffer") for p in params]
            momentum_step_(
                params,
                [p.grad for p in params],
                [self.state[p]["anchor"] for p in params] if group["lam"] != 0 else [],
                buffers,
                repeated=self._repeated.setdefault(number, Repeated()),
                **{name: value for name, value in group.items() if name in self.defaults},
            )
            if group["momentum"] != 0:
                for p, buffer in zip(params, buffers, strict=True):
                    self.state[p]["momentum_buffer"] = buffer
        return loss


def momentum_step_(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    anchors: Sequence[Tensor],
    buffers: list[Tensor | None],
    *,
    momentum: float = 0.0,
    repeated: Any = None,
    **options: Any,
) -> None:
    """:func:`pfl_ext.ops.proximal_sgd_step_` with momentum buffers that begin by themselves.

    For loops with their gradients at hand; :class:`ProximalSGD` is the same for those in ``.grad``.

    Args:
        params, gradients, anchors: as there.
        buffers: one for each parameter, None before its first step, which sets it.
        momentum: as there.
        repeated: a :class:`~pfl_ext.ops.prepared.Repeated`, which remembers the lists that stay the same from step to
            step.
        options: the others of that op.
    """
    if not params:
        return
    if repeated is not None:
        lists = {"params": params, "gradients": gradients, "anchors": anchors}
        params, gradients, anchors = (repeated(role, tensors) for role, tensors in lists.items())
    if momentum == 0:
        proximal_sgd_step_(params, gradients, anchors, **options)
        return
    if len(buffers) != len(params):
        raise ValueError(f"{len(buffers)} buffers for {len(params)} params")
    own = [torch.empty_like(p) if buffer is None else buffer for p, buffer in zip(params, buffers, strict=True)]
    beginning = [i for i, buffer in enumerate(buffers) if buffer is None]
    calls: list[tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], bool]]
    if len(beginning) in (0, len(params)):
        momenta = own if repeated is None else repeated("buffers", own)
        calls = [(params, gradients, anchors, momenta, bool(beginning))]
    else:
        # Here, as of two calls the second would be refused after the first.
        check_lists(params=params, grads=gradients, **({"anchors": anchors} if anchors else {}))
        calls = [
            (
                [params[i] for i in chosen],
                [gradients[i] for i in chosen],
                [anchors[i] for i in chosen] if anchors else [],
                [own[i] for i in chosen],
                first,
            )
            for chosen, first in ((beginning, True), (sorted({*range(len(params))} - {*beginning}), False))
        ]
    for some, along, near, momenta, first in calls:
        proximal_sgd_step_(some, along, near, momentum=momentum, momentum_buffers=momenta, first=first, **options)
    buffers[:] = own
