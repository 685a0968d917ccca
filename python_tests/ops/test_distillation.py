from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_ext import _native
from pfl_ext.ops import distillation, distillation_loss, ensemble_distillation_loss, ensemble_logits
from pfl_ext.ops._arguments import accumulate_type
from pfl_ext.ops._declare import OPS

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
AVERAGES = ["logits", "probs", "losses"]
OP, SCALE = OPS["distillation_loss"], OPS["distillation_scale_"]
# Around the CPU kernel's tile of 16 rows, its limit of 128 classes for tiles, rows padded to 16, and primes.
SHAPES = [(1, 1), (5, 3), (15, 10), (16, 10), (17, 10), (33, 128), (18, 129), (7, 48), (3, 97), (3, 211), (2, 1009)]


def random_logits(shape, dtype=torch.float32, device="cpu", seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)


def random_case(batch, classes, teachers, dtype=torch.float32, device="cpu"):
    student = random_logits((batch, classes), dtype, device, seed=1).requires_grad_()
    return student, [random_logits((batch, classes), dtype, device, seed=2 + m) for m in range(teachers)]


def softened(x, temperature, multilabel):
    """Log-probabilities over a last dimension of outcomes."""
    x = x.double() / temperature
    if multilabel:
        return torch.stack([F.logsigmoid(x), F.logsigmoid(-x)], -1)
    return torch.log_softmax(x, -1).unsqueeze(-1)


def exact_soft(student, teachers, shares, temperature, average, soft="kl", multilabel=False):
    """The soft term of every sample in float64, straight from the definition, through autograd."""
    log_p = softened(student, temperature, multilabel)
    if average == "logits":
        log_q = softened(sum(s * t.double() for s, t in zip(shares, teachers, strict=True)), temperature, multilabel)
    else:
        each = [softened(t, temperature, multilabel).exp() for t in teachers]
        log_q = sum(s * q for s, q in zip(shares, each, strict=True)).log()
    q = log_q.exp()
    cross = -(q * log_p).sum((-2, -1))
    if soft == "ce":
        return cross
    if average == "losses":
        return cross + sum(s * torch.xlogy(x, x).sum((-2, -1)) for s, x in zip(shares, each, strict=True))
    return cross + torch.xlogy(q, q).sum((-2, -1))


def gradient_of(loss, student):
    (gradient,) = torch.autograd.grad(loss, student)
    return gradient


def bits(x):
    return x.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(bits(a), bits(e))


def rounding(dtype, classes, largest):
    """Error of a sample's loss and of its gradient in units of the accumulate type.

    A logit of size L is divided by the temperature and differs from the largest with an error of 2 L u, which e^x
    passes on as a relative error; e^x itself has 1.5 u, and the sums over the classes, 16 at once, c / 16 + 4 u. The
    loss weighs logarithms of size up to 2 L + log c with probabilities that have that error.
    """
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    relative = (4 * largest + classes / 16 + 12) * unit
    return relative * (2 * largest + math.log(classes) + 1), 2 * relative


