from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from pfl_ext import _native
from pfl_ext.ops import layer_groups, lwsam_perturb_, personalization_scores, restore_
from pfl_ext.ops._declare import OPS

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Around the lanes of a sum (16), the kernels' block (2048), the thread's piece (16384), and a prime.
SIZES = [0, 1, 3, 15, 16, 17, 2047, 2048, 2049, 16383, 16384, 16385, 40009, 0]
POWERS = [1.0, 1.25, 2.0, 3.0, math.inf]


def random_tensors(shapes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]


def problem(dtype=torch.float32, device="cpu", sizes=SIZES):
    shapes = [(n,) for n in sizes]
    return random_tensors(shapes, dtype, device), random_tensors(shapes, dtype, device, seed=1)


def clones(tensors):
    return [x.clone() for x in tensors]


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert torch.equal(bits(a), bits(e))


def exact_step(grads, groups, scores, rho, p, norm, literal=False):
    """epsilon in float64, straight from the printed formula; only for p where nothing overflows."""
    flat = {}
    for g, group in zip(grads, groups, strict=True):
        flat.setdefault(group if norm == "layer" else 0, []).append(g.double().reshape(-1))
    result = []
    for g, group in zip(grads, groups, strict=True):
        everything, g = torch.cat(flat[group if norm == "layer" else 0]), g.double()
        if math.isinf(p):
            step = g.sign()
        elif p == 1:
            largest = everything.abs().max() if everything.numel() else everything.sum()
            step = torch.where(g.abs() == largest, g.sign(), 0) / (everything.abs() == largest).sum()
        else:
            q = p / (p - 1)
            total = (everything.abs() ** q).sum()
            step = g.sign() * g.abs() ** (q - 1) / total ** (p - 1 if literal else 1 / p)
        result.append(rho * scores[group] * step)
    return result


def assert_moved_by(params, before, steps, p):
    """Within rounding. In the accumulate type: the scale (its double value rounded once), the product, the sum, and for
    other p than 2 the ratio and the power: |d pow(x, y)| <= y |dx / x| pow + 1 unit, and y = q - 1 <= 4 here. In
    float64 the reference itself, a sum of up to 2**17 terms, is as far off."""
    for w, b, step in zip(params, before, steps, strict=True):
        unit = 2.0**-53 if w.dtype == torch.float64 else 2.0**-24
        roundings = 3 if p in (2.0, math.inf) else 12
        noise = 2.0**17 * 2.0**-53  # of the sums
        expected = b.double() + step
        bound = roundings * unit * (b.double().abs() + step.abs()) + noise * step.abs()
        if w.dtype in (torch.float16, torch.bfloat16):
            bound = (
                bound + torch.finfo(w.dtype).eps / 2 * (expected.abs() + bound) + torch.finfo(w.dtype).smallest_normal
            )
        assert bool(((w.double() - expected).abs() <= bound).all())


# ---- perturbation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("norm", ["global", "layer"])
def test_the_perturbation_is_within_rounding_of_the_definition(device, dtype, p, norm):
    params, grads = problem(dtype, device)
    before = clones(params)
    groups = [t % 4 for t in range(len(SIZES))]
    scores = [0.5, 0.25, 0.0, 2.0]
    lwsam_perturb_(params, grads, scores, 0.1, p, norm, groups=groups)
    assert_moved_by(params, before, exact_step(grads, groups, scores, 0.1, p, norm), p)


@pytest.mark.parametrize("p", [1.25, 2.0, 3.0])
def test_the_literal_exponent_is_the_printed_formula(device, p):
    params, grads = problem(torch.float64, device, [7, 0, 33])
    before = clones(params)
    lwsam_perturb_(params, grads, [1, 2, 3], 0.1, p, literal_exponent=True)
    assert_moved_by(params, before, exact_step(grads, [0, 1, 2], [1, 2, 3], 0.1, p, "global", literal=True), p)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("per_layer", [False, True])
