from __future__ import annotations

import math

import pytest
import torch

from pfl_ext import _native
from pfl_ext.ops import proximal_sgd_step_, squared_distance
from pfl_ext.ops._declare import OPS

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Around the lanes of a sum (16), the kernels' block (2048), the thread's piece (16384), and a prime.
SIZES = [0, 1, 3, 15, 16, 17, 2047, 2048, 2049, 16383, 16384, 16385, 40009, 0]
OPTIONS = {
    "plain": {},
    "weight decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "first": {"momentum": 0.9, "first": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"maximize": True, "weight_decay": 0.01},
}


def random_tensors(shapes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]


def problem(dtype=torch.float32, device="cpu", sizes=SIZES):
    """Parameters, gradients, anchors and momentum buffers."""
    return [random_tensors([(n,) for n in sizes], dtype, device, seed) for seed in range(4)]


def clones(tensors):
    return [x.clone() for x in tensors]


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        assert torch.equal(bits(a), bits(e))


def run(params, grads, anchors, buffers, lr=0.1, lam=0.5, **options):
    proximal_sgd_step_(
        params, grads, anchors, lr, lam, momentum_buffers=buffers if options.get("momentum") else [], **options
    )


def exact(
    v, g, w, m, lr, lam, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False, first=False
):
    """Float64, straight from the definition: the new parameter and buffer, and the size of the terms."""
    v, g, w, m = v.double(), g.double(), w.double(), m.double()
    d = (-g if maximize else g) + weight_decay * v + lam * (v - w)
    size = g.abs() + weight_decay * v.abs() + lam * (v.abs() + w.abs())
    if momentum:
        m = d if first else momentum * m + (1 - dampening) * d
        size = size if first else momentum * m.abs() + size + size
        d = d + momentum * m if nesterov else m
        size = 2 * size
    return v - lr * d, m, v.abs() + lr * size


def assert_within(actual, expected, size):
    """At most ten roundings of a term in the accumulate type, then one to the storage type."""
    bound = 10 * (2.0**-53 if actual.dtype == torch.float64 else 2.0**-24) * size
    if actual.dtype in (torch.float16, torch.bfloat16):
        bound = (
            bound
            + torch.finfo(actual.dtype).eps / 2 * (expected.abs() + bound)
            + torch.finfo(actual.dtype).smallest_normal
        )
    assert bool(((actual.double() - expected).abs() <= bound).all())


