"""Races of the sharpness ops: perturb and restore, for the whole model and by layers, and the scores of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pfl_ext.ops import Prepared, lwsam_perturb_, personalization_scores, prepare, restore_

from .case import Case, Contestant, Expected, Family, Grid, Kind, Skipped, Spec, WrongResult, flatten
from .opponents import sharpness as opponents
from .shapes import SHAPE_SETS

__all__ = ["FAMILY"]

_RHO = 0.05

Tensors = list[Tensor]


class _Model:
    """Weights and gradients; the same values for the same arguments."""

    def __init__(self, shapes: str, dtype: str) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(s, generator=generator).to(self.dtype) for s in SHAPE_SETS[shapes]]
        self.grads = [torch.randn(s, generator=generator).to(self.dtype) for s in SHAPE_SETS[shapes]]
        self.scores = torch.rand(len(self.weights), generator=generator, dtype=torch.float64)
        self.scores /= self.scores.sum()

    def copy(self) -> Tensors:
        return [w.clone() for w in self.weights]

    @property
    def bytes(self) -> int:
        return sum(w.nbytes for w in self.weights)


def _plan(grid: Grid) -> list[Spec]:
    shape_sets = grid.shapes or (("lenet", "adapters") if grid.quick else tuple(SHAPE_SETS))
    specs = []
    for shapes in shape_sets:
        for dtype in grid.dtypes or (FAMILY.dtypes if shapes == "resnet18" and not grid.quick else ("float32",)):
            for op in FAMILY.ops:
                few_or_all = (grid.all_threads,) if grid.quick else (1, grid.all_threads)
                specs += [Spec(op, shapes, 1, dtype, n) for n in dict.fromkeys(grid.threads or few_or_all)]
    return specs


def _cases(specs: Iterable[Spec]) -> Iterator[Case | Skipped]:
    for (shapes, dtype), group in groupby(specs, key=lambda spec: (spec.shapes, spec.dtype)):
        model = _Model(shapes, dtype)
        for spec in group:
            yield _scores(spec, model) if spec.op == "scores" else _perturbation(spec, model)


def _perturbation(spec: Spec, model: _Model) -> Case:
    scores = model.scores if spec.op == "lwsam" else None
    # As its authors would hold them: beside the weights, in their type.
    peers_scores = None if scores is None else scores.to(model.dtype)
    grads, wide = model.grads, torch.promote_types(model.dtype, torch.float32)
    norm = torch.cat([g.double().flatten() for g in grads]).norm()
    moved = torch.cat(
        [
            (w.double() + _RHO * (1.0 if scores is None else scores[t]) / norm * g.double()).flatten()
            for t, (w, g) in enumerate(zip(model.weights, grads, strict=True))
        ]
    )
    kept: dict[str, Tensor] = {}
    ready: dict[str, Prepared] = {"grads": prepare(grads)}

    def again(params: Tensors) -> Tensor:
        kept["backup"] = lwsam_perturb_(params, grads, scores, _RHO, backup=kept.get("backup"))
        return kept["backup"]

    def prepared_again(params: Tensors) -> Tensor:
        if "params" not in ready:
            ready["params"] = prepare(params)
        kept["prepared"] = lwsam_perturb_(ready["params"], ready["grads"], scores, _RHO, backup=kept.get("prepared"))
        return kept["prepared"]

    def prepared_restore(params: Tensors, backup: Tensor) -> None:
        restore_(ready["params"], backup)

    ways: list[tuple[str, Kind, Callable[[Tensors], Any], Callable[[Tensors, Any], None], torch.dtype]] = [
        ("pfl_ext", "ours", again, restore_, wide),
        ("pfl_ext (prepared)", "ours", prepared_again, prepared_restore, wide),
        ("pfl_ext (new backup)", "ours", lambda p: lwsam_perturb_(p, grads, scores, _RHO), restore_, wide),
        (
            "davda54 (per tensor)",
            "naive",
            lambda p: opponents.per_tensor_perturb(p, grads, _RHO, peers_scores),
            opponents.per_tensor_restore,
            model.dtype,
        ),
        (
            "_foreach",
            "skilled",
            lambda p: opponents.foreach_perturb(p, grads, _RHO, peers_scores),
            opponents.foreach_restore,
            model.dtype,
        ),
    ]
    contestants = []
    for name, kind, perturb, restore, adds_in in ways:
        params = model.copy()

        def both(params: Tensors = params, perturb: Any = perturb, restore: Any = restore) -> Tensors:
            restore(params, perturb(params))
            return params

        contestant = Contestant(name, kind, both, adds_in)
        _check_moved(contestant, params, perturb, restore, moved, model.dtype)
        contestants.append(contestant)
    # What is timed ends where it began, to the bit.
    begin = flatten(model.weights)
    expected = Expected(begin, torch.zeros_like(begin), roundings=0)
    # Of the perturbation: g twice, w in and out, the backup; of restoring: the backup in, w out.
    return Case(spec, contestants, expected, data_bytes=3 * model.bytes, limit_bytes=7 * model.bytes)


def _check_moved(
    contestant: Contestant, params: Tensors, perturb: Any, restore: Any, moved: Tensor, dtype: torch.dtype
) -> None:
    """The perturbed weights, which the timed call undoes: within some roundings of the contestant's type."""
    saved = perturb(params)
    given = flatten(params)
    restore(params, saved)
    bound = (16 * torch.finfo(contestant.adds_in).eps + torch.finfo(dtype).eps) * (moved.abs() + _RHO)
    if not bool(((given - moved).abs() <= bound).all()):
        raise WrongResult(f"{contestant.name} perturbs by something else than expected")


def _scores(spec: Spec, model: _Model) -> Case:
    a, b = model.weights, model.grads
    raw = torch.stack([(x.double() - y.double()).norm() / x.numel() for x, y in zip(a, b, strict=True)])
    values = raw / raw.sum()
    contestants = [
        Contestant("pfl_ext", "ours", lambda: personalization_scores(a, b), torch.float64),
        Contestant("loop over layers", "naive", lambda: opponents.per_layer_scores(a, b), model.dtype),
        Contestant("_foreach", "skilled", lambda: opponents.foreach_scores(a, b), model.dtype),
    ]
    # Differences, squares, sums in blocks, root, quotients.
    # torch adds a norm's squares in some vectors of partial sums: of the largest tensor, 2.4 million, a hundredth each.
    expected = Expected(values, values, roundings=24_000)
    return Case(spec, contestants, expected, data_bytes=2 * model.bytes, limit_bytes=2 * model.bytes)


FAMILY = Family(
    name="sharpness",
    summary="perturbation of SAM and LWSAM, and the scores of layers",
    ops={
        "sam": f"`lwsam_perturb_(params, grads, rho={_RHO})`, then `restore_`",
        "lwsam": "the same with a score for each tensor",
        "scores": "`personalization_scores(a, b)`, each tensor a layer",
    },
    notes={
        "pfl_ext": "the backup is used again, as the optimisers do",
        "pfl_ext (prepared)": "its lists were given to `prepare` before",
        "davda54 (per tensor)": "restores by giving the parameter the storage of the copy: nothing is copied back",
    },
    shapes=tuple(SHAPE_SETS),
    clients=(1,),
    dtypes=("float32", "float64", "bfloat16"),
    plan=_plan,
    cases=_cases,
)
