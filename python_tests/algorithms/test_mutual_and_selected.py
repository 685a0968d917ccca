"""FML, FedRoD with a hypernetwork, power-of-choice; Ditto by steps, pFedMe with everybody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LR, Turn, features_of, gradient, logits_of, personalize, server_of, slope
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FML, Ditto, FedAvg, FedRoDHyper, PFedMe, PowerOfChoice
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, InProcess, Settings, Uploads

QUICK: dict[str, Any] = {"lr": LR, "batch_size": 4}


@pytest.mark.by_hand("fml")
def test_both_models_of_fml_learn_from_labels_and_each_other(turn: Turn) -> None:
    alpha, beta = 0.3, 0.8
    runtime, client = turn(FML(**QUICK, alpha=alpha, beta=beta))
    w = runtime.server["model"]
    v = w + 0.2 * torch.randn(43, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    client["personal"] = v

    def loss(own: Tensor, other: Tensor, weight: float, b: Any) -> Tensor:
        p, q = F.log_softmax(logits_of(own, b.inputs), 1), F.softmax(logits_of(other, b.inputs), 1)
        apart = (q * (q.log() - p)).sum(1).mean()
        return weight * F.cross_entropy(logits_of(own, b.inputs), b.targets) + (1 - weight) * apart

    start = w
    for batch in client.batches(4):
        g = slope(lambda w, b=batch, v=v: loss(w, v, beta, b), w)[0]
        h = slope(lambda v, b=batch, w=w: loss(v, w, alpha, b), v)[0]
        w, v = w - LR * g, v - LR * h
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-13)
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-13)


def test_fml_by_labels_alone_is_fedavg_beside_standalone(turn: Turn) -> None:
    runtime, client = turn(FML(**QUICK, alpha=1.0, beta=1.0))
    plain, other = turn(FedAvg(**QUICK))
    start = {"model": runtime.server["model"]}
    expected = plain.method.train(other, start)["model"]
    torch.testing.assert_close(runtime.method.train(client, start)["model"], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(client["personal"], expected, rtol=0, atol=1e-14)


def _head(numbers: Tensor, shares: Tensor) -> Tensor:
    """H written out: 3 - 4 - 18."""
    a, b, c, d = numbers.split([12, 4, 72, 18])
    return F.linear(F.relu(F.linear(shares, a.view(4, 3), b)), c.view(18, 4), d)


@pytest.mark.by_hand("fedrod-h")
def test_the_hypernetwork_of_fedrod_learns_what_the_generic_head_lacks(turn: Turn) -> None:
    runtime, client = turn(FedRoDHyper(**QUICK, hidden=4))
    counts = torch.tensor([3.0, 3.0, 2.0], dtype=torch.float64)
    received = runtime.method.sends(runtime.server, 0, "train")
    assert not received["hypernetwork"][-90:].any()  # its last layer
    nu = received["hypernetwork"] + 0.1
    w = received["model"]
    for batch in client.batches(4):

        def balanced(w: Tensor, b: Any = batch) -> Tensor:
            return F.cross_entropy(logits_of(w, b.inputs) + counts.log(), b.targets)

        w = w - LR * slope(balanced, w)[0]
    for batch in client.batches(4, name="personal"):

        def personal(nu: Tensor, b: Any = batch) -> Tensor:
            head = w[25:] + _head(nu, counts / 8)
            return F.cross_entropy(F.linear(features_of(w, b.inputs), head[:15].view(3, 5), head[15:]), b.targets)

        nu = nu - LR * slope(personal, nu)[0]
    sent = runtime.method.train(client, {"model": received["model"], "hypernetwork": received["hypernetwork"] + 0.1})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["hypernetwork"], nu, rtol=0, atol=1e-13)
    evaluated = runtime.method.models(client, sent)["personal"]
    expected = torch.cat([w[:25], w[25:] + _head(nu, counts / 8)])
    torch.testing.assert_close(evaluated, expected, rtol=0, atol=1e-13)


def test_power_of_choice_selects_the_highest_losses_of_the_candidates(network: nn.Module) -> None:
    method = PowerOfChoice(candidates=4)
    server = server_of(network)
    method.set_up(server)
    server["losses"], server["samples"] = torch.tensor([1.0, 4.0, 3.0, 2.0]).double(), torch.ones(4).double()
    assert sorted(method.select(server, 2)) == [1, 2]  # of all
    server["losses"][0] = torch.inf
    assert sorted(method.select(server, 2)) == [0, 1]  # one that never took part comes first
    few = PowerOfChoice(candidates=2)
    server["samples"] = torch.tensor([1.0, 1e-9, 1e-9, 1.0]).double()
    assert sorted(few.select(server, 2)) == [0, 3]  # as many as are selected: by their samples


def test_power_of_choice_learns_losses_and_averages_as_fedavg(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(PowerOfChoice(**QUICK), network, dataset, partition, Settings(rounds=3, participation=0.34))
    records = run.run()
    assert sorted(k for record in records[:3] for k in record["clients"]) == [0, 1, 2]  # everybody once, first
    assert bool(run.server["losses"].isfinite().all()) and run.server["samples"].tolist() == [8, 8, 8]
    assert records[0]["communication"]["up_parameters"] == 43 + 1
    sent = [{"model": torch.tensor([v]), "loss": torch.tensor([v])} for v in (1.0, 5.0)]
    server = server_of(network, losses=torch.zeros(4), samples=torch.zeros(4))
    PowerOfChoice().aggregate(server, Uploads([0, 2], [3, 1], sent))
    assert server["model"].tolist() == [2.0] and server["losses"].tolist() == [1, 0, 5, 0]


def test_dittos_personal_model_can_take_steps(turn: Turn) -> None:
    runtime, client = turn(Ditto(**QUICK, lam=0.5, personal_epochs=7, personal_steps=3))
    w = runtime.server["model"]
    v = client["personal"]
    for batch in client.batches(4, steps=3, name="personal"):
        v = v - LR * (gradient(client, v, batch) + 0.5 * (v - w))
    personalize(runtime, client, {"model": w}, {})
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="personal_steps is"):
        Ditto(personal_steps=-1)


def test_everybody_trains_with_pfedme_and_those_selected_are_averaged(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings, found = Settings(rounds=1, participation=0.34), []
    for everyone in (False, True):
        run = Federation(PFedMe(batch_size=4, everyone=everyone), network, dataset, partition, settings)
        (record,) = run.run()
        assert isinstance(run.engine, InProcess)
        trained = [k for k in range(3) if run.engine.store.written(k, "personal")]
        found.append((run.server["model"], trained, record["communication"]["up_parameters"]))
    assert torch.equal(found[0][0], found[1][0])
    assert len(found[0][1]) == 1 and found[1][1] == [0, 1, 2] and found[0][2] == found[1][2] == 43
