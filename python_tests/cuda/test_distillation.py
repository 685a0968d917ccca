"""csrc/cuda/kernels/distillation.cuh, executed by the emulator and compared with the plain-torch reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from emulated_memory import DTYPES, as_numpy, name

from pfl_ext.ops.distillation import _distillation_reference

WARP_CLASSES = 1024
# Around a warp, the four rows of a block, and the step from a warp's row to a block's.
SHAPES = [(1, 1), (3, 31), (4, 32), (5, 33), (9, 10), (2, WARP_CLASSES), (2, WARP_CLASSES + 1), (2, 1289)]


def random_logits(shape, dtype, seed, offset=0):
    """With an offset of some elements into their storage, to be had misaligned."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(math.prod(shape) + offset, generator=generator) * 3).to(dtype)[offset:].view(shape)


def run(emulator, student, teachers, shares=None, target=None, rows=None, temperature=2.0, soft=0.6, hard=0.0,
        smoothing=0.0, ignore_index=-100, average=0, cross_entropy=False, multilabel=False, reduction=2,
        need_grad=True):  # fmt: skip
    """The emulated kernels and the reference on the same arguments."""
    accumulate = torch.float64 if student.dtype == torch.float64 else torch.float32
    batch, classes = student.shape
    losses = torch.full((batch,), 7.0, dtype=accumulate)
    loss, normalizer = torch.full((), 7.0, dtype=accumulate), torch.full((), 7.0, dtype=accumulate)
    gradient = torch.full((batch, classes), 7.0).to(student.dtype) if need_grad else None
    count = len(teachers)
    divisor = {0: 1.0, 1: 1.0, 2: float(batch * (classes if multilabel else 1)), 3: float(batch)}[reduction]
    if reduction == 2 and (target is not None or rows is not None):
        divisor = 0.0
    emulator.distillation(
        *(name(student.dtype), as_numpy(student), [as_numpy(t) for t in teachers]),
        *(shares or [1.0 / count] * count, None if target is None else as_numpy(target)),
        *(None if rows is None else as_numpy(rows), temperature, soft, hard, smoothing, ignore_index, average),
        *(cross_entropy, multilabel, divisor, None if reduction == 0 else as_numpy(loss), as_numpy(losses)),
        *(None if gradient is None else as_numpy(gradient), as_numpy(normalizer)),
    )
    expected = _distillation_reference(
        *(
            student,
            teachers,
            None if shares is None else torch.tensor(shares, dtype=torch.float64),
            target,
            rows,
            temperature,
        ),
        *(soft, hard, smoothing, ignore_index, average, cross_entropy, multilabel, reduction, need_grad),
    )
    return (losses if reduction == 0 else loss, gradient, normalizer), expected


def assert_close(actual, expected, dtype, scale=1.0):
    """Logits of size 12 and sums over a thousand classes: see rounding() in python_tests/ops/test_distillation.py."""
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    torch.testing.assert_close(actual[0], expected[0], rtol=100 * unit, atol=2000 * unit * scale, equal_nan=True)
    half = 2 * torch.finfo(dtype).eps if dtype in (torch.float16, torch.bfloat16) else 0.0
    if actual[1] is not None:
        torch.testing.assert_close(actual[1], expected[1], rtol=half, atol=300 * unit * scale, equal_nan=True)
    torch.testing.assert_close(actual[2], expected[2])


def test_the_boundaries_tested_are_the_kernels(emulator):
    assert emulator.MOST_WARP_CLASSES == WARP_CLASSES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("average", range(3))
