"""What is measured of the ops on a GPU: calls on tensors there, the bytes they must move, and their opponents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext import ops
from pfl_ext.ops._declare import OPS

from .opponents import averaging, proximal, sharpness, spectral
from .shapes import SHAPE_SETS

__all__ = ["UNLIKE", "GpuCase", "cases", "distillation_cases", "list_cases", "spectral_cases"]

Tensors = list[Tensor]
_CLIENTS = 8
UNLIKE = "fused SGD, no anchor"
"""What apex's multi-tensor SGD became in torch: the one opponent that computes something else, and reads less."""


@dataclass(frozen=True)
class GpuCase:
    """A call of one op, ready to run again and again."""

    op: str
    size: str
    dtype: str
    run: Callable[[], Any]
    reads: int
    """Bytes that every implementation of these passes reads: inputs, each as often as a pass needs it anew."""
    writes: int
    opponents: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    rows: bool = False
    """Whether neighbours share sectors because rows are no multiple of one: then a sector counts once a launch."""
    written: Sequence[Tensor] = ()
    """What ``run`` and its opponents change in place; without any, what they return is their result."""


def _lists(sets: int, shapes: str, dtype: torch.dtype, device: str) -> list[Tensors]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPE_SETS[shapes]] for _ in range(sets)
    ]


