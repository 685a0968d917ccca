"""Races of the step of SGD, with an anchor and without: against autograd, SGD and the ``_foreach`` functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from pfl_ext.ops import prepare, proximal_sgd_step_

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
            threads = dict.fromkeys(grid.threads or few_or_all)
            specs += [Spec(op, shapes, 1, dtype, n) for op in FAMILY.ops for n in threads]
    return specs


def _cases(specs: Iterable[Spec]) -> Iterator[Case | Skipped]:
    for spec in specs:
        yield _proximal(spec) if spec.op == "step" else _sgd(spec)


def _proximal(spec: Spec) -> Case:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(0)
    v, g, w = ([torch.randn(s, generator=generator).to(dtype) for s in SHAPE_SETS[spec.shapes]] for _ in range(3))
    exact = [torch.cat([x.double().flatten() for x in tensors]) for tensors in (v, g, w)]
    values = exact[0] - _LR * (exact[1] + _LAM * (exact[0] - exact[2]))
    size = exact[0].abs() + _LR * (exact[1].abs() + _LAM * (exact[0].abs() + exact[2].abs()))

    # Each has its own weights; and autograd its own gradients, to which it adds.
    ours, again, lerp, written_out, differentiated = ([x.clone() for x in v] for _ in range(5))
    lists = prepare(again), prepare(g), prepare(w)
    for p, gradient in zip(differentiated, g, strict=True):
        p.requires_grad_()
        p.grad = gradient.clone()
    sgd = torch.optim.SGD(differentiated, lr=_LR)

    def step() -> list[torch.Tensor]:
        proximal_sgd_step_(ours, g, w, _LR, _LAM)
        return ours

    def prepared_step() -> list[torch.Tensor]:
        proximal_sgd_step_(*lists, _LR, _LAM)
        return again

    wide = torch.promote_types(dtype, torch.float32)
    contestants = [
        Contestant("pfl_ext", "ours", step, wide),
        Contestant("pfl_ext (prepared)", "ours", prepared_step, wide),
        Contestant("autograd, then SGD", "naive", lambda: opponents.autograd_step(differentiated, w, _LAM, sgd), dtype),
        Contestant("_foreach", "skilled", lambda: opponents.foreach_step(written_out, g, w, _LR, _LAM), dtype),
        Contestant("_foreach_lerp_", "skilled", lambda: opponents.foreach_lerp_step(lerp, g, w, _LR, _LAM), dtype),
    ]
    # A term goes through at most: a difference, two products (one number rounded), two sums.
    return _case(spec, contestants, Expected(values, size, roundings=8), sum(x.nbytes for x in v), lists=3)


def _sgd(spec: Spec) -> Case:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(0)
    v, g = ([torch.randn(s, generator=generator).to(dtype) for s in SHAPE_SETS[spec.shapes]] for _ in range(2))
    exact = [torch.cat([x.double().flatten() for x in tensors]) for tensors in (v, g)]
    ours, again, added, optimised = ([x.clone() for x in v] for _ in range(4))
    lists = prepare(again), prepare(g)
    for p, gradient in zip(optimised, g, strict=True):
        p.requires_grad_()
        p.grad = gradient
    sgd = torch.optim.SGD(optimised, lr=_LR, foreach=True)

    def step(params: Any, grads: Any) -> Any:
        proximal_sgd_step_(params, grads, [], _LR, 0.0)
        return params

    def torch_step() -> list[torch.Tensor]:
        sgd.step()
        return optimised

    wide = torch.promote_types(dtype, torch.float32)
    contestants = [
        Contestant("pfl_ext (prepared)", "ours", partial(step, *lists), wide),
        Contestant("pfl_ext", "ours", partial(step, ours, g), wide),
        Contestant("torch.optim.SGD", "naive", torch_step, dtype),
        Contestant("_foreach_add_", "skilled", lambda: opponents.foreach_sgd_step(added, g, _LR), dtype),
    ]
    expected = Expected(exact[0] - _LR * exact[1], exact[0].abs() + _LR * exact[1].abs(), roundings=4)
    return _case(spec, contestants, expected, sum(x.nbytes for x in v), lists=2)


def _case(spec: Spec, contestants: list[Contestant], expected: Expected, size_in_bytes: int, lists: int) -> Case:
    """The first step is checked; of later ones, which begin where earlier ones ended, that they are finite."""
    for contestant in contestants:
        with torch.no_grad():
            expected.check(contestant, contestant.run(), getattr(torch, spec.dtype))
    anything = Expected(expected.values, torch.full_like(expected.values, torch.inf), roundings=1)
    return Case(spec, contestants, anything, data_bytes=lists * size_in_bytes, limit_bytes=(lists + 1) * size_in_bytes)


FAMILY = Family(
    name="proximal",
    summary="a step of SGD that is held near an anchor",
    ops={
        "step": f"`proximal_sgd_step_(params, grads, anchors, lr={_LR}, lam={_LAM})`",
        "sgd": f"`proximal_sgd_step_(params, grads, [], lr={_LR}, lam=0)`: plain SGD",
    },
    notes={
        "pfl_ext (prepared)": "its lists were given to `prepare` before",
        "torch.optim.SGD": "with `foreach=True`",
        "autograd, then SGD": "`sum((p - w).norm()**2)` backward into existing gradients, then `torch.optim.SGD`",
        "_foreach_lerp_": "`_foreach_lerp_` to the anchor, then `_foreach_add_` of the gradient",
    },
    shapes=tuple(SHAPE_SETS),
    clients=(1,),
    dtypes=("float32", "float64", "bfloat16"),
    plan=_plan,
    cases=_cases,
)
