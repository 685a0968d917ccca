from __future__ import annotations

import math

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F

from pfl_ext import _native
from pfl_ext.ops import conv_pool_relu
from pfl_ext.ops._declare import OPS

# samples, inputs, height, width, outputs, kernel: the networks' layers, and stretches of fewer and more numbers than
# vectors and their registers hold, odd sides, one position a cell row, more outputs than are taken at once, and few
# outputs, of which images are taken apart into planes: all at once, in two parts, and too large to be.
SHAPES = {
    "cnn 1": (4, 1, 28, 28, 32, 5),
    "cnn 2": (4, 32, 12, 12, 64, 5),
    "lenet 1": (2, 3, 32, 32, 6, 5),
    "lenet 2": (3, 6, 14, 14, 16, 5),
    "odd sides": (3, 2, 7, 10, 5, 3),
    "short stretches": (3, 2, 9, 11, 37, 3),
    "kernel of one": (2, 5, 8, 9, 70, 1),
    "long stretches": (2, 67, 9, 9, 17, 5),
    "few outputs": (2, 1, 12, 13, 4, 3),
    "eight outputs": (2, 2, 20, 41, 8, 4),
    "few outputs of a large image": (1, 3, 70, 90, 3, 3),
    "one cell": (1, 1, 3, 3, 1, 2),
    "no cell": (2, 1, 3, 3, 4, 3),
    "no sample": (0, 1, 6, 6, 4, 3),
}
MEMORY = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def tensors(shape, dtype=torch.float32, device="cpu", seed=0):
    """Input, weight and bias that require gradients."""
    samples, inputs, height, width, outputs, kernel = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    sizes = [(samples, inputs, height, width), (outputs, inputs, kernel, kernel), (outputs,)]
    scales = [1.0, 1 / math.sqrt(inputs * kernel**2), 0.3]
    return [
        (scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype).to(device).requires_grad_()
        for scale, size in zip(scales, sizes, strict=True)
    ]


def layers(x, weight, bias):
    return F.relu(F.max_pool2d(F.conv2d(x, weight, bias), 2))


def gradients(function, given, upstream):
    return torch.autograd.grad(function(*given), given, upstream)


def upstream_of(y, seed=1):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)


def channels_last(x):
    """What the ops take."""
    return x.permute(0, 2, 3, 1).contiguous()


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "no cell"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_result_is_that_of_the_three_layers_but_for_rounding(device, shape, memory, dtype):
    x, weight, bias = (t.detach() for t in tensors(shape, dtype, device))
    expected = layers(x.double(), weight.double(), bias.double())
    # A sum of n products and a bias has an error of at most (n + 1) roundings of the sum of their sizes; the largest of
    # a cell is off by no more than the worst of it. In float64 both sides round.
    size = F.max_pool2d(F.conv2d(x.double().abs(), weight.double().abs(), bias.double().abs()), 2)
    bound = (weight[0].numel() + 1) * torch.finfo(dtype).eps * size
    y = conv_pool_relu(*(t.contiguous(memory_format=MEMORY[memory]) for t in (x, weight)), bias)
    assert y.shape == expected.shape and y.dtype == dtype
    assert bool(((y.double() - expected).abs() <= bound).all())


