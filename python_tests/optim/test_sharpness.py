from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from pfl_ext.ops import layer_groups, lwsam_perturb_, personalization_scores, restore_
from pfl_ext.optim import LWSAM, SAM, ProximalSGD

BASES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(seed=1):
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(20, 6, generator=generator, device="cpu")
    y = torch.randint(0, 3, (20,), generator=generator, device="cpu")
    return x.to(torch.get_default_device()), y.to(torch.get_default_device())


def loss_of(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def two_steps(net, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(net, batch)
    loss.backward()
    optimizer.first_step(zero_grad=True)
    loss_of(net, batch).backward()
    optimizer.second_step(zero_grad=True)
    return loss


def by_hand(net, base, batch, rho, scores=None, groups=None):
    """SAM written out with plain torch."""
    params = list(net.parameters())
    grads = torch.autograd.grad(loss_of(net, batch), params)
    norm = torch.cat([g.flatten() for g in grads]).norm()
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for t, (p, g) in enumerate(zip(params, grads, strict=True)):
            p += rho * (1 if scores is None else scores[groups[t]].item()) * g / norm
    base.zero_grad()
    loss_of(net, batch).backward()
    with torch.no_grad():
        for p, b in zip(params, before, strict=True):
            p.copy_(b)
    base.step()


def assert_close(net, other, tolerance=1e-5):
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_same(net, other):
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("base", BASES)
def test_sam_is_what_plain_torch_computes_around_any_optimizer(base):
    cls, options = BASES[base]
    net, other, batch = network(), network(), data()
    optimizer, plain = SAM(net.parameters(), cls, rho=0.1, **options), cls(other.parameters(), **options)
    for _ in range(4):
        two_steps(net, optimizer, batch)
        by_hand(other, plain, batch, 0.1)
    assert_close(net, other, 1e-4)


def test_lwsam_scales_each_layer():
    net, other, batch = network(), network(), data()
    optimizer = LWSAM(net.named_parameters(), torch.optim.SGD, rho=0.5, lr=0.1)
    assert optimizer.groups == [0, 0, 1, 1] and optimizer.scores.tolist() == [0.5, 0.5]
    scores = optimizer.update_scores(list(network(7).parameters()), list(net.parameters()))
    assert torch.equal(
        scores, personalization_scores(list(network(7).parameters()), list(net.parameters()), layer_groups(net))
    )
    two_steps(net, optimizer, batch)
    by_hand(other, torch.optim.SGD(other.parameters(), lr=0.1), batch, 0.5, scores, layer_groups(net))
    assert_close(net, other)


def test_lwsam_with_equal_scores_is_sam():
    net, other, batch = network(), network(), data()
    lwsam = LWSAM(net.parameters(), torch.optim.SGD, rho=0.4, lr=0.1)
    sam = SAM(other.parameters(), torch.optim.SGD, rho=0.1, lr=0.1)
    assert lwsam.layers == 4
    for _ in range(3):
        two_steps(net, lwsam, batch)
        two_steps(other, sam, batch)
    assert_close(net, other)


def test_the_closure_protocol_is_the_two_steps_and_returns_the_first_loss():
    net, other, batch = network(), network(), data()
    optimizer = SAM(net.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9)
    second = SAM(other.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    for _ in range(3):
        assert torch.equal(optimizer.step(closure), two_steps(other, second, batch))
    assert_same(net, other)


def test_first_step_moves_by_rho_and_second_step_starts_from_where_it_was():
    net, batch = network(), data()
    optimizer = SAM(net.parameters(), torch.optim.SGD, rho=0.3, lr=0.0)
    before, pointers = copy.deepcopy(net), [p.data_ptr() for p in net.parameters()]
    loss_of(net, batch).backward()
    optimizer.first_step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(net.parameters(), before.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(0.3, rel=1e-4)
    optimizer.second_step()
    assert_same(net, before)
    assert [p.data_ptr() for p in net.parameters()] == pointers


def test_a_closure_that_raises_leaves_the_weights_as_they_were():
    net, batch = network(), data()
    before, calls = copy.deepcopy(net), []
    optimizer = SAM(net.parameters(), torch.optim.SGD, rho=0.3, lr=0.1)

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert_same(net, before)


def test_parameter_groups_have_their_own_radius_and_learning_rate():
    net, batch = network(), data()
    groups = [{"params": net[0].parameters(), "rho": 0.0, "lr": 0.0}, {"params": net[2].parameters(), "rho": 0.2}]
    optimizer = SAM(groups, torch.optim.SGD, rho=0.1, lr=0.5)
    before = copy.deepcopy(net)
    loss_of(net, batch).backward()
    grads = [p.grad.clone() for p in net.parameters()]
    optimizer.first_step()
    assert_same(net[0], before[0])
    expected = [p.detach().clone() for p in before.parameters()]
    lwsam_perturb_(expected, grads, [0.0, 0.0, 0.2, 0.2], rho=1.0)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), expected, strict=True))
    optimizer.second_step()
    assert_same(net[0], before[0])
    assert not torch.equal(net[2].weight, before[2].weight)


def test_a_scheduler_changes_the_learning_rate_of_the_base():
    net, batch = network(), data()
    optimizer = SAM(net.parameters(), torch.optim.SGD, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    optimizer.step(lambda: loss_of(net, batch).backward())
    scheduler.step()
    before = copy.deepcopy(net)
    optimizer.step(lambda: loss_of(net, batch).backward())
    assert_same(net, before)


def test_parameters_without_a_gradient_are_left_alone():
    net, batch = network(), data()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    optimizer = LWSAM(net.named_parameters(), torch.optim.SGD, rho=0.5, lr=0.1)
    two_steps(net, optimizer, batch)
    assert torch.equal(net[0].weight, before)


@pytest.mark.parametrize("cls", [SAM, LWSAM])
def test_a_resumed_run_is_identical_to_an_unbroken_one(cls):
    batch, net = data(), network()
    optimizer = cls(net.named_parameters(), torch.optim.Adam, rho=0.2, lr=0.01)
    if cls is LWSAM:
        optimizer.scores = [0.9, 0.1]
    two_steps(net, optimizer, batch)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for _ in range(2):
        two_steps(net, optimizer, batch)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network(5)
    other = cls(resumed.named_parameters(), torch.optim.Adam, rho=7.0, lr=7.0)
    resumed.load_state_dict(saved["net"])
    other.load_state_dict(saved["optimizer"])
    for _ in range(2):
        two_steps(resumed, other, batch)
    assert_same(net, resumed)
    assert other.param_groups[0]["rho"] == 0.2


@pytest.mark.parametrize("p", [1.0, 1.5, math.inf])
def test_other_norms_and_layers(p):
    net, batch = network(), data()
    optimizer = LWSAM(net.named_parameters(), torch.optim.SGD, rho=0.1, p=p, norm="layer", lr=0.1)
    before = [x.detach().clone() for x in net.parameters()]
    loss_of(net, batch).backward()
    expected, grads = [x.clone() for x in before], [x.grad for x in net.parameters()]
    backup = lwsam_perturb_(expected, grads, [0.5, 0.5], 0.1, p, "layer", groups=[0, 0, 1, 1])
    optimizer.first_step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), expected, strict=True))
    restore_(expected, backup)
    assert all(torch.equal(a, b) for a, b in zip(before, expected, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: SAM(p, torch.optim.SGD(p, lr=0.1)), "a class such as"),
        (lambda p: SAM(p, torch.optim.SGD, rho=-1.0), "rho is -1"),
        (lambda p: SAM(p, torch.optim.SGD, p=0.5), "p is 0.5"),
        (lambda p: SAM(p, torch.optim.SGD, norm="none"), "norm='none'"),
        (lambda p: SAM(p, torch.optim.SGD).step(), "give step"),
        (lambda p: SAM(p, torch.optim.SGD).second_step(), "without first_step"),
        (lambda p: LWSAM(p, torch.optim.SGD, groups=[0]), "1 groups for 4 parameters"),
        (lambda p: setattr(LWSAM(p, torch.optim.SGD), "scores", [1.0]), "for 4 layers"),
    ],
)
def test_bad_calls_say_what_is_accepted(call, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call(list(network().parameters()))


def test_the_order_of_the_steps_is_checked():
    net = network()
    optimizer = SAM(net.parameters(), torch.optim.SGD)
    loss_of(net, data()).backward()
    optimizer.first_step()
    with pytest.raises(RuntimeError, match="called twice"):
        optimizer.first_step()
    with pytest.raises(RuntimeError, match="perturbed"):
        optimizer.state_dict()


class Waits(TorchFunctionMode):
    """What makes the host wait for a GPU: numbers from Python put there, and copies that are waited for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        placed = func is torch.tensor and torch.device(given.get("device") or "cpu").type != "cpu"
        copied = func is torch.Tensor.to and args[0].is_cpu and not given.get("non_blocking")
        if placed or copied or (func is torch.Tensor.__getitem__ and isinstance(args[1], list)):
            self.found.append(func)
        return func(*args, **given)


@pytest.mark.parametrize("kind", [SAM, LWSAM])
def test_several_radii_do_not_wait_for_a_gpu(kind):
    with FakeTensorMode():
        params = [torch.zeros(3, device="cuda", requires_grad=True) for _ in range(2)]
        for w in params:
            w.grad = torch.ones_like(w)
        optimizer = kind(
            [{"params": [w], "rho": r} for w, r in zip(params, (0.1, 0.2), strict=True)], torch.optim.SGD, lr=0.1
        )
        optimizer._layers()
        with Waits() as waits:
            optimizer.first_step()
    assert waits.found == []


def test_the_state_that_the_base_begins_with_is_kept():
    net, other = network(), network()
    optimizer = SAM(net.parameters(), ProximalSGD, rho=0.0, lr=0.1, lam=0.5)
    plain = ProximalSGD(other.parameters(), lr=0.1, lam=0.5)
    for _ in range(3):
        two_steps(net, optimizer, data())
        other.zero_grad()
        loss_of(other, data()).backward()
        plain.step()
    assert_same(net, other)
    assert "anchor" in optimizer.state_dict()["state"][0]
