"""Cases of the averaging family and of ``ensemble_logits``."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from call import Call, compare, covers, unit
from guarded_tensors import FLOATS, Memory, draw_tensor
from torch import Tensor

from pfl_ext import ops
from pfl_ext.ops._arguments import accumulate_type

__all__ = ["SHAPES", "draw_shapes"]

SHAPES: list[list[int]] = [
    *([], [0], [1], [3], [13], [64], [127], [257], [1021], [0, 4], [5, 0, 2], [7, 5], [17, 31], [2, 3, 4]),
    *([1, 1, 1, 7], [4, 3, 5, 5], [33, 65], [2, 1, 129]),
]
LARGE: list[list[int]] = [[98317], [331, 257], [3, 16384], [7, 11, 13, 17], [65537]]


def draw_shapes(choice: random.Random, most: int = 4) -> list[list[int]]:
    shapes = [choice.choice(SHAPES) for _ in range(choice.randint(1, most))]
    if choice.random() < 0.03:
        shapes[choice.randrange(len(shapes))] = choice.choice(LARGE)
    return shapes


def _draw_models(choice: random.Random, count: int, integers: bool = False) -> list[list[dict[str, Any]]]:
    """Models of equal shapes and types; each tensor with a layout and values of its own."""
    shapes = draw_shapes(choice)
    types = [choice.choice(FLOATS) for _ in shapes]
    if integers and choice.random() < 0.3:
        shapes.append(choice.choice([[], [3]]))
        types.append("int64")
    values = None if choice.random() < 0.6 else "normal"
    models = []
    for _ in range(count):
        model = [draw_tensor(choice, shape, dtype, values) for shape, dtype in zip(shapes, types, strict=True)]
        for tensor in model:
            if tensor["dtype"] == "int64":
                tensor["range"] = choice.choice([[-1000, 1000], [-1000, 1000], [2**63 - 2, 2**63 - 1]])
        models.append(model)
    return models


def _draw_weights(choice: random.Random, count: int, signed: bool) -> list[float]:
    weights = [
        choice.choice([1.0, 2.0, 0.5, choice.random(), 1e-3, 1e4, float(choice.randint(1, 600))]) for _ in range(count)
    ]
    if signed:
        weights = [w * choice.choice([1, -1]) for w in weights]
    if count > 1 and choice.random() < 0.1:
        weights[choice.randrange(count)] = 0.0
    return weights if any(weights) else [1.0] * count


def _sums(memory: Memory, models: list[list[Tensor]], weights: list[float], server: list[Tensor] | None, lr: float):
    """Of each tensor: the float64 definition, and the magnitude of what it is the sum of."""
    for t in range(len(models[0])):
        start = None if server is None else memory.before(server[t]).double()
        total, size = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for model, weight in zip(models, weights, strict=True):
            x = memory.before(model[t]).double()
            total = total + weight * (x if start is None else x - start)
            size = size + abs(weight) * (x.abs() if start is None else x.abs() + start.abs())
        if start is not None:
            total, size = start + lr * total, start.abs() + abs(lr) * size
        yield total, size


def _compare_models(got: list[Tensor], sums: Any, terms: int) -> str | None:
    for t, (x, (truth, size)) in enumerate(zip(got, sums, strict=True)):
        if x.dtype == torch.int64:
            # Beside a half, either neighbour is a right rounding of a sum that is itself rounded. What no int64 can
            # hold becomes the nearest one that it can.
            limits = torch.iinfo(torch.int64)
            nearest = truth.clamp(limits.min, limits.max)
            off = (x.double() - nearest).abs() > 0.5 + terms * unit(torch.float64) * size
            if bool(off.any()):
                return f"tensor {t}: {x.tolist()} instead of {truth.tolist()}, rounded"
            continue
        if wrong := compare(f"tensor {t}", x, truth, size, terms, accumulate_type(x.dtype)):
            return wrong
    return None


def _draw_average(choice: random.Random) -> dict[str, Any]:
    count = choice.choice([1, 2, 3, 3, 5, 9])
    case: dict[str, Any] = {
        "op": choice.choice(["weighted_average", "weighted_average_", "server_update_", "accumulate_"]),
        "clients": _draw_models(choice, count),
        "weights": _draw_weights(choice, count, signed=choice.random() < 0.3),
        "lr": choice.choice([1.0, 0.1, 2.5, -1.0, 0.0]),
        "into_client": choice.random() < 0.2,
    }
    case["out"] = [
        {**tensor, "values": "normal", "layout": choice.choice(["contiguous", tensor["layout"], "sliced"])}
        for tensor in case["clients"][0]
    ]
    case["server"] = [{**tensor, "seed": tensor["seed"] + 1} for tensor in case["clients"][-1]]
    return case


@covers("raw.weighted_average", "raw.weighted_average_", "raw.server_update_", "raw.accumulate_", draw=_draw_average)
def average(case: dict[str, Any], memory: Memory) -> Call:
    models = [[memory.make(tensor) for tensor in model] for model in case["clients"]]
    flat = [tensor for model in models for tensor in model]
    weights, count, op = case["weights"], len(models), case["op"]
    vector = torch.tensor(weights, dtype=torch.float64)
    raw = getattr(torch.ops.pfl_ext, op)
    out = models[0] if case["into_client"] else [memory.make(tensor) for tensor in case["out"]]
    if op == "weighted_average":
        return Call(
            raw,
            [flat, vector],
            check=lambda got: _compare_models(got, _sums(memory, models, weights, None, 1), count + 4),
        )
    if op == "weighted_average_":
        return Call(
            raw,
            [out, flat, vector],
            written=out,
            check=lambda _: _compare_models(out, _sums(memory, models, weights, None, 1), count + 4),
        )
    if op == "server_update_":
        server = [memory.make(tensor) for tensor in case["server"]]
        lr = case["lr"]
        return Call(
            raw,
            [out, server, flat, vector, lr],
            written=out,
            check=lambda _: _compare_models(out, _sums(memory, models, weights, server, lr), count + 8),
        )
    sums = []
    for tensor in case["clients"][0]:
        accumulate = "float64" if tensor["dtype"] == "float64" else "float32"
        sums.append(memory.make({**tensor, "dtype": accumulate, "layout": "contiguous", "seed": tensor["seed"] + 2}))
    weight = weights[0]

    def check(_: Any) -> str | None:
        truth = (
            (
                memory.before(s).double() + weight * x.double(),
                memory.before(s).double().abs() + abs(weight) * x.double().abs(),
            )
            for s, x in zip(sums, models[0], strict=True)
        )
        return _compare_models(sums, truth, 4)

    return Call(raw, [sums, models[0], weight], written=sums, check=check)


def _prepared(model: Any) -> Any:
    """A list of tensors as it is best given; any other form as it is."""
    return ops.prepare(model) if isinstance(model, list) else model


def _draw_public(choice: random.Random) -> dict[str, Any]:
    count = choice.choice([1, 2, 3, 4, 7])
    normalize = choice.random() < 0.7
    case: dict[str, Any] = {
        "op": choice.choice(["weighted_average", "server_update", "StreamingAverage"]),
        "form": choice.choice(["list", "dict", "matrix", "tuple"]),
        "weights": _draw_weights(choice, count, signed=not normalize and choice.random() < 0.3),
        "normalize": normalize,
        "lr": choice.choice([1.0, 0.3, 1.7]),
        "out": choice.random() < 0.4,
        "nonfinite": choice.choice(["propagate", "propagate", "raise", "skip"]),
        "prepared": choice.random() < 0.5,
        "integers": choice.choice(["round", "round", "first"]),
    }
    if normalize and choice.random() < 0.05:
        case["weights"] = [choice.choice([1.0, 3.0]) * choice.choice([1e308, 1e37, 1e-46, 5e-324])] * count
    if case["form"] == "matrix":
        size = choice.choice([1, 5, 127, 1021, 70001 if choice.random() < 0.1 else 33])
        dtype = choice.choice(FLOATS)
        case["matrix"] = draw_tensor(choice, [count, size], dtype, None if choice.random() < 0.5 else "normal")
        case["out"] = False
    else:
        case["clients"] = _draw_models(choice, count, integers=True)
    return case


@covers("ops.weighted_average", "ops.server_update", "ops.StreamingAverage", draw=_draw_public)
def public_average(case: dict[str, Any], memory: Memory) -> Call:
    weights, form, op, lr = case["weights"], case["form"], case["op"], case["lr"]
    normalize, nonfinite = case["normalize"], case["nonfinite"]
    if form == "matrix":
        matrix = memory.make(case["matrix"])
        values = [[row] for row in matrix.unbind(0)]
        before = [[row] for row in memory.before(matrix).unbind(0)]
        given: Any = matrix if op != "StreamingAverage" else list(matrix.unbind(0))
        server_tensors = [before[0][0].clone().flip(0)]
        server: Any = server_tensors[0]
    else:
        values = [[memory.make(tensor) for tensor in model] for model in case["clients"]]
        before = [[memory.before(x) for x in model] for model in values]
        server_tensors = [x.clone().flip(0) if x.dim() else x.clone() for x in before[-1]]
        named = [{f"layer.{t}": x for t, x in enumerate(model)} for model in values]
        given = {"list": values, "dict": named, "tuple": [tuple(model) for model in values]}[form]
        server = {f"layer.{t}": x for t, x in enumerate(server_tensors)} if form == "dict" else server_tensors
    infinite = not all(map(math.isfinite, weights))
    if normalize and not infinite:  # so that their sum is one that float64 has
        largest = max(weights)
        weights = [w / largest for w in weights]
    bad = [any(x.is_floating_point() and not bool(x.isfinite().all()) for x in model) for model in before]
    kept = [c for c in range(len(weights)) if nonfinite != "skip" or not bad[c]]
    remaining = sum(weights[c] for c in kept)
    refuse = (any(bad) and nonfinite == "raise") or not kept or (normalize and remaining <= 0)
    refuse = refuse or infinite or (nonfinite == "skip" and any(bad) and remaining == 0)
    used = [weights[c] for c in kept]
    total = sum(used) if normalize else 1.0
    if not normalize and len(kept) < len(weights) and sum(weights):
        total = remaining / sum(weights)
    shares = [w / total for w in used] if total else used
    out: list[Tensor] = []
    options: dict[str, Any] = {"normalize": normalize, "nonfinite": nonfinite}
    first = case.get("integers") == "first" and nonfinite == "propagate"
    if first:
        options["integers"] = "first"
    ready: Any = _prepared if case.get("prepared") else lambda model: model
    if case["out"]:
        out = [torch.empty_like(x) for x in values[0]]
        into: Any = {f"layer.{t}": x for t, x in enumerate(out)} if form == "dict" else out

    whole = 0.01 * sum(map(abs, weights))
    cancel = nonfinite == "skip" and any(bad) and min(abs(remaining), abs(sum(weights))) < whole

    def check(got: Any) -> str | None:
        if infinite:
            return "infinite weights were not refused"
        if cancel:
            return "remaining weights that add up to 0 were not refused" if kept and remaining == 0 else None
        if form == "matrix":
            got = [got]
        elif form == "dict":
            got = list(got.values())
        sums = []
        for t in range(len(before[0])):
            start = server_tensors[t].double() if op == "server_update" else torch.zeros((), dtype=torch.float64)
            truth, size = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
            if first and not before[0][t].is_floating_point():
                sums.append((before[0][t].double(), size))
                continue
            for c, share in zip(kept, shares, strict=True):
                truth = truth + share * (before[c][t].double() - start)
                size = size + abs(share) * (before[c][t].double().abs() + start.abs())
            if op == "server_update":
                truth, size = start + lr * truth, start.abs() + lr * size
            sums.append((truth, size))
        return _compare_models(got, sums, 2 * len(weights) + 12)

    if op == "StreamingAverage":

        def stream(models: Any, numbers: Any) -> Any:
            running = ops.StreamingAverage(**options)
            for model, weight in zip(models, numbers, strict=True):
                running.add(ready(model), weight)
            return running.result(into) if out else running.result()

        return Call(stream, [given, case["weights"]], check=check, may_refuse=refuse)
    if out:
        options["out"] = into

    def averaged(models: Any, *rest: Any, **named: Any) -> Any:
        models = [ready(model) for model in models] if isinstance(models, list) else models
        return ops.weighted_average(models, *rest, **named)

    def updated(start: Any, models: Any, *rest: Any, **named: Any) -> Any:
        models = [ready(model) for model in models] if isinstance(models, list) else models
        return ops.server_update(ready(start), models, *rest, **named)

    if op == "server_update":
        arguments = [server, given, case["weights"]]
        return Call(updated, arguments, {**options, "lr": lr}, check=check, may_refuse=refuse)
    return Call(averaged, [given, case["weights"]], options, check=check, may_refuse=refuse)


def _draw_nonfinite(choice: random.Random) -> dict[str, Any]:
    shapes = draw_shapes(choice, 6)
    return {
        "op": choice.choice(["nonfinite", "all_finite"]),
        "tensors": [draw_tensor(choice, shape, choice.choice(FLOATS)) for shape in shapes],
    }


@covers("raw.nonfinite", "ops.all_finite", draw=_draw_nonfinite)
def nonfinite(case: dict[str, Any], memory: Memory) -> Call:
    tensors = [memory.make(tensor) for tensor in case["tensors"]]
    truth = [not bool(x.double().isfinite().all()) for x in tensors]
    if case["op"] == "all_finite":
        return Call(ops.all_finite, tensors, check=lambda got: None if got == (not any(truth)) else f"{got}: {truth}")
    return Call(
        torch.ops.pfl_ext.nonfinite, [tensors], check=lambda got: None if got.tolist() == truth else f"{got}: {truth}"
    )


def _draw_rows(choice: random.Random) -> dict[str, Any]:
    count, size, dtype = (
        choice.choice([1, 2, 3, 5, 9]),
        choice.choice([0, 1, 3, 64, 1021, 20011]),
        choice.choice(FLOATS),
    )
    return {
        "op": choice.choice(["average_rows_", "weighted_average"]),
        "matrix": draw_tensor(choice, [count, size], dtype),
        "weights": _draw_weights(choice, count, signed=False),
        "out": draw_tensor(choice, [size], dtype, "normal", "contiguous"),
    }


@covers("raw.average_rows_", "ops.weighted_average", draw=_draw_rows)
def rows(case: dict[str, Any], memory: Memory) -> Call:
    matrix, weights = memory.make(case["matrix"]), case["weights"]
    shares = [weight / sum(weights) for weight in weights]
    clients = memory.before(matrix).double()
    truth = sum((share * row for share, row in zip(shares, clients, strict=True)), torch.zeros(()).double())
    size = sum((share * row.abs() for share, row in zip(shares, clients, strict=True)), torch.zeros(()).double())
    sums, terms = [(truth, size)], len(weights) + 4
    if case["op"] == "weighted_average":
        return Call(ops.weighted_average, [matrix, weights], check=lambda got: _compare_models([got], sums, terms))
    out = memory.make(case["out"])
    return Call(
        torch.ops.pfl_ext.average_rows_,
        [out, matrix, torch.tensor(shares, dtype=torch.float64)],
        written=[out],
        check=lambda _: _compare_models([out], sums, terms),
    )


def _draw_ensemble(choice: random.Random) -> dict[str, Any]:
    count, dtype = choice.randint(1, 5), choice.choice(FLOATS)
    shape = choice.choice([[1, 2], [5, 10], [33, 7], [4, 100], [0, 3]])
    return {
        "teachers": [draw_tensor(choice, shape, dtype) for _ in range(count)],
        "weights": None if choice.random() < 0.3 else _draw_weights(choice, count, signed=False),
    }


@covers("ops.ensemble_logits", draw=_draw_ensemble)
def ensemble_logits(case: dict[str, Any], memory: Memory) -> Call:
    teachers = [memory.make(tensor) for tensor in case["teachers"]]
    weights = case["weights"] or [1.0] * len(teachers)
    used = [m for m, weight in enumerate(weights) if weight]
    shares = [weights[m] / sum(weights) for m in used]
    sums = list(_sums(memory, [[teachers[m]] for m in used], shares, None, 1))
    return Call(
        ops.ensemble_logits,
        [teachers, case["weights"]],
        check=lambda got: _compare_models([got], sums, len(teachers) + 4),
    )


def _draw_overlap(choice: random.Random) -> dict[str, Any]:
    return {
        "op": choice.choice(["weighted_average_", "public", "StreamingAverage"]),
        "how": choice.choice(["two tensors", "within one"]),
        "dtype": choice.choice(FLOATS),
        "shift": choice.randint(1, 63),
    }


@covers("ops.weighted_average", draw=_draw_overlap)
def overlapping_out(case: dict[str, Any], memory: Memory) -> Call:
    """An ``out`` whose elements share memory has no right result."""
    base = memory.make({"shape": [512], "dtype": case["dtype"], "layout": "contiguous", "values": "normal", "seed": 1})
    shift = case["shift"]
    if case["how"] == "two tensors":
        out = [base[:64], base[shift : shift + 64]]
    else:
        out = [base.as_strided([8, 8], [min(shift, 7), 1])]
    clients = [[torch.ones(x.shape, dtype=x.dtype) for x in out] for _ in range(2)]

    def refused(into: Any) -> Any:
        if case["op"] == "public":
            return ops.weighted_average(clients, out=into)
        if case["op"] == "StreamingAverage":
            running = ops.StreamingAverage()
            running.add(clients[0])
            return running.result(into)
        flat = [x for client in clients for x in client]
        return torch.ops.pfl_ext.weighted_average_(into, flat, torch.full((2,), 0.5, dtype=torch.float64))

    return Call(refused, [out], written=[base], may_refuse=True, check=lambda _: "an overlapping out was not refused")
