from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, models, server_of
from torch import nn

from pfl_ext.algorithms import FedAvg, PerFedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, Federation, InProcess, Request, Settings, Uploads


def _step(client: Client, w: torch.Tensor, batches: Any, alpha: float, delta: float | None) -> torch.Tensor:
    """The equations: u, g, and (I - alpha H) g with H g as a difference, or without H."""
    inner, outer, hessian = batches
    u = w - alpha * gradient(client, w, inner)
    g = gradient(client, u, outer)
    if delta is None:
        return g
    product = gradient(client, w + delta * g, hessian) - gradient(client, w - delta * g, hessian)
    return g - alpha * product / (2 * delta)


@pytest.mark.by_hand("per-fedavg")
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_each_step_is_by_the_meta_gradient_of_three_batches(turn: Turn, variant: str) -> None:
    alpha, delta = 0.3, 0.01
    runtime, client = turn(PerFedAvg(lr=LR, batch_size=4, alpha=alpha, delta=delta, variant=variant))
    start = runtime.server["model"]
    w = start
    names = ("inner", "batches", "hessian")
    triples = list(zip(*(list(client.batches(4, name=name)) for name in names), strict=True))
    assert len(triples) == 2 and len({str(batch.rows.tolist()) for batch in triples[0]}) == 3
    for batches in triples:
        w = w - LR * _step(client, w, batches, alpha, delta if variant == "hf" else None)
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-12)


def test_the_hessian_free_step_is_that_of_the_exact_meta_gradient(turn: Turn, dataset: Dataset) -> None:
    """With all samples in each of the three batches, against autograd through the inner step."""
    alpha = 0.2
    runtime, client = turn(PerFedAvg(lr=LR, batch_size=8, alpha=alpha, delta=1e-5, variant="hf"), client=2)
    start = runtime.server["model"]
    (batch,) = client.batches(8)
    client.model.load(start)
    module = client.model.module
    params = dict(module.named_parameters())
    loss = nn.functional.cross_entropy
    inner = torch.autograd.grad(loss(module(batch.inputs), batch.targets), list(params.values()), create_graph=True)
    moved = {name: p - alpha * g for (name, p), g in zip(params.items(), inner, strict=True)}
    outer = loss(torch.func.functional_call(module, moved, (batch.inputs,)), batch.targets)
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(outer, list(params.values()))])
    first_order = gradient(client, start - alpha * gradient(client, start, batch), batch)
    assert (exact - first_order).abs().max() > 1e-3
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close((start - sent["model"]) / LR, exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize("variant", ["fo", "hf"])
@pytest.mark.usefixtures("by_autograd")
def test_without_inner_steps_it_is_fedavg(turn: Turn, variant: str) -> None:
    options = {"lr": LR, "batch_size": 4, "momentum": 0.5, "weight_decay": 0.01}
    runtime, client = turn(PerFedAvg(**options, alpha=0.0, variant=variant))
    plain, other = turn(FedAvg(**options))
    w = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, w)["model"], plain.method.train(other, w)["model"])
    found = models(runtime, client, **w)
    assert torch.equal(found["personal"], found["global"])


@pytest.mark.parametrize(("variant", "batches"), [("fo", 2), ("hf", 3)])
def test_batches_that_a_variant_does_not_use_are_not_drawn(turn: Turn, variant: str, batches: int) -> None:
    runtime, client = turn(PerFedAvg(batch_size=4, variant=variant))
    runtime.method.train(client, {"model": runtime.server["model"]})
    assert client.trained == batches * 8


@pytest.mark.parametrize("steps", [1, 2])
def test_the_personal_model_is_steps_on_training_data_away_from_the_global_one(turn: Turn, steps: int) -> None:
    alpha = 0.3
    runtime, client = turn(PerFedAvg(batch_size=4, alpha=alpha, personal_steps=steps))
    w = runtime.server["model"] + 0.1
    v = w
    for batch in client.batches(4, steps=steps, name="personal"):
        v = v - alpha * gradient(client, v, batch)
    found = models(runtime, client, model=w)
    torch.testing.assert_close(found["personal"], v, rtol=0, atol=1e-14)
    assert torch.equal(found["global"], w) and not torch.equal(found["personal"], w)


def test_labels_of_test_and_validation_data_change_no_model(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    held_out = torch.cat([*partition.test, *partition.validation])
    targets = dataset.targets.clone()
    targets[held_out] = (targets[held_out] + 1) % 3
    inputs = dataset.inputs.clone()
    inputs[held_out] += 5
    found = []
    for data in (dataset, dataclasses.replace(dataset, inputs=inputs, targets=targets)):
        cut = dataclasses.replace(partition, description={})
        engine = InProcess()
        method = PerFedAvg(lr=LR, batch_size=4, alpha=0.3)
        run = Federation(method, network, data, cut, Settings(rounds=2), engine=engine)
        run.run()
        evaluated = engine.runtime.models(*engine.runtime.begin(Request(1, 2, "evaluate")))
        found.append([run.server["model"], evaluated["personal"]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_server_counts_clients_alike(network: nn.Module) -> None:
    server = server_of(network)
    PerFedAvg().aggregate(server, Uploads([0, 1], [3, 1], [{"model": torch.tensor([x])} for x in (1.0, 2.0)]))
    assert server["model"].tolist() == [1.5]


@pytest.mark.parametrize(
    ("option", "value"), [("alpha", -0.1), ("delta", 0.0), ("variant", "so"), ("personal_steps", -1)]
)
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        PerFedAvg(**{option: value})
