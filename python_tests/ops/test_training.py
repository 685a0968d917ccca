from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pfl_ext import _native
from pfl_ext.ops import distillation_loss, loss_and_gradients, proximal_sgd_step_, train_steps_
from pfl_ext.ops._declare import OPS


def block(inputs, outputs, size=3):
    return [nn.Conv2d(inputs, outputs, size), nn.MaxPool2d(2), nn.ReLU()]


NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(7, 3)), ["linear"], (7,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(37, 21), nn.ReLU(), nn.Linear(21, 10)), ["linear_relu", "linear"], (37,)),
    "wide mlp": (
        lambda: nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)),
        ["linear_relu", "linear"],
        (784,),
    ),
    "two convolutions": (
        lambda: nn.Sequential(
            *block(3, 6), *block(6, 17), nn.Flatten(), nn.Linear(17 * 3 * 2, 12), nn.ReLU(), nn.Linear(12, 5)
        ),
        ["conv_pool_relu", "conv_pool_relu", "linear_relu", "linear"],
        (3, 20, 14),
    ),
    "one channel": (
        lambda: nn.Sequential(*block(1, 4, 5), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)),
        ["conv_pool_relu", "linear"],
        (1, 12, 12),
    ),
    "one place": (
        lambda: nn.Sequential(*block(2, 4), nn.Flatten(), nn.Linear(4, 3)),
        ["conv_pool_relu", "linear"],
        (2, 4, 4),
    ),
}
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.01},
    "anchor": {"lam": 0.3},
    "momentum": {"momentum": 0.9},
    "first": {"momentum": 0.9, "first": True},
    "all": {"momentum": 0.9, "weight_decay": 0.01, "lam": 0.3},
}


def problem(name, dtype, rows=10):
    """Network, layers, batch, anchors and buffers."""
    make, layers, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = make().to(dtype).to(memory_format=torch.channels_last)
    x = torch.randn(rows, *shape, dtype=dtype)
    classes = list(network.parameters())[-1].numel()
    others = [[torch.randn_like(p) for p in network.parameters()] for _ in range(2)]
    return network, layers, x, torch.randint(0, classes, (rows,)), *others


def by_autograd(network, x, targets, anchors, buffers, **options):
    params = list(network.parameters())
    loss = F.cross_entropy(network(x), targets)
    grads = list(torch.autograd.grad(loss, params))
    lam = options.pop("lam", 0.0)
    proximal_sgd_step_(
        params, grads, anchors, 0.1, lam, momentum_buffers=buffers if "momentum" in options else [], **options
    )
    return loss.detach(), [p.detach() for p in params]


def by_the_op(network, layers, x, targets, anchors, buffers, **options):
    params = [p.detach() for p in network.parameters()]
    (loss,) = train_steps_(params, x, targets, layers, 0.1, anchors=anchors, momentum_buffers=buffers, **options)
    return loss, params


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_that_of_autograd(device, name, options):
    network, layers, x, targets, anchors, buffers = problem(name, torch.float64)
    other, others = copy.deepcopy(network), [b.clone() for b in buffers]
    loss, expected = by_autograd(other, x, targets, anchors, others, **options)
    found, params = by_the_op(network, layers, x, targets, anchors, buffers, **options)
    # Sums of at most a thousand numbers around 1, a few times over: far below 1e-12 in float64.
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
    for a, b in zip([*params, *buffers], [*expected, *others], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_in_one_call_are_those_of_a_call_for_each_to_the_bit(device, name, options):
    network, layers, x, targets, anchors, buffers = problem(name, torch.float32, rows=23)
    again = {"params": [p.detach().clone() for p in network.parameters()], "buffers": [b.clone() for b in buffers]}
    params = [p.detach() for p in network.parameters()]
    more = {"anchors": anchors, **options}
    losses = train_steps_(params, x, targets, layers, 0.1, batch_size=10, momentum_buffers=buffers, **more)
    expected = []
    for inputs, classes in zip(x.split(10), targets.split(10), strict=True):
        expected.append(
            train_steps_(again["params"], inputs, classes, layers, 0.1, momentum_buffers=again["buffers"], **more)
        )
        more.pop("first", None)
    assert torch.equal(losses, torch.cat(expected)) and len(losses) == 3
    for a, b in zip([*params, *buffers], [*again["params"], *again["buffers"]], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 4, 33])