def test_the_native_kernel_agrees_with_the_reference(device, dtype, p, per_layer):
    params, grads = problem(dtype, device)
    before, other = clones(params), clones(params)
    groups = [t % 3 for t in range(len(SIZES))]
    scores = torch.tensor([0.5, 0.25, 1.5], dtype=torch.float64, device=device)
    backup = torch.zeros(sum(-(-x.nbytes // 64) * 64 for x in params), dtype=torch.uint8, device=device)
    second = torch.zeros_like(backup)
    if device == "cpu" and _native.status()["cpu"].loaded:
        assert OPS["lwsam_perturb_"].has_kernel("CPU")
    for run, weights, memory in (
        (OPS["lwsam_perturb_"], params, backup),
        (OPS["lwsam_perturb_"].reference, other, second),
    ):
        run(weights, memory, grads, scores, groups, 3, 0.1, p, False, per_layer)
    steps = [o.double() - b.double() for o, b in zip(other, before, strict=True)]
    assert_moved_by(params, before, steps, p)
    if math.isinf(p):
        assert_same_bits(params, other)
    # The reference can read what the kernel wrote, and the other way round.
    OPS["restore_"].reference(params, backup)
    OPS["restore_"](other, second)
    assert_same_bits(params, before)
    assert_same_bits(other, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_within_twice_the_error_of_plain_torch(device, dtype):
    params, grads = problem(dtype, device, [5000, 77])
    before = clones(params)
    exact = [b.double() + s for b, s in zip(before, exact_step(grads, [0, 1], [1, 1], 2.0, 2.0, "global"), strict=True)]
    norm = torch.stack([g.norm() for g in grads]).norm()
    plain = [b + 2.0 / norm * g for b, g in zip(before, grads, strict=True)]
    lwsam_perturb_(params, grads, rho=2.0)
    for w, torchs, e in zip(params, plain, exact, strict=True):
        assert (w.double() - e).abs().max() <= 2 * (torchs.double() - e).abs().max()


def test_scores_of_one_are_sam_and_equal_scores_sam_of_another_radius(device):
    params, grads = problem(device=device)
    by_default, ones, halves = clones(params), clones(params), clones(params)
    lwsam_perturb_(by_default, grads, rho=0.05)
    lwsam_perturb_(ones, grads, [1.0] * len(SIZES), rho=0.05)
    lwsam_perturb_(halves, grads, [0.5] * len(SIZES), rho=0.1)
    assert_same_bits(ones, by_default)
    assert_same_bits(halves, by_default)
    moved = torch.cat([(a.double() - b.double()).flatten() for a, b in zip(by_default, params, strict=True)])
    assert moved.norm().item() == pytest.approx(0.05, rel=1e-4)


@given(st.floats(1.0, 50.0), st.integers(1, 40), st.floats(0.01, 5.0), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_p_norm_of_the_perturbation_is_rho(p, size, rho, seed):
    (w,), (g,) = random_tensors([(size,)], torch.float64), random_tensors([(size,)], torch.float64, seed=seed)
    before = w.clone()
    backup = lwsam_perturb_([w], [g], rho=rho, p=p)
    # Differences of values near 1: their absolute error, a unit an element, by rho >= 0.01.
    assert torch.linalg.vector_norm(w - before, p).item() == pytest.approx(rho, rel=1e-9)
    restore_([w], backup)
    assert_same_bits([w], [before])


@pytest.mark.parametrize("p", [1.0, 1.001, 1.5, 2.0, 3.0, 100.0])
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e30])
def test_tiny_and_huge_gradients_neither_vanish_nor_overflow(device, p, size):
    w = torch.zeros(1000, device=device)
    g = torch.linspace(0.5, 1, 1000, device=device) * size
    lwsam_perturb_([w], [g], rho=0.1, p=p)
    assert torch.linalg.vector_norm(w.double(), p).item() == pytest.approx(0.1, rel=1e-3)


def test_a_gradient_whose_norm_is_subnormal_gives_no_infinity(device):
    w = torch.zeros(3, device=device)
    lwsam_perturb_([w], [torch.full((3,), 1e-45, device=device)], rho=0.5)
    assert bool(w.isfinite().all()) and bool((w >= 0).all()) and w.norm().item() <= 0.5


def test_equal_largest_gradients_share_the_radius_at_p_1(device):
    w = torch.zeros(4, device=device)
    lwsam_perturb_([w], [torch.tensor([2.0, -2.0, 1.0, 0.0], device=device)], rho=0.5, p=1)
    assert w.tolist() == [0.25, -0.25, 0.0, 0.0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("norm", ["global", "layer"])
def test_a_zero_gradient_changes_nothing(device, dtype, p, norm):
    params, _ = problem(dtype, device, [5, 0, 3000])
    params[0][0] = -0.0
    params[0][1] = math.nan
    before = clones(params)
    lwsam_perturb_(params, [torch.zeros_like(w) for w in params], rho=0.5, p=p, norm=norm)
    if math.isinf(p):  # no norm there: zero is added, which makes -0 zero and any NaN the device's own
        assert params[0][0] == 0 and params[0][1].isnan()
        params[0][:2] = before[0][:2]
    assert_same_bits(params, before)


def test_a_layer_with_a_zero_gradient_or_score_is_left_alone(device):
    params, grads = problem(torch.float32, device, [5, 6, 7])
    grads[1].zero_()
    before = clones(params)
    lwsam_perturb_(params, grads, [1.0, 1.0, 0.0], rho=0.5, norm="layer")
    assert_same_bits(params[1:], before[1:])
    assert not torch.equal(params[0], before[0])


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_nan_spreads_over_its_norm_and_an_infinite_norm_changes_nothing(device, p):
    for bad in (math.nan, math.inf):
        params, grads = problem(torch.float32, device, [20000, 3])
        grads[0][17000], grads[0][5] = bad, 0.0
        before = clones(params)
        backup = lwsam_perturb_(params, grads, rho=0.1, p=p, norm="layer")
        if math.isnan(bad):
            assert bool(params[0].isnan().all())
        else:
            assert_same_bits(params[:1], before[:1])
        assert bool(params[1].isfinite().all()) and not torch.equal(params[1], before[1])
        restore_(params, backup)
        assert_same_bits(params, before)


def test_nan_with_the_sign_is_one_element(device):
    w, g = torch.zeros(3, device=device), torch.tensor([1.0, math.nan, -math.inf], device=device)
    lwsam_perturb_([w], [g], rho=0.5, p=math.inf)
    assert w[0] == 0.5 and w[1].isnan() and w[2] == -0.5


# ---- restoring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_restoring_is_exact_and_keeps_the_memory(device, dtype):
    params, grads = problem(dtype, device)
    params[4][:3] = torch.tensor([math.nan, -math.inf, -0.0], dtype=dtype)
    before, pointers = clones(params), [w.data_ptr() for w in params]
    backup = lwsam_perturb_(params, grads, rho=1.0)
    restore_(params, backup)
    assert_same_bits(params, before)
    assert [w.data_ptr() for w in params] == pointers


def test_more_weights_than_the_caches_hold_are_restored_exactly(device):
    # From 12 MiB on the backup is written past the caches; odd offsets in memory show a wrong head or tail there.
    memory = random_tensors([(1 << 22,)], device=device)[0]
    params = [memory[1:1_000_004], memory[1_000_006 : 2**22 - 1]]
    before, grads = clones(params), [x.roll(1) for x in params]
    untouched = memory[1_000_004:1_000_006].clone()
    backup = lwsam_perturb_(params, grads, rho=1.0)
    assert_moved_by(params, before, exact_step(grads, [0, 1], [1, 1], 1.0, 2.0, "global"), 2.0)
    restore_(params, backup)
    assert_same_bits(params, before)
    assert torch.equal(memory[1_000_004:1_000_006], untouched)


def test_a_backup_is_used_again(device):
    params, grads = problem(device=device)
    before = clones(params)
    backup = lwsam_perturb_(params, grads)
    restore_(params, backup)
    assert lwsam_perturb_(params, grads, backup=backup) is backup
    restore_(params, backup)
    assert_same_bits(params, before)


def test_views_of_any_layout(device):
    base = random_tensors([(40, 50), (2, 3, 4, 5), (6, 100)], device=device)
    other = random_tensors([(50, 40), (2, 3, 4, 5), (6, 50)], device=device, seed=1)
    views = [base[0].t(), base[1].to(memory_format=torch.channels_last), base[2][:, ::2]]
    before, surroundings = [v.contiguous().clone() for v in views], base[2][:, 1::2].clone()
    expected = clones(before)
    lwsam_perturb_(expected, other, rho=1.0)
    backup = lwsam_perturb_(views, other, rho=1.0)
    for v, e in zip(views, expected, strict=True):
        torch.testing.assert_close(v.contiguous(), e, rtol=2e-7, atol=1e-8)
    assert torch.equal(base[2][:, 1::2], surroundings)
    restore_(views, backup)
    assert_same_bits([v.contiguous() for v in views], before)


def test_layers_may_be_numbered_beyond_the_number_of_tensors(device):
    params, grads = problem(torch.float32, device, [9])
    expected = clones(params)
    lwsam_perturb_(expected, grads, norm="layer")
    lwsam_perturb_(params, grads, norm="layer", groups=[3])
    assert_same_bits(params, expected)


def test_mixed_types_share_one_norm(device):
    params = [x.to(d).to(device) for x, d in zip(random_tensors([(301,)] * 4), FLOATS, strict=True)]
    grads = [x.to(d).to(device) for x, d in zip(random_tensors([(301,)] * 4, seed=1), FLOATS, strict=True)]
    before = clones(params)
    backup = lwsam_perturb_(params, grads, rho=3.0)
    assert_moved_by(params, before, exact_step(grads, range(4), [1] * 4, 3.0, 2.0, "global"), 2.0)
    restore_(params, backup)
    assert_same_bits(params, before)


class Copies(TorchFunctionMode):
    """Whether each copy between devices waits, by the device that it goes to."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to and args[0].device.type != torch.device(args[1]).type:
            self.waits.append((torch.device(args[1]).type, not (kwargs or {}).get("non_blocking", False)))
        return func(*args, **kwargs or {})


def test_scores_are_waited_for_on_their_way_to_the_cpu_and_nowhere_else():
    with FakeTensorMode(), Copies() as copies:
        for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
            w, g = torch.zeros(3, device=here), torch.ones(3, device=here)
            lwsam_perturb_([w], [g], torch.ones(1, dtype=torch.float64, device=there))
    assert copies.waits == [("cpu", True), ("cuda", False)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("here", "there"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_scores_may_be_on_another_device(here, there):
    given = torch.tensor([0.25, 0.75], dtype=torch.float64, device=there)
    found = []
    for scores in (given.to(here), given, given.tolist(), given.pin_memory() if there == "cpu" else given):
        params, grads = problem(torch.float32, here, [3000, 17])
        lwsam_perturb_(params, grads, scores)
        if isinstance(scores, torch.Tensor) and scores.is_pinned():
            scores.fill_(math.nan)
        found.append(params)
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_no_tensors_and_only_empty_tensors(device):
    restore_([], lwsam_perturb_([], []))
    empty = [torch.empty(0, device=device)]
    restore_(empty, lwsam_perturb_(empty, [torch.empty(0, device=device)]))


def test_version_counters_tell_autograd_of_the_write(device):
    x = torch.ones(3, device=device, requires_grad=True)
    square = x * x
    lwsam_perturb_([x], [torch.ones(3, device=device)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_are_the_definition(device, dtype):
    a, b = problem(dtype, device)
    groups = [t % 5 for t in range(len(SIZES))]
    raw = []
    for group in range(5):
        x = torch.cat([x.double() for x, g in zip(a, groups, strict=True) if g == group])
        y = torch.cat([y.double() for y, g in zip(b, groups, strict=True) if g == group])
        raw.append(((x - y).norm() / x.numel()).item())
    scores = personalization_scores(a, b, groups)
    assert scores.dtype == torch.float64
    # Sums of up to 2**17 terms in float64, on both sides.
    expected = torch.tensor([r / sum(raw) for r in raw], dtype=torch.float64, device=device)
    torch.testing.assert_close(scores, expected, rtol=2.0**18 * 2.0**-53, atol=0)
    torch.testing.assert_close(
        scores, OPS["personalization_scores"].reference(a, b, groups, 5), rtol=2.0**18 * 2.0**-53, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_in_half_precision_are_within_twice_the_error_of_plain_torch(device, dtype):
    a, b = problem(dtype, device, [5000, 77])

    def definition(a, b):
        raw = torch.stack([(x - y).norm() / x.numel() for x, y in zip(a, b, strict=True)])
        return (raw / raw.sum()).double()

    exact = definition([x.double() for x in a], [x.double() for x in b])
    error = (personalization_scores(a, b) - exact).abs().max()
    assert error <= 2 * (definition(a, b) - exact).abs().max()


def test_equal_models_give_equal_scores(device):
    a = random_tensors([(3,), (0,), (5, 2)], device=device)
    assert personalization_scores(a, clones(a), [0, 0, 1]).tolist() == [0.5, 0.5]
    # A layer without elements does not count.
    assert personalization_scores(a, clones(a)).tolist() == [0.5, 0.0, 0.5]
    assert personalization_scores(a, [x + 1 for x in a])[1] == 0


def test_differences_beyond_the_range_of_a_float_are_scored(device):
    a, b = (
        [torch.full((2,), 3e38, device=device), torch.ones(2, device=device)],
        [torch.full((2,), -3e38, device=device), torch.zeros(2, device=device)],
    )
    assert personalization_scores(a, b)[0].item() == pytest.approx(1.0)


def test_nan_in_a_model_makes_the_scores_nan(device):
    a, b = [torch.tensor([math.nan], device=device), torch.ones(1, device=device)], [torch.zeros(1, device=device)] * 2
    assert bool(personalization_scores(a, b).isnan().all())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2)


def test_layers_are_modules_with_parameters_unless_the_caller_says_otherwise(device):
    assert layer_groups(Net()) == [0, 0, 1, 1, 2, 2]
    a, b = Net().to(device), Net().to(device)
    by_module = personalization_scores(a, b)
    assert by_module.shape == (3,)
    assert by_module.sum().item() == pytest.approx(1.0)
    assert torch.equal(by_module, personalization_scores(list(a.parameters()), list(b.parameters()), layer_groups(a)))
    assert personalization_scores(list(a.parameters()), list(b.parameters())).shape == (6,)
    named_a, named_b = dict(a.named_parameters()), dict(reversed(list(b.named_parameters())))
    assert torch.equal(by_module, personalization_scores(named_a, named_b))
    halves = {name: int(name.startswith("head")) for name in named_a}
    assert personalization_scores(a, b, halves).shape == (2,)


# ---- the same bits ---------------------------------------------------------------------------------------------------


def everything(dtype, device, p):
    params, grads = problem(dtype, device, [70001, 13, 12297])
    scores = personalization_scores(params, grads)
    lwsam_perturb_(params, grads, scores, 1.0, p)
    return [*params, scores]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [2.0, 3.0])
def test_the_bits_do_not_depend_on_threads_or_runs(device, dtype, p):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4, 1):
            torch.set_num_threads(threads)
            results.append(everything(dtype, device, p))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
def test_the_bits_do_not_depend_on_the_instruction_set(dtype, p):
    if len(_native.available_isas()) < 2:
        pytest.skip("this machine and library have only one instruction set")
    before, results = _native.isa(), []
    for isa in _native.available_isas():
        _native.set_isa(isa)
        results.append(everything(dtype, "cpu", p))
    _native.set_isa(before)
    for other in results[1:]:
        assert_same_bits(results[0], other)


# ---- bad input -------------------------------------------------------------------------------------------------------


def x3():
    return torch.tensor([1.0, 2.0, 3.0])


def backed_up_into_the_gradient(w):
    grads = torch.ones(16, device=w.device)
    lwsam_perturb_([w], [grads[:3]], backup=grads.view(torch.uint8))


def backed_up_into_the_scores(w, g):
    scores = torch.ones(8, dtype=torch.float64, device=w.device)
    lwsam_perturb_([w], [g], scores[:1], backup=scores.view(torch.uint8))


BAD_CALLS = {
    "negative rho": (lambda w, g: lwsam_perturb_([w], [g], rho=-0.1), "rho is -0.1"),
    "infinite rho": (lambda w, g: lwsam_perturb_([w], [g], rho=math.inf), "rho is inf"),
    "nan rho": (lambda w, g: lwsam_perturb_([w], [g], rho=math.nan), "rho is nan"),
    "p below 1": (lambda w, g: lwsam_perturb_([w], [g], p=0.5), "p is 0.5; 1 or more"),
    "p nan": (lambda w, g: lwsam_perturb_([w], [g], p=math.nan), "p is nan"),
    "literal at p = 1": (lambda w, g: lwsam_perturb_([w], [g], p=1, literal_exponent=True), "1 < p < infinity"),
    "literal at infinity": (
        lambda w, g: lwsam_perturb_([w], [g], p=math.inf, literal_exponent=True),
        "1 < p < infinity",
    ),
    "norm": (lambda w, g: lwsam_perturb_([w], [g], norm="tensor"), "norm='tensor'"),
    "shape": (lambda w, g: lwsam_perturb_([w, w.clone()], [g, g[:2]]), r"tensor 1 of grads is float32 \[2\]"),
    "dtype": (lambda w, g: lwsam_perturb_([w], [g.double()]), "tensor 0 of grads is float64"),
    "device": (lambda w, g: lwsam_perturb_([w], [g.to("meta")]), "of grads .* on meta"),
    "integers": (lambda w, g: lwsam_perturb_([w, w.long()], [g, g.long()]), "tensor 1 of params is int64"),
    "length": (lambda w, g: lwsam_perturb_([w], [g, g]), "2 grads for 1 params"),
    "no gradient": (lambda w, g: lwsam_perturb_([w], [None]), "tensor 0 of grads is a NoneType"),
    "scores": (lambda w, g: lwsam_perturb_([w, w.clone()], [g, g], [1.0]), "the group of tensor 1 is 1; 0 to 0"),
    "shape of scores": (lambda w, g: lwsam_perturb_([w], [g], torch.ones(1, 1)), r"scores are float64 \[1, 1\]"),
    "groups": (lambda w, g: lwsam_perturb_([w], [g], groups=[0, 1]), "2 group indices for 1 tensors"),
    "negative group": (lambda w, g: lwsam_perturb_([w, w.clone()], [g, g], groups=[0, -1]), "group of tensor 1 is -1"),
    "twice": (lambda w, g: lwsam_perturb_([w, w], [g, g]), "overlap in memory"),
    "overlap": (lambda w, g: lwsam_perturb_([w[:2], w[1:]], [g[:2], g[1:]]), "overlap in memory"),
    "shifted gradient": (lambda w, g: lwsam_perturb_([w[:2]], [w[1:]]), "overlap in memory"),
    "expanded": (lambda w, g: lwsam_perturb_([w[:1].expand(3)], [g]), "is expanded"),
    "over itself": (lambda w, g: lwsam_perturb_([w.as_strided((2, 2), (1, 1))], [g.new_ones(2, 2)]), "overlaps itself"),
    "restore over itself": (
        lambda w, g: restore_([w.as_strided((2, 2), (1, 1))], w.new_zeros(64, dtype=torch.uint8)),
        "overlaps itself",
    ),
    "backup is gradient": (lambda w, g: backed_up_into_the_gradient(w), "overlap in memory"),
    "backup holds scores": (lambda w, g: backed_up_into_the_scores(w, g), "overlap in memory"),
    "scores are params": (
        lambda w, g: lwsam_perturb_([x := w.double()], [g.double()], x[:1]),
        "overlap in memory",
    ),
    "far group": (lambda w, g: lwsam_perturb_([w], [g], groups=[2**33], norm="layer"), "8589934593 layers; at most"),
    "far group of scores": (lambda w, g: personalization_scores([w], [g], [2**33]), "8589934593 layers; at most"),
    "farther group": (lambda w, g: personalization_scores([w], [g], [2**70]), "layers; at most 1048576 are accepted"),
    "small backup": (
        lambda w, g: lwsam_perturb_([w], [g], backup=w.view(torch.uint8).clone()),
        "at least 64 bytes",
    ),
    "restore small": (lambda w, g: restore_([w], w.view(torch.uint8).clone()), "at least 64 bytes"),
    "restore wrong": (lambda w, g: restore_([w], [w]), "what lwsam_perturb_ returned"),
    "no models": (lambda w, g: personalization_scores([], []), "0 tensors in 0 groups"),
    "models": (lambda w, g: personalization_scores([w], [g[:2]]), "tensor 0 of b"),
    "names": (lambda w, g: personalization_scores({"a": w}, {"b": w}), "a has the tensors"),
    "one tensor": (lambda w, g: personalization_scores(w, g), "a module, a dict"),
    "missing group": (lambda w, g: personalization_scores({"a": w}, {"a": g}, {}), "missing"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_say_what_is_accepted_and_change_nothing(device, case):
    call, message = BAD_CALLS[case]
    w, g = x3().to(device), x3().to(device)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call(w, g)
    assert w.tolist() == [1.0, 2.0, 3.0]


def test_the_reference_refuses_the_same(device):
    w, memory = x3().to(device), torch.zeros(128, dtype=torch.uint8, device=device)
    for params, message in ([[w, w], "overlap"], [[w[:1].expand(3), x3().to(device)], "expanded"]):
        with pytest.raises(ValueError, match=message):
            OPS["lwsam_perturb_"].reference(
                params, memory, [w.clone(), w.clone()], None, [0, 1], 2, 0.1, 2.0, False, False
            )
    assert w.tolist() == [1.0, 2.0, 3.0]


# ---- torch.compile and friends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2.0, 1.5])
def test_opcheck(device_type, p):
    params, grads = problem(torch.float32, device_type, [5, 0, 17])
    memory = torch.zeros(256, dtype=torch.uint8, device=device_type)
    scores = torch.tensor([0.25, 0.75], dtype=torch.float64, device=device_type)
    torch.library.opcheck(
        torch.ops.pfl_ext.lwsam_perturb_, (params, memory, grads, scores, [0, 0, 1], 2, 0.1, p, False, False)
    )
    torch.library.opcheck(
        torch.ops.pfl_ext.lwsam_perturb_, (params, memory, grads, None, [0, 1, 2], 3, 0.1, p, False, True)
    )
    torch.library.opcheck(torch.ops.pfl_ext.restore_, (params, memory))
    torch.library.opcheck(torch.ops.pfl_ext.personalization_scores, (params, grads, [0, 0, 1], 2))


def test_a_compiled_step_gives_the_same_bits(device_type):
    def step(params, grads, anchors):
        scores = personalization_scores(params, anchors)
        backup = lwsam_perturb_(params, grads, scores, 0.1)
        moved = [w * 1.0 for w in params]
        restore_(params, backup)
        return moved

    params, grads = problem(torch.float32, device_type, [5, 40, 17])
    anchors, before = [x + 1 for x in grads], clones(params)
    expected = step(params, grads, anchors)
    assert_same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(params, grads, anchors), expected)
    assert_same_bits(params, before)


def test_fake_tensors_on_a_cuda_device_need_no_gpu():
    with FakeTensorMode():
        params = [torch.empty(5, 3, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        grads = [torch.empty_like(w) for w in params]
        scores = personalization_scores(params, grads)
        backup = lwsam_perturb_(params, grads, scores)
        restore_(params, backup)
    assert (scores.shape, scores.dtype, scores.device.type) == (torch.Size([3]), torch.float64, "cuda")
    assert (backup.shape, backup.dtype, backup.device.type) == (torch.Size([192]), torch.uint8, "cuda")


def test_the_example_of_the_docstring_and_deepcopies(device):
    w = copy.deepcopy([torch.zeros(2, device=device)])
    backup = lwsam_perturb_(w, [torch.tensor([3.0, 4.0], device=device)], rho=0.5)
    torch.testing.assert_close(w[0], torch.tensor([0.3, 0.4], device=device))
    restore_(w, copy.deepcopy(backup))
    assert w[0].tolist() == [0.0, 0.0]
