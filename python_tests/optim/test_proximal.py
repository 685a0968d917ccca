from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from pfl_ext.optim import ProximalSGD
from pfl_ext.optim.proximal import momentum_step_

OPTIONS = {
    "plain": {},
    "momentum": {"momentum": 0.5},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "all": {"momentum": 0.5, "dampening": 0.5, "weight_decay": 0.125, "maximize": True},
}


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(20, 6, generator=generator, device="cpu")
    y = torch.randint(0, 3, (20,), generator=generator, device="cpu")
    return x.to(torch.get_default_device(), dtype), y.to(torch.get_default_device())


def train(net, optimizer, steps, lam=0.0, anchors=()):
    x, y = data(next(net.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        for p, w in zip(net.parameters(), anchors, strict=False):
            loss = loss + lam / 2 * (p - w).square().sum()
        loss.backward()
        optimizer.step()


def parameters(net):
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("options", OPTIONS)
def test_without_lam_it_is_torchs_sgd_to_the_bit(options):
    # Numbers that are powers of two make products exact, so that torch's fused multiply-add rounds as we do.
    net, other = network(), network()
    train(net, ProximalSGD(net.parameters(), lr=0.25, lam=0.0, **OPTIONS[options]), 5)
    train(other, torch.optim.SGD(other.parameters(), lr=0.25, **OPTIONS[options]), 5)
    assert all(torch.equal(a, b) for a, b in zip(parameters(net), parameters(other), strict=True))


@pytest.mark.parametrize("options", ["plain", "momentum", "nesterov"])
def test_it_is_sgd_on_the_loss_with_the_proximal_term(options):
    net, other, anchors = (
        network(dtype=torch.float64),
        network(dtype=torch.float64),
        parameters(network(3, torch.float64)),
    )
    train(net, ProximalSGD(net.parameters(), lr=0.1, lam=0.7, anchors=anchors, **OPTIONS[options]), 5)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, **OPTIONS[options]), 5, 0.7, anchors)
    for a, b in zip(parameters(net), parameters(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_the_default_anchor_is_where_the_parameters_were():
    net, start = network(), parameters(network())
    optimizer = ProximalSGD(net.parameters(), lr=0.1, lam=10.0)
    train(net, optimizer, 20)
    near = sum((a - b).norm() for a, b in zip(parameters(net), start, strict=True))
    free = network()
    train(free, ProximalSGD(free.parameters(), lr=0.1, lam=0.0), 20)
    assert near < 0.2 * sum((a - b).norm() for a, b in zip(parameters(free), start, strict=True))
    optimizer.set_anchors([torch.zeros_like(p) for p in net.parameters()])
    train(net, optimizer, 200)
    assert all(p.norm() < 0.2 for p in net.parameters())


def test_feddyn_by_a_shifted_anchor():
    alpha, net, other = 0.5, network(dtype=torch.float64), network(dtype=torch.float64)
    start, state = parameters(net), parameters(network(4, torch.float64))
    shifted = [w + h / alpha for w, h in zip(start, state, strict=True)]
    train(net, ProximalSGD(net.parameters(), lr=0.1, lam=alpha, anchors=shifted), 4)
    x, y = data(torch.float64)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(4):
        plain.zero_grad()
        loss = nn.functional.cross_entropy(other(x), y)
        for p, w, h in zip(other.parameters(), start, state, strict=True):
            loss = loss - (h * p).sum() + alpha / 2 * (p - w).square().sum()
        loss.backward()
        plain.step()
    for a, b in zip(parameters(net), parameters(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_parameters_that_get_their_first_gradient_later_begin_their_momentum_then():
    results = []
    for make in (
        lambda p: ProximalSGD(p, lr=0.25, lam=0.0, momentum=0.5, dampening=0.25),
        lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.5, dampening=0.25),
    ):
        a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        optimizer = make([a, b])
        for used in ([a], [a, b], [b], [a, b]):
            optimizer.zero_grad()
            sum(x.square().sum() for x in used).backward()
            optimizer.step()
        results.append((a.detach(), b.detach()))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_resumed_run_is_identical_to_an_unbroken_one():
    net = network()
    optimizer = ProximalSGD(net.parameters(), lr=0.1, lam=0.3, momentum=0.9, anchors=parameters(network(3)))
    train(net, optimizer, 2)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(net, optimizer, 2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network(5)
    resumed.load_state_dict(saved["net"])
    other = ProximalSGD(resumed.parameters())
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, 2)
    assert all(torch.equal(a, b) for a, b in zip(parameters(net), parameters(resumed), strict=True))


def test_groups_closure_and_scheduler():
    net = network()
    optimizer = ProximalSGD(
        [{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters()}], lr=0.1, lam=0.1
    )
    before, (x, y) = parameters(net), data()

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert optimizer.step(closure) > 0
    assert torch.equal(net[0].weight, before[0]) and not torch.equal(net[2].weight, before[2])
    scheduler.step()
    assert optimizer.param_groups[1]["lr"] == 0.05


# ---- gradients at hand -----------------------------------------------------------------------------------------------


def gradients(net):
    x, y = data(next(net.parameters()).dtype)
    return list(torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters())))


@pytest.mark.parametrize("options", OPTIONS)
def test_steps_along_gradients_are_those_of_parameters_that_have_them(options):
    net, other, anchors = network(), network(), parameters(network(3))
    optimizer = ProximalSGD(other.parameters(), lr=0.1, lam=0.7, anchors=anchors, **OPTIONS[options])
    buffers = [None] * 4
    for _ in range(3):
        momentum_step_(list(net.parameters()), gradients(net), anchors, buffers, lr=0.1, lam=0.7, **OPTIONS[options])
        train(other, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(parameters(net), parameters(other), strict=True))
    assert all(p.grad is None for p in net.parameters()) and not torch.equal(net[0].weight, network()[0].weight)


def test_several_groups_are_several_steps():
    """The first layer moves slowly and freely, the second one is held near an anchor."""
    slow, held = {"lr": 0.01, "lam": 0.0, "weight_decay": 0.1}, {"lr": 0.1, "lam": 0.7}
    net, other, anchors = network(), network(), parameters(network(3))
    groups = [{"params": other[0].parameters(), **slow}, {"params": other[2].parameters(), **held}]
    optimizer, buffers = ProximalSGD(groups, momentum=0.5, anchors=anchors), ([None] * 2, [None] * 2)
    for _ in range(3):
        g = gradients(net)
        momentum_step_(list(net[0].parameters()), g[:2], [], buffers[0], momentum=0.5, **slow)
        momentum_step_(list(net[2].parameters()), g[2:], anchors[2:], buffers[1], momentum=0.5, **held)
        train(other, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(parameters(net), parameters(other), strict=True))
    assert not torch.equal(net[0].weight, network()[0].weight) and not torch.equal(net[2].weight, network()[2].weight)


def test_buffers_that_begin_later_are_set_and_the_others_go_on():
    params, anchors = [torch.ones(2), torch.ones(3)], [torch.full((2,), 3.0), torch.full((3,), 5.0)]
    g, buffers = [torch.full((2,), 4.0), torch.full((3,), 8.0)], [torch.full((2,), 16.0), None]
    momentum_step_(params, g, anchors, buffers, lr=0.25, lam=0.5, momentum=0.5)
    moved = 0.5 * 16 + 4 + 0.5 * (1 - 3), 8 + 0.5 * (1 - 5)
    assert [b.tolist() for b in buffers] == [[moved[0]] * 2, [moved[1]] * 3]
    assert [p.tolist() for p in params] == [[1 - 0.25 * moved[0]] * 2, [1 - 0.25 * moved[1]] * 3]
    assert [x.tolist() for x in g] == [[4.0] * 2, [8.0] * 3]


def wrong(change, given):
    if change == "shape":
        return [*given[:-1], given[-1][:2]]
    if change == "type":
        return [*given[:-1], given[-1].double()]
    return {"one too few": given[:-1], "one too many": [*given, given[-1]], "none": []}[change]


@pytest.mark.parametrize("begun", ["no", "some", "all"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("one too few", "3 grads for 4 params"),
        ("one too many", "5 grads for 4 params"),
        ("none", "0 grads for 4 params"),
        ("shape", r"tensor 3 of grads is float32 \[2\].*, of params float32 \[3\]"),
        ("type", r"tensor 3 of grads is float64.*, of params float32"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_before_anything_changes(change, message, momentum, begun):
    net, anchors = network(), parameters(network(3))
    buffers = [None if begun == "no" or (begun == "some" and t < 2) else p for t, p in enumerate(parameters(net))]
    before, kept = parameters(net), [None if b is None else b.clone() for b in buffers]
    options = {"lr": 0.1, "lam": 0.7, "momentum": momentum}
    with pytest.raises(ValueError, match=message):
        momentum_step_(list(net.parameters()), wrong(change, gradients(net)), anchors, buffers, **options)
    assert all(torch.equal(a, b) for a, b in zip(parameters(net), before, strict=True))
    assert [b is None for b in buffers] == [b is None for b in kept]
    assert all(torch.equal(a, b) for a, b in zip(buffers, kept, strict=True) if a is not None)


def test_buffers_that_do_not_fit_are_refused_before_anything_changes():
    net = network()
    before = parameters(net)
    with pytest.raises(ValueError, match="3 buffers for 4 params"):
        momentum_step_(list(net.parameters()), gradients(net), [], [None] * 3, lr=0.1, lam=0.0, momentum=0.5)
    assert all(torch.equal(a, b) for a, b in zip(parameters(net), before, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1"),
        ({"lam": -1.0}, "lam is -1"),
        ({"nesterov": True}, "nesterov needs momentum"),
        ({"anchors": []}, "0 anchors for 4 parameters"),
        ({"anchors": [torch.zeros(1)] * 4}, "anchor 0 is"),
    ],
)
def test_bad_options_say_what_is_accepted(options, message):
    with pytest.raises(ValueError, match=message):
        ProximalSGD(network().parameters(), **options)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_gradients_that_stay_in_place_are_stepped_along_as_new_ones_are(options):
    def weights(set_to_none):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        optimizer = ProximalSGD(model.parameters(), lr=0.1, lam=0.3, **options)
        for step in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.full((2, 5), float(step))).square().mean().backward()
            optimizer.step()
            if step == 2:
                optimizer.param_groups[0]["lr"] = 0.05
        return [p.detach() for p in model.parameters()]

    for a, b in zip(weights(False), weights(True), strict=True):
        assert torch.equal(a, b)


def test_a_copied_optimiser_steps_its_own_parameters():
    model = torch.nn.Linear(2, 1)
    optimizer = ProximalSGD(model.parameters(), lr=0.1, lam=0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    other_model, other = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    for p in other_model.parameters():
        p.grad = torch.ones_like(p)  # which torch does not copy
    other.step()
    for p, q, old in zip(model.parameters(), other_model.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert torch.allclose(q, old - 0.1)
