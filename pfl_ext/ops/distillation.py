r"""Distillation losses: an ensemble of teachers (PerAda), and one teacher beside the labels (PersFL, PersFL-GD).

For a sample with student logits :math:`a`, :math:`p = \mathrm{softmax}(a / T)`, and teacher probabilities :math:`q`:

* divergence (``soft="kl"``):     :math:`\mathrm{KL}(q \| p) = \sum_k q_k (\log q_k - \log p_k)`
* cross-entropy (``soft="ce"``):  :math:`-\sum_k q_k \log p_k`
* gradient of both:               :math:`(p - q) / T`

:math:`q` comes from M teachers with logits :math:`z_m` and weights :math:`w_m`, which are divided by their sum:

* ``average="logits"``:  :math:`q = \mathrm{softmax}(\sum_m w_m z_m / T)`
* ``average="probs"``:   :math:`q = \sum_m w_m \, \mathrm{softmax}(z_m / T)`
* ``average="losses"``:  the loss is :math:`\sum_m w_m \mathrm{KL}(q_m \| p)`; its gradient is that of ``"probs"``

In the multi-label form each class is a question of its own: sigmoids instead of softmax, and the loss of a sample is
the sum over its labels of the two-class divergence or cross-entropy.

The gradient is computed with the loss, in one pass over the logits; backward scales it. It flows to the student alone:
teachers, weights and targets are constants, also where they require gradients. Differentiating twice is refused.

Arithmetic is in float32 for float16, bfloat16 and float32, and in float64 for float64. The loss has that type, the
gradient the student's. The result does not depend on the number of threads or the instruction set: it is the same to
the bit.

**Infinities and NaN.** A class whose logit is ``-inf`` is masked: its probability is 0 and, masked in teacher and
student, it adds nothing. Masked in the student alone, it makes the divergence infinite; the gradient stays finite. A
row with a NaN, a ``+inf`` or nothing but ``-inf`` gets NaN for its loss and its gradient, as in torch, and no other row
does. In the multi-label form, logits over T (with ``average="logits"`` their mean) beyond 1e30 count as 1e30. A sample
that is left out is not looked at: its loss and gradient are 0 whatever it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ._arguments import FLOATS, accumulate_type, check_dense, check_memory, describe, one_of
from ._declare import declare, raise_out_of_memory
from .averaging import _weigh, _weighted_average

__all__ = ["distillation_loss", "ensemble_distillation_loss", "ensemble_logits"]

Average: TypeAlias = Literal["logits", "probs", "losses"]
Soft: TypeAlias = Literal["kl", "ce"]
Reduction: TypeAlias = Literal["none", "sum", "mean", "batchmean"]
Teachers: TypeAlias = Tensor | Sequence[Tensor]

# The numbers by which the op knows them: csrc/common/distillation.h.
_AVERAGES = ("logits", "probs", "losses")
_REDUCTIONS = ("none", "sum", "mean", "batchmean")
_NONE, _SUM, _MEAN, _BATCHMEAN = range(4)


# ---- the op --------------------------------------------------------------------------------------------------------


def _check(
    student: Tensor,
    teachers: Sequence[Tensor],
    weights: Tensor | None,
    target: Tensor | None,
    sample_weights: Tensor | None,
    temperature: float,
    soft_scale: float,
    hard_scale: float,
    label_smoothing: float,
    ignore_index: int,
    average: int,
    cross_entropy: bool,
    multilabel: bool,
    reduction: int,
    need_grad: bool,
) -> int:
    """What the native kernels check too, but the values of the target. Returns the number of teachers."""
    if student.dim() != 2 or student.dtype not in FLOATS or student.shape[1] == 0:
        raise ValueError(
            f"student is {describe(student)}; logits [batch, classes] in float32, float64, float16 or bfloat16 are "
            "accepted"
        )
    check_dense("student", student)
    if not teachers:
        raise ValueError("no teachers given; at least one is needed")
    # Logits are divided by it and losses multiplied by its square, in the accumulate type.
    largest = 2.0 ** (511 if student.dtype == torch.float64 else 63)
    if not 1 / largest <= temperature <= largest:
        raise ValueError(
            f"temperature is {temperature}; a positive number from {1 / largest:.3g} to {largest:.3g} is accepted"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; 0 to 1 is accepted")
    if not (math.isfinite(soft_scale) and math.isfinite(hard_scale)):
        raise ValueError(f"the scales of the soft and the hard term are {soft_scale} and {hard_scale}")
    if not (0 <= average < len(_AVERAGES) and 0 <= reduction < len(_REDUCTIONS)):
        raise ValueError(f"average is {average} and reduction {reduction}; 0 to 2 and 0 to 3 are accepted")
    stacked = len(teachers) == 1 and teachers[0].dim() == 3
    for m, x in enumerate(teachers):
        shape = x.shape[1:] if stacked else x.shape
        if (shape, x.dtype, x.device) != (student.shape, student.dtype, student.device) or (
            stacked and x.shape[0] == 0
        ):
            raise ValueError(
                f"teacher {m} is {describe(x)}, the student is {describe(student)}; the same shape (or one stacked "
                "tensor [teachers, batch, classes] of at least one teacher), type and device are accepted"
            )
        check_dense(f"teacher {m}", x)
    count = teachers[0].shape[0] if stacked else len(teachers)
    if weights is not None and (weights.device.type, weights.dtype, weights.shape) != ("cpu", torch.float64, (count,)):
        raise ValueError(
            f"weights are {describe(weights)} for {count} teachers; float64 [{count}] on the CPU is accepted"
        )
    accumulate = accumulate_type(student.dtype)
    if target is None and hard_scale != 0:
        raise ValueError(f"the hard term has the scale {hard_scale} and no target")
    if target is not None:
        shape, dtype = (student.shape, accumulate) if multilabel else (student.shape[:1], torch.int64)
        if (target.shape, target.dtype, target.device) != (shape, dtype, student.device):
            raise ValueError(
                f"target is {describe(target)}, the student is {describe(student)}; "
                f"{str(dtype).removeprefix('torch.')} {list(shape)} on the same device is accepted"
            )
        check_dense("target", target)
    if sample_weights is not None:
        expected = (student.shape[:1], accumulate, student.device)
        if (sample_weights.shape, sample_weights.dtype, sample_weights.device) != expected:
            raise ValueError(
                f"sample_weights are {describe(sample_weights)}; {str(accumulate).removeprefix('torch.')} "
                f"[{student.shape[0]}] on {student.device} is accepted"
            )
        check_dense("sample_weights", sample_weights)
    return count


def _check_target(target: Tensor, classes: int, kept: Tensor, multilabel: bool, ignore_index: int) -> None:
    """On the CPU only: looking at values of another device would wait for it."""
    in_range = (target >= 0) & ((target <= 1) if multilabel else (target < classes))
    in_range |= target == ignore_index
    wrong = (~(in_range.all(1) if multilabel else in_range)) & kept
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        accepted = "0 to 1" if multilabel else f"a class from 0 to {classes - 1}"
        raise ValueError(
            f"the target of row {row} is out of range; {accepted} or ignore_index {ignore_index} is accepted"
        )


def _sigmoid_entropy(x: Tensor) -> Tensor:
    """Sum of p log p over a sigmoid's two outcomes."""
    return -_binary_cross_entropy(x.sigmoid(), (-x).sigmoid(), x)


