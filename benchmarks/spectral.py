"""Races of the spectral divergence: forward and backward, the value alone, and against yardsticks of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from itertools import groupby

import torch
from torch import Tensor

from pfl_ext.ops import SpectralTeacher, spectral_divergence
from pfl_ext.ops._declare import OPS

from .case import Case, Contestant, Expected, Family, Grid, Skipped, Spec
from .opponents import spectral as opponents
from .shapes import SHAPE_SETS, Shapes

__all__ = ["FAMILY", "ModelPair"]

# ResNet-18 has 11,181,642 = 2 * 3 * 1,863,607 weights; the smooth length next to it is 2^10 * 3^7 * 5.
_SMOOTH = 11_197_440
_SHAPES: dict[str, Shapes] = {**SHAPE_SETS, "smooth": ((_SMOOTH,),)}


class ModelPair:
    """A student and its teacher, as lists of parameters."""

    def __init__(self, shapes: str, dtype: str) -> None:
        """Draw them; the same values for the same arguments."""
        generator = torch.Generator().manual_seed(0)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.student, self.teacher = (
            [torch.randn(shape, generator=generator).mul_(0.05).to(self.dtype) for shape in _SHAPES[shapes]]
            for _ in range(2)
        )
        for x in self.student:
            x.requires_grad_()

    @classmethod
    def of(cls, student: list[Tensor], teacher: list[Tensor]) -> ModelPair:
        """A pair of models that are there, in place of drawn ones."""
        pair = cls.__new__(cls)
        pair.dtype, pair.student, pair.teacher = student[0].dtype, student, teacher
        return pair

    @property
    def numel(self) -> int:
        """How many weights one of the two models has."""
        return sum(x.numel() for x in self.student)

    @cached_property
    def _exact(self) -> tuple[Tensor, Tensor, Tensor]:
        student = [x.detach().double().requires_grad_() for x in self.student]
        log_q, counts = opponents.rfft_teacher([x.double() for x in self.teacher])
        loss, *grads = opponents.autograd_rfft(student, log_q, counts)
        # Of the divergence's terms p (log p - log q), the parts that cancel are what is rounded.
        return loss.detach(), torch.cat([g.reshape(-1) for g in grads]), 2 * log_q.abs().max()

    def expected(self, with_gradient: bool) -> Expected:
        """In float64. An FFT rounds log2(d) times, relative to the root mean square of its results."""
        loss, grad, terms = self._exact
        roundings = 8 * math.ceil(math.log2(self.numel))
        if not with_gradient:
            return Expected(loss[None], terms[None], roundings)
        # A coefficient's logarithm is off by the error of the transform over its magnitude, and magnitudes are
        # Rayleigh distributed: some are as small as d ** -0.5 of the mean.
        spread = grad.square().mean().sqrt() * 64
        magnitude = torch.cat([terms[None], spread.expand_as(grad)])
        return Expected(torch.cat([loss[None], grad]), magnitude, roundings)


@torch.enable_grad()  # the harness races without gradients
def _ours(student: list[Tensor], teacher: SpectralTeacher) -> list[Tensor]:
    loss = spectral_divergence(student, teacher)
    return [loss, *torch.autograd.grad(loss, student)]


def _ours_value(student: list[Tensor], teacher: SpectralTeacher) -> Tensor:
    with torch.no_grad():
        return spectral_divergence(student, teacher)


def _divergence(spec: Spec, models: ModelPair) -> Case:
    student, teacher = models.student, models.teacher
    contestants = [
        Contestant("pfl_ext", "ours", partial(_ours, student, SpectralTeacher(teacher)), models.dtype),
        Contestant(
            "fft + autograd",
            "naive",
            partial(opponents.autograd_fft, student, opponents.fft_teacher(teacher)),
            models.dtype,
        ),
        Contestant(
            "rfft + autograd",
            "skilled",
            partial(opponents.autograd_rfft, student, *opponents.rfft_teacher(teacher)),
            models.dtype,
        ),
    ]
    return _case(spec, models, models.expected(True), contestants)


def _value(spec: Spec, models: ModelPair) -> Case:
    contestants = [
        Contestant(
            "pfl_ext", "ours", partial(_ours_value, models.student, SpectralTeacher(models.teacher)), models.dtype
        ),
        Contestant("NumPy and lists", "naive", partial(_numpy_value, models.student, models.teacher), models.dtype),
    ]
    return _case(spec, models, models.expected(False), contestants)


def _numpy_value(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    return torch.tensor(opponents.numpy_lists(student, teacher), dtype=torch.float64)


def _smooth(spec: Spec, models: ModelPair) -> Case:
    """The same weights with zeros up to a smooth length: another result, at the price of a length that FFTs like."""
    student, teacher = models.student, models.teacher
    padding = torch.zeros(_SMOOTH - models.numel, dtype=models.dtype)
    padded = ModelPair.of([*student, padding.clone().requires_grad_()], [*teacher, padding])
    contestants = [
        Contestant("pfl_ext", "ours", partial(_ours, student, SpectralTeacher(teacher)), models.dtype),
        Contestant(
            f"{_SMOOTH:,} weights",
            "yardstick",
            partial(_ours, padded.student, SpectralTeacher(padded.teacher)),
            models.dtype,
            padded.expected(True),
        ),
    ]
    return _case(spec, models, models.expected(True), contestants)


def _transforms(weights: Tensor) -> Tensor:
    length = weights.shape[1]
    result: Tensor = OPS["real_idft"](OPS["real_dft"](weights, length), length, length)
    return result


def _passes(half_spectrum: Tensor, spare: Tensor, teacher: SpectralTeacher) -> Tensor:
    """The loss, and in ``spare`` the gradient's half spectrum; what is copied there first is part of the time."""
    (part,) = teacher._parts
    loss: Tensor = OPS["half_spectrum_divergence_"](spare.copy_(half_spectrum), *part, 0, True)
    return loss


