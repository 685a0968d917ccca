from __future__ import annotations

import math

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F

from pfl_ext import _native
from pfl_ext.ops import linear, linear_relu
from pfl_ext.ops._declare import OPS

# rows, inputs, outputs: the CNN's layer, rows beside the groups of five, outputs beside those of the registers, inputs
# that fill no vector and that leave a rest, and nothing at all.
SHAPES = {
    "cnn": (10, 1024, 512),
    "lenet": (10, 400, 120),
    "one row": (1, 33, 7),
    "rows beside groups": (9, 65, 23),
    "most rows": (10, 129, 66),
    "few inputs": (4, 3, 11),
    "one of each": (1, 1, 1),
    "no row": (0, 8, 4),
    "no input": (3, 0, 4),
    "no output": (3, 8, 0),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def tensors(shape, dtype=torch.float32, device="cpu"):
    """Input, weight and bias that require gradients."""
    rows, inputs, outputs = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    sizes = [((rows, inputs), 1.0), ((outputs, inputs), 1 / math.sqrt(max(1, inputs))), ((outputs,), 0.3)]
    return [
        (scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype).to(device).requires_grad_()
        for size, scale in sizes
    ]


def layers(x, weight, bias):
    return F.relu(F.linear(x, weight, bias))


def upstream_of(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)


@pytest.fixture(autouse=True)
def kernels_for_small_layers(monkeypatch):
    """They would be torch's otherwise, as the call takes longer than their products."""
    monkeypatch.setattr(linear, "_FEWEST_WEIGHTS", 0)


@pytest.fixture
def calls(monkeypatch):
    """How often the kernels of the forward pass were asked."""
    seen = []
    monkeypatch.setattr(linear, "_forward", lambda *given: seen.append(1) or OPS["linear_relu_forward"](*given))
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients_are_those_of_the_layers_but_for_rounding(device, shape, dtype):
    given = tensors(shape, DTYPES[dtype], device)
    rows, inputs, outputs = SHAPES[shape]
    y = linear_relu(*given)
    upstream = upstream_of(y)
    found = torch.autograd.grad(y, given, upstream)
    x, weight, bias = (t.detach().double() for t in given)
    exact = F.linear(x, weight, bias)
    # Where a sum is nearly zero rounding may cut it or not: the choice is taken from what is tested.
    masked = torch.where(y.detach() <= 0, 0, upstream.double())
    expected = [torch.relu(exact), masked @ weight, masked.T @ x, masked.sum(0)]
    size = masked.abs()
    sizes = [F.linear(x.abs(), weight.abs(), bias.abs()), size @ weight.abs(), size.T @ x.abs(), size.sum(0)]
    # A sum of n products has an error of at most (n + 1) roundings of the sum of their sizes, on either side.
    for actual, e, s, count in zip((y, *found), expected, sizes, (inputs + 1, outputs, rows, rows), strict=True):
        assert actual.shape == e.shape and actual.dtype == DTYPES[dtype]
        bound = (count + 1) * torch.finfo(actual.dtype).eps * s + torch.finfo(actual.dtype).tiny
        assert bool(((actual.double() - e).abs() <= bound).all())


@pytest.mark.parametrize("shape", ["cnn", "lenet", "rows beside groups", "few inputs"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_neither_threads_nor_the_instruction_set_where_products_are_not_rounded(
    on_every_isa, shape, dtype
):
    given = tensors(shape, DTYPES[dtype])
    upstream = upstream_of(layers(*given))

    def run():
        y = linear_relu(*given)
        return [y, *torch.autograd.grad(y, given, upstream)]

    found = on_every_isa(run)
    for (isa, _), values in found.items():
        same = found[isa if isa in (None, "baseline") else next(reversed(found))[0], 1]
        assert all(torch.equal(a, b) for a, b in zip(values, same, strict=True))


def test_nan_and_infinity_pass_as_in_torch(device):
    for value in (math.nan, math.inf, -math.inf):
        x, weight, bias = (t.detach() for t in tensors("rows beside groups", device=device))
        x[3, 5] = value
        mine, theirs = ([t.clone().requires_grad_() for t in (x, weight, bias)] for _ in range(2))
        y, expected = linear_relu(*mine), layers(*theirs)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        upstream = upstream_of(y)
        found, other = (torch.autograd.grad(a, b, upstream) for a, b in ((y, mine), (expected, theirs)))
        for a, b in zip(found, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_strided_views_and_offsets_are_taken(device):
    x, weight, bias = (t.detach() for t in tensors("rows beside groups", device=device))
    expected = linear_relu(x, weight, bias)
    assert torch.equal(linear_relu(x.T.contiguous().T, weight.T.contiguous().T, bias), expected)
    wide = torch.cat([torch.zeros_like(x), x], 1)[:, x.shape[1] :]
    assert torch.equal(linear_relu(wide, torch.cat([weight, weight])[len(weight) :], bias), expected)


def test_gradcheck_of_first_and_second_order(device):
    given = tensors("few inputs", torch.float64, device)
    assert torch.autograd.gradcheck(linear_relu, given)
    assert torch.autograd.gradgradcheck(linear_relu, given)


def test_only_what_is_asked_for_is_given(device):
    x, weight, bias = tensors("rows beside groups", device=device)
    upstream = upstream_of(linear_relu(x, weight, bias))
    full = torch.autograd.grad(linear_relu(x, weight, bias), (x, weight, bias), upstream)
    fixed = linear_relu(x.detach(), weight, bias)
    for found, expected in zip(torch.autograd.grad(fixed, (weight, bias), upstream), full[1:], strict=True):
        assert torch.equal(found, expected)


def test_kernels_are_for_few_rows_and_many_weights_of_float32_and_float64(calls, monkeypatch):
    x, weight, bias = (t.detach() for t in tensors("rows beside groups"))
    linear_relu(x, weight, bias)
    assert len(calls) == (_native.isa() is not None)
    calls.clear()
    monkeypatch.setattr(linear, "_FEWEST_WEIGHTS", weight.numel() + 1)
    assert torch.equal(linear_relu(x, weight, bias), layers(x, weight, bias))
    monkeypatch.setattr(linear, "_FEWEST_WEIGHTS", weight.numel())
    for other in (x.repeat(2, 1), x[None], x[0]):
        assert torch.equal(linear_relu(other, weight, bias), layers(other, weight, bias))
    low = [t.bfloat16() for t in (x, weight, bias)]
    assert torch.equal(linear_relu(*low), layers(*low))
    several = torch.stack([weight, 2 * weight])
    together = vmap(linear_relu, in_dims=(None, 0, None))(x, several, bias)
    for one, w in zip(together, several, strict=True):
        torch.testing.assert_close(one, layers(x, w, bias), rtol=1e-5, atol=1e-6)
    assert calls == []


def test_shapes_that_do_not_fit_are_refused(device):
    x, weight, bias = (t.detach() for t in tensors("rows beside groups", device=device))
    with pytest.raises(ValueError, match=r"takes rows .*; got float32 \[9, 65\] on .*, float32 \[65\] on"):
        linear_relu(x, weight[0], bias)
    with pytest.raises(RuntimeError):
        linear_relu(x[:, 1:], weight, bias)
    if device == "cpu" and _native.isa() is not None:
        forward, backward = OPS["linear_relu_forward"], OPS["linear_relu_backward"]
        with pytest.raises(RuntimeError, match=r"x is float32 .*; a contiguous float32 or float64 tensor of 2"):
            forward(x[:, ::2], weight, bias)
        for wrong in ((x, weight[:, 1:].contiguous(), bias), (x, weight, bias[1:])):
            with pytest.raises(RuntimeError, match="do not fit"):
                forward(*wrong)
        y = forward(x, weight, bias)
        for grad, out in ((y[1:], y[1:]), (y, y[1:]), (y[:, 1:].contiguous(), y[:, 1:].contiguous())):
            with pytest.raises(RuntimeError, match="do not fit"):
                backward(grad, out, x, weight, True)


def test_the_ops_pass_opcheck_and_agree_with_their_references(device_type):
    given = [t.detach() for t in tensors("rows beside groups", torch.float64, device_type)]
    torch.library.opcheck(OPS["linear_relu_forward"].overload, tuple(given))
    y = OPS["linear_relu_forward"](*given)
    torch.testing.assert_close(y, OPS["linear_relu_forward"].reference(*given), rtol=1e-12, atol=1e-12)
    for for_x in (True, False):
        arguments = (upstream_of(y), y, *given[:2], for_x)
        torch.library.opcheck(OPS["linear_relu_backward"].overload, arguments)
        found = OPS["linear_relu_backward"](*arguments)
        for mine, reference in zip(found, OPS["linear_relu_backward"].reference(*arguments), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)