# ---- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_is_within_rounding_of_the_definition(device, dtype, options):
    params, grads, anchors, buffers = problem(dtype, device)
    before = [clones(x) for x in (params, grads, anchors, buffers)]
    run(params, grads, anchors, buffers, **OPTIONS[options])
    for t, row in enumerate(zip(*before, strict=True)):
        v, m, size = exact(*row, 0.1, 0.5, **OPTIONS[options])
        assert_within(params[t], v, size)
        assert_within(buffers[t], m, size * 20 if "momentum" in OPTIONS[options] else size * 0)
    assert_same_bits(grads, before[1])
    assert_same_bits(anchors, before[2])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_the_native_kernel_gives_the_bits_of_the_reference(device, dtype, options, lam):
    chosen = {
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
        "first": False,
    }
    chosen.update(OPTIONS[options])
    params, grads, anchors, buffers = problem(dtype, device)
    if not chosen["momentum"]:
        buffers = []
    other, other_buffers = clones(params), clones(buffers)
    if device == "cpu" and _native.status()["cpu"].loaded:
        assert OPS["proximal_sgd_step_"].has_kernel("CPU")
    OPS["proximal_sgd_step_"](params, buffers, grads, anchors, 0.1, lam, *chosen.values())
    OPS["proximal_sgd_step_"].reference(other, other_buffers, grads, anchors, 0.1, lam, *chosen.values())
    assert_same_bits(params, other)
    assert_same_bits(buffers, other_buffers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_within_twice_the_error_of_plain_torch(device, dtype):
    params, grads, anchors, buffers = problem(dtype, device, [5000])
    v, _, _ = exact(params[0], grads[0], anchors[0], buffers[0], 0.1, 0.5)
    plain = params[0] - 0.1 * (grads[0] + 0.5 * (params[0] - anchors[0]))
    run(params, grads, anchors, buffers)
    assert (params[0].double() - v).abs().max() <= 2 * (plain.double() - v).abs().max()


def test_it_is_the_step_of_the_autograd_way(device):
    params, grads, anchors, _ = problem(torch.float64, device, [50, 7])
    other = [nn.detach().clone().requires_grad_() for nn in params]
    loss = sum((v * g).sum() for v, g in zip(other, grads, strict=True))
    loss = loss + 0.5 / 2 * sum((v - w).norm() ** 2 for v, w in zip(other, anchors, strict=True))
    loss.backward()
    torch.optim.SGD(other, lr=0.1).step()
    run(params, grads, anchors, [])
    for a, b in zip(params, other, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-14, atol=1e-15)


def test_the_anchor_pulls_and_lam_zero_does_not_read_it(device):
    v, zero = torch.full((3,), 2.0, device=device), torch.zeros(3, device=device)
    proximal_sgd_step_([v], [zero], [zero], lr=0.5, lam=1.0)
    assert v.tolist() == [1.0, 1.0, 1.0]
    proximal_sgd_step_([v], [zero], [torch.full((3,), math.nan, device=device)], lr=0.5, lam=0.0)
    proximal_sgd_step_([v], [zero], [], lr=0.5, lam=0.0)
    assert v.tolist() == [1.0, 1.0, 1.0]


def test_every_term_changes_the_result(device):
    params, grads, anchors, buffers = problem(torch.float64, device, [20])
    results = []
    changes = [
        {},
        {"lam": 0.6},
        {"lr": 0.2},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"maximize": True},
    ]
    for change in changes:
        moved = clones(params)
        run(moved, grads, anchors, clones(buffers), **change)
        results.append(moved[0])
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


def test_nan_and_infinity_propagate(device):
    v, g, w, _ = (x[0] for x in problem(torch.float32, device, [3]))
    g[1], w[2] = math.nan, math.inf
    proximal_sgd_step_([v], [g], [w], lr=0.1, lam=0.5)
    assert v[0].isfinite() and v[1].isnan() and v[2] == math.inf


def test_views_of_any_layout_and_mixed_types(device):
    a, b, c, m = ([*random_tensors([(6, 8), (2, 3, 4, 5), (4, 10)], device=device, seed=s)] for s in range(4))
    views = [a[0].t(), a[1].to(memory_format=torch.channels_last), a[2][:, ::2]]
    others = [[x[0].t().contiguous(), x[1], x[2][:, 1::2]] for x in (b, c)]
    buffers = [m[0].t(), m[1], m[2][:, ::2]]
    surroundings = a[2][:, 1::2].clone()
    expected, expected_buffers = [v.contiguous().clone() for v in views], [x.contiguous().clone() for x in buffers]
    run(expected, *others, expected_buffers, momentum=0.9)
    run(views, *others, buffers, momentum=0.9)
    assert_same_bits([v.contiguous() for v in views], expected)
    assert_same_bits([x.contiguous() for x in buffers], expected_buffers)
    assert torch.equal(a[2][:, 1::2], surroundings)
    mixed = [
        [x.to(d) for x, d in zip(random_tensors([(9,)] * 4, device=device, seed=s), FLOATS, strict=True)]
        for s in range(3)
    ]
    single = [clones(x) for x in mixed]
    run(*mixed, [])
    for t in range(4):
        run(*[[x[t]] for x in single], [])
        assert_same_bits([mixed[0][t]], [single[0][t]])


def test_no_tensors(device):
    proximal_sgd_step_([], [], [], lr=0.1, lam=0.1)


