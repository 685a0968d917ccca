from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pfl_ext import _native
from pfl_ext.ops import SpectralTeacher, spectral, spectral_divergence, spectrum
from pfl_ext.ops._declare import OPS

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FORMS = ["normalized", "paper", "generalized", "mean"]
# Odd and even, primes, around the block (256 bins) and the chunk (4096 bins) of the half spectrum.
SIZES = [1, 2, 3, 4, 5, 7, 12, 31, 510, 511, 512, 514, 8189, 8190, 8192, 8193, 8194, 16390]
# A prime above the largest radix, from which chirps are used, times the rows: 1 (odd), 3 (odd), 2, 4, 6 and 8.
PRIME = 8209
AWKWARD = [PRIME, 3 * PRIME, 2 * PRIME, 4 * PRIME, 6 * PRIME, 8 * PRIME]
# 2 * 7 * 43 * 103, LeNet's; two of two steps that leave lanes of their tiles empty; 2^18.
LONG = [62006, 2 * 363 * 385, 3 * 5 * 7 * 11 * 13, 1 << 18]


def weights(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def kept(x, tau):
    """The first ceil(tau d) magnitudes of the whole spectrum, with plain torch."""
    d = x.shape[-1]
    return torch.fft.fft(x).abs()[..., : math.ceil(round(tau * d, 9))]


def definition(p, q, tau=1.0, form="normalized"):
    p, q = kept(p, tau), kept(q, tau)
    if form == "normalized":
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    elif form == "mean":
        p, q = p / p.mean(-1, keepdim=True), q / q.mean(-1, keepdim=True)
    value = (torch.xlogy(p, p) - p * q.log()).sum(-1)
    return value + (q - p).sum(-1) if form == "generalized" else value


def magnitude_of_terms(p, q, tau, form):
    """The sum of the absolute terms, of which rounding takes a part."""
    if form == "mean":  # as many times those of the normalised form as there are entries
        return kept(p, tau).shape[-1] * magnitude_of_terms(p, q, tau, "normalized")
    p, q = kept(p, tau), kept(q, tau)
    scale = p.sum(-1) if form == "normalized" else 1.0
    return ((p * (p.log().abs() + q.log().abs() + 2)).sum(-1) + (q.sum(-1) if form == "generalized" else 0)) / scale + 2


def bits(x):
    return torch.view_as_real(x) if x.is_complex() else x


def same_bits(a, b):
    a, b = bits(a).contiguous(), bits(b).contiguous()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def value_and_grad(p, q, **options):
    p = p.detach().clone().requires_grad_()
    value = spectral_divergence(p, q, **options)
    (grad,) = torch.autograd.grad(value.sum(), p)
    return value.detach(), grad


# An FFT's error is of the order of eps log2(d) relative to the norm of the result; 4 covers both transforms and the two
# FFTs of a chirp.
def fft_error(d, dtype):
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    return 4 * torch.finfo(accumulate).eps * max(1.0, math.log2(d))


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [*SIZES, *AWKWARD])
def test_divergence_and_gradient_equal_the_definition(device, d):
    few = [("normalized", 1.0), ("paper", 0.4), ("generalized", 0.73), ("mean", 0.4)]
    for form, tau in few if d in AWKWARD else itertools.product(FORMS, [1.0, 0.4, 0.5, 0.73]):
        p, q = (
            weights(2, d, dtype=torch.float64, device=device),
            weights(2, d, dtype=torch.float64, device=device, seed=1),
        )
        value, grad = value_and_grad(p, q, tau=tau, form=form)
        reference = p.clone().requires_grad_()
        expected = definition(reference, q, tau, form)
        (expected_grad,) = torch.autograd.grad(expected.sum(), reference)
        error = fft_error(d, torch.float64)
        assert ((value - expected).abs() <= error * magnitude_of_terms(p, q, tau, form)).all(), d
        # The gradient's coefficients carry log p / q, of which a transform's error in a small p is a large part.
        smallest = kept(p, tau).min() / kept(p, tau).mean()
        scale = {"normalized": 1 / kept(p, tau).sum(), "mean": 1 / kept(p, tau).mean(-1).sum()}.get(form, 1.0)
        bound = 10 * error / smallest * (expected_grad.norm() + scale)
        assert (grad - expected_grad).norm() <= bound, d


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_lower_precision_is_within_twice_the_error_of_plain_torch(device, dtype, form):
    for d in (1000, 62006, PRIME, 2 * PRIME, 6 * PRIME, 8 * PRIME):
        p, q = weights(d, dtype=dtype, device=device), weights(d, dtype=dtype, device=device, seed=1)
        exact = p.double().requires_grad_()
        expected = definition(exact, q.double(), 0.7, form)
        (expected_grad,) = torch.autograd.grad(expected, exact)
        # Plain torch has no half-precision FFT on the CPU: it computes in float32 and rounds the result.
        plain = p.float().requires_grad_()
        plain_value = definition(plain, q.float(), 0.7, form)
        (plain_grad,) = torch.autograd.grad(plain_value, plain)
        value, grad = value_and_grad(p, q, tau=0.7, form=form)
        assert value.dtype == torch.float32
        assert grad.dtype == dtype
        floor = torch.finfo(torch.float32).eps * magnitude_of_terms(p.double(), q.double(), 0.7, form)
        assert (value.double() - expected).abs() <= 2 * (plain_value.double() - expected).abs() + floor
        error = (grad.double() - expected_grad).norm()
        assert error <= 2 * (plain_grad.to(dtype).double() - expected_grad).norm()