def test_where_no_cell_fits_nothing_comes_out():
    x, weight, bias = (t.detach() for t in tensors("no cell"))
    for y in OPS["conv_pool_relu_forward"](channels_last(x), channels_last(weight), bias):
        assert y.shape == (2, 0, 0, 4)


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "no cell"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_gradients_are_those_of_the_three_layers_but_for_rounding(device, shape, dtype):
    given = tensors(shape, dtype, device)
    exact = [t.detach().double().requires_grad_() for t in given]
    upstream = upstream_of(conv_pool_relu(*given))
    # Where two numbers of a cell are nearly equal, rounding may choose another one than in float64: the choice is
    # taken from what is tested, the sums are in float64.
    x, weight, bias = (t.detach() for t in given)
    which = OPS["conv_pool_relu_forward"](channels_last(x), channels_last(weight), bias)[1]
    full = OPS["conv_pool_relu_backward"].reference(
        upstream.double().permute(0, 2, 3, 1).contiguous(),
        which,
        exact[0].detach().permute(0, 2, 3, 1).contiguous(),
        exact[1].detach().permute(0, 2, 3, 1).contiguous(),
        True,
    )
    expected = [full[0].permute(0, 3, 1, 2), full[1].permute(0, 3, 1, 2), full[2]]
    size = OPS["conv_pool_relu_backward"].reference(
        upstream.double().abs().permute(0, 2, 3, 1).contiguous(),
        which,
        exact[0].detach().abs().permute(0, 2, 3, 1).contiguous(),
        exact[1].detach().abs().permute(0, 2, 3, 1).contiguous(),
        True,
    )
    sizes = [size[0].permute(0, 3, 1, 2), size[1].permute(0, 3, 1, 2), size[2]]
    terms = [SHAPES[shape][4] * SHAPES[shape][5] ** 2, *[max(1, which[..., 0].numel())] * 2]
    for actual, e, s, count in zip(gradients(conv_pool_relu, given, upstream), expected, sizes, terms, strict=True):
        assert actual.shape == e.shape and actual.dtype == dtype
        # A sum of n products has an error of at most (n + 1) roundings of the sum of their sizes.
        bound = (count + 1) * torch.finfo(dtype).eps / 2 * s + torch.finfo(dtype).tiny
        assert bool(((actual.double() - e).abs() <= bound).all())