def _bytes(tensors: Tensors) -> int:
    return sum(x.nbytes for x in tensors)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled when it is first called: a machine without a compiler only loses this contestant."""
    made: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        if not made:
            made.append(torch.compile(function))
        return made[0](*arguments)

    return call


def list_cases(shapes: str, dtype: torch.dtype, device: str) -> Iterator[GpuCase]:
    """The ops on lists of tensors, those of a network."""
    name, size = str(dtype).removeprefix("torch."), f"{shapes}, {_CLIENTS} clients"
    *clients, server = _lists(_CLIENTS + 1, shapes, dtype, device)
    one, weights = _bytes(server), list(range(1, _CLIENTS + 1))
    accumulated = sum(x.numel() for x in server) * max(4, dtype.itemsize)
    yield GpuCase(
        *("weighted_average", size, name),
        lambda: ops.weighted_average(clients, weights),
        *(_CLIENTS * one, one),
        {
            "_foreach": lambda: averaging.foreach_add(clients, weights),
            "torch.compile": partial(_compiled(averaging.per_tensor_add), clients, weights),
        },
    )
    yield GpuCase(
        *("server_update", size, name),
        lambda: ops.server_update(server, clients, weights, lr=0.5),
        *((_CLIENTS + 1) * one, one),
        {"_foreach": lambda: averaging.server_update_foreach_mix(server, clients, weights, 0.5)},
    )
    stream = ops.StreamingAverage()
    stream.add(server, 1.0)
    sums = [x.to(torch.promote_types(dtype, torch.float32)) for x in server]
    yield GpuCase(
        *("StreamingAverage.add", shapes, name),
        lambda: stream.add(server, 1.0),
        *(one + accumulated, accumulated),
        {"_foreach": lambda: torch._foreach_add_(sums, server, alpha=1.0)},
    )
    ended, out = ops.StreamingAverage(), [torch.empty_like(x) for x in server]
    ended.add(server, 2.0)
    twice = [2 * x for x in sums]
    yield GpuCase(
        *("StreamingAverage.result", shapes, name),
        lambda: ended.result(out),
        *(accumulated, one),
        {"_foreach": lambda: torch._foreach_copy_(out, torch._foreach_div(twice, 2.0))},
        written=out,
    )
    yield GpuCase(
        *("all_finite", shapes, name),
        lambda: ops.all_finite(*server),
        *(one, 0),
        {"_foreach": lambda: bool(torch.stack(torch._foreach_norm(server, math.inf)).isfinite().all())},
    )
    yield from _sharpness_cases(shapes, name, clients[0], clients[1], device)
    yield from _proximal_cases(shapes, name, clients[0], clients[1], clients[2])


def _sharpness_cases(shapes: str, name: str, a: Tensors, b: Tensors, device: str) -> Iterator[GpuCase]:
    one = _bytes(a)
    # Once: numbers that come from the host in every call would have it wait.
    sizes = torch.tensor([float(x.numel()) for x in a]).to(device)

    def foreach_scores() -> Tensor:
        raw = torch.stack(torch._foreach_norm(torch._foreach_sub(a, b))) / sizes
        return raw / raw.sum()

    yield GpuCase(
        *("personalization_scores", shapes, name),
        lambda: ops.personalization_scores(a, b),
        *(2 * one, 0),
        {"_foreach": foreach_scores},
    )
    saved = [x.clone() for x in a]
    backup = ops.lwsam_perturb_(a, b, rho=0.05)
    ops.restore_(a, backup)
    # The gradients twice: their norm comes before the first step along them.
    yield GpuCase(
        *("lwsam_perturb_", shapes, name),
        lambda: ops.lwsam_perturb_(a, b, rho=0.05, backup=backup),
        *(3 * one, 2 * one),
        {"_foreach": lambda: sharpness.foreach_perturb(a, b, 0.05)},
        written=a,
    )
    yield GpuCase(
        *("restore_", shapes, name),
        lambda: ops.restore_(a, backup),
        *(one, one),
        {"_foreach": lambda: sharpness.foreach_restore(a, saved)},
        written=a,
    )


def _proximal_cases(shapes: str, name: str, a: Tensors, b: Tensors, w: Tensors) -> Iterator[GpuCase]:
    one = _bytes(a)
    yield GpuCase(
        *("proximal_sgd_step_", shapes, name),
        lambda: ops.proximal_sgd_step_(a, b, w, lr=1e-3, lam=0.1),
        *(3 * one, one),
        {
            "_foreach": lambda: proximal.foreach_step(a, b, w, 1e-3, 0.1),
            "torch.compile": partial(_compiled(_plain_step), a, b, w),
            UNLIKE: _fused_sgd(a, b, momentum=0.0),
        },
        written=a,
    )
    momenta = [x.clone() for x in w]
    yield GpuCase(
        *("proximal_sgd_step_, momentum", shapes, name),
        lambda: ops.proximal_sgd_step_(a, b, w, lr=1e-3, lam=0.1, momentum=0.5, momentum_buffers=momenta),
        *(4 * one, 2 * one),
        {
            "_foreach": lambda: _foreach_momentum_step(a, momenta, b, w),
            "torch.compile": partial(_compiled(_plain_momentum_step), a, momenta, b, w),
            UNLIKE: _fused_sgd(a, b, momentum=0.5),
        },
        written=[*a, *momenta],
    )
    yield GpuCase(
        *("squared_distance", shapes, name),
        lambda: ops.squared_distance(a, b),
        *(2 * one, 0),
        {"_foreach": lambda: torch.stack(torch._foreach_norm(torch._foreach_sub(a, b))).square().sum()},
    )
    grad = torch.ones((), dtype=torch.promote_types(a[0].dtype, torch.float32), device=a[0].device)
    yield GpuCase(
        *("squared_distance_backward", shapes, name),
        lambda: OPS["squared_distance_backward"](grad, a, b, True, False),
        *(2 * one, one),
        {"_foreach": lambda: torch._foreach_mul(torch._foreach_sub(a, b), 2.0)},
    )


def _plain_step(params: Tensors, grads: Tensors, anchors: Tensors) -> None:
    for p, g, w in zip(params, grads, anchors, strict=True):
        p.sub_(1e-3 * (g + 0.1 * (p - w)))


def _plain_momentum_step(params: Tensors, momenta: Tensors, grads: Tensors, anchors: Tensors) -> None:
    for p, m, g, w in zip(params, momenta, grads, anchors, strict=True):
        m.mul_(0.5).add_(g + 0.1 * (p - w))
        p.sub_(1e-3 * m)


def _foreach_momentum_step(params: Tensors, momenta: Tensors, grads: Tensors, anchors: Tensors) -> None:
    steps = torch._foreach_sub(params, anchors)
    torch._foreach_mul_(steps, 0.1)
    torch._foreach_add_(steps, grads)
    torch._foreach_mul_(momenta, 0.5)
    torch._foreach_add_(momenta, steps)
    torch._foreach_add_(params, momenta, alpha=-1e-3)


def _fused_sgd(params: Tensors, grads: Tensors, momentum: float) -> Callable[[], Any]:
    made: list[torch.optim.Optimizer] = []

    def step() -> None:
        if not made:
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            made.append(torch.optim.SGD(params, lr=1e-3, momentum=momentum, fused=True))
        made[0].step()

    return step


def _gradient(loss: Callable[..., Tensor], leaf: Tensor, *arguments: Any) -> Tensor:
    """Forward and backward, as a training step takes them."""
    return torch.autograd.grad(loss(leaf, *arguments), leaf)[0]


def _peers(loss: Callable[..., Tensor], leaf: Tensor, *arguments: Any) -> dict[str, Callable[[], Any]]:
    """A loss of torch's functions, as it stands and compiled. Compiled it is alone: a gradient taken inside breaks."""
    return {
        "torch": partial(_gradient, loss, leaf, *arguments),
        "torch.compile": partial(_gradient, _compiled(loss), leaf, *arguments),
    }


