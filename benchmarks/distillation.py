"""Races of the distillation losses, forward and backward: an ensemble of teachers; one teacher beside the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from pfl_ext.ops import distillation_loss, ensemble_distillation_loss

from .case import Case, Contestant, Expected, Family, Grid, Kind, Skipped, Spec
from .opponents import distillation as opponents

__all__ = ["FAMILY", "Logits"]

_SHAPES = {"2048x10": (2048, 10), "2048x100": (2048, 100), "2048x1000": (2048, 1000)}
"""Batch and classes."""

_LAM, _TEMPERATURE = 0.5, 5.0


class Logits:
    """Random logits of a student and M teachers, and labels."""

    def __init__(self, shapes: str, teachers: int, dtype: str) -> None:
        """Draw them; the same values for the same arguments."""
        self.dtype: torch.dtype = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(teachers)
        shape = _SHAPES[shapes]
        draw = lambda: torch.randn(shape, generator=generator).to(self.dtype)  # noqa: E731
        self.student = draw().requires_grad_()
        self.teachers = [draw() for _ in range(teachers)]
        self.target = torch.randint(shape[1], shape[:1], generator=generator)

    @property
    def bytes(self) -> int:
        """Size of one tensor of logits."""
        return self.student.numel() * self.student.element_size()

    def expected(self, loss: Callable[..., Any], temperature: float) -> Expected:
        """Loss and gradient in float64, through autograd."""
        student = self.student.detach().double().requires_grad_()
        teachers = [x.double() for x in self.teachers]
        value, gradient = opponents.with_gradient(partial(loss, teachers=teachers), student)
        batch, classes = student.shape
        # The gradient is a difference of probabilities, the loss a mean of their logarithms.
        p = student.detach().softmax(1)
        q = torch.stack(teachers).mean(0).softmax(1)
        size = temperature * (p + q + torch.eye(classes, dtype=torch.float64)[self.target] + 1 / classes) / batch
        magnitude = torch.cat([(value.detach().abs() + temperature**2 * 10).reshape(1), size.reshape(-1)])
        # Logits of size 5 enter an exponential, whose error is theirs; sums over the classes and the batch.
        return Expected(
            torch.cat([value.detach().reshape(1), gradient.reshape(-1)]),
            magnitude,
            roundings=32 + classes + len(teachers),
        )


def _plan(grid: Grid) -> list[Spec]:
    shapes = grid.shapes or (("2048x10", "2048x100") if grid.quick else tuple(_SHAPES))
    specs = []
    for name in shapes:
        for teachers in grid.clients or ((8,) if grid.quick else FAMILY.clients):
            detailed = teachers == 8 and not grid.quick
            for dtype in grid.dtypes or (FAMILY.dtypes if detailed else ("float32",)):
                for op in FAMILY.ops:
                    if op == "labels" and grid.clients is None and teachers != 8:
                        continue
                    threads = grid.threads or ((1, grid.all_threads) if detailed else (grid.all_threads,))
                    specs += [Spec(op, name, teachers, dtype, t) for t in dict.fromkeys(threads)]
    return specs


def _cases(specs: Iterable[Spec]) -> Iterator[Case | Skipped]:
    for spec in specs:
        torch._dynamo.reset()  # a new shape is a new program, not a recompilation of the last one
        yield _BUILDERS[spec.op](spec, Logits(spec.shapes, spec.clients, spec.dtype))


def _ensemble(spec: Spec, logits: Logits) -> Case:
    entries: list[tuple[str, Kind, Callable[..., Any]]] = [
        ("pfl_ext", "ours", ensemble_distillation_loss),
        ("loop over teachers", "naive", opponents.loop_over_teachers),
        ("stack, mean", "skilled", opponents.stack_and_mean),
        ("torch.compile", "skilled", opponents.compiled(opponents.stack_and_mean)),
    ]
    runs = [
        (name, kind, partial(opponents.with_gradient, partial(loss, teachers=logits.teachers), logits.student))
        for name, kind, loss in entries
    ]
    expected = logits.expected(opponents.stack_and_mean, 1.0)
    return _case(spec, logits, runs, expected, passes=spec.clients + 2)


def _labels(spec: Spec, logits: Logits) -> Case:
    given: dict[str, Any] = {"target": logits.target, "lam": _LAM, "temperature": _TEMPERATURE}
    entries: list[tuple[str, Kind, Callable[..., Any]]] = [
        ("pfl_ext", "ours", distillation_loss),
        ("cross_entropy + kl_div", "naive", opponents.hard_and_soft),
        ("torch.compile", "skilled", opponents.compiled(opponents.hard_and_soft)),
    ]
    runs = [
        (
            name,
            kind,
            partial(opponents.with_gradient, partial(loss, teacher=logits.teachers[0], **given), logits.student),
        )
        for name, kind, loss in entries
    ]
    expected = logits.expected(
        lambda student, teachers: opponents.hard_and_soft(student, teachers[0], **given), _TEMPERATURE
    )
    return _case(spec, logits, runs, expected, passes=3)


_BUILDERS: dict[str, Callable[[Spec, Logits], Case]] = {"ensemble": _ensemble, "labels": _labels}


def _case(
    spec: Spec, logits: Logits, runs: Sequence[tuple[str, Kind, Callable[[], Any]]], expected: Expected, passes: int
) -> Case:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return Case(
        spec,
        [Contestant(name, kind, run, wide if kind == "ours" else logits.dtype) for name, kind, run in runs],
        expected,
        data_bytes=(spec.clients + 1) * logits.bytes,
        limit_bytes=passes * logits.bytes,
    )


FAMILY = Family(
    name="distillation",
    summary="distillation losses, forward and backward: an ensemble of teachers; labels and one teacher",
    ops={
        "ensemble": "`ensemble_distillation_loss(student, teachers)` and its gradient; C is the number of teachers",
        "labels": f"`distillation_loss(student, teacher, target, {_LAM}, {_TEMPERATURE})`, one teacher",
    },
    notes={
        "loop over teachers": "`logits / M` added teacher by teacher, `kl_div(log_softmax, softmax)` through autograd",
        "torch.compile": "of the skilled form, for the one shape",
    },
    shapes=tuple(_SHAPES),
    clients=(8, 20),
    counted="teachers",
    dtypes=("float32", "float64", "bfloat16"),
    plan=_plan,
    cases=_cases,
)