@pytest.mark.parametrize("multilabel", [False, True], ids=["softmax", "multilabel"])
def test_ensemble_loss_equals_the_reference_over_boundary_sizes(emulator, dtype, average, multilabel):
    for place, (batch, classes) in enumerate(SHAPES):
        student = random_logits((batch, classes), dtype, 0, offset=place % 2)
        teachers = [random_logits((batch, classes), dtype, 1 + m, offset=(place + m) % 2) for m in range(3)]
        actual, expected = run(
            *(emulator, student, teachers, [0.5, 0.2, 0.3]), average=average, multilabel=multilabel,
            cross_entropy=place % 3 == 2, reduction=place % 4,
        )  # fmt: skip
        assert_close(actual, expected, dtype, scale=classes if multilabel else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multilabel", [False, True], ids=["softmax", "multilabel"])
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_hard_and_soft_loss_with_weights_and_ignored_samples_equals_the_reference(
    emulator, dtype, multilabel, temperature
):
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    for place, (batch, classes) in enumerate(SHAPES):
        student, teacher = (random_logits((batch, classes), dtype, seed) for seed in range(2))
        target = torch.arange(batch) % classes
        if multilabel:
            target = random_logits((batch, classes), accumulate, 5).sigmoid()
        target[0] = -7
        rows = torch.linspace(0.5, 2, batch, dtype=accumulate)
        rows[-1] = 0
        actual, expected = run(
            *(emulator, student, [teacher], None, target, rows, temperature, 0.6, 0.4, 0.1, -7),
            multilabel=multilabel, reduction=[2, 0, 1, 3][place % 4],
        )  # fmt: skip
        assert_close(actual, expected, dtype, scale=classes if multilabel else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("average", [0, 1])
def test_rows_too_long_for_shared_memory(emulator, dtype, average):
    classes = emulator.MAX_SHARED_CACHE // (8 if dtype == torch.float64 else 4) + 1
    student, *teachers = (random_logits((2, classes), dtype, seed) for seed in range(3))
    actual, expected = run(emulator, student, teachers, average=average)
    assert_close(actual, expected, dtype, scale=4.0)


@pytest.mark.parametrize("classes", [10, 1100])
def test_masks_and_bad_logits(emulator, classes):
    student, *teachers = (random_logits((6, classes), torch.float32, seed) for seed in range(3))
    for x in (student, *teachers):
        x[:, 3] = -math.inf
    student[1, 0] = math.nan
    teachers[0][2, 1] = math.inf
    student[3] = -math.inf
    for average in range(3):
        actual, expected = run(emulator, student, teachers, average=average, reduction=0)
        assert actual[0].isnan().tolist() == [False, True, True, True, False, False]
        assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("classes", [10, 1100])
def test_a_target_out_of_range_gives_nan_for_its_row_alone(emulator, classes):
    student, teacher = (random_logits((4, classes), torch.float32, seed) for seed in range(2))
    target = torch.tensor([0, classes, -5, 1])
    losses = torch.zeros(4)
    gradient = torch.zeros(4, classes)
    emulator.distillation(
        *(
            "float32",
            as_numpy(student),
            [as_numpy(teacher)],
            [1.0],
            as_numpy(target),
            None,
            1.0,
            0.5,
            0.5,
            0.0,
            -100,
            0,
        ),
        *(False, False, 1.0, None, as_numpy(losses), as_numpy(gradient), np.zeros((), np.float32)),
    )
    assert losses.isnan().tolist() == [False, True, True, False]
    assert gradient.isnan().all(1).tolist() == [False, True, True, False]
    assert gradient[[0, 3]].isfinite().all()


@pytest.mark.parametrize("classes", [10, 1100])
def test_order_of_threads_and_blocks_does_not_change_the_bits(emulator, classes):
    student, *teachers = (random_logits((5, classes), torch.float32, seed) for seed in range(4))
    results = []
    for seed in range(3):
        emulator.set_seed(seed)
        results.append(run(emulator, student, teachers, rows=torch.ones(5))[0])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize(
    ("classes", "given", "reduction", "launches"),
    [(10, {}, 2, 2), (10, {"rows": torch.ones(3)}, 2, 3), (1100, {"rows": torch.ones(3)}, 2, 3), (10, {}, 0, 2)],
)
def test_at_most_three_launches(emulator, classes, given, reduction, launches):
    student, *teachers = (random_logits((3, classes), torch.float32, seed) for seed in range(9))
    emulator.reset_launch_count()
    run(emulator, student, teachers, reduction=reduction, **given)
    assert emulator.launch_count() == launches


def test_the_gradient_is_left_out_on_request_and_an_empty_batch_is_no_launch_of_nothing(emulator):
    student, teacher = (random_logits((3, 10), torch.float32, seed) for seed in range(2))
    actual, expected = run(emulator, student, [teacher], need_grad=False)
    assert_close(actual, expected, torch.float32)
    empty = torch.empty(0, 10)
    actual, _ = run(emulator, empty, [empty], reduction=1)
    assert actual[0].item() == 0


# Around a vector's width, and the elements of a block.
@pytest.mark.parametrize("count", [0, 1, 7, 8191, 8192, 8201])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_gradient_is_rounded_once(emulator, dtype, offset, count):
    gradient = random_logits((count,), dtype, 0, offset)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    incoming, normalizer = torch.tensor(3.7, dtype=accumulate), torch.tensor(48.0, dtype=accumulate)
    factor = incoming / normalizer if dtype.itemsize < 4 else incoming
    expected = (gradient.to(accumulate) * factor).to(dtype)
    emulator.scale_gradient(name(dtype), *map(as_numpy, (gradient, incoming, normalizer)))
    assert torch.equal(gradient, expected)


def test_a_gradient_that_one_comes_in_for_stays_as_it_is(emulator):
    gradient = torch.tensor([1.5, -0.0, math.nan, math.inf])
    before = gradient.view(torch.int32).clone()
    emulator.scale_gradient("float32", *map(as_numpy, (gradient, torch.tensor(1.0), torch.tensor(48.0))))
    assert torch.equal(gradient.view(torch.int32), before)
