from __future__ import annotations

import dataclasses

import pytest
import torch
from by_hand import LR, Turn, models, personalize
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.algorithms import FedAvg, FedRoD
from pfl_ext.data import Dataset
from pfl_ext.federation import Client

HEAD = 5 * 3 + 3  # the last layer of the network


def _logits(client: Client, state: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Features and logits by hand."""
    sizes = [shape.numel() for shape in client.model.shapes]
    w = [x.view(shape) for x, shape in zip(state.split(sizes), client.model.shapes, strict=True)]
    z = F.relu(F.linear(inputs, w[0], w[1]))
    return z, F.linear(z, w[2], w[3])


@pytest.mark.by_hand("fedrod")
def test_the_generic_model_is_trained_by_the_balanced_softmax(turn: Turn) -> None:
    runtime, client = turn(FedRoD(lr=LR, batch_size=4, gamma=1.0))
    counts = client.label_counts().double()
    assert counts.sum() == 8
    w = runtime.server["model"]
    for batch in client.batches(4):
        v = w.clone().requires_grad_()
        weighed = _logits(client, v, batch.inputs)[1].exp() * counts  # n_c exp(z_c) / sum n exp(z)
        loss = -(weighed.gather(1, batch.targets[:, None])[:, 0] / weighed.sum(1)).log().mean()
        w = w - LR * torch.autograd.grad(loss, v)[0]
    sent = runtime.method.train(client, {"model": runtime.server["model"]})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-13)


def test_a_class_that_the_client_does_not_have_is_no_trouble(
    turn: Turn, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, client = turn(FedRoD(lr=LR, batch_size=4))
    targets = dataset.targets.clone()
    targets[client.train] = targets[client.train] % 2
    client._dataset = dataclasses.replace(dataset, targets=targets)
    assert client.label_counts().tolist()[2] == 0
    sent = runtime.method.train(client, {"model": runtime.server["model"]})
    assert torch.isfinite(sent["model"]).all()
    # Nothing is learnt of it: the head's row of that class has no gradient.
    head = sent["model"][-HEAD:], runtime.server["model"][-HEAD:]
    assert torch.equal(head[0][10:15], head[1][10:15]) and head[0][-1] == head[1][-1]
    assert not torch.equal(head[0][:5], head[1][:5])


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_personal_head_adds_to_the_generic_logits_and_alone_is_trained(turn: Turn, decay: float) -> None:
    runtime, client = turn(FedRoD(lr=LR, batch_size=4, weight_decay=decay))
    sent = runtime.server["model"] * 1.1
    phi = torch.linspace(-0.5, 0.5, HEAD, dtype=torch.float64)
    client["head"] = phi
    for batch in client.batches(4, name="personal"):
        p = phi.clone().requires_grad_()
        z, generic = _logits(client, sent, batch.inputs)
        logits = generic + F.linear(z, p[:15].view(3, 5), p[15:])
        phi = phi - LR * (torch.autograd.grad(F.cross_entropy(logits, batch.targets), p)[0] + decay * phi)
    before = sent.clone()
    personalize(runtime, client, {"model": runtime.server["model"]}, {"model": sent})
    torch.testing.assert_close(client["head"], phi, rtol=0, atol=1e-13)
    assert torch.equal(sent, before)
    assert torch.equal(client["personal"][:-HEAD], sent[:-HEAD])  # frozen to the bit
    torch.testing.assert_close(client["personal"][-HEAD:], sent[-HEAD:] + phi, rtol=0, atol=1e-13)
    evaluated = models(runtime, client, model=sent)
    assert torch.equal(evaluated["global"], sent) and torch.equal(evaluated["personal"], client["personal"])


@pytest.mark.usefixtures("by_autograd")
def test_without_balancing_the_generic_model_is_fedavgs(turn: Turn) -> None:
    runtime, client = turn(FedRoD(lr=LR, batch_size=4, gamma=0.0))
    plain, other = turn(FedAvg(lr=LR, batch_size=4))
    received = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, received)["model"], plain.method.train(other, received)["model"])


def test_neither_part_is_dead(turn: Turn) -> None:
    runtime, client = turn(FedRoD(lr=LR, batch_size=4))
    plain, other = turn(FedRoD(lr=LR, batch_size=4, gamma=0.0))
    received = {"model": runtime.server["model"]}
    sent = runtime.method.train(client, received)
    assert not torch.equal(sent["model"], plain.method.train(other, received)["model"])
    personalize(runtime, client, received, sent)
    assert client["head"].abs().min() > 0


@pytest.mark.usefixtures("by_autograd")
def test_weight_decay_of_the_generic_model_is_that_of_all_its_parameters(turn: Turn) -> None:
    options = {"lr": LR, "batch_size": 4, "weight_decay": 0.1}
    runtime, client = turn(FedRoD(**options, gamma=0.0))
    plain, other = turn(FedAvg(**options))
    received = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, received)["model"], plain.method.train(other, received)["model"])
