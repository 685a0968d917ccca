"""csrc/cuda/kernels/spectral.cuh, executed by the emulator and compared with the plain-torch reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pfl_ext.ops import spectral

DTYPES = [torch.complex64, torch.complex128]
CHUNK = 4096
# Bins around a block's pass (256), a chunk and two: as odd and as even lengths.
LENGTHS = [
    1,
    2,
    3,
    9,
    508,
    511,
    512,
    513,
    2 * CHUNK - 3,
    2 * CHUNK - 2,
    2 * CHUNK - 1,
    2 * CHUNK,
    2 * CHUNK + 1,
    4 * CHUNK,
]


def random_spectrum(rows, length, dtype, seed=0, offset=0):
    """Contiguous, at `offset` numbers into its storage, with a bin of zero."""
    generator = torch.Generator().manual_seed(seed)
    count = rows * (length // 2 + 1)
    flat = torch.randn(count + offset, generator=generator, dtype=dtype)[offset:]
    flat[count // 2] = 0
    return flat.view(rows, length // 2 + 1)


def run_teacher(emulator, x, length, count):
    real = x.real.dtype
    log_q = torch.full((x.shape[0], spectral._bins(length, count)), 7, dtype=real)
    total = torch.full((x.shape[0],), 7, dtype=torch.float64)
    emulator.spectral_teacher(x.numpy(), length, count, log_q.numpy(), total.numpy())
    return log_q, total


def run_divergence(emulator, x, log_q, total, length, count, form, need_grad=True):
    loss = torch.full((x.shape[0],), 7, dtype=x.real.dtype)
    emulator.half_spectrum_divergence(
        x.numpy(), log_q.numpy(), total.numpy(), length, count, form, need_grad, loss.numpy()
    )
    return loss


def log_error(log, eps):
    """How far two logarithms of a magnitude may be apart.

    The magnitudes are each within eps (two roundings of squares and their sum, halved by the root, and the root's own;
    hypot's ulp). The kernel's logarithm is within (1.5 |log| + 0.5) eps, as its own test shows, torch's within an ulp.
    """
    return (2.5 * log.abs() + 2.5) * eps


def errors(p, log_q, total, length, count, form, eps):
    """How far the loss, and each bin of the gradient's spectrum, may be from the reference's; in float64."""
    weights = spectral._bin_weights(length, count, log_q)
    p = p[:, : weights.numel()].to(torch.complex128).abs()
    zero, one = p == 0, torch.ones_like(p)
    log = torch.where(zero, 0.0, torch.where(zero, one, p).log())
    ratio = torch.where(zero, 0.0, log - log_q.double())
    ratio_error = log_error(log, eps) + eps * ratio.abs()  # the difference is rounded on both sides
    # The sums: p is off by 2 eps, the product is rounded on both sides. Sums are in float64; where that is the type
    # itself, a term goes through 16 additions of its thread, 8 of the block and some of the row on one side.
    additions = 15 * eps if eps < 1e-10 else 0.0
    z = (weights * p).sum(1)
    a = (weights * p * ratio).sum(1)
    a_error = (weights * p * (ratio_error + (3 * eps + additions) * ratio.abs())).sum(1)
    z_error = (2 * eps + additions) * z
    if form in (0, 3):
        z = torch.where(z == 0, 1.0, z)  # a spectrum of zeros: both say zero
        mean = a / z
        loss = mean - z.log() + total.log()
        mean_error = (a_error + mean.abs() * z_error) / z + eps * mean.abs()
        loss_error = mean_error + z_error / z + 2 * eps * (z.log().abs() + total.log().abs())
        scale, offset, offset_error, scale_error = 1 / z, -mean, mean_error + eps * mean.abs(), z_error / z + eps
        if form == 3:  # as many times all of it as entries are compared
            loss, loss_error, scale = count * loss, count * loss_error, count * scale
    else:
        loss = a if form == 1 else a - z + total
        loss_error = a_error + (form == 2) * (z_error + eps * (z + total))
        scale, offset = torch.ones_like(z), torch.full_like(z, float(form == 1))
        offset_error = scale_error = torch.zeros_like(z)
    slope = (ratio + offset[:, None]).abs()
    # Its sum and two products are rounded on both sides; so is the product with the direction, which itself is off by
    # 2 eps in the kernel and 1.5 in the reference.
    slope_error = ratio_error + offset_error[:, None] + slope * (3 * eps + scale_error[:, None] + 4.5 * eps)
    return loss_error + eps * loss.abs(), 2**0.5 * scale[:, None] * slope_error


def test_the_chunk_size_tested_is_the_kernels(emulator):
    assert emulator.SPECTRAL_CHUNK == CHUNK


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", [1.0, 0.7, 0.3])
def test_kernels_equal_the_reference_over_chunk_boundaries(emulator, dtype, tau):
    for length in LENGTHS:
        count = spectral._entries(tau, length)
        for rows, teachers, offset in [(1, 1, 0), (3, 1, 1), (2, 2, 0)]:
            p, q = random_spectrum(rows, length, dtype, 0, offset), random_spectrum(teachers, length, dtype, 1, offset)
            log_q, total = run_teacher(emulator, q, length, count)
            expected_log_q, expected_total = spectral._teacher_reference(q, length, count)
            eps = torch.finfo(dtype).eps
            assert ((log_q - expected_log_q).abs() <= log_error(expected_log_q, eps)).all()
            # 2 eps of the magnitudes, and 30 additions in float64.
            torch.testing.assert_close(total, expected_total, rtol=2 * eps + 30 * 2.0**-53, atol=0)
            for form in range(len(spectral._FORMS)):
                x, y = p.clone(), p.clone()
                loss = run_divergence(emulator, x, log_q, total, length, count, form)
                expected = spectral._half_divergence_reference(y, log_q, total, length, count, form, True)
                loss_error, seed_error = errors(p, log_q, total, length, count, form, eps)
                used = seed_error.shape[1]
                assert ((loss.double() - expected.double()).abs() <= loss_error).all()
                assert ((x - y)[:, :used].abs() <= seed_error).all()
                assert (x[:, used:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_gradient_the_spectrum_is_left_as_it_was(emulator, dtype):
    p = random_spectrum(2, 1000, dtype)
    before = p.clone()
    log_q, total = run_teacher(emulator, random_spectrum(1, 1000, dtype, 1), 1000, 700)
    loss = run_divergence(emulator, p, log_q, total, 1000, 700, 0, need_grad=False)
    assert torch.equal(torch.view_as_real(p), torch.view_as_real(before))
    assert torch.equal(loss, run_divergence(emulator, p, log_q, total, 1000, 700, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_give_zero_gradients_and_nan_is_handed_on(emulator, dtype):
    zero = torch.zeros(1, 51, dtype=dtype)
    log_q, total = run_teacher(emulator, zero, 100, 100)
    for form in range(len(spectral._FORMS)):
        x = zero.clone()
        loss = run_divergence(emulator, x, log_q, total, 100, 100, form)
        assert torch.isfinite(loss).all()
        assert torch.equal(torch.view_as_real(x), torch.view_as_real(zero))
        x[0, 5] = complex(float("nan"), 0)
        assert run_divergence(emulator, x, log_q, total, 100, 100, form).isnan().all()


def test_order_of_threads_and_blocks_does_not_change_the_bits(emulator):
    results = []
    for seed in range(3):
        emulator.set_seed(seed)
        x = random_spectrum(2, 5 * CHUNK, torch.complex64)
        log_q, total = run_teacher(emulator, random_spectrum(1, 5 * CHUNK, torch.complex64, 1), 5 * CHUNK, 4 * CHUNK)
        loss = run_divergence(emulator, x, log_q, total, 5 * CHUNK, 4 * CHUNK, 0)
        results.append([np.array(a.numpy()).view(np.uint8) for a in (x, log_q, total, loss)])
    assert all(np.array_equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_three_launches_a_divergence_and_two_a_teacher_for_any_number_of_clients(emulator):
    for rows in (1, 5):
        emulator.reset_launch_count()
        log_q, total = run_teacher(emulator, random_spectrum(rows, 3 * CHUNK, torch.complex64), 3 * CHUNK, 3 * CHUNK)
        assert emulator.launch_count() == 2
        x = random_spectrum(rows, 3 * CHUNK, torch.complex64, 1)
        run_divergence(emulator, x, log_q, total, 3 * CHUNK, 3 * CHUNK, 0)
        assert emulator.launch_count() == 5
        run_divergence(emulator, x, log_q, total, 3 * CHUNK, 3 * CHUNK, 0, need_grad=False)
        assert emulator.launch_count() == 7