@pytest.mark.parametrize("name", NETWORKS)
def test_in_float32_it_is_no_further_from_the_truth_than_autograd(device, name, rows):
    network, layers, x, targets, anchors, buffers = problem(name, torch.float32, rows)
    _, exact = by_autograd(copy.deepcopy(network).double(), x.double(), targets, [], [])
    _, theirs = by_autograd(copy.deepcopy(network), x, targets, [], [])
    _, ours = by_the_op(network, layers, x, targets, anchors, buffers)
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        unit = torch.finfo(torch.float32).eps * truth.abs().max()
        assert (a - truth).abs().max() <= 4 * (b - truth).abs().max() + 4 * unit


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_a_step_to_the_bit(device, name):
    network, layers, x, targets, *_ = problem(name, torch.float32)
    params = [p.detach() for p in network.parameters()]
    before = [p.clone() for p in params]
    loss, gradients = loss_and_gradients(params, x, targets, layers)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert [g.stride() for g in gradients] == [p.stride() for p in params]
    # The first step of momentum puts the gradient into its buffer.
    buffers = [torch.full_like(p, 7) for p in params]
    (expected,) = train_steps_(params, x, targets, layers, 0.1, momentum=0.9, momentum_buffers=buffers, first=True)
    assert torch.equal(loss, expected)
    assert all(torch.equal(g, b) for g, b in zip(gradients, buffers, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_autograd(device, name):
    network, layers, x, targets, *_ = problem(name, torch.float64)
    params = list(network.parameters())
    expected = F.cross_entropy(network(x), targets)
    loss, gradients = loss_and_gradients(params, x, targets, layers)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, params), strict=True):
        assert not mine.requires_grad and theirs.abs().max() > 1e-3
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_parameters_may_lie_as_they_like_in_memory(device):
    network, layers, x, targets, *_ = problem("mlp", torch.float32)
    params = [p.detach() for p in network.parameters()]
    room = torch.zeros(10_000)
    moved, place = [], 3
    for p in params:
        moved.append(room[place : place + p.numel()].view(p.shape).copy_(p))
        place += p.numel() + 5
    found, expected = (loss_and_gradients(some, x, targets, layers)[1] for some in (moved, params))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


DISTILLED = [(1.0, 0.3, "kl"), (5.0, 0.75, "kl"), (25.0, 1.0, "kl"), (0.5, 0.5, "ce"), (9.0, 0.0, "kl")]