def assert_loss_and_gradient(loss, gradient, expected, expected_gradient, dtype, classes, largest=12.0, scale=1.0):
    loss_error, gradient_error = rounding(dtype, classes, largest)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype
    assert float((loss.detach().double() - expected).abs().max()) <= loss_error * scale
    error = (gradient.double() - expected_gradient.double()).abs()
    bound = gradient_error * scale
    if dtype in (torch.float16, torch.bfloat16):
        # Rounded when it is stored, and again when backward scales it.
        bound = bound + torch.finfo(dtype).eps * expected_gradient.double().abs() + torch.finfo(dtype).smallest_normal
    assert bool((error <= bound).all())


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("multilabel", [False, True], ids=["softmax", "multilabel"])
def test_ensemble_loss_and_gradient_are_within_rounding_of_the_definition(device, dtype, average, multilabel):
    for (batch, classes), soft, count in zip(
        SHAPES, itertools.cycle(["kl", "ce"]), itertools.cycle([1, 2, 4, 5, 9]), strict=False
    ):
        student, teachers = random_case(batch, classes, count, dtype, device)
        weights = [float(m + 1) for m in range(count)]
        shares = [w / sum(weights) for w in weights]
        loss = ensemble_distillation_loss(
            student, teachers, weights, 2.0, average, "none", soft=soft, multilabel=multilabel
        )
        wide = student.detach().double().requires_grad_()
        expected = exact_soft(wide, teachers, shares, 2.0, average, soft, multilabel)
        terms = classes if multilabel else 1  # a sum of independent labels
        assert_loss_and_gradient(
            *(loss, gradient_of(loss.sum(), student), expected.detach(), gradient_of(expected.sum(), wide)),
            *(dtype, classes, 12.0, terms),
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("soft", ["kl", "ce"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_hard_and_soft_loss_is_torch_s_cross_entropy_and_divergence(device, dtype, soft, smoothing, temperature):
    for batch, classes in SHAPES:
        student, (teacher,) = random_case(batch, classes, 1, dtype, device)
        target = torch.arange(batch, device=device) % classes
        if batch > 2:
            target[1] = -100
        kept = (target != -100).double()
        loss = distillation_loss(student, teacher, target, 0.25, temperature, soft, label_smoothing=smoothing)
        wide = student.detach().double().requires_grad_()
        hard = F.cross_entropy(wide, target, label_smoothing=smoothing, ignore_index=-100)
        soft_term = (exact_soft(wide, [teacher], [1.0], temperature, "logits", soft) * kept).sum() / kept.sum()
        expected = 0.75 * hard + 0.25 * temperature**2 * soft_term
        assert_loss_and_gradient(
            *(loss, gradient_of(loss, student), expected.detach(), gradient_of(expected, wide)),
            *(dtype, classes, 12.0, temperature**2),
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", [5, 129, 200])
def test_multilabel_hard_term_is_torch_s_binary_cross_entropy_without_the_uncertain_labels(device, dtype, classes):
    student, (teacher,) = random_case(21, classes, 1, dtype, device)
    target = (random_logits((21, classes), device=device, seed=7) > 0).float()
    target[::3, 1] = -1
    loss = distillation_loss(student, teacher, target, 0.5, 2.0, multilabel=True, ignore_index=-1)
    wide = student.detach().double().requires_grad_()
    kept = (target != -1).double()
    hard = F.binary_cross_entropy_with_logits(wide, target.double(), weight=kept, reduction="sum") / kept.sum()
    log_p, log_q = softened(wide, 2.0, True), softened(teacher, 2.0, True)
    soft = ((log_q.exp() * (log_q - log_p)).sum(-1) * kept).sum() / kept.sum()
    expected = 0.5 * hard + 0.5 * 4 * soft
    assert_loss_and_gradient(
        *(loss, gradient_of(loss, student), expected.detach(), gradient_of(expected, wide), dtype, classes),
        *(12.0, 4.0),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("average", range(3))
@pytest.mark.parametrize("multilabel", [False, True], ids=["softmax", "multilabel"])
@pytest.mark.parametrize("reduction", range(4))
def test_native_kernel_agrees_with_the_reference_in_everything_at_once(device, dtype, average, multilabel, reduction):
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    for (batch, classes), cross_entropy in itertools.product(SHAPES, [False, True]):
        student, teachers = random_case(batch, classes, 3, dtype, device)
        target = torch.arange(batch, device=device) % classes
        if multilabel:
            target = random_logits((batch, classes), accumulate, device).sigmoid()
        target[0] = -7
        rows = torch.linspace(0.5, 2, batch, device=device, dtype=accumulate)
        rows[-1] = 0
        shares = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
        arguments = (
            teachers,
            shares,
            target,
            rows,
            3.0,
            0.6,
            0.4,
            0.05,
            -7,
            average,
            cross_entropy,
            multilabel,
            reduction,
        )
        native, reference = OP(student.detach(), *arguments, True), OP.reference(student.detach(), *arguments, True)
        loss_error, gradient_error = rounding(dtype, classes, 12.0)
        scale = 4.0 * (batch if reduction == 1 else 1) * (classes if multilabel else 1)
        torch.testing.assert_close(native[0], reference[0], rtol=0, atol=loss_error * scale, equal_nan=True)
        half = torch.finfo(dtype).eps if dtype in (torch.float16, torch.bfloat16) else 0.0
        torch.testing.assert_close(native[1], reference[1], rtol=half, atol=4 * gradient_error, equal_nan=True)
        torch.testing.assert_close(native[2], reference[2])
        without = OP(student.detach(), *arguments, False)
        assert_same_bits([without[0]], [native[0]])
        assert without[1].numel() == 0
    if device == "cpu" and _native.status()["cpu"].loaded:
        assert OP.has_kernel("CPU")


@pytest.mark.parametrize("kernel", [OP, OP.reference], ids=["op", "reference"])
def test_an_infinite_multilabel_logit_counts_as_1e30_whatever_the_temperature(device, kernel):
    student, teacher = torch.tensor([[math.inf]], device=device), torch.zeros(1, 1, device=device)
    for temperature in (0.5, 1.0, 300.0):
        numbers = (temperature, 1.0, 0.0, 0.0, -1, 0, True, True, 1, True)
        loss, _, _ = kernel(student, [teacher], None, None, None, *numbers)
        assert loss.item() == pytest.approx(0.5e30, rel=1e-6)
        loss, _, _ = kernel(student, [student], None, None, None, *numbers)
        assert loss.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [10, 100])
def test_half_precision_is_within_twice_the_error_of_plain_torch(device, dtype, classes):
    student, teachers = random_case(64, classes, 8, dtype, device)
    wide = student.detach().double().requires_grad_()
    expected = exact_soft(wide, teachers, [1 / 8] * 8, 1.0, "logits").mean()
    ours = ensemble_distillation_loss(student, teachers)
    plain = F.kl_div(student.log_softmax(1), torch.stack(teachers).mean(0).softmax(1), reduction="batchmean")
    exact = gradient_of(expected, wide)
    errors = [(gradient_of(loss, student).double() - exact).abs().max() for loss in (ours, plain)]
    assert errors[0] <= 2 * errors[1]
    assert (ours.double() - expected).abs() <= 2 * (plain.double() - expected).abs() + 1e-6


def test_fifty_thousand_classes(device):
    student, teachers = random_case(3, 50_000, 2, torch.float32, device)
    loss = ensemble_distillation_loss(student, teachers, reduction="none")
    wide = student.detach().double().requires_grad_()
    expected = exact_soft(wide, teachers, [0.5, 0.5], 1.0, "logits")
    assert_loss_and_gradient(
        *(loss, gradient_of(loss.sum(), student), expected.detach(), gradient_of(expected.sum(), wide)),
        *(torch.float32, 50_000, 15.0),
    )


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("multilabel", [False, True], ids=["softmax", "multilabel"])
def test_logits_of_ten_thousand(device, average, multilabel):
    for classes in (10, 100):
        student, teachers = random_case(9, classes, 3, torch.float32, device)
        student = (student.detach() * 1e4).requires_grad_()
        teachers = [t * 1e4 for t in teachers]
        loss = ensemble_distillation_loss(student, teachers, average=average, multilabel=multilabel, reduction="none")
        gradient = gradient_of(loss.sum(), student)
        expected = exact_soft(student.detach(), teachers, [1 / 3] * 3, 1.0, average, multilabel=multilabel)
        if multilabel and average != "logits":  # log 0 in the definition
            expected = torch.where(expected.isnan(), loss.double().detach(), expected)
        assert bool(gradient.isfinite().all())
        torch.testing.assert_close(loss.double().detach(), expected, rtol=1e-5, atol=1e-2)


# ---- laws ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 20), st.floats(0.25, 20))
@settings(max_examples=25, deadline=None)
def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient(classes, batch, temperature):
    student = random_logits((batch, classes)).requires_grad_()
    loss = ensemble_distillation_loss(student, [student.detach()], temperature=temperature)
    assert abs(loss.item()) <= rounding(torch.float32, classes, 12.0)[0]
    assert gradient_of(loss, student).abs().max() == 0


def test_equal_teachers_are_one_teacher_however_they_are_averaged(device):
    student, (teacher,) = random_case(20, 10, 1, torch.float64, device)
    one = ensemble_distillation_loss(student, [teacher])
    for average in AVERAGES:
        torch.testing.assert_close(ensemble_distillation_loss(student, [teacher] * 4, average=average), one)


def test_averaging_losses_and_averaging_probabilities_have_one_gradient(device):
    student, teachers = random_case(20, 10, 3, torch.float32, device)
    probs, losses = (ensemble_distillation_loss(student, teachers, average=a) for a in ("probs", "losses"))
    assert losses > probs  # by Jensen's inequality
    assert_same_bits([gradient_of(probs, student)], [gradient_of(losses, student)])


def test_divergence_and_cross_entropy_have_one_gradient_and_differ_by_the_teacher_s_entropy(device):
    student, (teacher,) = random_case(20, 10, 1, torch.float64, device)
    kl, ce = (ensemble_distillation_loss(student, [teacher], soft=s) for s in ("kl", "ce"))
    q = teacher.softmax(1)
    torch.testing.assert_close(ce - kl, -(q * q.log()).sum(1).mean())
    assert_same_bits([gradient_of(kl, student)], [gradient_of(ce, student)])


def test_each_term_of_the_loss_has_a_gradient(device):
    student, (teacher,) = random_case(20, 10, 1, torch.float32, device)
    target = torch.arange(20, device=device) % 10
    for multilabel in (False, True):
        labels = F.one_hot(target, 10).float() if multilabel else target
        for lam, soft in [(0.0, "kl"), (1.0, "kl"), (1.0, "ce")]:
            gradient = gradient_of(
                distillation_loss(student, teacher, labels, lam, 3.0, soft, multilabel=multilabel), student
            )
            assert gradient.abs().min() > 0
    for average in AVERAGES:
        assert gradient_of(ensemble_distillation_loss(student, [teacher], average=average), student).abs().min() > 0


def test_lambda_zero_is_cross_entropy_and_does_not_read_the_teacher(device):
    student, _ = random_case(20, 10, 1, torch.float64, device)
    target = torch.arange(20, device=device) % 10
    nothing = torch.full_like(student, math.nan).detach()
    torch.testing.assert_close(distillation_loss(student, nothing, target, 0, 5), F.cross_entropy(student, target))


def test_temperature_squared_multiplies_the_loss(device):
    student, teachers = random_case(6, 10, 2, torch.float64, device)
    one = ensemble_distillation_loss(student, teachers, temperature=3)
    nine = ensemble_distillation_loss(student, teachers, temperature=3, temperature_squared=True)
    torch.testing.assert_close(nine, 9 * one)


# ---- forms of input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_stack_and_a_list_of_teachers_give_the_same_bits(device, dtype):
    student, teachers = random_case(33, 10, 5, dtype, device)
    for average in AVERAGES:
        results = [
            ensemble_distillation_loss(student, t, [1, 2, 3, 4, 5], average=average)
            for t in (teachers, tuple(teachers), torch.stack(teachers))
        ]
        assert_same_bits(results[:1] * 2, results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [10, 100])
def test_cached_mean_logits_give_the_bits_of_all_teachers(device, dtype, classes):
    student, teachers = random_case(33, classes, 6, dtype, device)
    for weights in (None, [1, 2, 3, 4, 5, 6]):
        cached = ensemble_logits(teachers, weights)
        losses = [ensemble_distillation_loss(student, t, w) for t, w in ((teachers, weights), ([cached], None))]
        assert_same_bits(*[[loss, gradient_of(loss, student)] for loss in losses])
        assert torch.equal(ensemble_logits(torch.stack(teachers), weights), cached)


def test_a_teacher_of_weight_zero_is_not_read(device):
    student, teachers = random_case(5, 10, 3, torch.float32, device)
    expected = ensemble_distillation_loss(student, [teachers[0], teachers[2]], [1, 3])
    teachers[1].fill_(math.nan)
    for form in (teachers, torch.stack(teachers)):
        assert_same_bits([ensemble_distillation_loss(student, form, [1, 0, 3])], [expected])
    assert ensemble_logits(teachers, [1, 0, 3]).isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_non_contiguous_and_offset_views_give_what_their_copies_give(device, dtype):
    base = random_logits((4, 24, 25), dtype, device)
    views = [x.t() for x in base]
    flat = base.flatten()[3 : 3 + 600].view(25, 24)
    for student in (views[0], flat):
        teachers = [views[1], views[2], flat]
        copies = [x.clone(memory_format=torch.contiguous_format) for x in teachers]
        losses = []
        for s, t in ((student, teachers), (student.clone(memory_format=torch.contiguous_format), copies)):
            leaf = s.detach().requires_grad_()
            loss = ensemble_distillation_loss(leaf, t)
            losses.append([loss, gradient_of(loss, leaf)])
        assert_same_bits(*losses)


def test_an_empty_batch(device):
    student = torch.empty(0, 10, device=device, requires_grad=True)
    teachers = torch.empty(3, 0, 10, device=device)
    assert ensemble_distillation_loss(student, teachers, reduction="sum").item() == 0
    assert ensemble_distillation_loss(student, teachers).isnan()  # as torch's mean of nothing
    loss = ensemble_distillation_loss(student, teachers, reduction="none")
    assert loss.shape == (0,)
    assert gradient_of(loss.sum(), student).shape == (0, 10)


def test_teachers_and_sample_weights_that_require_gradients_are_constants(device):
    student, teachers = random_case(5, 10, 2, torch.float32, device)
    teachers = [t.requires_grad_() for t in teachers]
    rows = torch.ones(5, device=device, requires_grad=True)
    ensemble_distillation_loss(student, teachers, sample_weights=rows).backward()
    assert student.grad is not None
    assert all(x.grad is None for x in [*teachers, rows])


def test_targets_of_other_integer_types(device):
    student, (teacher,) = random_case(5, 10, 1, torch.float32, device)
    target = torch.arange(5, device=device)
    expected = distillation_loss(student, teacher, target, 0.5, 2)
    assert_same_bits([distillation_loss(student, teacher, target.int(), 0.5, 2)], [expected])
    assert_same_bits([distillation_loss(student, teacher, target.to(torch.uint8), 0.5, 2)], [expected])


# ---- reductions, weights, masks --------------------------------------------------------------------------------------


def test_reductions_and_sample_weights(device):
    student, teachers = random_case(6, 10, 2, torch.float64, device)
    rows = torch.tensor([1.0, 2.0, 0.0, 0.5, 1.0, 1.0], device=device, dtype=torch.float64)
    each = ensemble_distillation_loss(student, teachers, reduction="none")
    run = lambda reduction: ensemble_distillation_loss(student, teachers, reduction=reduction, sample_weights=rows)  # noqa: E731
    torch.testing.assert_close(run("none"), each * rows)
    torch.testing.assert_close(run("sum"), (each * rows).sum())
    torch.testing.assert_close(run("batchmean"), (each * rows).sum() / 6)
    torch.testing.assert_close(run("mean"), (each * rows).sum() / rows.sum())
    assert gradient_of(run("mean"), student)[2].abs().max() == 0


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("multilabel", [False, True], ids=["softmax", "multilabel"])
def test_a_sample_that_is_left_out_counts_nowhere_whatever_it_holds(device, classes, multilabel):
    student, teachers = random_case(20, classes, 2, torch.float32, device)
    ignore = torch.zeros(20, dtype=torch.bool, device=device)
    ignore[3] = ignore[17] = True
    spoilt = student.detach().clone()
    spoilt[ignore] = math.nan
    spoilt.requires_grad_()
    loss = ensemble_distillation_loss(spoilt, teachers, ignore=ignore, multilabel=multilabel)
    kept = ensemble_distillation_loss(student[~ignore], [t[~ignore] for t in teachers], multilabel=multilabel)
    torch.testing.assert_close(loss, kept)
    gradient = gradient_of(loss, spoilt)
    assert gradient[ignore].abs().max() == 0
    assert gradient[~ignore].isfinite().all()
    both = ensemble_distillation_loss(
        spoilt, teachers, ignore=ignore, sample_weights=torch.ones(20, device=device), multilabel=multilabel
    )
    torch.testing.assert_close(both, loss)


def test_ignore_index_leaves_a_sample_out_of_both_terms(device):
    student, (teacher,) = random_case(6, 10, 1, torch.float64, device)
    target = torch.tensor([0, 1, 255, 3, 255, 5], device=device)
    kept = target != 255
    loss = distillation_loss(student, teacher, target, 0.5, 2, ignore_index=255)
    torch.testing.assert_close(loss, distillation_loss(student[kept], teacher[kept], target[kept], 0.5, 2))
    torch.testing.assert_close(
        distillation_loss(student, teacher, target, 0, 1, ignore_index=255),
        F.cross_entropy(student, target, ignore_index=255),
    )


def test_if_nothing_counts_the_mean_is_nan_and_the_gradient_zero(device):
    student, (teacher,) = random_case(3, 4, 1, torch.float32, device)
    loss = distillation_loss(student, teacher, torch.full((3,), -100, device=device), 0.5, 2)
    assert loss.isnan()
    assert gradient_of(loss, student).abs().max() == 0


# ---- masks, infinities and NaNs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("classes", [10, 100])
def test_a_masked_class_is_as_if_it_were_not_there(device, dtype, average, classes):
    student, teachers = random_case(18, classes, 3, dtype, device)
    mask = torch.zeros(classes, dtype=torch.bool, device=device)
    mask[::4] = True
    masked = student.detach().masked_fill(mask, -math.inf).requires_grad_()
    loss = ensemble_distillation_loss(masked, [t.masked_fill(mask, -math.inf) for t in teachers], average=average)
    small = student.detach()[:, ~mask].requires_grad_()
    expected = ensemble_distillation_loss(small, [t[:, ~mask] for t in teachers], average=average)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    gradient = gradient_of(loss, masked)
    assert gradient[:, mask].abs().max() == 0
    torch.testing.assert_close(
        gradient[:, ~mask], gradient_of(expected, small), rtol=torch.finfo(dtype).eps * 4, atol=1e-6
    )


def test_masked_in_the_student_alone_the_loss_is_infinite_and_the_gradient_finite(device):
    student, teachers = random_case(3, 10, 2, torch.float32, device)
    masked = student.detach().clone()
    masked[1, 4] = -math.inf
    masked.requires_grad_()
    loss = ensemble_distillation_loss(masked, teachers, reduction="none")
    assert loss.isinf().tolist() == [False, True, False]
    assert gradient_of(loss.sum(), masked).isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("classes", [10, 100])
def test_a_bad_logit_spoils_its_row_and_no_other(device, dtype, average, bad, classes):
    for in_student in (True, False):
        student, teachers = random_case(18, classes, 2, dtype, device)
        values = student.detach().clone()
        (values if in_student else teachers[1])[5, classes // 2] = bad
        values.requires_grad_()
        loss = ensemble_distillation_loss(values, teachers, average=average, reduction="none")
        gradient = gradient_of(loss.sum(), values)
        others = torch.arange(18, device=device) != 5
        assert loss[5].isnan()
        assert gradient[5].isnan().any()
        assert loss[others].isfinite().all()
        assert gradient[others].isfinite().all()


def test_infinite_logits_in_the_multilabel_form_are_certainties(device):
    student = torch.tensor([[math.inf, -math.inf, math.inf]], device=device)
    same = ensemble_distillation_loss(student, [student], multilabel=True)
    assert same.item() == 0
    assert ensemble_distillation_loss(student, [-student], multilabel=True) > 1e29


# ---- the same bits ---------------------------------------------------------------------------------------------------


def everything(dtype, device="cpu"):
    results = []
    # With five teachers and the gradient, 2**18 logits and more: fewer are not spread over threads.
    for (batch, classes), average, multilabel in itertools.product(
        [(3761, 10), (377, 100), (41, 1009)], AVERAGES, [False, True]
    ):
        student, teachers = random_case(batch, classes, 5, dtype, device)
        loss = ensemble_distillation_loss(student, teachers, [5, 4, 3, 2, 1], 2, average, multilabel=multilabel)
        results += [loss, gradient_of(loss, student)]
    return results


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_do_not_depend_on_threads_or_runs(dtype):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4, 1):
            torch.set_num_threads(threads)
            results.append(everything(dtype))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_do_not_depend_on_the_instruction_set(dtype):
    if len(_native.available_isas()) < 2:
        pytest.skip("this machine and library have only one instruction set")
    before, results = _native.isa(), []
    for isa in _native.available_isas():
        _native.set_isa(isa)
        results.append(everything(dtype))
    _native.set_isa(before)
    for other in results[1:]:
        assert_same_bits(results[0], other)


# ---- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("multilabel", [False, True], ids=["softmax", "multilabel"])
def test_gradcheck(device, reduction, multilabel):
    student, teachers = random_case(4, 5, 3, torch.float64, device)
    target = torch.tensor([0, 1, 2, -100], device=device)
    if multilabel:
        target = F.one_hot(target.clamp(0), 5).double()
    for average, soft in itertools.product(AVERAGES, ["kl", "ce"]):
        assert torch.autograd.gradcheck(
            lambda x, average=average, soft=soft: ensemble_distillation_loss(
                x, teachers, [1, 2, 3], 2.0, average, reduction, soft=soft, multilabel=multilabel
            ),
            (student,),
        )
    assert torch.autograd.gradcheck(
        lambda x: distillation_loss(
            x, teachers[0], target, 0.3, 2.0, reduction=reduction, multilabel=multilabel, label_smoothing=0.1
        ),
        (student,),
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_incoming_gradient_scales_the_stored_one(device, dtype):
    student, teachers = random_case(2048, 4, 2, dtype, device)
    loss = ensemble_distillation_loss(student, teachers)
    one = torch.autograd.grad(loss, student, retain_graph=True)[0].clone()
    # A loss scale lifts the gradient of half types before it is rounded: nothing is lost in their subnormal numbers.
    scaled = torch.autograd.grad(loss * 1024, student)[0]
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(scaled / 1024, one, rtol=rtol, atol=float(torch.finfo(dtype).smallest_normal))
    wide = student.detach().double().requires_grad_()
    exact = gradient_of(exact_soft(wide, teachers, [0.5, 0.5], 1.0, "logits").mean() * 1024, wide)
    torch.testing.assert_close(scaled.double(), exact, rtol=max(rtol, 1e-4), atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_scaled_gradient_is_rounded_once_also_where_the_scale_is_on_a_gpu(device, dtype):
    gradient = random_logits((33, 257), dtype, device)
    incoming, normalizer = (torch.tensor(x, dtype=accumulate_type(dtype), device=device) for x in (3.7, 48.0))
    factor = incoming / normalizer if dtype.itemsize < 4 else incoming
    expected = (gradient.to(factor.dtype) * factor).to(dtype)
    assert torch.equal(distillation._scale(incoming, gradient, normalizer), expected)
    SCALE(gradient, incoming, normalizer)
    assert torch.equal(gradient, expected)


def test_on_a_gpu_the_stored_gradient_becomes_the_student_s_and_one_moves_nothing(device_type):
    if device_type == "cpu":
        pytest.skip("asked on the host")
    fakegpu = pytest.importorskip("fakegpu", reason="what a kernel moves is known of a simulated GPU")
    student, teachers = random_case(64, 100, 2, torch.float32, device_type)
    for scale in (1.0, 2.0):
        loss = scale * ensemble_distillation_loss(student, teachers)
        with fakegpu.Recording() as record:
            torch.autograd.grad(loss, student)
        (launch,) = record.launches
        assert "scale_kernel" in launch.name
        assert launch.sector_bytes[1] == (0 if scale == 1.0 else student.nbytes)
        assert not [op for op in record.torch_ops if "copy" in op or "clone" in op]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, i, n: (g.t(), i, n), "gradient is .*contiguous"),
        (lambda g, i, n: (g.long(), i, n), "gradient .*(int64|Long)"),
        (lambda g, i, n: (g, i.view(1), n), r"incoming is float32 \[1\] on .*, the gradient is float32 \[5, 4\]"),
        (lambda g, i, n: (g, i, n.double()), "normalizer is float64"),
        (lambda g, i, n: (g, g[0, 0], n), "overlap"),
    ],
)
def test_a_scaling_that_does_not_fit_is_refused_before_anything_changes(device, change, message):
    gradient = torch.ones(5, 4, device=device)
    numbers = (torch.tensor(2.0, device=device) for _ in range(2))
    with pytest.raises((ValueError, RuntimeError), match=message):
        SCALE(*change(gradient, *numbers))
    assert torch.equal(gradient, torch.ones_like(gradient))


def test_backward_twice_over_a_kept_graph_adds_up(device):
    student, teachers = random_case(20, 10, 2, torch.float32, device)
    loss = ensemble_distillation_loss(student, teachers)
    for _ in range(3):
        loss.backward(retain_graph=True)
    once = gradient_of(loss, student)
    torch.testing.assert_close(student.grad, 3 * once)
    student.grad = None
    loss = ensemble_distillation_loss(student, teachers)
    loss.backward()
    first = student.grad.clone()
    ensemble_distillation_loss(student, teachers).backward()
    torch.testing.assert_close(student.grad, 2 * first)


def test_a_second_backward_over_a_freed_graph_is_refused(device):
    student, teachers = random_case(5, 4, 2, torch.float32, device)
    loss = ensemble_distillation_loss(student, teachers)
    loss.backward()
    given = student.grad.clone()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    assert torch.equal(student.grad, given)


@pytest.mark.parametrize("classes", [10, 100])
def test_the_stored_gradient_becomes_the_student_s_without_a_copy(classes):
    student, teachers = random_case(64, classes, 2, torch.float32, "cpu")
    places = []
    overload = distillation._distillation.overload

    def seen(*arguments):
        results = overload(*arguments)
        places.append(results[1].data_ptr())
        return results

    with patch.object(distillation, "_distillation", SimpleNamespace(overload=seen)):
        ensemble_distillation_loss(student, teachers).backward()
    assert [student.grad.data_ptr()] == places


def test_without_torch_s_internals_the_bits_are_the_same(device, monkeypatch):
    student, teachers = random_case(20, 10, 2, torch.float32, device)
    quick = gradient_of(ensemble_distillation_loss(student, teachers), student)
    monkeypatch.setattr(distillation, "_below_autograd", nullcontext)
    monkeypatch.setattr(distillation, "_graph_is_kept", lambda: True)
    loss = ensemble_distillation_loss(student, teachers)
    assert torch.equal(gradient_of(loss, student), quick)
    assert torch.equal(gradient_of(loss, student), quick)


def test_a_second_derivative_is_refused(device):
    student, teachers = random_case(5, 4, 2, torch.float32, device)
    for loss in (ensemble_distillation_loss(student, teachers), OP(student, *op_arguments(device)[1:])[0]):
        (gradient,) = torch.autograd.grad(loss, student, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            gradient.sum().backward()


def test_without_gradients_none_is_computed(device):
    student, teachers = random_case(5, 4, 2, torch.float32, device)
    with torch.no_grad():
        assert not ensemble_distillation_loss(student, teachers).requires_grad
    loss = OP(student, *op_arguments(device)[1:-1], False)[0]
    with pytest.raises(RuntimeError, match="need_grad=False"):
        loss.sum().backward()


# ---- torch's own machinery -------------------------------------------------------------------------------------------


def op_arguments(device, multilabel=False, reduction=2, dtype=torch.float32):
    student, teachers = random_case(5, 4, 3, dtype, device)
    target = torch.tensor([0, 1, -100, 3, 2], device=device)
    if multilabel:
        target = random_logits((5, 4), dtype, device).sigmoid()
    shares = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    rows = torch.ones(5, dtype=dtype, device=device)
    return (student, teachers, shares, target, rows, 2.0, 0.7, 0.3, 0.1, -100, 0, False, multilabel, reduction, True)


@pytest.mark.parametrize("multilabel", [False, True], ids=["softmax", "multilabel"])
@pytest.mark.parametrize("reduction", range(4))
def test_opcheck(device_type, multilabel, reduction):
    torch.library.opcheck(OP.overload, op_arguments(device_type, multilabel, reduction, torch.float64))


@pytest.mark.parametrize("dtype", FLOATS)
def test_opcheck_of_the_scaling(device_type, dtype):
    numbers = [torch.tensor(x, dtype=accumulate_type(dtype), device=device_type) for x in (3.7, 48.0)]
    torch.library.opcheck(SCALE.overload, (random_logits((5, 4), dtype, device_type), *numbers))


def test_every_op_of_the_family_is_checked():
    family = [name for name, op in OPS.items() if op.reference.__module__.endswith("distillation")]
    assert family == [OP.name, SCALE.name]


def test_the_public_functions_compile_without_a_graph_break(device_type):
    student, teachers = random_case(20, 10, 3, torch.float32, device_type)
    target = torch.arange(20, device=device_type) % 10

    def step(student, teachers):
        mean = ensemble_logits(teachers, [1.0, 2.0, 3.0])
        return (
            ensemble_distillation_loss(student, teachers, [1.0, 2.0, 3.0], average="probs")
            + ensemble_distillation_loss(student, [mean], sample_weights=torch.ones(20, device=student.device))
            + distillation_loss(student, teachers[0], target, 0.5, 5.0)
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for f in (compiled, step):
        loss = f(student, teachers)
        results.append([loss, gradient_of(loss, student)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_fake_tensors_on_a_cuda_device_need_no_gpu():
    with torch._subclasses.FakeTensorMode():
        student = torch.empty(5, 3, device="cuda", dtype=torch.bfloat16)
        loss, gradient, normalizer = OP(
            student,
            [torch.empty(4, 5, 3, device="cuda", dtype=torch.bfloat16)],
            None,
            None,
            None,
            1.0,
            1.0,
            0.0,
            0.0,
            -100,
            0,
            False,
            False,
            0,
            True,
        )
    assert (loss.shape, loss.dtype, loss.device.type) == (torch.Size([5]), torch.float32, "cuda")
    assert (gradient.shape, gradient.dtype) == (torch.Size([5, 3]), torch.bfloat16)
    assert normalizer.shape == ()


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, t, y: ensemble_distillation_loss(s, []), "no teachers given"),
        (lambda s, t, y: ensemble_distillation_loss(s, torch.empty(0, 5, 4)), "no teachers given"),
        (lambda s, t, y: ensemble_distillation_loss(s, t), r"a stack \[teachers, batch, classes\]"),
        (lambda s, t, y: ensemble_distillation_loss(s, [3.0]), "teacher 0 is a float"),
        (lambda s, t, y: ensemble_distillation_loss("s", [t]), "student is a str"),
        (
            lambda s, t, y: ensemble_distillation_loss(s, [t, t[:3]]),
            r"teacher 1 is float32 \[3, 4\].*student is float32 \[5, 4\]",
        ),
        (lambda s, t, y: ensemble_distillation_loss(s, [t.double()]), "teacher 0 is float64"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t.to("meta")]), "teacher 0 is .* on meta"),
        (lambda s, t, y: ensemble_distillation_loss(s[0], [t[0]]), r"student is float32 \[4\]"),
        (lambda s, t, y: ensemble_distillation_loss(s.long(), [t.long()]), "student is int64"),
        (lambda s, t, y: ensemble_distillation_loss(s[:, :0], [t[:, :0]]), r"student is float32 \[5, 0\]"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t], temperature=0), "temperature is 0.0"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t], temperature=-1), "temperature is -1.0"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t], temperature=math.nan), "temperature is nan"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t], [1, 2]), "2 weights for 1 teachers"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t, t], [1, -2]), "weight of teacher 1 is -2"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t, t], [0, 0]), "add up to 0"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t], average="median"), "average='median'"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t], reduction="max"), "reduction='max'"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t], soft="js"), "soft='js'"),
        (lambda s, t, y: ensemble_distillation_loss(s, [t], ignore=torch.zeros(5)), "ignore is float32"),
        (
            lambda s, t, y: ensemble_distillation_loss(s, [t], sample_weights=torch.zeros(4)),
            r"sample_weights are float32 \[4\]",
        ),
        (lambda s, t, y: distillation_loss(s, t, y, -0.1, 1), "lam is -0.1"),
        (lambda s, t, y: distillation_loss(s, t, y, 1.1, 1), "lam is 1.1"),
        (lambda s, t, y: distillation_loss(s, t, y, math.nan, 1), "lam is nan"),
        (lambda s, t, y: distillation_loss(s, t, y, 0.5, 0), "temperature is 0.0"),
        (lambda s, t, y: distillation_loss(s, t, y, 0.5, 1, label_smoothing=2), "label_smoothing is 2.0"),
        (lambda s, t, y: distillation_loss(s, t, y[:3], 0.5, 1), r"target is int64 \[3\]"),
        (lambda s, t, y: distillation_loss(s, t, y.float(), 0.5, 1), "integers are accepted"),
        (
            lambda s, t, y: distillation_loss(s, t, y + 1, 0.5, 1),
            "target of row 3 is out of range; a class from 0 to 3",
        ),
        (lambda s, t, y: distillation_loss(s, t, y - 1, 0.5, 1), "target of row 0 is out of range"),
        (
            lambda s, t, y: distillation_loss(s, t, s + 9, 0.5, 1, multilabel=True),
            "target of row 0 is out of range; 0 to 1",
        ),
        (lambda s, t, y: distillation_loss(s, t[0], y, 0.5, 1), "teacher 0 is"),
        (lambda s, t, y: ensemble_logits([t, t[:3]]), "teacher 1 is"),
        (lambda s, t, y: ensemble_logits([t.long()]), "teacher 0 is int64"),
        (lambda s, t, y: ensemble_logits([]), "no teachers given"),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_bad_calls_say_what_is_accepted_and_change_nothing(device, call, message, requires_grad):
    if device != "cpu":
        pytest.skip("values of targets are not looked at")
    student, teacher, target = random_logits((5, 4)), random_logits((5, 4), seed=1), torch.tensor([0, 1, 2, 3, 0])
    before = student.clone(), teacher.clone()
    given = student.clone().requires_grad_(requires_grad)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call(given, teacher, target)
    assert torch.equal(given.detach(), before[0])
    assert torch.equal(teacher, before[1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_temperatures_beyond_the_range_of_the_arithmetic_are_refused(device, dtype):
    student, teacher = (random_logits((5, 4), dtype, device, seed=seed).requires_grad_() for seed in (0, 1))
    target = torch.tensor([0, 1, 2, 3, 0], device=device)
    largest = 2.0**511 if dtype == torch.float64 else 2.0**63
    for temperature in (largest, 1 / largest):
        for loss in (
            distillation_loss(student, teacher, target, 0.5, temperature),
            ensemble_distillation_loss(student, [teacher], temperature=temperature),
        ):
            (grad,) = torch.autograd.grad(loss, student)
            assert loss.isfinite() and not grad.isnan().any()
    for temperature in (2 * largest, 0.5 / largest, 0.0, math.inf):
        for call in (
            lambda t: distillation_loss(student, teacher, target, 0.5, t),
            lambda t: ensemble_distillation_loss(student.detach(), [teacher], temperature=t),
        ):
            with pytest.raises(ValueError, match=r"temperature is .*; a positive number from .* is accepted"):
                call(temperature)


def test_the_op_itself_refuses_what_does_not_fit(device):
    good = list(op_arguments(device))
    for place, bad in {
        1: [],
        2: torch.ones(2, dtype=torch.float64),
        3: None,
        4: torch.ones(3),
        5: 0.0,
        8: 1.5,
        10: 3,
        13: 4,
    }.items():
        with pytest.raises((RuntimeError, ValueError)):
            OP(*good[:place], bad, *good[place + 1 :])


def test_a_target_without_weight_may_have_any_logit(device):
    """With a smoothing of 1 the target counts nothing: its masked logit is one of all classes' and no NaN."""
    student = torch.tensor([[0.0, 1.0, -math.inf, 2.0]], device=device)
    target = torch.tensor([2], device=device)
    loss = distillation_loss(student, student.clone(), target, 0.0, 1.0, label_smoothing=1.0)
    assert loss.isposinf()  # the mean over the classes has an infinite term
    finite = torch.tensor([[0.0, 1.0, 2.0]], device=device)
    expected = F.cross_entropy(finite.double(), target[:1] * 0 + 2, label_smoothing=1.0)
    loss = distillation_loss(finite, finite.clone(), target[:1] * 0 + 2, 0.0, 1.0, label_smoothing=1.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
