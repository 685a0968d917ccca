"""Races of the proximal step: against the proximal term through autograd, and against the ``_foreach`` functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pfl_ext.ops import proximal_sgd_step_

from .case import Case, Contestant, Expected, Family, Grid, Skipped, Spec
from .opponents import proximal as opponents
from .shapes import SHAPE_SETS

__all__ = ["FAMILY"]

# The contestants step on and on: small enough that a million steps end nowhere near the limits of a type.
_LR, _LAM = 1e-3, 0.1


def _plan(grid: Grid) -> list[Spec]:
    shape_sets = grid.shapes or (("lenet", "adapters") if grid.quick else tuple(SHAPE_SETS))
    specs = []
    for shapes in shape_sets:
        for dtype in grid.dtypes or (FAMILY.dtypes if shapes == "resnet18" and not grid.quick else ("float32",)):
            few_or_all = (grid.all_threads,) if grid.quick else (1, grid.all_threads)
            specs += [Spec("step", shapes, 1, dtype, n) for n in dict.fromkeys(grid.threads or few_or_all)]
    return specs


def _cases(specs: Iterable[Spec]) -> Iterator[Case | Skipped]:
    for spec in specs:
        yield _step(spec)


def _step(spec: Spec) -> Case:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(0)
    v, g, w = ([torch.randn(s, generator=generator).to(dtype) for s in SHAPE_SETS[spec.shapes]] for _ in range(3))
    exact = [torch.cat([x.double().flatten() for x in tensors]) for tensors in (v, g, w)]
    values = exact[0] - _LR * (exact[1] + _LAM * (exact[0] - exact[2]))
    size = exact[0].abs() + _LR * (exact[1].abs() + _LAM * (exact[0].abs() + exact[2].abs()))

    # Each has its own weights; and autograd its own gradients, to which it adds.
    ours, lerp, written_out, differentiated = ([x.clone() for x in v] for _ in range(4))
    for p, gradient in zip(differentiated, g, strict=True):
        p.requires_grad_()
        p.grad = gradient.clone()
    sgd = torch.optim.SGD(differentiated, lr=_LR)

    def step() -> list[torch.Tensor]:
        proximal_sgd_step_(ours, g, w, _LR, _LAM)
        return ours

    contestants = [
        Contestant("pfl_ext", "ours", step, torch.promote_types(dtype, torch.float32)),
        Contestant("autograd, then SGD", "naive", lambda: opponents.autograd_step(differentiated, w, _LAM, sgd), dtype),
        Contestant("_foreach", "skilled", lambda: opponents.foreach_step(written_out, g, w, _LR, _LAM), dtype),
        Contestant("_foreach_lerp_", "skilled", lambda: opponents.foreach_lerp_step(lerp, g, w, _LR, _LAM), dtype),
    ]
    size_in_bytes = sum(x.nbytes for x in v)
    # A term goes through at most: a difference, two products (one number rounded), two sums.
    expected = Expected(values, size, roundings=8)
    for contestant in contestants:
        with torch.no_grad():
            expected.check(contestant, contestant.run(), dtype)
    # Later steps begin where earlier ones ended: all that is asked of them is that they are finite.
    anything = Expected(values, torch.full_like(values, torch.inf), roundings=1)
    return Case(spec, contestants, anything, data_bytes=3 * size_in_bytes, limit_bytes=4 * size_in_bytes)


FAMILY = Family(
    name="proximal",
    summary="a step of SGD that is held near an anchor",
    ops={"step": f"`proximal_sgd_step_(params, grads, anchors, lr={_LR}, lam={_LAM})`"},
    notes={
        "autograd, then SGD": "`sum((p - w).norm()**2)` backward into existing gradients, then `torch.optim.SGD`",
        "_foreach_lerp_": "`_foreach_lerp_` to the anchor, then `_foreach_add_` of the gradient",
    },
    shapes=tuple(SHAPE_SETS),
    clients=(1,),
    dtypes=("float32", "float64", "bfloat16"),
    plan=_plan,
    cases=_cases,
)
