"""Cases of the distillation losses."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from call import Call, compare, covers, leaf
from guarded_tensors import FLOATS, Memory, draw_tensor
from torch import Tensor

from pfl_ext import ops
from pfl_ext.ops._arguments import accumulate_type
from pfl_ext.ops._declare import OPS

_AVERAGES = ("logits", "probs", "losses")
_REDUCTIONS = ("none", "sum", "mean", "batchmean")
_LOGITS = ("normal", "normal", "normal", "normal", "low", "large", "zeros", "equal", "nan", "mixed", "inf", "subnormal")


def _draw(choice: random.Random) -> dict[str, Any]:
    shape = choice.choice([[1, 1], [1, 2], [5, 10], [33, 7], [4, 100], [0, 3], [17, 257], [2, 1021]])
    if choice.random() < 0.03:
        shape = choice.choice([[4096, 10], [700, 97], [3, 20011]])
    dtype, count = choice.choice(FLOATS), choice.choice([1, 1, 2, 3, 5])
    values = "normal" if choice.random() < 0.5 else None
    weights = [choice.choice([1.0, 0.25, 3.0]) for _ in range(count)]
    multilabel, ensemble = choice.random() < 0.3, choice.random() < 0.5
    logits = lambda: draw_tensor(choice, shape, dtype, values or choice.choice(_LOGITS))  # noqa: E731
    return {
        "op": choice.choice(["raw", "ensemble" if ensemble else "single"]),
        "student": logits(),
        "teachers": [logits() for _ in range(count if ensemble else 1)],
        "stacked": ensemble and choice.random() < 0.3,
        "weights": weights if ensemble and choice.random() < 0.6 else None,
        "target": None if ensemble else choice.randrange(2**31),
        "sample_weights": choice.choice([None, None, "some", "none"]),
        "ignored": choice.random() < 0.3,
        "temperature": 1e-40 if choice.random() < 0.03 else choice.choice([1.0, 2.0, 0.5, 10.0, 0.05, 300.0]),
        "lam": choice.choice([0.0, 0.3, 0.5, 1.0]),
        "smoothing": choice.choice([0.0, 0.0, 0.1, 1.0]),
        "average": choice.randrange(3) if ensemble else 0,
        "cross_entropy": choice.random() < 0.4,
        "multilabel": multilabel,
        "reduction": choice.randrange(4),
        "need_grad": choice.random() < 0.7,
    }  # fmt: skip


def _target(case: dict[str, Any], rows: int, classes: int, accumulate: torch.dtype) -> Tensor | None:
    if case["target"] is None:
        return None
    generator = torch.Generator().manual_seed(case["target"])
    ignore = -100 if not case["multilabel"] else -1
    if case["multilabel"]:
        target = torch.randint(0, 2, (rows, classes), generator=generator).to(accumulate)
    else:
        target = torch.randint(0, classes, (rows,), generator=generator)
    if case["ignored"]:
        target[torch.rand(target.shape, generator=generator) < 0.3] = ignore
    return target


def _sample_weights(case: dict[str, Any], rows: int, accumulate: torch.dtype) -> Tensor | None:
    if case["sample_weights"] is None:
        return None
    if case["sample_weights"] == "none":
        return torch.zeros(rows, dtype=accumulate)
    generator = torch.Generator().manual_seed(rows)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64).to(accumulate)
    weights[torch.rand(rows, generator=generator) < 0.3] = 0
    return weights


def _draw_scaled(choice: random.Random) -> dict[str, Any]:
    shape = choice.choice([[1, 1], [5, 10], [0, 3], [17, 257], [2, 1021]])
    number = lambda: choice.choice([1.0, 1.0, 0.0, -2.5, 3.7, 48.0, 1e-30, 65536.0, math.inf, math.nan])  # noqa: E731
    gradient = draw_tensor(choice, shape, choice.choice(FLOATS), choice.choice(_LOGITS), "contiguous")
    return {"gradient": gradient, "incoming": number(), "normalizer": number()}


@covers("raw.distillation_scale_", draw=_draw_scaled)
def scaled_gradient(case: dict[str, Any], memory: Memory) -> Call:
    gradient = memory.make(case["gradient"])
    accumulate, half = accumulate_type(gradient.dtype), gradient.dtype in (torch.float16, torch.bfloat16)
    incoming, normalizer = (torch.tensor(case[name], dtype=accumulate) for name in ("incoming", "normalizer"))
    factor = incoming.double() / normalizer.double() if half else incoming.double()
    truth = memory.before(gradient).double() * factor
    size = torch.where(truth.isfinite(), truth.abs(), truth)
    return Call(
        torch.ops.pfl_ext.distillation_scale_,
        [gradient, incoming, normalizer],
        written=[gradient],
        check=lambda _: compare("gradient", gradient, truth, size, 3, accumulate),
        may_refuse=not gradient.is_contiguous(),
    )


@covers("raw.distillation_loss", "ops.distillation_loss", "ops.ensemble_distillation_loss", draw=_draw)
def distillation(case: dict[str, Any], memory: Memory) -> Call:
    student, teachers = memory.make(case["student"]), [memory.make(x) for x in case["teachers"]]
    rows, classes = student.shape
    accumulate, half = accumulate_type(student.dtype), student.dtype in (torch.float16, torch.bfloat16)
    listed = [torch.stack(teachers)] if case["stacked"] else teachers
    target, row = _target(case, rows, classes, accumulate), _sample_weights(case, rows, accumulate)
    temperature, average, reduction = case["temperature"], case["average"], case["reduction"]
    lam, smoothing, multilabel, ce = case["lam"], case["smoothing"], case["multilabel"], case["cross_entropy"]
    ignore_index = -1 if multilabel else -100
    soft, hard = (1.0, 0.0) if target is None else (lam * temperature**2, 1.0 - lam)
    if target is None:
        smoothing, ignore_index = 0.0, -100
    shares = None
    if case["weights"] is not None:
        total = sum(case["weights"])
        shares = torch.tensor([w / total for w in case["weights"]], dtype=torch.float64)

    double = [memory.before(x).double() for x in (student, *teachers)]
    numbers = (temperature, soft, hard, smoothing, ignore_index, average, ce, multilabel, reduction, True)
    wide = (
        *(double[0], double[1:], shares, None if target is None else target if not multilabel else target.double()),
        *(None if row is None else row.double(), *numbers),
    )
    truth, gradient, divisor = OPS["distillation_loss"].reference(*wide)

    # How far a rounding is carried: through logits of this size over T, and their exponentials.
    finite = [torch.where(x.isfinite(), x, 0.0).abs() for x in double]
    own = finite[0].amax(1) if classes else finite[0].sum(1)
    others = torch.stack(finite[1:]).amax(0).amax(1)
    spread = (own + others) / temperature
    logs = math.log(classes)
    soft_size = abs(soft) * (1 + 2 * spread + logs) ** 2
    hard_size = abs(hard) * (1 + 2 * own + logs)
    many = classes if multilabel else 1
    scale = torch.ones(rows, dtype=torch.float64) if row is None else row.double().abs()
    sizes = (soft_size + hard_size) * many * scale
    if multilabel:  # infinite logits count as 1e30, and a loss is linear in them
        infinite = sum(x.isinf().sum(1) for x in double)
        sizes = sizes + 1e30 * infinite * (abs(soft) * (1 + 2 * spread) + abs(hard)) * scale
    slopes = (abs(soft) / temperature * (1 + 2 * spread) + abs(hard) * (1 + 2 * own)) * scale
    terms = classes + len(teachers) + 24
    broken = [not bool(x.isfinite().all()) for x in double]
    # -inf beside a probability that float32 cannot hold and float64 can: masked in one, infinite in the other.
    vague = any(broken) and rows and float(spread.max()) > 60
    vague = vague or (rows and float(spread.max()) > torch.finfo(accumulate).max ** 0.3)
    vague = vague or (reduction in (2, 3) and (not rows or float(divisor) == 0))

    def check_loss(loss: Tensor) -> str | None:
        if loss.dtype != accumulate:
            return f"the loss is {loss.dtype}"
        if temperature < 1e-30 and not any(broken) and rows and float(divisor) and bool(loss.isnan().any()):
            return "a tiny temperature made NaN of finite logits"
        if vague:
            return None
        size = sizes if reduction == 0 else sizes.sum() / divisor.abs()
        return compare("loss", loss, truth, size, terms, accumulate)

    def check_gradient(got: Tensor, undivided: bool) -> str | None:
        if vague:
            return None
        factor = divisor if undivided else 1.0
        size = slopes.unsqueeze(1).expand(rows, classes) / divisor.abs() * factor
        right = gradient * factor
        if half and not undivided:  # rounded twice, and once more by the incoming number
            size = size + right.abs() * 4 * torch.finfo(got.dtype).eps / torch.finfo(accumulate).eps
            size = size + 4 * torch.finfo(got.dtype).tiny / torch.finfo(accumulate).eps
        return compare("gradient", got, right, size, terms, accumulate)

    if case["op"] == "raw":
        arguments = [student, listed, shares, target, row, *numbers[:-1], case["need_grad"]]

        def check_raw(got: Any) -> str | None:
            wrong = check_loss(got[0])
            return wrong or (check_gradient(got[1], half) if case["need_grad"] else None)

        raw = torch.ops.pfl_ext.distillation_loss
        return Call(raw, arguments, check=check_raw, may_refuse=temperature < 1e-30)

    function: Any = ops.distillation_loss if target is not None else ops.ensemble_distillation_loss
    options: dict[str, Any] = {
        "soft": "ce" if ce else "kl",
        "reduction": _REDUCTIONS[reduction],
        "multilabel": multilabel,
    }
    if row is not None:
        options["sample_weights"] = row
    if target is not None:
        options |= {"label_smoothing": smoothing, "ignore_index": ignore_index}
        arguments = [teachers[0], target, lam, temperature]
    else:
        options["average"] = _AVERAGES[average]
        arguments = [listed[0] if case["stacked"] else listed, case["weights"], temperature]

    def with_gradient(first: Any, *rest: Any, **named: Any) -> Any:
        first = leaf(first)
        loss = function(first, *rest, **named)
        return loss, torch.autograd.grad(loss.sum(), first)[0]

    return Call(
        with_gradient,
        [student, *arguments],
        options,
        check=lambda got: check_loss(got[0]) or check_gradient(got[1], False),
        may_refuse=temperature < 1e-30,
    )