def distillation_cases(rows: int, classes: int, dtype: torch.dtype, device: str) -> Iterator[GpuCase]:
    """The losses of rows of logits, with their gradient: of teachers alone, and of one beside a class or labels."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(rows, classes, generator=generator).to(device, dtype) for _ in range(5)]
    leaf, *teachers = logits
    leaf.requires_grad_()
    name, size, one = str(dtype).removeprefix("torch."), f"{rows} x {classes:,}", leaf.nbytes
    # The gradient of half types is divided by the rows that count when a loss scale has lifted it: once more.
    again = one if dtype.itemsize < 4 else 0

    def ensemble(count: int, average: Any) -> Callable[[], Any]:
        def loss(student: Tensor) -> Tensor:
            return ops.ensemble_distillation_loss(student, teachers[:count], temperature=2.0, average=average)

        return partial(_gradient, loss, leaf)

    for count in (1, 4):
        yield GpuCase(
            *(f"ensemble_distillation_loss, {count} teacher{'s' * (count > 1)}", size, name),
            ensemble(count, "logits"),
            *((1 + count) * one + again, one + again),
            _peers(_divergence_of_mean, leaf, teachers[:count]),
            rows=True,
        )
    yield GpuCase(
        *("ensemble_distillation_loss, probabilities", size, name),
        ensemble(2, "probs"),
        *(3 * one + again, one + again),
        _peers(_divergence_of_probabilities, leaf, teachers[:2]),
        rows=True,
    )
    target = torch.randint(classes, (rows,), generator=generator).to(device)
    # Of the accumulate type, as the kernel has labels. The targets twice: how many count comes before the gradient.
    labels = (
        torch.rand(rows, classes, generator=generator).round().to(device, torch.promote_types(dtype, torch.float32))
    )
    teacher = teachers[0]
    yield GpuCase(
        *("distillation_loss", size, name),
        lambda: _gradient(lambda x: ops.distillation_loss(x, teacher, target, 0.5, 2.0), leaf),
        *(2 * one + 2 * target.nbytes + again, one + again),
        _peers(_hard_and_soft, leaf, teacher, target),
        rows=True,
    )
    yield GpuCase(
        *("distillation_loss, multilabel", size, name),
        lambda: _gradient(lambda x: ops.distillation_loss(x, teacher, labels, 0.5, 2.0, multilabel=True), leaf),
        *(2 * one + 2 * labels.nbytes + again, one + again),
        _peers(_hard_and_soft_labels, leaf, teacher, labels.to(dtype)),
        rows=True,
    )


def _divergence_of_mean(student: Tensor, teachers: Tensors) -> Tensor:
    target = F.log_softmax(torch.stack(teachers).mean(0) / 2, -1)
    return F.kl_div(F.log_softmax(student / 2, -1), target, reduction="batchmean", log_target=True)


def _divergence_of_probabilities(student: Tensor, teachers: Tensors) -> Tensor:
    target = F.softmax(torch.stack(teachers) / 2, -1).mean(0)
    return F.kl_div(F.log_softmax(student / 2, -1), target, reduction="batchmean")


def _hard_and_soft(student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    return 0.5 * F.cross_entropy(student, target) + 2 * _divergence_of_mean(student, [teacher])


def _hard_and_soft_labels(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    hard = F.binary_cross_entropy_with_logits(student, labels)
    return 0.5 * hard + 2 * F.binary_cross_entropy_with_logits(student / 2, torch.sigmoid(teacher / 2))


def spectral_cases(clients: int, length: int, device: str) -> Iterator[GpuCase]:
    """The passes over half spectra, and the whole divergence: the transforms around them are torch's."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(clients, length, generator=generator)
    half = torch.fft.rfft(weights).to(device)
    teacher, size = half[:1].clone(), f"{clients} x {length:,}"
    log_q, total = OPS["spectral_teacher"](teacher, length, length)
    yield GpuCase(
        *("spectral_teacher", size, "float32"),
        lambda: OPS["spectral_teacher"](teacher, length, length),
        *(teacher.nbytes, log_q.nbytes),
        rows=True,
    )
    # The spectra twice: what they are divided by comes before the gradient.
    passes = 2 * half.nbytes + 2 * log_q.nbytes, half.nbytes
    yield GpuCase(
        *("half_spectrum_divergence_", size, "float32"),
        lambda: OPS["half_spectrum_divergence_"](half, log_q, total, length, length, 0, True),
        *passes,
        rows=True,
    )
    leaf, given = weights.to(device).requires_grad_(), torch.randn(length, generator=generator).to(device)
    fixed = ops.SpectralTeacher(given)
    yield GpuCase(
        *("spectral_divergence", size, "float32"),
        lambda: _gradient(lambda x: ops.spectral_divergence(x, fixed).sum(), leaf),
        *passes,
        {
            "torch.fft.fft": partial(_gradient, _plain_divergence, leaf, spectral.fft_teacher([given])),
            **_peers(_plain_half_divergence, leaf, *spectral.rfft_teacher([given])),
        },
        rows=True,
    )


def _plain_divergence(students: Tensor, log_q: Tensor) -> Tensor:
    p = torch.fft.fft(students).abs()
    p = p / p.sum(1, keepdim=True)
    return (p * (p.log() - log_q)).sum()


def _plain_half_divergence(students: Tensor, log_q: Tensor, counts: Tensor) -> Tensor:
    """By who knows that half of the spectrum mirrors the other."""
    p = torch.fft.rfft(students).abs()
    p = p / (counts * p).sum(1, keepdim=True)
    return (counts * p * (p.log() - log_q)).sum()


_SMALL, _LARGE = ((16_384, 10), (64, 1_000), (8, 32_000)), ((65_536, 10), (8_192, 1_000), (256, 32_000))


def cases(device: str, shapes: str = "lenet", large: bool = False) -> Iterator[GpuCase]:
    """All of them, at sizes for an interpreter or, ``large``, for a GPU."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from list_cases(shapes, dtype, device)
    yield from spectral_cases(4, 11_181_642 if large else 62_006, device)
    for rows, classes in _LARGE if large else _SMALL:
        for dtype in (torch.float32, torch.bfloat16):
            yield from distillation_cases(rows, classes, dtype, device)
