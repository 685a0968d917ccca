"""Cases of the proximal and the sharpness family: what moves a model's weights in place."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from averaging_cases import draw_shapes
from call import Call, bits, compare, covers, leaf, unit
from guarded_tensors import FLOATS, Memory, draw_tensor
from torch import Tensor

from pfl_ext import ops
from pfl_ext.ops import sharpness
from pfl_ext.ops._arguments import accumulate_type
from pfl_ext.ops._declare import OPS


def _draw_lists(choice: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
    """Lists of equal shapes and types."""
    shapes = draw_shapes(choice)
    types = [choice.choice(FLOATS) for _ in shapes]
    values = None if choice.random() < 0.5 else "normal"
    return {
        name: [draw_tensor(choice, shape, dtype, values) for shape, dtype in zip(shapes, types, strict=True)]
        for name in names
    }


def _draw_step(choice: random.Random) -> dict[str, Any]:
    nesterov = choice.random() < 0.2
    momentum = choice.choice([0.5, 0.9]) if nesterov or choice.random() < 0.5 else 0.0
    return {
        **_draw_lists(choice, ("params", "grads", "anchors", "buffers")),
        "raw": choice.random() < 0.5,
        "prepared": choice.random() < 0.5,
        "same_anchor": choice.random() < 0.1,
        "lr": choice.choice([0.1, 1.0, 0.0, 1e-3]),
        "lam": choice.choice([0.0, 0.5, 1.0]),
        "momentum": momentum,
        "dampening": 0.0 if nesterov else choice.choice([0.0, 0.3]),
        "weight_decay": choice.choice([0.0, 1e-2]),
        "nesterov": nesterov,
        "maximize": choice.random() < 0.2,
        "first": choice.random() < 0.3,
    }


def _prepared_step(params: Any, grads: Any, anchors: Any, *numbers: Any, momentum_buffers: Any, **options: Any) -> None:
    """The same step twice from the same numbers: the second one is asked for in a word."""
    lists = [ops.prepare(x) for x in (params, grads, anchors)]
    buffers = ops.prepare(momentum_buffers)
    begin = [x.clone() for x in (*lists[0], *buffers)]
    ops.proximal_sgd_step_(*lists, *numbers, momentum_buffers=buffers, **options)
    for x, value in zip((*lists[0], *buffers), begin, strict=True):
        x.copy_(value)
    ops.proximal_sgd_step_(*lists, *numbers, momentum_buffers=buffers, **options)


@covers(
    "raw.proximal_sgd_step_",
    "raw.proximal_sgd_step_again_",
    "raw.prepare",
    "raw.end_prepared_",
    "ops.proximal_sgd_step_",
    "ops.prepare",
    "ops.Prepared",
    draw=_draw_step,
)
def proximal_step(case: dict[str, Any], memory: Memory) -> Call:
    params, grads, anchors = ([memory.make(x) for x in case[name]] for name in ("params", "grads", "anchors"))
    if case["same_anchor"]:
        anchors = params
    lr, lam, mu, tau, decay = (case[name] for name in ("lr", "lam", "momentum", "dampening", "weight_decay"))
    nesterov, maximize, first = case["nesterov"], case["maximize"], case["first"]
    buffers = [memory.make(x) for x in case["buffers"]] if mu else []

    def check(_: Any) -> str | None:
        for t, v in enumerate(params):
            w, g, a = (memory.before(x[t]).double() for x in (params, grads, anchors))
            d = -g if maximize else g
            size = g.abs()
            if decay:
                d, size = d + decay * w, size + decay * w.abs()
            if lam:
                d, size = d + lam * (w - a), size + lam * (w.abs() + a.abs())
            if mu:
                m = memory.before(buffers[t]).double()
                moved = d if first else mu * m + (1 - tau) * d
                large = size if first else mu * m.abs() + abs(1 - tau) * size
                if wrong := compare(f"buffer {t}", buffers[t], moved, large, 12, accumulate_type(v.dtype)):
                    return wrong
                d, size = (d + mu * moved, size + mu * large) if nesterov else (moved, large)
            if wrong := compare(f"param {t}", v, w - lr * d, w.abs() + lr * size, 16, accumulate_type(v.dtype)):
                return wrong
        return None

    written = [*params, *buffers]
    if case["raw"]:
        arguments = [params, buffers, grads, anchors, lr, lam, mu, tau, decay, nesterov, maximize, first]
        return Call(torch.ops.pfl_ext.proximal_sgd_step_, arguments, written=written, check=check)
    options = {
        "dampening": tau,
        "nesterov": nesterov,
        "maximize": maximize,
        "momentum_buffers": buffers,
        "first": first,
    }
    function = _prepared_step if case.get("prepared") else ops.proximal_sgd_step_
    return Call(function, [params, grads, anchors, lr, lam, mu, decay], options, written=written, check=check)


def _draw_distance(choice: random.Random) -> dict[str, Any]:
    return {
        **_draw_lists(choice, ("a", "b")),
        "op": choice.choice(["raw", "public", "backward"]),
        "grad": choice.choice([1.0, -0.3, 1e3]),
    }


@covers("raw.squared_distance", "ops.squared_distance", "raw.squared_distance_backward", draw=_draw_distance)
def squared_distance(case: dict[str, Any], memory: Memory) -> Call:
    a, b = [memory.make(x) for x in case["a"]], [memory.make(x) for x in case["b"]]
    x, y = [memory.before(t).double() for t in a], [memory.before(t).double() for t in b]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in a) else torch.float32
    elements = sum(t.numel() for t in a)
    truth = sum((((p - q) ** 2).sum() for p, q in zip(x, y, strict=True)), torch.zeros((), dtype=torch.float64))

    def check_value(got: Tensor) -> str | None:
        if got.dtype != dtype:
            return f"the distance is {got.dtype}, not {dtype}"
        return compare("distance", got, truth, truth, elements + 4, torch.float64)

    def check_gradients(got: list[Tensor], scale: float) -> str | None:
        for t, (p, q) in enumerate(zip(x, y, strict=True)):
            for sign, g in ((1, got[t]), (-1, got[len(x) + t])):
                gradient, size = 2 * sign * scale * (p - q), 2 * abs(scale) * (p.abs() + q.abs())
                if wrong := compare(f"gradient {t}", g, gradient, size, 6, accumulate_type(g.dtype)):
                    return wrong
        return None

    if case["op"] == "raw":
        return Call(torch.ops.pfl_ext.squared_distance, [a, b], check=check_value)
    if case["op"] == "backward":
        grad = torch.tensor(case["grad"], dtype=dtype)
        arguments = [grad, a, b, True, True]
        check = lambda got: check_gradients(got, float(grad))  # noqa: E731
        return Call(torch.ops.pfl_ext.squared_distance_backward, arguments, check=check)

    def with_gradients(first: Any, second: Any) -> Any:
        first = list(map(leaf, first)) if isinstance(first, list) else first
        second = list(map(leaf, second)) if isinstance(second, list) else second
        value = ops.squared_distance(first, second)
        return value, list(torch.autograd.grad(value, [*first, *second]))

    return Call(with_gradients, [a, b], check=lambda got: check_value(got[0]) or check_gradients(got[1], 1.0))


def _draw_perturb(choice: random.Random) -> dict[str, Any]:
    case = _draw_lists(choice, ("params", "grads"))
    tensors = len(case["params"])
    layers = choice.randint(1, tensors)
    case |= {
        "raw": choice.random() < 0.5,
        "groups": [choice.randrange(layers) for _ in range(tensors)] if choice.random() < 0.5 else None,
        "scores": choice.random() < 0.5,
        "rho": choice.choice([0.05, 1.0, 0.0, 10.0]),
        "p": choice.choice([2.0, 2.0, 2.0, 1.0, math.inf, 3.0, 1.5, 4.7, 1.1]),
        "norm": choice.choice(["global", "layer"]),
        "odd": choice.random() < 0.3,
        "prepared": choice.random() < 0.5,
    }
    case["literal"] = choice.random() < 0.2 and 1 < case["p"] < math.inf
    if choice.random() < 0.03:
        whole = {"shape": [64], "dtype": choice.choice(FLOATS), "layout": "contiguous", "values": "normal"}
        case |= {"params": [{**whole, "seed": 1}], "grads": [{**whole, "seed": 2}], "groups": None, "alias": True}
    case["restore_threads"] = choice.choice([1, 3])
    if case["p"] == math.inf:
        case["p"] = "inf"  # JSON has none
    return case


@covers("raw.lwsam_perturb_", "ops.lwsam_perturb_", "raw.restore_", "ops.restore_", draw=_draw_perturb)
def perturb(case: dict[str, Any], memory: Memory) -> Call:
    params, grads = ([memory.make(x) for x in case[name]] for name in ("params", "grads"))
    p, rho, literal, per_layer = float(case["p"]), case["rho"], case["literal"], case["norm"] == "layer"
    groups = list(range(len(params))) if case["groups"] is None else case["groups"]
    layers = max(groups) + 1
    scores = [0.3 + 0.4 * i for i in range(layers)] if case["scores"] else None
    vector = None if scores is None else torch.tensor(scores, dtype=torch.float64)
    room = sharpness.backup_bytes(params)
    backup = memory.make(
        {
            "shape": [room],
            "dtype": "uint8",
            "layout": "offset" if case["odd"] else "contiguous",
            "values": "",
            "seed": 0,
        }
    )

    if case.get("alias"):  # refused, or right
        backup = grads[0].view(torch.uint8)

    def check(_: Any) -> str | None:
        # Fresh ones: where nothing is in it, contiguous() keeps the strides.
        moved = [torch.zeros(x.shape, dtype=torch.float64).copy_(memory.before(x)) for x in params]
        slopes = [torch.zeros(x.shape, dtype=torch.float64).copy_(memory.before(x)) for x in grads]
        spare = torch.empty(sharpness.backup_bytes(moved), dtype=torch.uint8)
        OPS["lwsam_perturb_"].reference(moved, spare, slopes, vector, groups, layers, rho, p, literal, per_layer)
        exponent = 0.0 if math.isinf(p) else 1.0 if p == 2 else math.inf if p == 1 else 1 / (p - 1)
        for t, (x, truth, g) in enumerate(zip(params, moved, slopes, strict=True)):
            w, accumulate = memory.before(x).double(), accumulate_type(x.dtype)
            step = (truth - w).abs()
            largest = max((float(s.abs().max()) for s in slopes if s.numel() and bool(s.isfinite().all())), default=1.0)
            # A power's relative error is its exponent times that of the base, and the logarithm's of a small base.
            if exponent in (0.0, 1.0, math.inf):
                terms = 16.0
            else:
                ratio = (g.abs() / (largest or 1.0)).clamp(min=1e-300)
                spread = float(ratio.log().abs().nan_to_num(0, 0, 0).max()) if g.numel() else 0.0
                terms = 16 + 8 * max(exponent, 1 / exponent, p) * (1 + spread)
            if terms * unit(accumulate) > 0.1:
                continue
            # The factor itself may leave the range of the accumulate type: then it is clamped, or nothing.
            factor = step / g.abs()
            limits = torch.finfo(accumulate)
            usual = (factor < limits.max / 16) & (factor > limits.tiny * 16) & (step < limits.max**0.9)
            usual |= (step == 0) | ~step.isfinite()
            size = torch.where(usual, w.abs() + step, torch.full_like(step, limits.max))
            # A share of the largest gradient that has no place in the accumulate type counts as none: the step is lost.
            lost = (g.abs() < 2 * limits.tiny * largest) & (exponent not in (0.0, 1.0, math.inf))
            size = torch.where(lost, size + 2 * step / (terms * unit(accumulate)), size)
            if wrong := compare(f"param {t}", x, truth, size, terms, accumulate):
                return wrong
        torch.set_num_threads(case.get("restore_threads", 1))
        given = ops.prepare(params) if case.get("prepared") and not case["raw"] else params
        (ops.restore_ if not case["raw"] else torch.ops.pfl_ext.restore_)(given, backup)
        for t, x in enumerate(params):
            if bits(x) != bits(memory.before(x)):
                return f"restore_ gave param {t} other bits"
        return None

    alias = bool(case.get("alias"))
    written = [*params, *grads] if alias else [*params, backup]
    if case["raw"]:
        arguments = [params, backup, grads, vector, groups, layers, rho, p, literal, per_layer]
        return Call(torch.ops.pfl_ext.lwsam_perturb_, arguments, written=written, check=check, may_refuse=alias)
    options = {"groups": case["groups"], "literal_exponent": literal, "backup": backup}

    def prepared(params: Any, grads: Any, *rest: Any, **named: Any) -> Any:
        return ops.lwsam_perturb_(ops.prepare(params), ops.prepare(grads), *rest, **named)

    return Call(
        prepared if case.get("prepared") else ops.lwsam_perturb_,
        [params, grads, scores, rho, p, case["norm"]],
        options,
        written=written,
        check=check,
        may_refuse=alias,
    )


def _draw_scores(choice: random.Random) -> dict[str, Any]:
    case = _draw_lists(choice, ("a", "b"))
    tensors = len(case["a"])
    return {
        **case,
        "raw": choice.random() < 0.5,
        "form": choice.choice(["list", "dict"]),
        "groups": [choice.randrange(choice.randint(1, tensors)) for _ in range(tensors)],
    }


@covers("raw.personalization_scores", "ops.personalization_scores", "ops.layer_groups", draw=_draw_scores)
def scores(case: dict[str, Any], memory: Memory) -> Call:
    a, b = [memory.make(x) for x in case["a"]], [memory.make(x) for x in case["b"]]
    groups = case["groups"]
    names = [f"part{group}.{t}" for t, group in enumerate(groups)]
    if case["form"] == "dict" and not case["raw"]:
        numbered = ops.layer_groups(names)
        if [names[i].split(".")[0] == names[j].split(".")[0] for i in range(len(a)) for j in range(len(a))] != [
            numbered[i] == numbered[j] for i in range(len(a)) for j in range(len(a))
        ]:
            return Call(lambda: None, [], check=lambda _: f"layer_groups of {names} is {numbered}")
        groups = numbered
    layers = max(groups) + 1
    double = [[memory.before(x).double().contiguous() for x in side] for side in (a, b)]
    truth = OPS["personalization_scores"].reference(*double, groups, layers)
    filled = {group for group, x in zip(groups, a, strict=True) if x.numel()}
    truth = torch.where(torch.tensor([layer in filled for layer in range(layers)]), truth, 0.0)  # without elements: 0
    elements = sum(x.numel() for x in a)
    # A sum of squares that leaves float64 has no scores to compare.
    squares = [float((x - y).square().sum()) for x, y in zip(*double, strict=True)]
    check = lambda got: compare("scores", got, truth, truth, elements + 16, torch.float64)  # noqa: E731
    if any(math.isinf(s) for s in squares) and all(bool(x.isfinite().all()) for side in double for x in side):
        check = lambda got: None  # noqa: E731
    if case["raw"]:
        return Call(torch.ops.pfl_ext.personalization_scores, [a, b, groups, layers], check=check)
    if case["form"] == "dict":
        return Call(
            ops.personalization_scores,
            [dict(zip(names, a, strict=True)), dict(zip(reversed(names), reversed(b), strict=True))],
            check=check,
        )
    return Call(ops.personalization_scores, [a, b, groups], check=check)