def _binary_cross_entropy(q: Tensor, complement: Tensor, x: Tensor) -> Tensor:
    return torch.where(x < 0, -q * x, complement * x) + torch.log1p(torch.exp(-x.abs()))


def _distillation_reference(
    student: Tensor,
    teachers: list[Tensor],
    weights: Tensor | None,
    target: Tensor | None,
    sample_weights: Tensor | None,
    temperature: float,
    soft_scale: float,
    hard_scale: float,
    label_smoothing: float,
    ignore_index: int,
    average: int,
    cross_entropy: bool,
    multilabel: bool,
    reduction: int,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    count = _check(
        *(student, teachers, weights, target, sample_weights, temperature, soft_scale, hard_scale, label_smoothing),
        *(ignore_index, average, cross_entropy, multilabel, reduction, need_grad),
    )
    accumulate = accumulate_type(student.dtype)
    batch, classes = student.shape
    a = student.to(accumulate)
    shares = [1.0 / count] * count if weights is None else weights.tolist()
    logits = [x.to(accumulate) / temperature for x in (teachers[0].unbind(0) if teachers[0].dim() == 3 else teachers)]
    scaled = a / temperature
    if multilabel:
        a, scaled = a.clamp(-1e30, 1e30), scaled.clamp(-1e30, 1e30)

    row = torch.ones(batch, dtype=accumulate, device=student.device) if sample_weights is None else sample_weights
    kept = row != 0
    if target is not None:
        if target.device.type == "cpu":
            _check_target(target, classes, kept, multilabel, ignore_index)
        if not multilabel:
            kept = kept & (target != ignore_index)
    counted = kept.unsqueeze(1).expand(-1, classes)
    if target is not None and multilabel:
        counted = counted & (target != ignore_index)

    # The soft term of every class and its gradient; rows that do not count are masked at the end.
    loss = torch.zeros_like(a)
    gradient = torch.zeros_like(a)
    if soft_scale != 0:
        if average == 0:
            mean = logits[0] * shares[0]
            for x, share in zip(logits[1:], shares[1:], strict=True):
                mean = mean + x * share
            logits, shares = [mean], [1.0]
        zero = torch.zeros_like(a)
        if multilabel:
            logits = [x.clamp(-1e30, 1e30) for x in logits]
            q = sum((x.sigmoid() * s for x, s in zip(logits, shares, strict=True)), zero)
            complement = sum(((-x).sigmoid() * s for x, s in zip(logits, shares, strict=True)), zero)
            if average == 1:
                entropy = torch.xlogy(q, q) + torch.xlogy(complement, complement)
            else:
                entropy = sum((_sigmoid_entropy(x) * s for x, s in zip(logits, shares, strict=True)), zero)
            p = scaled.sigmoid()
            cross = _binary_cross_entropy(q, complement, scaled)
        else:
            logs = [torch.log_softmax(x, 1) for x in logits]
            q = sum((x.exp() * s for x, s in zip(logs, shares, strict=True)), zero)
            if average == 1:
                entropy = torch.xlogy(q, q)
            else:  # 0 * -infinity is 0: the class is masked
                terms = [torch.where(x.exp() > 0, x.exp() * x, x.exp()) * s for x, s in zip(logs, shares, strict=True)]
                entropy = sum(terms, zero)
            log_p = torch.log_softmax(scaled, 1)
            p = log_p.exp()
            cross = torch.where(q > 0, -q * log_p, q)
        loss = loss + soft_scale * (cross if cross_entropy else cross + entropy)
        gradient = gradient + (soft_scale / temperature) * (p - q)
    if target is not None and hard_scale != 0:
        if multilabel:
            y = target * (1 - label_smoothing) + label_smoothing / 2
            loss = loss + hard_scale * _binary_cross_entropy(y, 1 - y, a)
            gradient = gradient + hard_scale * (a.sigmoid() - y)
        else:
            log_p = torch.log_softmax(a, 1)
            inside = (target >= 0) & (target < classes)
            index = torch.where(inside, target, 0).unsqueeze(1)
            y = torch.zeros_like(a).scatter(1, index, 1.0 - label_smoothing)
            hard = -y * torch.where(y > 0, log_p, 0)
            if label_smoothing:
                hard = hard - label_smoothing / classes * log_p
            # Out of range where values cannot be looked at (see _check_target): NaN, not a made-up class.
            hard = torch.where((inside | (target == ignore_index)).unsqueeze(1), hard, math.nan)
            loss = loss + hard_scale * hard
            gradient = gradient + hard_scale * (log_p.exp() - y - label_smoothing / classes)
            gradient = torch.where(hard.isnan(), math.nan, gradient)
    losses = torch.where(counted, loss, 0).sum(1) * torch.where(kept, row, 0)

    if reduction == _MEAN:
        divisor = ((counted if multilabel else counted[:, :1]) * row.double().unsqueeze(1)).sum()
    else:
        divisor = torch.tensor(batch if reduction == _BATCHMEAN else 1.0, dtype=torch.float64, device=student.device)
    result = losses if reduction == _NONE else (losses.double().sum() / divisor).to(accumulate)
    # Half types keep the gradient undivided: see csrc/glue/distillation.h.
    scale = row / (divisor.to(accumulate) if student.dtype == accumulate else 1.0)
    gradient = torch.where(counted, gradient * scale.unsqueeze(1), 0)
    gradient = gradient.to(student.dtype).contiguous() if need_grad else student.new_empty(0)
    return result, gradient, divisor.to(accumulate)


def _distillation_fake(student: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check(student, *arguments)
    reduction, need_grad = arguments[-2:]
    accumulate = accumulate_type(student.dtype)
    return (
        student.new_empty(student.shape[:1] if reduction == _NONE else (), dtype=accumulate),
        student.new_empty(student.shape if need_grad else (0,)),
        student.new_empty((), dtype=accumulate),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.teachers = len(inputs[1])
    ctx.need_grad = inputs[-1]
    ctx.save_for_backward(output[1], output[2])
    ctx.set_materialize_grads(False)


class _Scale(torch.autograd.Function):
    """The stored gradient times the incoming one, for ``create_graph=True``: it refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, incoming: Tensor, gradient: Tensor, normalizer: Tensor, student: Tensor) -> Tensor:
        """Scale. ``student`` stands in for what the stored gradient was computed from."""
        return _scale(incoming, gradient, normalizer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        """Refuse: the stored gradient is a number, the student it came from is not in the graph any more."""
        raise RuntimeError(
            "the distillation losses compute their gradient in forward and cannot be differentiated twice; "
            "call backward without create_graph=True"
        )


def _scale_once(incoming: Tensor, gradient: Tensor, normalizer: Tensor) -> Tensor:
    result: Tensor = _Scale.apply(incoming, gradient, normalizer, gradient.new_empty(0, requires_grad=True))
    return result


def _scale(incoming: Tensor, gradient: Tensor, normalizer: Tensor) -> Tensor:
    if gradient.dtype in (torch.float16, torch.bfloat16):
        incoming = incoming / normalizer
    if incoming.dim() == 1:
        return (gradient * incoming.unsqueeze(1)).to(gradient.dtype)
    # A GPU would round a number of no dimensions to the gradient's type before it multiplies.
    return gradient * incoming if incoming.is_cpu else (gradient.to(incoming.dtype) * incoming).to(gradient.dtype)


def _backward(ctx: Any, incoming: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    gradient, normalizer = ctx.saved_tensors
    result = None
    if incoming is not None:
        if not ctx.need_grad:
            raise RuntimeError("the gradient was not computed: the op was called with need_grad=False")
        if torch.is_grad_enabled():  # create_graph=True
            result = _scale_once(incoming, gradient, normalizer)
        else:
            result = _scale(incoming, gradient, normalizer)
    return result, [None] * ctx.teachers, *[None] * 13


_distillation = declare(
    "distillation_loss(Tensor student, Tensor[] teachers, Tensor? weights, Tensor? target, Tensor? sample_weights, "
    "float temperature, float soft_scale, float hard_scale, float label_smoothing, int ignore_index, int average, "
    "bool cross_entropy, bool multilabel, int reduction, bool need_grad) -> (Tensor, Tensor, Tensor)",
    reference=_distillation_reference,
    fake=_distillation_fake,
    setup_context=_setup,
    backward=_backward,
)


# ---- its gradient, scaled in place on a GPU ------------------------------------------------------------------------


def _scale_in_place_check(gradient: Tensor, incoming: Tensor, normalizer: Tensor) -> None:
    if gradient.dtype not in FLOATS:
        raise ValueError(f"gradient is {describe(gradient)}; float32, float64, float16 and bfloat16 are accepted")
    check_dense("gradient", gradient)
    if not gradient.is_contiguous():
        raise ValueError(f"gradient is {describe(gradient)} and not contiguous")
    accumulate = accumulate_type(gradient.dtype)
    for name, x in (("incoming", incoming), ("normalizer", normalizer)):
        check_dense(name, x)
        if x.dim() != 0 or x.dtype != accumulate or x.device != gradient.device:
            raise ValueError(
                f"{name} is {describe(x)}, the gradient is {describe(gradient)}; one "
                f"{str(accumulate).removeprefix('torch.')} on the same device is accepted"
            )


def _scale_in_place_reference(gradient: Tensor, incoming: Tensor, normalizer: Tensor) -> None:
    _scale_in_place_check(gradient, incoming, normalizer)
    check_memory({"gradient": [gradient]}, {"the numbers that scale it": [incoming, normalizer]})
    gradient.copy_(_scale(incoming, gradient, normalizer))


_scale_in_place = declare(
    "distillation_scale_(Tensor(a!) gradient, Tensor incoming, Tensor normalizer) -> ()",
    reference=_scale_in_place_reference,
    fake=_scale_in_place_check,
    plain_on={"cpu": "one product, which torch has"},
)


# ---- what users call -----------------------------------------------------------------------------------------------


# Two of torch's internals, for speed alone: eager autograd spends longer on a small batch than the kernel does. Where a
# release has them no more, the public way is taken, and the result is the same.
_below_autograd: Callable[[], AbstractContextManager[object]] = getattr(
    torch._C, "_AutoDispatchBelowAutograd", nullcontext
)
"""Straight to the kernel: :class:`_Loss` is its autograd, the op's registered formula is not needed."""
_graph_is_kept: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Whether this backward may be followed by another one over the same graph (``retain_graph=True``)."""


class _Loss(torch.autograd.Function):
    """The op for eager autograd: the same as its registered formula, which takes three times as long to set up."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """Compute the loss and the gradient at once, and keep the gradient."""
        with _below_autograd():
            loss, gradient, normalizer = _distillation.overload(student, *arguments, True)
        # Attributes, not saved tensors: they are neither inputs nor outputs, and the last reference can be given away.
        ctx.gradient, ctx.normalizer = gradient, normalizer
        return loss

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None]:
        """Scale the kept gradient, which is used once."""
        gradient = ctx.gradient
        if gradient is None:
            raise RuntimeError(
                "the gradient of this distillation loss has been used already; "
                "call the first backward with retain_graph=True"
            )
        if torch.is_grad_enabled():
            return _scale_once(incoming, gradient, ctx.normalizer), None
        if not _graph_is_kept():
            ctx.gradient = None
            # Ours alone until now: it becomes the student's without a copy.
            if _is_one(incoming, gradient):
                return gradient, None
            if incoming.is_cuda and incoming.dim() == 0:
                _scale_in_place(gradient, incoming, ctx.normalizer)
                return gradient, None
        return _scale(incoming, gradient, ctx.normalizer), None


def _is_one(incoming: Tensor, gradient: Tensor) -> bool:
    """Whether backward starts at this loss and the gradient is complete. Asked on the CPU alone: there it is free."""
    complete = gradient.dtype in (torch.float32, torch.float64)
    return complete and incoming.dim() == 0 and incoming.device.type == "cpu" and incoming.item() == 1.0


def _loss(student: Tensor, *arguments: Any) -> Tensor:
    if torch.compiler.is_compiling():
        need_grad = student.requires_grad and torch.is_grad_enabled()
        loss: Tensor = _distillation(student, *arguments, need_grad)[0]
        return loss
    try:
        if student.requires_grad and torch.is_grad_enabled():
            return _Loss.apply(student, arguments)
        loss = _distillation(student, *arguments, False)[0]
        return loss
    except RuntimeError as error:
        raise_out_of_memory(error)
        _check(*(student, *arguments, True))  # says the same as the native kernel, as a ValueError
        raise


def _teacher_list(teachers: Teachers) -> tuple[list[Tensor], int]:
    """The teachers as the op takes them, and how many they are."""
    if isinstance(teachers, Tensor):
        if teachers.dim() != 3:
            raise ValueError(
                f"teachers is {describe(teachers)}; a stack [teachers, batch, classes] or a list is accepted"
            )
        return [teachers.detach()], teachers.shape[0]
    if not isinstance(teachers, Iterable):
        raise TypeError(f"teachers is {describe(teachers)}; a stack [teachers, batch, classes] or a list is accepted")
    listed = list(teachers)
    for m, x in enumerate(listed):
        if not isinstance(x, Tensor):
            raise TypeError(f"teacher {m} is a {type(x).__name__}, not a tensor")
    if any(x.requires_grad for x in listed):
        listed = [x.detach() for x in listed]
    return listed, len(listed)


def _weigh_teachers(teachers: Teachers, weights: Sequence[float] | Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    """Teachers and normalised weights; those of weight 0 are left out, so that nothing they hold matters."""
    listed, count = _teacher_list(teachers)
    if count == 0:
        raise ValueError("no teachers given; at least one is needed")
    if weights is None:
        return listed, None
    given = weights.tolist() if isinstance(weights, Tensor) and weights.dim() == 1 else weights
    try:
        shares = _weigh(given, count, normalize=True)
    except ValueError as error:
        raise ValueError(str(error).replace("client", "teacher")) from None
    used = [m for m, weight in enumerate(given) if weight != 0]
    if len(used) < count:
        each = listed[0].unbind(0) if listed[0].dim() == 3 else listed
        return [each[m] for m in used], shares[used]
    return listed, shares


def _weigh_samples(student: Tensor, sample_weights: Tensor | None, ignore: Tensor | None) -> Tensor | None:
    """One weight for each row in the accumulate type; 0 leaves a row out."""
    accumulate = accumulate_type(student.dtype)
    if ignore is not None:
        _as_tensor("ignore", ignore)
        if ignore.dtype != torch.bool or ignore.shape != student.shape[:1] or ignore.device != student.device:
            raise ValueError(
                f"ignore is {describe(ignore)}; bool [{student.shape[0]}] on {student.device} is accepted, "
                "True for a sample to leave out"
            )
        if sample_weights is None:
            return (~ignore).to(accumulate)
    if sample_weights is None:
        return None
    _as_tensor("sample_weights", sample_weights)
    if sample_weights.shape != student.shape[:1] or sample_weights.device != student.device:
        raise ValueError(
            f"sample_weights are {describe(sample_weights)}; one weight for each of the {student.shape[0]} samples on "
            f"{student.device} is accepted"
        )
    sample_weights = sample_weights.detach().to(accumulate)
    return sample_weights if ignore is None else sample_weights.masked_fill(ignore, 0)


def _as_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; a tensor is accepted")


def ensemble_distillation_loss(
    student: Tensor,
    teachers: Teachers,
    weights: Sequence[float] | Tensor | None = None,
    temperature: float = 1.0,
    average: Average = "logits",
    reduction: Reduction = "mean",
    *,
    soft: Soft = "kl",
    multilabel: bool = False,
    temperature_squared: bool = False,
    sample_weights: Tensor | None = None,
    ignore: Tensor | None = None,
) -> Tensor:
    r"""Distil M teachers into a student: the server's step of PerAda (Algorithm 1, line 21), and FedDF's.

    .. math:: \ell = \frac{1}{B} \sum_j \mathrm{KL}\Big(\mathrm{softmax}\big(\tfrac{1}{T} \sum_m w_m z_m(x_j)\big)
              \;\Big\|\; \mathrm{softmax}\big(\tfrac{1}{T} a(x_j)\big)\Big)

    The paper's KL(teacher, student) is read with the teacher's distribution in front, as in the distillation that it
    cites. It has no temperature: 1 is the default, and the factor :math:`T^2`, which keeps gradients of one size over
    temperatures, is the option ``temperature_squared``.

    Args:
        student: logits [B, C]. The gradient goes to it alone.
        teachers: logits of M teachers, stacked as [M, B, C] or a list of [B, C], of the student's type and device.
        weights: one number a teacher, not negative, divided by their sum; equal by default. A teacher of weight 0 is
            not read.
        temperature: T > 0, in float32 from 2**-63 to 2**63 (and its square is in range).
        average: what is averaged over the teachers: ``"logits"``, ``"probs"`` or ``"losses"`` (see the module).
        reduction: ``"mean"`` divides the sum by the weight of all samples that count (of all labels, in the multi-label
            form), ``"batchmean"`` by B whatever was left out, ``"sum"`` by nothing; ``"none"`` gives the loss of every
            sample, [B].
        soft: ``"kl"`` or ``"ce"``: with or without the teachers' entropy, which is constant in the student.
        multilabel: a sigmoid for each class instead of a softmax over all.
        temperature_squared: multiply the loss by :math:`T^2`.
        sample_weights: a weight for each sample, [B]. A sample of weight 0 is left out, whatever it holds.
        ignore: bool [B], True for a sample to leave out.

    Returns:
        The loss in float32 (float64 for a float64 student). If no sample counts, the mean is NaN, as in torch.

    Raises:
        ValueError: if shapes, types, devices or numbers do not fit; nothing is computed then.
    """
    _as_tensor("student", student)
    one_of("average", average, _AVERAGES)
    one_of("reduction", reduction, _REDUCTIONS)
    one_of("soft", soft, ("kl", "ce"))
    listed, shares = _weigh_teachers(teachers, weights)
    if sample_weights is not None or ignore is not None:
        sample_weights = _weigh_samples(student, sample_weights, ignore)
    temperature = float(temperature)
    scale = temperature * temperature if temperature_squared else 1.0
    return _loss(
        *(student, listed, shares, None, sample_weights, temperature, scale, 0.0, 0.0, -100),
        *(_AVERAGES.index(average), soft == "ce", multilabel, _REDUCTIONS.index(reduction)),
    )


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    lam: float,
    temperature: float,
    soft: Soft = "kl",
    reduction: Reduction = "mean",
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    multilabel: bool = False,
    sample_weights: Tensor | None = None,
    ignore: Tensor | None = None,
) -> Tensor:
    r"""Labels and one teacher: the objective of PersFL (equation 3), and of PersFL-GD (equation 7) with ``soft="ce"``.

    .. math:: (1 - \lambda) \, \mathrm{CE}(y, \mathrm{softmax}(a))
              + \lambda T^2 \, \mathrm{KL}(\mathrm{softmax}(z / T) \,\|\, \mathrm{softmax}(a / T))

    Both terms are fused into one pass. With :math:`\lambda = 0` the teacher is not read, with :math:`\lambda = 1` the
    target only says which samples are ignored.

    Args:
        student: logits [B, C] of the personal model A. The gradient goes to it alone.
        teacher: logits [B, C] of the teacher O, of the same type and device.
        target: classes [B], any integer type; in the multi-label form probabilities [B, C], 0 to 1.
        lam: the imitation parameter, 0 to 1.
        temperature: T > 0, of the soft term; its range is as in :func:`ensemble_distillation_loss`.
        soft: ``"kl"`` (PersFL) or ``"ce"`` (PersFL-GD). They differ by the teacher's entropy: the gradients are equal.
        reduction: as in :func:`ensemble_distillation_loss`.
        label_smoothing: of the hard term, as in :func:`torch.nn.functional.cross_entropy`; in the multi-label form a
            label y becomes y (1 - s) + s / 2.
        ignore_index: a sample with this target counts in neither term and not in the mean. In the multi-label form it
            is a label that is left out (CheXpert's uncertain labels: -1), not the whole sample.
        multilabel: binary cross-entropy and two-class divergences, summed over the labels of a sample.
        sample_weights: as in :func:`ensemble_distillation_loss`.
        ignore: as in :func:`ensemble_distillation_loss`.

    Returns:
        The loss in float32 (float64 for a float64 student).

    Raises:
        ValueError: if shapes, types, devices or numbers do not fit; nothing is computed then. A target out of range is
            an error on the CPU. On a GPU, looking at it would mean to wait for it: the sample's loss is NaN there.
    """
    _as_tensor("student", student)
    _as_tensor("teacher", teacher)
    _as_tensor("target", target)
    one_of("soft", soft, ("kl", "ce"))
    one_of("reduction", reduction, _REDUCTIONS)
    lam, temperature = float(lam), float(temperature)
    if not 0 <= lam <= 1:
        raise ValueError(f"lam is {lam}; 0 to 1 is accepted")
    if multilabel:
        target = target.detach().to(accumulate_type(student.dtype))
    elif target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"target is {describe(target)}; integers are accepted, or multilabel=True for probabilities")
    elif target.dtype != torch.int64:
        target = target.long()
    if sample_weights is not None or ignore is not None:
        sample_weights = _weigh_samples(student, sample_weights, ignore)
    listed, _ = _teacher_list([teacher])
    return _loss(
        *(student, listed, None, target, sample_weights, temperature),
        *(lam * temperature * temperature, 1.0 - lam, float(label_smoothing), ignore_index),
        *(0, soft == "ce", multilabel, _REDUCTIONS.index(reduction)),
    )


def ensemble_logits(teachers: Teachers, weights: Sequence[float] | Tensor | None = None) -> Tensor:
    r"""The teachers' mean logits :math:`\sum_m w_m z_m`, [B, C] in their type, to be kept for later steps.

    Frozen teachers give the same logits for a sample every time: average them once, and distil from the result as from
    a single teacher. In float32 and float64 at temperature 1 that gives the bits of
    :func:`ensemble_distillation_loss` with all teachers. Weights are as there, and no gradient is kept.
    """
    listed, shares = _weigh_teachers(teachers, weights)
    each = [x.detach() for x in (listed[0].unbind(0) if listed[0].dim() == 3 else listed)]
    first = each[0]
    for m, x in enumerate(each):
        if x.dtype not in FLOATS or (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"teacher {m} is {describe(x)}, teacher 0 is {describe(first)}; "
                "logits of one floating type, shape and device are accepted"
            )
        check_dense(f"teacher {m}", x)
    if shares is None:
        shares = torch.full((len(each),), 1.0 / len(each), dtype=torch.float64)
    result: Tensor = _weighted_average(each, shares)[0]
    return result
