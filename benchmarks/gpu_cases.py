"""What is measured of the ops on a GPU: calls on tensors there, the bytes they must move, and their opponents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext import ops
from pfl_ext.ops._declare import OPS

from .opponents import averaging, proximal, sharpness
from .shapes import SHAPE_SETS

__all__ = ["GpuCase", "cases", "distillation_cases", "list_cases"]

Tensors = list[Tensor]
_CLIENTS = 8


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
    yield GpuCase("StreamingAverage.add", shapes, name, lambda: stream.add(server, 1.0), one + accumulated, accumulated)
    out = [torch.empty_like(x) for x in server]
    yield GpuCase("StreamingAverage.result", shapes, name, lambda: stream.result(out), accumulated, one)
    yield GpuCase("all_finite", shapes, name, lambda: ops.all_finite(*server), one, 0)
    a, b, w = clients[:3]
    yield GpuCase(
        *("personalization_scores", shapes, name),
        lambda: ops.personalization_scores(a, b),
        *(2 * one, 0),
        {"_foreach": lambda: sharpness.foreach_scores(a, b)},
    )
    backup = ops.lwsam_perturb_(a, b, rho=0.05)
    ops.restore_(a, backup)
    # The gradients twice: their norm comes before the first step along them.
    yield GpuCase(
        *("lwsam_perturb_", shapes, name),
        lambda: ops.lwsam_perturb_(a, b, rho=0.05, backup=backup),
        *(3 * one, 2 * one),
        {"_foreach": lambda: sharpness.foreach_perturb(a, b, 0.05)},
    )
    yield GpuCase("restore_", shapes, name, lambda: ops.restore_(a, backup), one, one)
    yield GpuCase(
        *("proximal_sgd_step_", shapes, name),
        lambda: ops.proximal_sgd_step_(a, b, w, lr=1e-3, lam=0.1),
        *(3 * one, one),
        {
            "_foreach": lambda: proximal.foreach_step(a, b, w, 1e-3, 0.1),
            "torch.compile": partial(_compiled(_plain_step), a, b, w),
            # What apex's multi-tensor SGD became in torch; without an anchor, so it reads less.
            "fused SGD, no anchor": _fused_sgd(a, b),
        },
    )
    momenta = [torch.zeros_like(x) for x in a]
    yield GpuCase(
        *("proximal_sgd_step_, momentum", shapes, name),
        lambda: ops.proximal_sgd_step_(a, b, w, lr=1e-3, lam=0.1, momentum=0.5, momentum_buffers=momenta),
        *(4 * one, 2 * one),
    )
    yield GpuCase(
        *("squared_distance", shapes, name),
        lambda: ops.squared_distance(a, b),
        *(2 * one, 0),
        {"_foreach": lambda: torch.stack(torch._foreach_norm(torch._foreach_sub(a, b))).square().sum()},
    )
    grad = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), device=device)
    yield GpuCase(
        *("squared_distance_backward", shapes, name),
        lambda: OPS["squared_distance_backward"](grad, a, b, True, False),
        *(2 * one, one),
        {"_foreach": lambda: torch._foreach_mul(torch._foreach_sub(a, b), 2.0)},
    )


def _plain_step(params: Tensors, grads: Tensors, anchors: Tensors) -> None:
    for p, g, w in zip(params, grads, anchors, strict=True):
        p.sub_(1e-3 * (g + 0.1 * (p - w)))


def _fused_sgd(params: Tensors, grads: Tensors) -> Callable[[], Any]:
    made: list[torch.optim.Optimizer] = []

    def step() -> None:
        if not made:
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            made.append(torch.optim.SGD(params, lr=1e-3, fused=True))
        made[0].step()

    return step


def distillation_cases(rows: int, classes: int, dtype: torch.dtype, device: str) -> Iterator[GpuCase]:
    """The losses of rows of logits, with their gradient: of teachers alone, and of one beside a class or labels."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(rows, classes, generator=generator).to(device, dtype) for _ in range(5)]
    student, *teachers = logits
    name, size, one = str(dtype).removeprefix("torch."), f"{rows} x {classes:,}", student.nbytes

    def call(count: int, **options: Any) -> Callable[[], Any]:
        leaf = student.detach().requires_grad_()
        return lambda: ops.ensemble_distillation_loss(leaf, teachers[:count], temperature=2.0, **options)

    def plain(leaf: Tensor, count: int) -> Tensor:
        target = torch.stack(teachers[:count]).mean(0) / 2
        soft, given = F.log_softmax(target, -1), F.log_softmax(leaf / 2, -1)
        loss = F.kl_div(given, soft, reduction="batchmean", log_target=True) * 4
        return torch.autograd.grad(loss, leaf)[0]

    leaf = student.detach().requires_grad_()
    for count in (1, 4):
        yield GpuCase(
            *(f"ensemble_distillation_loss, {count} teacher{'s' * (count > 1)}", size, name),
            call(count),
            *((1 + count) * one, one),
            {
                "torch": partial(plain, leaf, count),
                "torch.compile": partial(_compiled(plain), leaf, count),
            },
            rows=True,
        )
    yield GpuCase(
        *("ensemble_distillation_loss, probabilities", size, name),
        call(2, average="probs"),
        *(3 * one, one),
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
        lambda: ops.distillation_loss(leaf, teacher, target, 0.5, 2.0),
        *(2 * one + 2 * target.nbytes, one),
        {
            "torch": lambda: _plain_loss(leaf, teacher, target),
            "torch.compile": partial(_compiled(_plain_loss), leaf, teacher, target),
        },
        rows=True,
    )
    yield GpuCase(
        *("distillation_loss, multilabel", size, name),
        lambda: ops.distillation_loss(leaf, teacher, labels, 0.5, 2.0, multilabel=True),
        *(2 * one + 2 * labels.nbytes, one),
        rows=True,
    )