def test_version_counters_tell_autograd_of_the_write(device):
    x = torch.ones(3, device=device, requires_grad=True)
    square = x * x
    proximal_sgd_step_([x], [torch.ones(3, device=device)], [torch.ones(3, device=device)], lr=0.1, lam=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


# ---- squared distance ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_distance_is_the_definition(device, dtype):
    a, b, _, _ = problem(dtype, device)
    expected = sum((x.double() - y.double()).square().sum() for x, y in zip(a, b, strict=True))
    result = squared_distance(a, b)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # Sums of up to 2**17 float64 terms on both sides, and one rounding to the result's type.
    tolerance = 2.0**18 * 2.0**-53 + (0 if dtype == torch.float64 else 2.0**-24)
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(OPS["squared_distance"].reference(a, b), result, rtol=2 * tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_distance_in_half_precision_is_within_twice_the_error_of_plain_torch(device, dtype):
    a, b, *_ = problem(dtype, device, [5000, 77])
    exact = sum((x.double() - y.double()).square().sum() for x, y in zip(a, b, strict=True))
    plain = sum((x - y).square().sum() for x, y in zip(a, b, strict=True))
    assert (squared_distance(a, b).double() - exact).abs() <= 2 * (plain.double() - exact).abs()
    x = a[0].clone().requires_grad_()
    squared_distance([x], b[:1]).backward()
    wanted = 2 * (a[0].double() - b[0].double())
    assert (x.grad.double() - wanted).abs().max() <= 2 * (2 * (a[0] - b[0]) - wanted).abs().max()


def test_nan_and_infinity_propagate_into_the_distance(device):
    a, b = torch.zeros(3, device=device), torch.zeros(3, device=device)
    a[1] = math.inf
    assert squared_distance([a], [b]).item() == math.inf
    b[1] = math.inf
    assert math.isnan(squared_distance([a], [b]).item())


def test_the_distance_of_equal_models_is_zero_and_its_gradient_too(device):
    a = [x.requires_grad_() for x in random_tensors([(5,), (0,), (3, 2)], device=device)]
    distance = squared_distance(a, [x.detach().clone() for x in a])
    assert distance.item() == 0
    distance.backward()
    assert all(bool((x.grad == 0).all()) for x in a)


def test_gradcheck(device):
    a = [x.requires_grad_() for x in random_tensors([(3, 2), (0,), (), (5,)], torch.float64, device)]
    b = [x.requires_grad_() for x in random_tensors([(3, 2), (0,), (), (5,)], torch.float64, device, seed=1)]
    assert torch.autograd.gradcheck(lambda *x: squared_distance(list(x[:4]), list(x[4:])), (*a, *b))
    assert torch.autograd.gradcheck(lambda *x: squared_distance(list(x), [y.detach() for y in b]), tuple(a))
    assert torch.autograd.gradcheck(lambda *x: squared_distance([y.detach() for y in a], list(x)), tuple(b))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_native_gradient_gives_the_bits_of_the_reference(device, dtype):
    a, b, _, _ = problem(dtype, device)
    upstream = torch.tensor(0.7, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    native = OPS["squared_distance_backward"](upstream, a, b, True, True)
    assert_same_bits(native, OPS["squared_distance_backward"].reference(upstream, a, b, True, True))
    assert len(native) == 2 * len(SIZES) and bool((native[4] != 0).any())


def test_gradients_of_views_and_of_some_tensors_only(device):
    base, other = (
        random_tensors([(6, 8), (6, 8)], device=device),
        random_tensors([(8, 6), (6, 8)], device=device, seed=1),
    )
    for x in base:
        x.requires_grad_()
    (squared_distance([base[0].t(), base[1][:, ::2]], [other[0], other[1][:, ::2]]) * 3).backward()
    torch.testing.assert_close(base[0].grad, 6 * (base[0].detach() - other[0].t()))
    expected = torch.zeros_like(base[1]).detach()
    expected[:, ::2] = 6 * (base[1].detach() - other[1])[:, ::2]
    torch.testing.assert_close(base[1].grad, expected)
    fixed, free = torch.ones(2, device=device), torch.ones(2, device=device, requires_grad=True)
    squared_distance([fixed, free], [free.detach() * 2, fixed * 3]).backward()
    assert free.grad.tolist() == [-4.0, -4.0]


def test_the_gradient_cannot_be_differentiated_again(device):
    a = torch.ones(2, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(squared_distance([a], [torch.zeros(2, device=device)]), a, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        grad.sum().backward()


# ---- the same bits ---------------------------------------------------------------------------------------------------


def everything(dtype, device):
    params, grads, anchors, buffers = problem(dtype, device, [70001, 13, 12297])
    distance = squared_distance(params, anchors)
    run(params, grads, anchors, buffers, momentum=0.9, nesterov=True, weight_decay=0.01)
    return [*params, *buffers, distance]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_do_not_depend_on_threads_or_runs(device, dtype):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4, 1):
            torch.set_num_threads(threads)
            results.append(everything(dtype, device))
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
        results.append(everything(dtype, "cpu"))
    _native.set_isa(before)
    for other in results[1:]:
        assert_same_bits(results[0], other)


# ---- bad input -------------------------------------------------------------------------------------------------------


def x3():
    return torch.tensor([1.0, 2.0, 3.0])


BAD_CALLS = {
    "lr": (lambda v, g: proximal_sgd_step_([v], [g], [g], lr=-1, lam=0.1), "lr is -1"),
    "lam": (lambda v, g: proximal_sgd_step_([v], [g], [g], lr=1, lam=-0.1), "lam is -0.1"),
    "nan": (lambda v, g: proximal_sgd_step_([v], [g], [g], lr=1, lam=math.nan), "lam is nan"),
    "weight decay": (
        lambda v, g: proximal_sgd_step_([v], [g], [g], 1, 0.1, weight_decay=math.inf),
        "weight_decay is inf",
    ),
    "momentum": (lambda v, g: proximal_sgd_step_([v], [g], [g], 1, 0.1, momentum=-0.9), "momentum is -0.9"),
    "nesterov": (lambda v, g: proximal_sgd_step_([v], [g], [g], 1, 0.1, nesterov=True), "nesterov needs momentum"),
    "no buffers": (lambda v, g: proximal_sgd_step_([v], [g], [g], 1, 0.1, momentum=0.9), "0 momentum buffers"),
    "buffers": (
        lambda v, g: proximal_sgd_step_([v], [g], [g], 1, 0.1, momentum_buffers=[v.clone()]),
        "1 momentum buffers",
    ),
    "shape": (
        lambda v, g: proximal_sgd_step_([v, v.clone()], [g, g], [g, g[:2]], 1, 0.1),
        r"tensor 1 of anchors is float32 \[2\]",
    ),
    "dtype": (lambda v, g: proximal_sgd_step_([v], [g.double()], [g], 1, 0.1), "of grads is float64"),
    "device": (lambda v, g: proximal_sgd_step_([v], [g], [g.to("meta")], 1, 0.1), "of anchors .* on meta"),
    "length": (lambda v, g: proximal_sgd_step_([v], [g], [], 1, 0.1), "0 anchors for 1 params"),
    "none": (lambda v, g: proximal_sgd_step_([v], [None], [g], 1, 0.1), "a NoneType"),
    "one tensor": (lambda v, g: proximal_sgd_step_(v, [g], [g], 1, 0.1), "params is float32"),
    "integers": (lambda v, g: proximal_sgd_step_([v.long()], [g.long()], [g.long()], 1, 0.1), "int64"),
    "twice": (lambda v, g: proximal_sgd_step_([v, v], [g, g], [g, g], 1, 0.1), "overlap in memory"),
    "shifted": (lambda v, g: proximal_sgd_step_([v[:2]], [g[:2]], [v[1:]], 1, 0.1), "overlap in memory"),
    "buffer is param": (
        lambda v, g: proximal_sgd_step_([v], [g], [g], 1, 0.1, 0.9, momentum_buffers=[v]),
        "overlap in memory",
    ),
    "expanded": (lambda v, g: proximal_sgd_step_([v[:1].expand(3)], [g], [g], 1, 0.1), "is expanded"),
    "over itself": (
        lambda v, g: proximal_sgd_step_([v.as_strided((2, 2), (1, 1))], *[[g.new_ones(2, 2)]] * 2, 1, 0.1),
        "overlaps itself",
    ),
    "no tensors": (lambda v, g: squared_distance([], []), "no tensors given"),
    "distance": (lambda v, g: squared_distance([v], [g[:2]]), "tensor 0 of b"),
    "distance of one": (lambda v, g: squared_distance(v, g), "a list of tensors"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_say_what_is_accepted_and_change_nothing(device, case):
    call, message = BAD_CALLS[case]
    v, g = x3().to(device), x3().to(device)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call(v, g)
    assert v.tolist() == [1.0, 2.0, 3.0]


# ---- torch.compile and friends ---------------------------------------------------------------------------------------


def test_opcheck(device_type):
    params, grads, anchors, buffers = problem(torch.float32, device_type, [5, 0, 17])
    step = torch.ops.pfl_ext.proximal_sgd_step_
    torch.library.opcheck(step, (params, [], grads, anchors, 0.1, 0.5, 0.0, 0.0, 0.01, False, False, False))
    torch.library.opcheck(step, (params, buffers, grads, anchors, 0.1, 0.5, 0.9, 0.0, 0.01, True, False, False))
    a = [x.clone().requires_grad_() for x in params]
    torch.library.opcheck(torch.ops.pfl_ext.squared_distance, (a, anchors))
    torch.library.opcheck(
        torch.ops.pfl_ext.squared_distance_backward,
        (torch.tensor(1.0, device=device_type), params, anchors, True, True),
    )


LAYOUTS = {
    "contiguous": lambda x: x,
    "permuted": lambda x: x.permute(2, 0, 1),
    "gaps": lambda x: x[:, :, ::2],
    "permuted with gaps": lambda x: x[:, :, ::2].permute(2, 0, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_have_the_layout_that_torch_compile_was_told(device_type, layout):
    a, b = (LAYOUTS[layout](x) for x in random_tensors([(6, 4, 8), (6, 4, 8)], torch.float32, device_type))
    given = (torch.tensor(1.5, device=device_type), [a], [b], True, True)
    torch.library.opcheck(torch.ops.pfl_ext.squared_distance_backward, given)
    op = OPS["squared_distance_backward"]
    found, reference = op(*given), op.reference(*given)
    for x, y in zip(found, reference, strict=True):
        assert x.stride() == y.stride()
    assert_same_bits(found, reference)


def test_a_compiled_step_gives_the_same_bits(device_type):
    def step(params, grads, anchors):
        proximal_sgd_step_(params, grads, anchors, lr=0.1, lam=0.5)
        return squared_distance(params, anchors)

    params, grads, anchors, _ = problem(torch.float32, device_type, [5, 40, 17])
    other = clones(params)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits([compiled(params, grads, anchors)], [step(other, grads, anchors)])
    assert_same_bits(params, other)


def test_a_compiled_loss_has_its_gradient(device_type):
    a = torch.ones(3, device=device_type, requires_grad=True)
    loss = torch.compile(lambda x: squared_distance([x], [x.detach() * 3]) / 2, fullgraph=True, backend="aot_eager")
    loss(a).backward()
    assert a.grad.tolist() == [-2.0, -2.0, -2.0]


def test_fake_tensors_on_a_cuda_device_need_no_gpu():
    with torch._subclasses.FakeTensorMode():
        params = [torch.empty(5, 3, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        others = [torch.empty_like(w) for w in params]
        proximal_sgd_step_(params, others, others, 0.1, 0.5)
        distance = squared_distance(params, others)
    assert (distance.shape, distance.dtype, distance.device.type) == (torch.Size([]), torch.float32, "cuda")
