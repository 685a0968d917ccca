"""Steps, which all methods train by: what each of its parts does to a step, by hand in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import (
    Batch,
    Client,
    ClientRuntime,
    Plan,
    Request,
    Settings,
    Steps,
    WorkingModel,
    sam,
)
from pfl_ext.federation.client import Rows
from pfl_ext.tasks import Classification

RHO, LAM, CLIP = 0.3, 0.7, 0.05


def _begin(turn: Turn, **options: Any) -> tuple[Client, FedAvg, Tensor, list[Batch]]:
    """A client whose working model is at v, and two batches."""
    method = FedAvg(lr=LR, batch_size=4, **options)
    runtime, client = turn(method)
    return client, method, runtime.server["model"] + 0.05, list(client.batches(4))


def _anchor(v: Tensor) -> Tensor:
    return v + torch.linspace(-0.5, 0.4, len(v), dtype=v.dtype)


def _clipped(g: Tensor, clip: float = CLIP) -> Tensor:
    assert g.norm() > clip
    return g * clip / (g.norm() + 1e-6)


def _taken(client: Client, v: Tensor, batches: list[Batch], steps: Steps) -> Tensor:
    client.model.load(v)
    for batch in batches:
        steps.take(batch)
    return client.model.state()


# ---- momentum --------------------------------------------------------------------------------------------------------


def test_momentum_goes_on_from_step_to_step_and_begins_anew_with_each_object(turn: Turn) -> None:
    client, method, v, (first, second) = _begin(turn, momentum=0.5)
    moved = gradient(client, v, first)
    after_one = v - LR * moved
    g = gradient(client, after_one, second)
    together, apart = after_one - LR * (0.5 * moved + g), after_one - LR * g
    found = _taken(client, v, [first, second], Steps(client, method))
    torch.testing.assert_close(found, together, rtol=0, atol=1e-14)
    found = _taken(client, _taken(client, v, [first], Steps(client, method)), [second], Steps(client, method))
    torch.testing.assert_close(found, apart, rtol=0, atol=1e-14)
    assert (together - apart).abs().max() > 1e-3


def test_a_method_that_trains_twice_in_a_turn_begins_its_momentum_twice(turn: Turn) -> None:
    """The same through the loop over batches, with one batch of all samples in each."""
    client, _, v, _ = _begin(turn)
    method = FedAvg(lr=LR, batch_size=8, momentum=0.5)
    (batch,) = client.batches(8)
    expected = v
    client.model.load(v)
    for _ in range(2):
        Steps(client, method).train()
    found = client.model.state()
    for _ in range(2):
        expected = expected - LR * gradient(client, expected, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


# ---- each part of a step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["state", "tensors"])
def test_the_proximal_term_draws_to_the_anchor(turn: Turn, given: str) -> None:
    client, method, v, (batch, _) = _begin(turn)
    w = _anchor(v)
    expected = v - LR * (gradient(client, v, batch) + LAM * (v - w))
    plain = v - LR * gradient(client, v, batch)
    anchor = w if given == "state" else client.model.tensors(w)
    found = _taken(client, v, [batch], Steps(client, method, anchor=anchor, lam=LAM))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert (expected - plain).abs().max() > 1e-2


@pytest.mark.parametrize("options", [{"lam": LAM}, {"anchor": "somewhere", "lam": 0.0}])
def test_without_an_anchor_or_its_weight_there_is_no_proximal_term(turn: Turn, options: dict[str, Any]) -> None:
    client, method, v, batches = _begin(turn)
    plain = _taken(client, v, batches, Steps(client, method))
    if "anchor" in options:
        options = {**options, "anchor": _anchor(v)}
    assert torch.equal(_taken(client, v, batches, Steps(client, method, **options)), plain)


def test_the_perturbation_moves_where_the_gradient_is_taken_and_not_where_the_step_begins(turn: Turn) -> None:
    client, method, v, batches = _begin(turn)
    expected = plain = v
    for batch in batches:
        g = gradient(client, expected, batch)
        expected = expected - LR * gradient(client, expected + RHO * g / g.norm(), batch)
        plain = plain - LR * gradient(client, plain, batch)
    found = _taken(client, v, batches, Steps(client, method, perturb=sam(RHO)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    assert (expected - plain).abs().max() > 1e-3


def test_a_radius_of_zero_is_no_perturbation() -> None:
    assert sam(0.0) is None and sam(RHO) is not None


def test_a_gradient_beyond_the_clip_is_shortened_to_it(turn: Turn) -> None:
    client, method, v, (batch, _) = _begin(turn)
    g = gradient(client, v, batch)
    found = _taken(client, v, [batch], Steps(client, replace(method, clip=CLIP)))
    torch.testing.assert_close(found, v - LR * _clipped(g), rtol=0, atol=1e-14)
    assert float((v - found).norm()) == pytest.approx(LR * CLIP, rel=1e-3)
    assert float(g.norm()) > 2 * CLIP


@pytest.mark.usefixtures("by_autograd")
def test_a_gradient_within_the_clip_is_left_as_it_is(turn: Turn) -> None:
    client, method, v, batches = _begin(turn)
    plain = _taken(client, v, batches, Steps(client, method))
    assert torch.equal(_taken(client, v, batches, Steps(client, replace(method, clip=100.0))), plain)


def test_all_parts_together(turn: Turn) -> None:
    """The clip is of the gradient of L at the perturbed point, not of the proximal term or the weight decay."""
    decay, momentum = 0.02, 0.5
    client, method, v, batches = _begin(turn, momentum=momentum, weight_decay=decay)
    w, expected, moved = _anchor(v), v, torch.zeros_like(v)
    for batch in batches:
        g = gradient(client, expected, batch)
        g = _clipped(gradient(client, expected + RHO * g / g.norm(), batch))
        moved = momentum * moved + g + LAM * (expected - w) + decay * expected
        expected = expected - LR * moved
    steps = Steps(client, replace(method, clip=CLIP), anchor=w, lam=LAM, perturb=sam(RHO))
    torch.testing.assert_close(_taken(client, v, batches, steps), expected, rtol=0, atol=1e-14)


def test_the_step_size_can_be_another_than_the_methods(turn: Turn) -> None:
    client, method, v, (batch, _) = _begin(turn)
    expected = v - 0.03 * gradient(client, v, batch)
    torch.testing.assert_close(_taken(client, v, [batch], Steps(client, method, lr=0.03)), expected, rtol=0, atol=1e-14)


# ---- what is added to the gradients ----------------------------------------------------------------------------------


def test_what_is_added_is_neither_clipped_nor_perturbed_with(turn: Turn) -> None:
    momentum = 0.5
    client, method, v, batches = _begin(turn, momentum=momentum)
    added, expected, moved = torch.linspace(-0.5, 0.4, len(v), dtype=v.dtype), v, torch.zeros_like(v)
    for batch in batches:
        g = gradient(client, expected, batch)
        moved = momentum * moved + _clipped(gradient(client, expected + RHO * g / g.norm(), batch)) + added
        expected = expected - LR * moved
    steps = Steps(client, replace(method, clip=CLIP), perturb=sam(RHO), add=client.model.tensors(added))
    torch.testing.assert_close(_taken(client, v, batches, steps), expected, rtol=0, atol=1e-14)
    assert steps.taken == 2


def test_what_is_added_has_no_noise(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    """With and without it the same noisy gradients: the first steps differ by what is added alone."""
    settings = Settings(seed=7, dp_clip=1.0, dp_noise=1.0)
    method = FedAvg(lr=LR, batch_size=4, local_steps=1)
    found = []
    for scale in (0.0, 1.0):
        rows = {0: Rows(partition.train[0], partition.validation[0], partition.test[0])}
        plan = Plan(method, Classification(), copy.deepcopy(network), dataset, rows, settings)
        runtime = ClientRuntime(plan, plan.store())
        runtime.server = {"model": runtime.model.state()}
        client, received = runtime.begin(Request(0, 1, "train"))
        client.model.load(received["model"])
        added = scale * torch.linspace(-5, 4, client.model.size, dtype=torch.float64)
        Steps(client, method, add=client.model.tensors(added)).train()
        found.append(client.model.state())
    torch.testing.assert_close(found[0] - found[1], LR * added, rtol=0, atol=1e-14)
    assert (found[0] - received["model"]).abs().max() > 0.01


def test_parameters_that_share_a_gradient_have_it_once_each(turn: Turn) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3] * 0 + (self.a + self.b)

    _, client = turn(FedAvg())
    model = WorkingModel(Sum().double())
    client.model = model
    steps = Steps(client, FedAvg(lr=1.0), add=[torch.full((3,), 1.0).double(), torch.full((3,), 10.0).double()])
    shared = torch.full((3,), 0.5, dtype=torch.float64)
    steps.step([shared, shared])
    assert model.state().tolist() == [-1.5] * 3 + [-10.5] * 3 and shared.tolist() == [0.5] * 3


def test_what_does_not_fit_the_parameters_is_refused(turn: Turn) -> None:
    _, client = turn(FedAvg())
    for wrong in ([torch.zeros(4, 5)], [torch.zeros(1) for _ in client.model.trained]):
        with pytest.raises(ValueError, match=r"add has the shapes .*; the parameters have \[\[5, 4\], \[5\]"):
            Steps(client, FedAvg(), add=wrong)


# ---- what is trained -------------------------------------------------------------------------------------------------


def test_only_the_parameters_that_are_named_are_trained(turn: Turn) -> None:
    client, method, v, (batch, _) = _begin(turn)
    expected = v - LR * gradient(client, v, batch)
    head = client.model.part("2").parameters
    steps = Steps(client, method, params=head, perturb=sam(RHO))
    found = _taken(client, v, [batch], steps)
    assert torch.equal(found[:25], v[:25]) and not torch.equal(found[25:], v[25:])
    found = _taken(client, v, [batch], Steps(client, method, params=head))
    torch.testing.assert_close(found[25:], expected[25:], rtol=0, atol=1e-14)


def test_parameters_count_once_for_each_object_that_takes_a_step(turn: Turn) -> None:
    client, method, v, (first, second) = _begin(turn)
    idle = Steps(client, method)
    idle.gradients(first)
    assert client.trained_parameters == 0
    _taken(client, v, [first, second], Steps(client, method))
    assert client.trained_parameters == 43
    _taken(client, v, [first], Steps(client, method, params=client.model.part("2").parameters))
    assert client.trained_parameters == 43 + 18


def test_the_loss_that_is_told_is_that_of_where_steps_begin(turn: Turn) -> None:
    client, method, v, batches = _begin(turn)
    expected, at = [], v
    for batch in batches:
        client.model.load(at)
        expected.append(float(F.cross_entropy(client.model(batch.inputs), batch.targets).detach()))
        g = gradient(client, at, batch)
        at = at - LR * gradient(client, at + RHO * g / g.norm(), batch)
    client.model.load(v)
    mean = Steps(client, method, perturb=sam(RHO)).train()
    assert mean == pytest.approx(sum(expected) / 2, rel=1e-6)  # summed in float32
    assert math.isnan(Steps(client, method).train(epochs=0))


def test_gradients_can_be_those_of_another_loss(turn: Turn) -> None:
    client, method, v, (batch, _) = _begin(turn)
    client.model.load(v)
    loss, found = Steps(client, method).gradients(batch, lambda logits, some: 3 * logits.square().mean())
    expected = gradient(client, v, batch, lambda logits, targets: 3 * logits.square().mean())
    torch.testing.assert_close(torch.cat([g.flatten() for g in found]), expected, rtol=0, atol=1e-14)
    assert not loss.requires_grad and loss > 0