@pytest.mark.parametrize("shape", ["cnn 1", "cnn 2", "lenet 2", "odd sides", "short stretches", "long stretches"])
def test_gradients_have_the_same_bits_on_every_instruction_set_and_number_of_threads(on_every_isa, shape):
    x, weight, bias = (t.detach() for t in tensors(shape))
    y, which = OPS["conv_pool_relu_forward"](channels_last(x), channels_last(weight), bias)
    arguments = (upstream_of(y), which, channels_last(x), channels_last(weight), True)
    found = list(on_every_isa(lambda: OPS["conv_pool_relu_backward"](*arguments)).values())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("shape", [name for name in SHAPES if not name.startswith("no ")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_results_have_the_same_bits_for_any_threads_and_wherever_products_are_not_rounded(on_every_isa, shape, dtype):
    x, weight, bias = (t.detach() for t in tensors(shape, dtype))
    found = on_every_isa(lambda: OPS["conv_pool_relu_forward"](channels_last(x), channels_last(weight), bias))
    for (isa, _), (y, which) in found.items():
        same = found[isa if isa in (None, "baseline") else next(reversed(found))[0], 1]
        assert torch.equal(y, same[0]) and torch.equal(which, same[1])


@pytest.mark.parametrize("shape", ["cnn 2", "odd sides", "few outputs", "one cell"])
def test_kernel_and_reference_choose_the_same_and_agree(device, shape):
    x, weight, bias = (t.detach() for t in tensors(shape, torch.float64, device))
    given = (channels_last(x), channels_last(weight), bias)
    y, which = OPS["conv_pool_relu_forward"](*given)
    expected, chosen = OPS["conv_pool_relu_forward"].reference(*given)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(which, chosen)
    arguments = (upstream_of(y), which, *given[:2])
    for for_x in (True, False):
        found = OPS["conv_pool_relu_backward"](*arguments, for_x)
        for mine, reference in zip(found, OPS["conv_pool_relu_backward"].reference(*arguments, for_x), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_nan_reaches_the_result_and_the_gradient_as_in_torch(device):
    for place in range(4):
        z = torch.tensor([[1.0, 5.0], [3.0, 2.0]], device=device).view(1, 1, 2, 2)
        z.view(-1)[place] = math.nan
        one, none = torch.ones(1, 1, 1, 1, device=device), torch.zeros(1, device=device)
        mine, theirs = (z.clone().requires_grad_() for _ in range(2))
        y, expected = conv_pool_relu(mine, one, none), layers(theirs, one, none)
        assert y.isnan().all() and expected.isnan().all()
        y.sum().backward()
        expected.sum().backward()
        assert torch.equal(mine.grad, theirs.grad)


def test_the_first_of_equal_numbers_has_the_gradient_and_zero_has_none(device):
    z = torch.tensor([[2.0, 2.0], [1.0, 2.0]], device=device).view(1, 1, 2, 2).requires_grad_()
    one, none = torch.ones(1, 1, 1, 1, device=device), torch.zeros(1, device=device)
    conv_pool_relu(z, one, none).sum().backward()
    assert z.grad.flatten().tolist() == [1, 0, 0, 0]
    z = torch.tensor([[0.0, -1.0], [-2.0, -3.0]], device=device).view(1, 1, 2, 2).requires_grad_()
    conv_pool_relu(z, one, none).sum().backward()
    assert z.grad.flatten().tolist() == [0, 0, 0, 0]


def test_gradcheck_of_first_and_second_order(device):
    given = tensors("odd sides", torch.float64, device)
    assert torch.autograd.gradcheck(conv_pool_relu, given)
    assert torch.autograd.gradgradcheck(conv_pool_relu, given)


def test_only_what_is_asked_for_is_given(device):
    x, weight, bias = tensors("odd sides", device=device)
    upstream = upstream_of(conv_pool_relu(x, weight, bias))
    full = gradients(conv_pool_relu, [x, weight, bias], upstream)
    fixed = conv_pool_relu(x.detach(), weight, bias)
    for found, expected in zip(torch.autograd.grad(fixed, (weight, bias), upstream), full[1:], strict=True):
        assert torch.equal(found, expected)
    with torch.no_grad():
        assert not conv_pool_relu(x, weight, bias).requires_grad


def test_other_types_and_transforms_get_the_three_layers(device):
    x, weight, bias = (t.detach().bfloat16() for t in tensors("odd sides", device=device))
    assert torch.equal(conv_pool_relu(x, weight, bias), layers(x, weight, bias))
    x, weight, bias = (t.detach() for t in tensors("odd sides", device=device))
    several = torch.stack([weight, 2 * weight])
    together = vmap(conv_pool_relu, in_dims=(None, 0, None))(x, several, bias)
    for one, w in zip(together, several, strict=True):
        torch.testing.assert_close(one, layers(x, w, bias), rtol=1e-5, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused(device):
    x, weight, bias = (t.detach() for t in tensors("odd sides", device=device))
    with pytest.raises(ValueError, match=r"takes images .*; got float32 \[2, 7, 10\] on"):
        conv_pool_relu(x[0], weight, bias)
    with pytest.raises(RuntimeError):
        conv_pool_relu(x, weight[:, :1], bias)
    if device == "cpu" and _native.isa() is not None:
        forward = OPS["conv_pool_relu_forward"]
        with pytest.raises(RuntimeError, match=r"x is float32 .*; a contiguous float32 or float64 tensor of 4"):
            forward(x.permute(0, 2, 3, 1), channels_last(weight), bias)
        with pytest.raises(RuntimeError, match=r"bias is float64 .* of the type of the others"):
            forward(channels_last(x), channels_last(weight), bias.double())
        for wrong in (
            (weight[:, :1], bias),
            (weight, bias[1:]),
            (weight[:, :, :0], bias),
            (weight.tile(1, 1, 3, 1), bias),
        ):
            with pytest.raises(RuntimeError, match="do not fit"):
                forward(channels_last(x), channels_last(wrong[0]), wrong[1])
        y, which = forward(channels_last(x), channels_last(weight), bias)
        with pytest.raises(RuntimeError, match="do not fit"):
            OPS["conv_pool_relu_backward"](y[:1], which[:1], channels_last(x), channels_last(weight), True)


@pytest.mark.parametrize("shape", ["odd sides", "long stretches", "short stretches"])
def test_a_place_beyond_the_cell_has_no_gradient_as_in_the_reference(device, shape):
    x, weight, bias = (t.detach() for t in tensors(shape, torch.float64, device))
    given = (channels_last(x), channels_last(weight))
    y, which = OPS["conv_pool_relu_forward"](*given, bias)
    which[::2, 0] = 255
    which[..., -1] = 5
    upstream = upstream_of(y)
    op = OPS["conv_pool_relu_backward"]
    for found, expected in zip(
        op(upstream, which, *given, True), op.reference(upstream, which, *given, True), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_the_ops_pass_opcheck(device_type):
    x, weight, bias = (t.detach() for t in tensors("odd sides", torch.float64, device_type))
    given = (channels_last(x), channels_last(weight), bias)
    torch.library.opcheck(OPS["conv_pool_relu_forward"].overload, given)
    y, which = OPS["conv_pool_relu_forward"](*given)
    torch.library.opcheck(OPS["conv_pool_relu_backward"].overload, (y, which, *given[:2], True))
