"""Cases of the spectral family."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from averaging_cases import draw_shapes
from call import Call, compare, covers, leaf, unit
from guarded_tensors import FLOATS, Memory, draw_tensor
from torch import Tensor

from pfl_ext import ops
from pfl_ext.ops._arguments import accumulate_type
from pfl_ext.ops._declare import OPS

_LENGTHS = [1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 31, 60, 64, 97, 127, 210, 256, 257, 499, 1000, 1021, 1024, 2187, 4099]
_LONG = [16384, 20011, 44426, 62006, 65537, 99991]
_FORMS = ("normalized", "paper", "generalized", "mean")
_RELATIVE = (0, 3)  # of spectra that are divided by their sums or means; rounding hides most of their errors
_DRAWN_FORMS = (0, 1, 1, 2, 2, 3)
# Of a transform: an element's error is at most this many roundings of the spectrum's norm for each halving of the
# length. Large prime factors are a convolution, three transforms of up to four times the length.
_PER_HALVING = 24


def _length(choice: random.Random) -> int:
    return choice.choice(_LONG) if choice.random() < 0.03 else choice.choice(_LENGTHS)


def _terms(length: int) -> float:
    return _PER_HALVING * (1 + math.log2(max(length, 2)))


def _draw_transform(choice: random.Random) -> dict[str, Any]:
    length = _length(choice)
    size = length if choice.random() < 0.5 else choice.randint(1, length)
    rows = choice.choice([1, 1, 2, 3, 9]) if length < 5000 else choice.choice([1, 2])
    op = choice.choice(["real_dft", "real_idft", "spectrum"])
    values = "normal" if choice.random() < 0.6 else None
    if op == "real_idft":
        shape, dtype = [rows, length // 2 + 1], choice.choice(["complex64", "complex128"])
        layout = choice.choice(["contiguous", "offset"])
        return {
            "op": op,
            "x": draw_tensor(choice, shape, dtype, values or choice.choice(["normal", "large", "small"]), layout),
            "length": length,
            "size": size,
        }
    return {
        "op": op,
        "x": draw_tensor(choice, [rows, size if op == "real_dft" else length], choice.choice(FLOATS), values),
        "length": length,
        "size": size,
        "full": choice.random() < 0.5,
        "fast": choice.random() < 0.3,
    }  # fmt: skip


def _wrong_rows(
    what: str, got: Tensor, truth: Tensor, size: Tensor, terms: float, accumulate: torch.dtype, row_finite: Tensor
) -> str | None:
    """Rows with NaN or infinity in them need only be not finite somewhere: a transform spreads them in its own way."""
    for r in range(len(truth)):
        if not bool(row_finite[r]):
            if got[r].numel() and bool(got[r].isfinite().all()):
                return f"{what}: row {r} has lost the NaN or infinity of its input"
            continue
        if wrong := compare(f"{what}, row {r}", got[r], truth[r], size[r], terms, accumulate):
            return wrong
    return None


@covers("raw.real_dft", "raw.real_idft", "ops.spectrum", draw=_draw_transform)
def transform(case: dict[str, Any], memory: Memory) -> Call:
    x = memory.make(case["x"])
    length, size, op = case["length"], case["size"], case["op"]
    before = memory.before(x)
    if op == "real_idft":
        wide = before.to(torch.complex128)
        accumulate = torch.float64 if x.dtype == torch.complex128 else torch.float32
        truth = torch.fft.irfft(wide, n=length, norm="forward")[:, :size]
        large = 2 * wide.abs().square().sum(1).sqrt() * math.sqrt(length)
        finite = wide.isfinite().all(1)
        return Call(
            torch.ops.pfl_ext.real_idft,
            [x, length, size],
            check=lambda got: _wrong_rows("idft", got, truth, large, _terms(length), accumulate, finite),
        )
    wide = before.double()
    finite = wide.isfinite().all(1)
    accumulate = accumulate_type(x.dtype)
    if op == "real_dft":
        truth = torch.fft.rfft(wide, n=length)
        large = wide.square().sum(1).sqrt() * math.sqrt(length)

        def check(got: Tensor) -> str | None:
            for name, mine, right in (("real", got.real, truth.real), ("imaginary", got.imag, truth.imag)):
                if not bool(finite.all()):
                    mine, right = mine[finite], right[finite]
                if wrong := _wrong_rows(name, mine, right, large[finite], _terms(length), accumulate, finite[finite]):
                    return wrong
            return _wrong_rows("dft", got.abs(), truth.abs(), large, 4 * _terms(length), accumulate, finite)

        return Call(torch.ops.pfl_ext.real_dft, [x, length], check=check)
    points = wide.shape[1]
    if case["fast"]:
        from pfl_ext.ops.spectral import _smooth_length

        points = _smooth_length(points)
    truth = torch.fft.fft(wide, n=points).abs()
    truth = truth if case["full"] else truth[:, : points // 2 + 1]
    large = wide.square().sum(1).sqrt() * math.sqrt(points)
    options = {"full": case["full"], "length": "fast" if case["fast"] else "exact"}
    return Call(
        ops.spectrum,
        [x],
        options,
        check=lambda got: _wrong_rows("spectrum", got, truth, large, 4 * _terms(points), accumulate, finite),
    )


def _draw_divergence(choice: random.Random) -> dict[str, Any]:
    length = _length(choice)
    rows = choice.choice([1, 1, 2, 5]) if length < 5000 else 1
    dtype, bins = choice.choice(["complex64", "complex128"]), length // 2 + 1
    of_p = choice.choice(["normal", "normal", "large", "small", "zeros"])
    of_q = choice.choice(["normal", "normal", "small", "zeros"])
    return {
        "op": choice.choice(["teacher", "half"]),
        "p": draw_tensor(choice, [rows, bins], dtype, of_p, "contiguous"),
        "q": draw_tensor(choice, [choice.choice([1, rows]), bins], dtype, of_q, "contiguous"),
        "length": length,
        "count": choice.choice([1, length, choice.randint(1, length)]),
        "form": choice.choice(_DRAWN_FORMS),
        "need_grad": choice.random() < 0.7,
    }  # fmt: skip


def _loss_size(p: Tensor, log_q: Tensor, weights: Tensor, slip: Tensor | float, form: int, total: Tensor) -> Tensor:
    """What a relative rounding (and an error ``slip`` of each magnitude) can do to the divergence of each row."""
    floor = torch.clamp(p, min=1e-300)
    logs = floor.log().abs() + log_q.abs() + 2
    value = (weights * p * logs).sum(1)
    moved = (
        weights
        * slip
        * (
            torch.clamp(p, min=1e-300).maximum(torch.as_tensor(slip, dtype=p.dtype).clamp(min=1e-300)).log().abs()
            + logs
        )
    ).sum(1)
    z = (weights * p).sum(1)
    if form in _RELATIVE:
        safe = torch.where(z == 0, 1.0, z)
        size = value / safe + moved / safe * (1 + value / safe) + safe.log().abs() + total.log().abs() + 2
        return weights.sum() * size if form == 3 else size
    return value + moved + z + total.abs() + moved


@covers("raw.spectral_teacher", "raw.half_spectrum_divergence_", draw=_draw_divergence)
def half_divergence(case: dict[str, Any], memory: Memory) -> Call:
    q = memory.make(case["q"])
    length, count, form = case["length"], case["count"], case["form"]
    real = torch.float64 if q.dtype == torch.complex128 else torch.float32
    tiny = torch.finfo(real).smallest_normal
    bins = min(count, length // 2 + 1)
    magnitude = memory.before(q).to(torch.complex128).abs()[:, :bins]
    floored = torch.where(magnitude < tiny, tiny, magnitude)
    k = torch.arange(bins)
    weights = 1.0 + ((k > length - count) & (k > 0) & (2 * k != length)).double()
    if case["op"] == "teacher":

        def check_teacher(got: Any) -> str | None:
            log_q, total = got
            # Beside the floor a rounding decides on which side a magnitude lies; either way it is that floor.
            if wrong := compare("log_q", log_q, floored.log(), floored.log().abs() + 2, 8, real):
                return wrong
            return (
                compare("total", total, (floored * weights).sum(1), (floored * weights).sum(1), 8, real)
                if real == torch.float64
                else compare("total", total.float(), (floored * weights).sum(1), (floored * weights).sum(1), 8, real)
            )

        return Call(torch.ops.pfl_ext.spectral_teacher, [q, length, count], check=check_teacher)
    p = memory.make(case["p"])
    log_q = floored.log().to(real)
    total = (floored * weights).sum(1)
    wide = memory.before(p).to(torch.complex128).contiguous()
    # The definition floors at the smallest number of its own type: do that for ours first.
    wide = torch.where(wide.abs() < tiny, 0, wide)
    replaced = wide.clone()
    truth = OPS["half_spectrum_divergence_"].reference(replaced, log_q.double(), total, length, count, form, True)
    magnitudes = wide.abs()[:, :bins]

    def check(loss: Tensor) -> str | None:
        size = _loss_size(magnitudes, log_q.double(), weights, 0.0, form, total)
        if wrong := compare("divergence", loss, truth, size, 24, real):
            return wrong
        if not case["need_grad"]:
            return None if torch.equal(torch.view_as_real(p), torch.view_as_real(memory.before(p))) else "p was changed"
        z = (weights * magnitudes).sum(1)
        slope = magnitudes.clamp(min=1e-300).log().abs() + log_q.double().abs() + 4
        if form in _RELATIVE:
            safe = torch.where(z == 0, 1.0, z)
            slope = (slope + ((weights * magnitudes * slope).sum(1) / safe)[:, None]) / safe[:, None]
            slope = count * slope if form == 3 else slope
        for name, mine, right in (("real", p.real, replaced.real), ("imaginary", p.imag, replaced.imag)):
            if bool((mine[:, bins:] != 0).any()):
                return "bins that are not compared have a gradient"
            if wrong := compare(f"gradient, {name} part", mine[:, :bins], right[:, :bins], slope, 32, real):
                return wrong
        return None

    written = [p] if case["need_grad"] else []
    arguments = [p, log_q, total, length, count, form, case["need_grad"]]
    raw = torch.ops.pfl_ext.half_spectrum_divergence_
    return Call(raw, arguments, written=written, writable=[p], check=check)


def _draw_spectral(choice: random.Random) -> dict[str, Any]:
    dtype = choice.choice(FLOATS)
    form = choice.choice(["vector", "matrix", "list"])
    values = choice.choice(["normal", "normal", "normal", "nan", "inf", "small"])
    if form == "list":
        shapes = [shape for shape in draw_shapes(choice) if math.prod(shape)] or [[5]]
    else:
        size = _length(choice)
        shapes = [[size] if form == "vector" else [choice.choice([1, 2, 4]), size]]
    return {
        "op": choice.choice(["public", "public", "raw"]),
        "p": [draw_tensor(choice, shape, dtype, values) for shape in shapes],
        "q": [draw_tensor(choice, shape, dtype, "normal") for shape in shapes],
        "given": form,
        "tau": choice.choice([1.0, 1.0, 0.5, 0.03]),
        "form": choice.choice(_DRAWN_FORMS),
        "scope": choice.choice(["model", "tensor"]) if form == "list" else "model",
        "teacher": choice.random() < 0.5,
        "need_grad": choice.random() < 0.7,
    }


@covers(
    "raw.spectral_divergence",
    "ops.spectral_divergence",
    "ops.SpectralTeacher",
    "raw.spectral_scale_gradient",
    draw=_draw_spectral,
)
def divergence(case: dict[str, Any], memory: Memory) -> Call:
    p, q = [memory.make(x) for x in case["p"]], [memory.make(x) for x in case["q"]]
    form, tau, given = case["form"], case["tau"], case["given"]
    clients = p[0].shape[0] if given == "matrix" else 1
    accumulate = accumulate_type(p[0].dtype)
    tiny = torch.finfo(accumulate).smallest_normal
    groups = [[t] for t in range(len(p))] if case["scope"] == "tensor" else [list(range(len(p)))]
    truths, sizes, slopes, grads, parts = 0.0, 0.0, [], [], []
    for group in groups:
        x = torch.cat([memory.before(p[t]).double().reshape(clients, -1) for t in group], 1)
        y = torch.cat([memory.before(q[t]).double().reshape(clients, -1) for t in group], 1)
        d = x.shape[1]
        count = min(d, max(1, math.ceil(tau * d * (1 - 2.0**-50))))
        bins = min(count, d // 2 + 1)
        k = torch.arange(bins)
        weights = 1.0 + ((k > d - count) & (k > 0) & (2 * k != d)).double()
        floored = torch.fft.rfft(y).abs()[:, :bins].clamp(min=tiny)
        total = (floored * weights).sum(1)
        spectrum = torch.fft.rfft(x)
        replaced = torch.where(spectrum.abs() < tiny, 0, spectrum)
        loss = OPS["half_spectrum_divergence_"].reference(replaced, floored.log(), total, d, count, form, True)
        truths = truths + loss
        grads.append(torch.fft.irfft(replaced, n=d, norm="forward"))
        magnitudes = spectrum.abs()[:, :bins]
        # Each magnitude is known up to the transform's error, and so is the teacher's, whose logarithm is taken.
        slip = _terms(d) * unit(accumulate) * math.sqrt(d)
        of_p, of_q = slip * x.square().sum(1).sqrt()[:, None], slip * y.square().sum(1).sqrt()[:, None]
        loose = (of_q / floored).clamp(max=torch.finfo(accumulate).max) + 0 * of_p
        carried = (weights * magnitudes * torch.log1p(loose)).sum(1)
        z = (weights * magnitudes).sum(1)
        logs = magnitudes.clamp(min=1e-300).log().abs() + floored.log().abs() + 4
        size = _loss_size(magnitudes, floored.log(), weights, of_p, form, total) * unit(accumulate)
        moved = (weights * of_p * (of_p.clamp(min=1e-300).log().abs() + logs)).sum(1)
        safe = torch.where(z == 0, 1.0, z)
        q_slip = (weights * of_q).sum(1)
        times = float(count) if form == 3 else 1.0
        if form in _RELATIVE:
            size = size + times * (moved / safe * (2 + logs.amax(1)) + carried / safe + q_slip / total)
        else:
            size = size + 2 * moved + carried + q_slip
        sizes = sizes + size / unit(accumulate)
        turn = (2 * of_p / magnitudes.clamp(min=1e-300)).clamp(max=2.0)
        bend = logs * turn + torch.log1p(loose) + logs * 8 * unit(accumulate)
        if form in _RELATIVE:
            mean = (weights * magnitudes * logs).sum(1)[:, None] / safe[:, None]
            bend = (
                times * (bend + mean * (turn + 16 * unit(accumulate)))
                + (size[:, None] + times * moved[:, None] / safe[:, None])
            ) / safe[:, None]
        slopes.append(2 * bend.sum(1)[:, None].expand(clients, d))
        q_row = (floored.log().to(accumulate), total, d, count)
        parts.append(q_row)
    finite = all(bool(memory.before(x).isfinite().all()) for x in (*p, *q))

    def check(got: Any) -> str | None:
        loss, gradients = got
        loss = loss.reshape(-1)
        if not finite:
            return (
                "NaN or infinity in the weights gave a finite divergence"
                if bool(loss.isfinite().all()) and clients == 1
                else None
            )
        if wrong := compare("divergence", loss, truths, sizes, 24, accumulate):
            return wrong
        if gradients is None:
            return None
        for right, slope, mine in zip(grads, slopes, gradients, strict=True):
            if wrong := compare("gradient", mine, right, slope / unit(accumulate) + right.abs() * 32, 1, accumulate):
                return wrong
        return None

    if case["op"] == "raw" and len(groups) == 1:
        log_q, total, d, count = parts[0]

        def raw(
            tensors: Any, number: Any, logs: Any, sums: Any, length: Any, entries: Any, code: Any, need_grad: Any
        ) -> Any:
            loss, gradient = torch.ops.pfl_ext.spectral_divergence(
                tensors, number, logs, sums, length, entries, code, need_grad
            )
            return loss, [
                torch.ops.pfl_ext.spectral_scale_gradient(gradient, torch.ones_like(loss))
            ] if need_grad else None

        return Call(raw, [p, clients, log_q, total, d, count, form, case["need_grad"]], check=check)

    def public(first: Any, second: Any, **options: Any) -> Any:
        student = list(map(leaf, first)) if given == "list" and isinstance(first, list) else leaf(first)
        teacher = second
        if case["teacher"]:
            teacher = ops.SpectralTeacher(second, tau=options.pop("tau"), scope=options.pop("scope"))
        loss = ops.spectral_divergence(student, teacher, **options)
        leaves = student if given == "list" else [student]
        found = torch.autograd.grad(loss.sum(), leaves)
        return loss, [torch.cat([found[t].reshape(clients, -1) for t in group], 1) for group in groups]

    options = {"tau": tau, "form": _FORMS[form], "scope": case["scope"]}
    first, second = (p, q) if given == "list" else (p[0], q[0])
    return Call(public, [first, second], options, check=check)