@pytest.mark.parametrize(("temperature", "lam", "soft"), DISTILLED)
@pytest.mark.parametrize("name", ["linear", "mlp", "two convolutions"])
def test_a_step_of_distillation_is_that_of_autograd(device, name, temperature, lam, soft):
    network, layers, x, targets, *_ = problem(name, torch.float64)
    other = copy.deepcopy(network)
    teacher = 3 * torch.randn(len(x), list(network.parameters())[-1].numel(), dtype=torch.float64)
    loss = distillation_loss(other(x), teacher, targets, lam, temperature, soft)
    expected = [
        p.detach() - 0.1 * g
        for p, g in zip(other.parameters(), torch.autograd.grad(loss, list(other.parameters())), strict=True)
    ]
    params = [p.detach() for p in network.parameters()]
    (found,) = train_steps_(
        params, x, targets, layers, 0.1,
        teacher=teacher, temperature=temperature, soft_scale=lam * temperature**2, hard_scale=1 - lam, soft=soft,
    )  # fmt: skip
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(params, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_each_step_has_its_own_rows_of_the_teacher(device):
    network, layers, x, targets, *_ = problem("mlp", torch.float32, rows=23)
    teacher, numbers = torch.randn(23, 10), {"temperature": 5.0, "soft_scale": 10.0, "hard_scale": 0.5}
    again = [p.detach().clone() for p in network.parameters()]
    params = [p.detach() for p in network.parameters()]
    losses = train_steps_(params, x, targets, layers, 0.1, batch_size=10, teacher=teacher, **numbers)
    parts = zip(x.split(10), targets.split(10), teacher.split(10), strict=True)
    expected = [train_steps_(again, a, y, layers, 0.1, teacher=t, **numbers) for a, y, t in parts]
    assert torch.equal(losses, torch.cat(expected))
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


def test_a_sure_teacher_has_a_finite_loss_and_a_nan_of_his_is_not_hidden(device):
    params = [torch.zeros(3, 2), torch.zeros(3)]
    teacher = torch.tensor([[0.0, -torch.inf, -1000.0]])
    more = {"soft_scale": 1.0, "hard_scale": 0.0}
    (loss,) = train_steps_(params, torch.ones(1, 2), torch.tensor([1]), ["linear"], 1.0, teacher=teacher, **more)
    assert float(loss) == pytest.approx(float(torch.tensor(3.0).log()))
    assert params[1].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    teacher[0, 1] = torch.nan
    (loss,) = train_steps_(params, torch.ones(1, 2), torch.tensor([1]), ["linear"], 1.0, teacher=teacher, **more)
    assert loss.isnan() and params[1].isnan().all()


def test_the_loss_and_its_gradient_of_large_logits_are_right(device):
    bias = torch.tensor([1000.0, -1000.0, 999.0])
    (loss,) = train_steps_([torch.zeros(3, 2), bias], torch.ones(2, 2), torch.tensor([0, 2]), ["linear"], 1.0)
    exact = F.cross_entropy(torch.tensor([[1000.0, -1000.0, 999.0]] * 2, dtype=torch.float64), torch.tensor([0, 2]))
    assert float(loss) == pytest.approx(float(exact), rel=1e-6)
    share = 1 / (1 + torch.tensor(-1.0).exp())
    assert bias.tolist() == pytest.approx([1000 - float(share) + 0.5, -1000.0, 999 - (1 - float(share)) + 0.5])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(device, value):
    network, layers, x, targets, *_ = problem("mlp", torch.float32)
    x[3, 5] = value
    loss, params = by_the_op(network, layers, x, targets, [], [])
    assert not loss.isfinite()
    assert not all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_bits_with_any_number_of_threads(name, on_every_isa):
    def step():
        network, layers, x, targets, anchors, buffers = problem(name, torch.float32, rows=33)
        params = [p.detach() for p in network.parameters()]
        of_batch, gradients = loss_and_gradients(params, x, targets, layers)
        distilled = {"teacher": torch.randn(33, params[-1].numel()), "temperature": 5.0, "soft_scale": 12.5}
        loss, params = by_the_op(network, layers, x, targets, anchors, buffers, **OPTIONS["all"], **distilled)
        return [of_batch, *gradients, loss, *params, *buffers]

    found = on_every_isa(step)
    for (isa, _), tensors in found.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, found[isa, 1], strict=True))


WRONG = {
    "a class that is not there": (lambda g: g.update(targets=torch.tensor([0] * 9 + [10])), "target 9 is 10"),
    "a negative class": (lambda g: g.update(targets=torch.tensor([-100] + [0] * 9)), "target 0 is -100"),
    "too few targets": (lambda g: g.update(targets=torch.tensor([0])), "targets are int64"),
    "targets of another type": (lambda g: g.update(targets=torch.zeros(10)), "targets are float32"),
    "other inputs": (lambda g: g.update(x=torch.zeros(10, 36)), "layer 0 has the weight"),
    "no samples": (lambda g: g.update(x=torch.zeros(0, 37)), "x is float32"),
    "too few layers": (lambda g: g.update(layers=["linear"]), "4 params for"),
    "no layer at the end": (lambda g: g.update(layers=["linear", "linear_relu"]), "4 params for"),
    "an unknown layer": (lambda g: g.update(layers=["softmax", "linear"]), "layer 'softmax' is not known"),
    "a negative size": (lambda g: g.update(batch_size=-1), "batch_size is -1"),
    "a negative step": (lambda g: g.update(lr=-1.0), "lr"),
    "an anchor too few": (lambda g: g.update(anchors=g["anchors"][1:], lam=0.1), "3 anchors for 4 params"),
    "a buffer of another shape": (
        lambda g: g.update(momentum_buffers=[torch.zeros(2)] * 4, momentum=0.5),
        "tensor 0 of momentum_buffers",
    ),
    "no teacher": (lambda g: g.update(soft_scale=1.0), "soft_scale is 1"),
    "a teacher of other classes": (lambda g: g.update(soft_scale=1.0, teacher=torch.zeros(10, 9)), "teacher.* float32"),
    "a teacher of other samples": (lambda g: g.update(soft_scale=1.0, teacher=torch.zeros(9, 10)), "teacher.* float32"),
    "a teacher of another type": (
        lambda g: g.update(soft_scale=1.0, teacher=torch.zeros(10, 10, dtype=torch.float64)),
        "teacher.* float64",
    ),
    "a temperature of zero": (lambda g: g.update(temperature=0.0), "temperature is 0"),
    "an infinite scale": (lambda g: g.update(soft_scale=float("inf")), "scales of the soft"),
    "an unknown soft term": (lambda g: g.update(soft="js"), "soft='js' is not known"),
    "a teacher in the weights": (
        lambda g: g.update(soft_scale=1.0, teacher=g["params"][0].view(-1)[:100].view(10, 10)),
        "overlap",
    ),
    "the weight as a batch": (lambda g: g.update(x=g["params"][0][:10]), "overlap"),
}