def _parts(spec: Spec, models: ModelPair) -> Case:
    teacher = SpectralTeacher(models.teacher)
    weights = torch.cat([x.detach().reshape(-1) for x in models.student])[None]
    half_spectrum = OPS["real_dft"](weights, models.numel)
    value, exact = models.expected(False), weights[0].double() * models.numel
    spread = exact.square().mean().sqrt().expand_as(exact)
    contestants = [
        Contestant("pfl_ext", "ours", partial(_ours, models.student, teacher), models.dtype),
        Contestant(
            "transform and inverse",
            "yardstick",
            partial(_transforms, weights),
            models.dtype,
            Expected(exact, 8 * spread, value.roundings),
        ),
        Contestant(
            "passes",
            "yardstick",
            partial(_passes, half_spectrum, torch.empty_like(half_spectrum), teacher),
            models.dtype,
            value,
        ),
    ]
    return _case(spec, models, models.expected(True), contestants)


def _case(spec: Spec, models: ModelPair, expected: Expected, contestants: list[Contestant]) -> Case:
    size = models.numel * models.student[0].element_size()
    # Read the weights and write the half spectrum; read it twice and the teacher's; write and read the gradient's
    # spectrum; write the gradient. FFTs of this size do not do it in one pass, but must do that much.
    return Case(spec, contestants, expected, data_bytes=2 * size, limit_bytes=8 * size)


def _ops(shapes: str) -> list[str]:
    own = {"length": "resnet18", "parts": "smooth"}
    return [op for op in FAMILY.ops if own.get(op, shapes) == shapes]


def _plan(grid: Grid) -> list[Spec]:
    shape_sets = grid.shapes or (("lenet", "adapters") if grid.quick else tuple(_SHAPES))
    specs = []
    for shapes in shape_sets:
        for dtype in grid.dtypes or (("float32", "float64") if shapes == "lenet" and not grid.quick else ("float32",)):
            for op in _ops(shapes):
                for threads in grid.threads or (grid.all_threads,):
                    specs.append(Spec(op, shapes, 1, dtype, threads))
    return specs


def _cases(specs: Iterable[Spec]) -> Iterator[Case | Skipped]:
    builders = {"divergence": _divergence, "value": _value, "length": _smooth, "parts": _parts}
    for (shapes, dtype), group in groupby(specs, key=lambda spec: (spec.shapes, spec.dtype)):
        models = ModelPair(shapes, dtype)
        for spec in group:
            yield builders[spec.op](spec, models)
        del models


FAMILY = Family(
    name="spectral",
    summary="divergence between weight spectra, forward and backward",
    ops={
        "divergence": "`spectral_divergence(student, teacher)` of lists of parameters, and its gradient",
        "value": "the same without the gradient, which the NumPy way does not have",
        "length": "the first at 11,181,642 = 2 * 3 * 1,863,607 weights, related to a smooth length next to it",
        "parts": "the first at that smooth length, and the time of its parts alone",
    },
    notes={
        "fft + autograd": "the teacher's logarithm is cached, as ours",
        "rfft + autograd": "the half spectrum with weighted bins; the teacher's logarithm is cached, as ours",
        f"{_SMOOTH:,} weights": "2^10 * 3^7 * 5: the same weights and zeros",
        "transform and inverse": "the real FFT and its inverse, without anything between",
        "passes": "sums, and the gradient's spectrum, with a copy of the spectrum that the op does not make",
        "NumPy and lists": "both models in every step, magnitudes in Python lists, as in the paper's code",
    },
    shapes=tuple(_SHAPES),
    clients=(1,),
    dtypes=("float32", "float64"),
    plan=_plan,
    cases=_cases,
)