def assert_transforms(x):
    """Forward as exact as an FFT, and back to where it came from."""
    d = x.shape[1]
    expected = torch.fft.rfft(x.double())
    half = OPS["real_dft"](x, d)
    assert (half.to(torch.complex128) - expected).norm() <= fft_error(d, x.dtype) * expected.norm(), d
    back = OPS["real_idft"](half, d, d)
    assert (back.double() / d - x.double()).norm() <= 2 * fft_error(d, x.dtype) * x.double().norm(), d


def test_every_short_length_is_transformed(device):
    for d in range(1, 400):
        assert_transforms(weights(2, d, dtype=torch.float64, device=device))


# Rows of lengths around the block (256 bins) and the chunk (4096 bins) that joins and splits them.
@pytest.mark.parametrize("prime", [131, 251, 257, 509, 8191, PRIME])
def test_rows_of_an_awkward_length_are_joined_and_split(device, prime):
    for rows in (1, 2, 3, 4, 5, 6, 8):
        assert_transforms(weights(1, rows * prime, dtype=torch.float64, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [*LONG, 262147, 2 * 131101])
def test_long_and_awkward_lengths_are_as_exact_as_an_fft(device, dtype, d):
    assert_transforms(weights(2, d, dtype=dtype, device=device))


def test_an_inverse_ignores_imaginary_parts_of_real_bins_and_leaves_its_input(device):
    for d in (9, 10, 262, 131):
        half = torch.complex(weights(2, d // 2 + 1, dtype=torch.float64), weights(2, d // 2 + 1, dtype=torch.float64))
        half = half.to(device)
        before = half.clone()
        back = OPS["real_idft"](half, d, d - 1)
        torch.testing.assert_close(back, torch.fft.irfft(half, n=d, norm="forward")[:, :-1])
        assert same_bits(half, before)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(device, form):
    for d in (9, 10):
        p, q = (
            weights(2, d, dtype=torch.float64, device=device).requires_grad_(),
            weights(2, d, dtype=torch.float64, device=device, seed=1),
        )
        for tau in (1.0, 0.6, 0.3):
            assert torch.autograd.gradcheck(lambda p, tau=tau, q=q: spectral_divergence(p, q, tau=tau, form=form), (p,))
        assert torch.autograd.gradcheck(lambda p: spectrum(p, full=True), (p,))


@pytest.mark.parametrize("form", FORMS)
def test_gradient_is_not_zero(device, form):
    _, grad = value_and_grad(weights(50, device=device), weights(50, device=device, seed=1), form=form)
    assert grad.abs().max() > 1e-4


@given(st.integers(1, 300), st.floats(0.01, 1.0), st.sampled_from(FORMS))
@settings(max_examples=60, deadline=None)
def test_any_length_and_truncation(d, tau, form):
    p, q = weights(d, dtype=torch.float64), weights(d, dtype=torch.float64, seed=1)
    value, _ = value_and_grad(p, q, tau=tau, form=form)
    count = math.ceil(tau * d * (1 - 2.0**-50))
    full = spectrum(p, full=True)
    assert full.shape == (d,)
    torch.testing.assert_close(value, definition(p, q, count / d, form), rtol=1e-9, atol=1e-9)


def test_tau_counts_entries_of_the_whole_spectrum():
    assert spectral._entries(0.07, 100) == 7  # 0.07 * 100 is 7.000000000000001
    assert spectral._entries(0.4, 11_181_642) == 4_472_657
    assert [spectral._entries(0.5, d) for d in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert spectral._entries(1e-9, 10) == 1


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [1, 2, 1001, 4 * PRIME])
def test_divergence_of_a_model_from_itself_is_zero_and_minimal(device, dtype, d):
    p = weights(d, dtype=dtype, device=device)
    for form in ("normalized", "generalized", "mean"):
        value, grad = value_and_grad(p, p, form=form)
        assert value == 0
        assert (grad == 0).all()
    # The literal sum is not minimal there: its derivative in every magnitude is 1.
    _, grad = value_and_grad(p, p, form="paper")
    assert grad.abs().max() > 0


def test_normalized_divergence_does_not_see_the_scale_of_either_model(device):
    p, q = weights(300, dtype=torch.float64, device=device), weights(300, dtype=torch.float64, device=device, seed=1)
    value = spectral_divergence(p, q)
    assert value > 0
    torch.testing.assert_close(spectral_divergence(8 * p, 0.25 * q), value)


def test_spectra_divided_by_their_means_have_as_many_times_the_normalised_divergence_as_entries(device):
    p, q = weights(2, 301, dtype=torch.float64, device=device), weights(301, dtype=torch.float64, device=device, seed=1)
    for tau, entries in ((1.0, 301), (0.4, 121)):
        value, grad = value_and_grad(p, q, tau=tau, form="mean")
        of_sums, of_sums_grad = value_and_grad(p, q, tau=tau)
        torch.testing.assert_close(value, entries * of_sums)
        torch.testing.assert_close(grad, entries * of_sums_grad)


def test_a_rotation_of_the_weights_changes_nothing(device):
    p, q = weights(300, dtype=torch.float64, device=device), weights(300, dtype=torch.float64, device=device, seed=1)
    torch.testing.assert_close(spectral_divergence(p.roll(17), q), spectral_divergence(p, q))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_give_zero_gradients_and_no_nan(device, form, dtype):
    zero, one = torch.zeros(64, dtype=dtype, device=device), torch.ones(64, dtype=dtype, device=device)
    some = weights(64, dtype=dtype, device=device)
    for p, q in [
        (zero, zero),
        (zero, some),
        (zero, one),
        (one, one),
        (one, some),
        (some, one),
        (some, zero),
        (one, zero),
    ]:
        value, grad = value_and_grad(p, q, form=form)
        assert torch.isfinite(value)
        # log(1 / tiny) is 87 or 708; what a coefficient of zero does not get, nobody gets.
        assert torch.isfinite(grad).all()
    value, grad = value_and_grad(zero, some, form=form)
    assert (grad == 0).all()
    assert form == "generalized" or value == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_magnitudes_neither_overflow_nor_vanish(device, dtype):
    p, q = weights(100, dtype=dtype, device=device), weights(100, dtype=dtype, device=device, seed=1)
    value, grad = value_and_grad(p, q)
    for exponent in (100, -100):  # beyond the square root of float32's range
        scaled, scaled_grad = value_and_grad(p * 2.0**exponent, q * 2.0**exponent)
        torch.testing.assert_close(scaled, value)
        torch.testing.assert_close(scaled_grad * 2.0**exponent, grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_handed_on(device, bad):
    p, q = weights(100, device=device), weights(100, device=device, seed=1)
    p[3] = bad
    value, grad = value_and_grad(p, q)
    assert not torch.isfinite(value)
    assert not torch.isfinite(grad).all()


def test_the_logarithm_is_as_good_as_the_librarys(device):
    # A constant row's first bin is d times the constant: the teacher's logarithm of it, over the whole range.
    for dtype, limit in ((torch.float32, 120), (torch.float64, 1000)):
        x = torch.exp2(torch.linspace(-limit, limit, 4001, dtype=torch.float64)).to(dtype).to(device)
        log_q, _ = OPS["spectral_teacher"](torch.complex(x, torch.zeros_like(x))[:, None], 1, 1)
        exact = x.double().log()
        unit = torch.finfo(dtype).eps
        assert ((log_q[:, 0].double() - exact).abs() <= 1.5 * unit * exact.abs() + 0.5 * unit).all()


# ---- native against reference ----------------------------------------------------------------------------------------


def op_arguments(device, d=12, dtype=torch.complex128):
    real = torch.float64 if dtype == torch.complex128 else torch.float32
    x = torch.complex(weights(2, d // 2 + 1, dtype=real), weights(2, d // 2 + 1, dtype=real, seed=1)).to(device)
    q = torch.complex(weights(1, d // 2 + 1, dtype=real, seed=2), weights(1, d // 2 + 1, dtype=real, seed=3)).to(device)
    count = spectral._entries(0.8, d)
    log_q, total = OPS["spectral_teacher"].reference(q, d, count)
    p = weights(2, d, dtype=real, device=device)
    return {
        "spectral_teacher": (q, d, count),
        "half_spectrum_divergence_": (x, log_q, total, d, count, 0, True),
        "real_dft": (p, d),
        "real_idft": (x, d, d),
        "spectral_divergence": ([p[:, :3].contiguous(), p[:, 3:].contiguous()], 2, log_q, total, d, count, 0, True),
        "spectral_scale_gradient": (p, p[:, 0].contiguous()),
    }


def results_of(run, args):
    """What an op returns, and what it may have changed."""
    result = run(*args)
    return [*([result] if isinstance(result, torch.Tensor) else result or []), *args[:1]]


class Seen(TorchDispatchMode):
    """The names of the ops that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_references_are_plain_torch(device_type):
    for name, args in op_arguments(device_type).items():
        with Seen() as seen:
            OPS[name].reference(*args)
        assert seen.names, name
        assert not [op for op in seen.names if op.startswith("pfl_ext")], name


PASSES = ["spectral_teacher", "half_spectrum_divergence_", "spectral_scale_gradient"]


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_native_kernel_agrees_with_the_reference(device, name, dtype):
    for d in (4, 8, 12, 1020, 1024, 1028, 16388, 32764, 32772):
        runs = (OPS[name], OPS[name].reference)
        for a, b in zip(*(results_of(run, op_arguments(device, d, dtype)[name]) for run in runs), strict=True):
            scale = max(1.0, float(b.abs().max()))
            torch.testing.assert_close(a, b, rtol=0, atol=16 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [12, 1023, 16388, PRIME])
def test_the_whole_divergence_agrees_with_the_reference(device, dtype, d):
    p, q = weights(2, d, dtype=dtype, device=device), weights(1, d, dtype=dtype, device=device, seed=1)
    count = spectral._entries(0.8, d)
    log_q, total = OPS["spectral_teacher"].reference(OPS["real_dft"].reference(q, d), d, count)
    for form, tensors in itertools.product(range(len(FORMS)), ([p], [p[:, :3].contiguous(), p[:, 3:].contiguous()])):
        given = (tensors, 2, log_q, total, d, count, form, True)
        (loss, grad), (expected, expected_grad) = (
            OPS["spectral_divergence"](*given),
            (OPS["spectral_divergence"].reference(*given)),
        )
        error = fft_error(d, dtype)
        assert ((loss - expected).abs() <= error * magnitude_of_terms(p, q, 0.8, FORMS[form])).all()
        # As above: a transform's error in a small magnitude is a large part of its logarithm.
        smallest = kept(p, 0.8).min() / kept(p, 0.8).mean()
        assert (grad - expected_grad).norm() <= 10 * error / smallest * expected_grad.norm()


def test_the_cpu_library_serves_every_op():
    if not _native.status()["cpu"].loaded:
        pytest.skip("no CPU library is loaded")
    assert all(OPS[name].has_kernel("CPU") for name in op_arguments("cpu"))


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("clients", "d"), [(3, PRIME), (1, 62006), (3, 65536), (1, 6 * PRIME), (1, 1 << 18), (1, 131101 * 2)]
)
def test_the_bits_do_not_depend_on_threads_or_runs(device, dtype, clients, d):
    # On a GPU the transforms are torch's. They know nothing of the host's threads there; where a simulated GPU takes
    # torch's transforms of the CPU in their place, those do, and are not what is tested.
    counts = (1, 2, 4, 1) if device == "cpu" else (1, 1, 1)
    p, q = weights(clients, d, dtype=dtype, device=device), weights(clients, d, dtype=dtype, device=device, seed=1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            results.append(value_and_grad(p, q, tau=0.9))
    finally:
        torch.set_num_threads(before)
    for value, grad in results[1:]:
        assert same_bits(value, results[0][0])
        assert same_bits(grad, results[0][1])


@pytest.mark.parametrize("name", list(op_arguments("cpu")))
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_bits_do_not_depend_on_the_instruction_set(name, dtype):
    if len(_native.available_isas()) < 2:
        pytest.skip("this machine and library have only one instruction set")
    before = _native.isa()
    # Chirps in four rows, and every kind of radix.
    for d in (16388, 2 * 2 * 3 * 4 * 5 * 7 * 8 * 127):
        results = []
        for isa in _native.available_isas():
            _native.set_isa(isa)
            *found, _ = results_of(OPS[name], op_arguments("cpu", d, dtype)[name])
            results.append(found)
        _native.set_isa(before)
        for other in results[1:]:
            assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("d", [1000, 1001, PRIME, 6 * PRIME])
def test_a_half_spectrum_of_a_batch_gets_the_bits_it_gets_alone(device, d):
    half = torch.fft.rfft(weights(4, d, device=device))
    log_q, total = OPS["spectral_teacher"](torch.fft.rfft(weights(4, d, device=device, seed=1)), d, d)
    together = half.clone()
    value = OPS["half_spectrum_divergence_"](together, log_q, total, d, d, 0, True)
    for c in range(4):
        own = slice(c, c + 1)
        alone = half[own].clone()
        assert same_bits(OPS["half_spectrum_divergence_"](alone, log_q[own], total[own], d, d, 0, True), value[own])
        assert same_bits(alone, together[own])


def test_a_client_of_a_batch_gets_the_bits_it_gets_alone(device):
    if device != "cpu":
        pytest.skip("the transforms are torch's there, which promises nothing of batches; the test above is of ours")
    for d in (1000, 1001, PRIME, 6 * PRIME):
        p, q = weights(4, d, device=device), weights(4, d, device=device, seed=1)
        value, grad = value_and_grad(p, q)
        for c in range(4):
            alone, alone_grad = value_and_grad(p[c], q[c])
            assert same_bits(alone, value[c])
            assert same_bits(alone_grad, grad[c])


# ---- forms of input --------------------------------------------------------------------------------------------------


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(5, 7))


def test_a_list_of_parameters_is_their_concatenation(device):
    student, teacher = small_net().to(device), small_net(1).to(device)
    value = spectral_divergence(student.parameters(), teacher.parameters(), tau=0.6)
    value.backward()
    flat = torch.cat([x.detach().reshape(-1) for x in student.parameters()])
    expected, grad = value_and_grad(flat, torch.cat([x.detach().reshape(-1) for x in teacher.parameters()]), tau=0.6)
    assert same_bits(value.detach(), expected)
    assert same_bits(torch.cat([x.grad.reshape(-1) for x in student.parameters()]), grad)
    assert all(x.grad is None for x in teacher.parameters())


def test_scope_tensor_adds_the_divergences_of_the_tensors(device):
    student, teacher = small_net().to(device), small_net(1).to(device)
    value = spectral_divergence(
        list(student.parameters()), list(teacher.parameters()), scope="tensor", form="generalized"
    )
    parts = [
        spectral_divergence(a.reshape(-1), b.reshape(-1), form="generalized")
        for a, b in zip(student.parameters(), teacher.parameters(), strict=True)
    ]
    torch.testing.assert_close(value, torch.stack(parts).sum())
    value.backward()
    assert all(torch.isfinite(x.grad).all() for x in student.parameters())


def test_empty_tensors_first_in_the_middle_and_last_change_nothing(device):
    a, b, empty = weights(50, device=device), weights(30, device=device, seed=1), torch.empty(0, 3, device=device)
    q = [empty, a.flip(0), empty, b.flip(0), empty]
    for scope in ("model", "tensor"):
        with_them = spectral_divergence([empty, a, empty, b, empty], q, scope=scope)
        assert same_bits(with_them, spectral_divergence([a, b], [a.flip(0), b.flip(0)], scope=scope))


def test_a_matrix_without_clients_gives_no_losses(device):
    p = torch.empty(0, 10, device=device)
    with pytest.raises(ValueError, match="holds no weights"):
        spectral_divergence(p, weights(10, device=device))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_a_cached_teacher_gives_the_bits_of_raw_weights(device, form, tau):
    p, q = weights(5, 1001, device=device), weights(1001, device=device, seed=1)
    teacher = SpectralTeacher(q, tau=tau)
    for a, b in zip(value_and_grad(p, teacher, form=form), value_and_grad(p, q, form=form, tau=tau), strict=True):
        assert same_bits(a, b)
    assert "tau" in repr(teacher)
    assert teacher._parts[0][0].shape == (1, min(math.ceil(tau * 1001), 501))


def test_non_contiguous_and_offset_weights_give_what_their_copies_give(device):
    base = weights(60, 80, device=device)
    q = weights(60, 80, device=device, seed=1)
    for view, other in [(base.T, q.T), (base[::2, 1:], q[::2, 1:]), (base.flatten()[3:1003], q.flatten()[5:1005])]:
        for a, b in zip(
            value_and_grad(view, other), value_and_grad(view.contiguous(), other.contiguous()), strict=True
        ):
            assert same_bits(a, b.contiguous())


def test_inputs_are_left_as_they_were(device):
    p, q = weights(2, 6 * PRIME, device=device), weights(6 * PRIME, device=device, seed=1)
    before = p.clone(), q.clone()
    value_and_grad(p, q)
    assert same_bits(p, before[0])
    assert same_bits(q, before[1])


def test_spectrum_forms(device):
    for d in (9, 10, 1, 2, 2 * PRIME):
        x = weights(3, d, dtype=torch.float64, device=device)
        full = torch.fft.fft(x).abs()
        torch.testing.assert_close(spectrum(x, full=True), full)
        torch.testing.assert_close(spectrum(x), full[:, : d // 2 + 1])
        torch.testing.assert_close(spectrum(x[0]), full[0, : d // 2 + 1])
        torch.testing.assert_close(spectrum([x[0, :1], x[0, 1:]]), full[0, : d // 2 + 1])
    assert spectrum(weights(8, dtype=torch.bfloat16, device=device)).dtype == torch.float32


def test_fast_length_is_the_spectrum_of_the_padded_weights(device):
    p, q = weights(1003, dtype=torch.float64, device=device), weights(1003, dtype=torch.float64, device=device, seed=1)
    assert spectral._smooth_length(1003) == 1024
    padded = [torch.nn.functional.pad(x, (0, 21)) for x in (p, q)]
    torch.testing.assert_close(spectrum(p, length="fast"), spectrum(padded[0]))
    value, grad = value_and_grad(p, q, length="fast", tau=0.7)
    expected, expected_grad = value_and_grad(*padded, tau=0.7)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, expected_grad[:1003])


def test_smooth_lengths_are_near():
    for n in [1, 2, 3, 1000, PRIME, 1_863_607, 11_181_642]:
        m = spectral._smooth_length(n)
        assert n <= m <= 1.07 * n + 1
        for factor in (2, 3, 5):
            while m % factor == 0:
                m //= factor
        assert m == 1


def test_no_gradient_is_computed_where_none_is_needed(device):
    p, q = weights(100, device=device).requires_grad_(), weights(100, device=device, seed=1)
    with torch.no_grad():
        value = spectral_divergence(p, q)
    assert not value.requires_grad
    assert same_bits(value, spectral_divergence(p, q).detach())
    assert not spectral_divergence(p.detach(), q).requires_grad


def test_differentiating_twice_is_refused(device):
    p, q = weights(10, device=device).requires_grad_(), weights(10, device=device, seed=1)
    (grad,) = torch.autograd.grad(spectral_divergence(p, q), p, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


def test_a_step_against_the_gradient_lowers_the_divergence(device):
    p, q = weights(2000, device=device), weights(2000, device=device, seed=1)
    for form in ("normalized", "generalized", "mean"):
        value, grad = value_and_grad(p, q, form=form)
        step = 1e-3 * p.norm() / grad.norm()
        assert spectral_divergence(p - step * grad, q, form=form) < value


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "options", "message"),
    [
        (torch.ones(4), torch.ones(5), {}, r"p has weights of sizes \[4\], q of \[5\]"),
        (torch.ones(4), torch.ones(4).double(), {}, "float64"),
        (torch.ones(4), torch.ones(4), {"tau": 0.0}, r"tau=0.0 .* \(0, 1\]"),
        (torch.ones(4), torch.ones(4), {"tau": 1.5}, "tau=1.5"),
        (torch.ones(4), torch.ones(4), {"tau": -0.1}, "tau=-0.1"),
        (torch.ones(4), torch.ones(4), {"tau": float("nan")}, "tau=nan"),
        (torch.ones(4), torch.ones(4), {"form": "kl"}, "form='kl' is not known; accepted: 'normalized'"),
        (torch.ones(4), torch.ones(4), {"scope": "layer"}, "scope='layer'"),
        (torch.ones(4), torch.ones(4), {"length": "padded"}, "length='padded'"),
        (torch.ones(2, 3, 4), torch.ones(4), {}, r"p is float32 \[2, 3, 4\]"),
        (torch.ones(4).long(), torch.ones(4), {}, "int64"),
        (torch.ones(4), torch.ones(4).cfloat(), {}, "complex64"),
        (torch.empty(0), torch.ones(4), {}, "p holds no weights"),
        ([], torch.ones(4), {}, "p is an empty list"),
        (torch.ones(4), [], {}, "q is an empty list"),
        (torch.ones(3, 4), torch.ones(2, 4), {}, "p has 3 clients, q has 2"),
        ([torch.ones(4), torch.ones(4).double()], [torch.ones(8)], {}, "tensor 1 is float64"),
        (torch.ones(4), SpectralTeacher(torch.ones(4), tau=0.5), {"tau": 0.4}, "teacher was made with tau=0.5"),
        (torch.ones(4), torch.ones(4, device="meta"), {}, "meta"),
    ],
)
def test_bad_input_is_refused_with_what_was_given(p, q, options, message):
    with pytest.raises(ValueError, match=message):
        spectral_divergence(p, q, **options)


def test_what_is_no_tensor_is_refused():
    for bad in (3.0, None, "weights", [torch.ones(3), 1.0]):
        with pytest.raises(TypeError):
            spectral_divergence(bad, torch.ones(3))
        with pytest.raises(TypeError):
            spectrum(bad)
    with pytest.raises(ValueError, match="length='long'"):
        spectrum(torch.ones(3), length="long")


def test_the_ops_refuse_arguments_that_do_not_fit_and_change_nothing(device):
    good = op_arguments(device)["half_spectrum_divergence_"]
    spectrum_before = good[0].clone()
    changes = {
        0: [good[0].real.contiguous(), good[0][0], good[0][:, :-1].contiguous(), good[0].T],
        1: [good[1].float(), good[1][:, :-1].contiguous(), torch.cat([good[1]] * 3)],
        2: [good[2].float(), torch.cat([good[2]] * 2)],
        3: [0, 11],
        4: [0, 13],
        5: [-1, len(FORMS)],
    }
    for place, values in changes.items():
        for value in values:
            with pytest.raises((RuntimeError, ValueError)):
                OPS["half_spectrum_divergence_"](*good[:place], value, *good[place + 1 :])
    assert same_bits(good[0], spectrum_before)


# ---- torch's own machinery -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(op_arguments("cpu")))
def test_opcheck(device, name):
    torch.library.opcheck(OPS[name].overload, op_arguments(device)[name])


def test_every_op_of_the_family_is_checked():
    assert set(op_arguments("cpu")) == {
        name for name, op in OPS.items() if op.reference.__module__.endswith("spectral")
    }


@pytest.mark.parametrize("clients", [1, 3])
def test_opcheck_of_views(device_type, clients):
    gaps = weights(8, 2 * clients, device=device_type)[:, ::2].T
    for x in (gaps, gaps.T.contiguous().T, gaps[:, :5]):
        torch.library.opcheck(OPS["spectral_scale_gradient"].overload, (x, x[:, 0]))
        assert OPS["spectral_scale_gradient"].reference(x, x[:, 0]).is_contiguous()
        half = torch.fft.rfft(x, n=16).T.contiguous().T
        torch.library.opcheck(OPS["real_dft"].overload, (x, 16))
        torch.library.opcheck(OPS["real_idft"].overload, (half, 16, 5))


def test_the_public_functions_compile_without_a_graph_break(device):
    student = [x.detach().clone().requires_grad_() for x in small_net().to(device).parameters()]
    teacher = SpectralTeacher([x.detach() for x in small_net(1).to(device).parameters()], tau=0.4)
    p, q = weights(3, 40, device=device).requires_grad_(), weights(40, device=device, seed=1)

    def step(student, p, q):
        return (
            spectral_divergence(student, teacher)
            + spectral_divergence(p, q, tau=0.5, form="paper").sum()
            + spectrum(p).sum()
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(student, p, q), step(student, p, q))
    grads = torch.autograd.grad(compiled(student, p, q), [*student, p])
    for a, b in zip(grads, torch.autograd.grad(step(student, p, q), [*student, p]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA cannot index fake CUDA tensors")
def test_fake_tensors_on_a_cuda_device_need_no_gpu():
    with torch._subclasses.FakeTensorMode():
        p = torch.empty(5, 30, device="cuda", dtype=torch.bfloat16)
        q = torch.empty(30, device="cuda", dtype=torch.bfloat16)
        value = spectral_divergence(p, q, tau=0.4)
        log_q, total, length, count = SpectralTeacher(q)._parts[0]
        _, grad = OPS["spectral_divergence"]([p], 5, log_q, total, length, count, 0, True)
        magnitudes = spectrum(p, full=True)
    assert (value.shape, value.dtype, value.device.type) == (torch.Size([5]), torch.float32, "cuda")
    assert (grad.shape, grad.dtype, grad.device.type) == (torch.Size([5, 30]), torch.bfloat16, "cuda")
    assert (magnitudes.shape, magnitudes.dtype) == (torch.Size([5, 30]), torch.float32)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's memory from /proc")
def test_tables_of_lengths_that_are_no_longer_used_are_given_back():
    def resident() -> float:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    # Primes: their tables are the largest, some 45 MiB each, and 256 MiB of them are kept.
    offsets = (0, 30, 34, 36, 78, 96, 114, 118, 130, 148, 156, 168, 180, 184, 190, 196, 208, 210, 228, 246)
    primes = [1_000_003 + offset for offset in offsets]
    x = torch.randn(primes[-1], generator=torch.Generator().manual_seed(0))
    first = spectrum(x[: primes[0]])
    for length in primes[:12]:
        spectrum(x[:length])
    before = resident()
    for length in primes[12:]:
        spectrum(x[:length])
    assert resident() < before + 150  # of 360 MiB more
    assert torch.equal(spectrum(x[: primes[0]]), first)