@pytest.mark.skipif(_native.isa() is None, reason="needs the CPU library")
@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(what):
    network, layers, x, targets, anchors, _ = problem("mlp", torch.float32)
    params = [p.detach() for p in network.parameters()]
    given = {"params": params, "x": x, "targets": targets, "layers": layers, "lr": 0.1, "anchors": anchors}
    change, message = WRONG[what]
    change(given)
    before = [p.clone() for p in params]
    with pytest.raises((ValueError, RuntimeError), match=message):
        train_steps_(**given)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


GRADIENTS_OF = {what: WRONG[what] for what in list(WRONG)[: list(WRONG).index("a negative size")]}


@pytest.mark.skipif(_native.isa() is None, reason="needs the CPU library")
@pytest.mark.parametrize("what", GRADIENTS_OF)
def test_what_does_not_fit_has_no_gradients(what):
    network, layers, x, targets, *_ = problem("mlp", torch.float32)
    given = {"params": [p.detach() for p in network.parameters()], "x": x, "targets": targets, "layers": layers}
    change, message = WRONG[what]
    change(given)
    with pytest.raises((ValueError, RuntimeError), match=message):
        loss_and_gradients(**given)


@pytest.mark.skipif(_native.isa() is None, reason="needs the CPU library")
def test_weights_of_convolutions_in_another_order_are_refused():
    network, layers, x, targets, *_ = problem("two convolutions", torch.float32)
    with pytest.raises(RuntimeError, match="layer 0 has the weight"):
        train_steps_([p.detach().contiguous() for p in network.parameters()], x, targets, layers, 0.1)


@pytest.mark.parametrize("layer", [3, -1, 2**33, -(2**63)])
@pytest.mark.parametrize("run", [OPS["train_steps_"].overload, OPS["train_steps_"].reference], ids=["op", "reference"])
def test_a_layer_that_is_none_is_refused(run, layer):
    network, _, x, targets, *_ = problem("mlp", torch.float32)
    params = [p.detach() for p in network.parameters()]
    with pytest.raises((ValueError, RuntimeError), match="0, 1 and 2 are accepted"):
        run(params, [], [], x, targets, [layer, 2], 4, 0.1, 0.0, 0.0, 0.0, False, None, 1.0, 0.0, 1.0, False)


def test_the_ops_pass_opcheck(device_type):
    network, _, x, targets, anchors, buffers = problem("mlp", torch.float64)
    teacher = torch.randn(10, 10, dtype=torch.float64)
    params = [p.detach() for p in network.parameters()]
    torch.library.opcheck(
        OPS["train_steps_"].overload,
        (params, buffers, anchors, x, targets, [1, 2], 4, 0.1, 0.2, 0.9, 0.01, False, teacher, 5.0, 10.0, 0.5, False),
    )
    gradients = [torch.empty_like(p) for p in params]
    torch.library.opcheck(OPS["loss_and_gradients_"].overload, (gradients, params, x, targets, [1, 2]))


def test_autograd_learns_of_the_step():
    network, layers, x, targets, *_ = problem("mlp", torch.float32)
    loss = F.cross_entropy(network(x), targets)
    train_steps_(list(network.parameters()), x, targets, layers, 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