def _plain_loss(leaf: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    soft = F.kl_div(F.log_softmax(leaf / 2, -1), F.log_softmax(teacher / 2, -1), reduction="batchmean", log_target=True)
    return torch.autograd.grad(0.5 * F.cross_entropy(leaf, target) + 2 * soft, leaf)[0]


def spectral_cases(clients: int, length: int, device: str) -> Iterator[GpuCase]:
    """The passes over half spectra; the transforms around them are torch's."""
    generator = torch.Generator().manual_seed(0)
    half = torch.fft.rfft(torch.randn(clients, length, generator=generator)).to(device)
    teacher, size = half[:1].clone(), f"{clients} x {length:,}"
    log_q, total = OPS["spectral_teacher"](teacher, length, length)
    yield GpuCase(
        *("spectral_teacher", size, "float32"),
        lambda: OPS["spectral_teacher"](teacher, length, length),
        *(teacher.nbytes, log_q.nbytes),
        rows=True,
    )
    # The spectra twice: what they are divided by comes before the gradient.
    yield GpuCase(
        *("half_spectrum_divergence_", size, "float32"),
        lambda: OPS["half_spectrum_divergence_"](half, log_q, total, length, length, 0, True),
        *(2 * half.nbytes + 2 * log_q.nbytes, half.nbytes),
        rows=True,
    )


_SMALL, _LARGE = ((16_384, 10), (64, 1_000), (8, 32_000)), ((65_536, 10), (8_192, 1_000), (256, 32_000))


def cases(device: str, shapes: str = "lenet", large: bool = False) -> Iterator[GpuCase]:
    """All of them, at sizes for an interpreter or, ``large``, for a GPU."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from list_cases(shapes, dtype, device)
    yield from spectral_cases(4, 11_181_642 if large else 62_006, device)
    for rows, classes in _LARGE if large else _SMALL:
        for dtype in (torch.float32, torch.bfloat16):
            yield from distillation_cases(rows, classes, dtype, device)
