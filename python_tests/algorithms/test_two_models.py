"""MTL, pFedMe and APFL: personal models beside, or in place of, a global one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, models, server_of
from torch import nn

from pfl_ext.algorithms import APFL, METHODS, MTL, FedAvg, PFedMe, Standalone
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, Uploads

SIZE = 4 * 5 + 5 + 5 * 3 + 3


@pytest.mark.parametrize(("cls", "trained"), [(MTL, 1), (PFedMe, 2), (APFL, 2)])
def test_one_model_is_sent_and_the_trained_ones_are_counted(
    dataset: Dataset, partition: Partition, network: nn.Module, cls: Any, trained: int
) -> None:
    run = Federation(cls(batch_size=4), network, dataset, partition, Settings(rounds=1))
    (record,) = run.run()
    sent = record["communication"]
    assert sent["up_parameters"] == sent["down_parameters"] == 3 * SIZE
    assert record["training"]["trained_parameters"] == trained * SIZE


# ---- MTL -------------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("mtl")
def test_mtls_model_is_drawn_to_the_mean(turn: Turn) -> None:
    lam = 0.5
    runtime, client = turn(MTL(lr=LR, batch_size=4, lam=lam))
    mean = runtime.server["mean"]
    start = mean + 0.25
    client["personal"] = v = start
    for batch in client.batches(4):
        v = v - LR * (gradient(client, v, batch) + lam * (v - mean))
    sent = runtime.method.train(client, {"mean": mean})
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-14)
    torch.testing.assert_close(sent["mean"], mean + (v - start), rtol=0, atol=1e-14)
    found = models(runtime, client, mean=mean)
    assert set(found) == {"personal"} and torch.equal(found["personal"], client["personal"])


def test_mtls_step_is_by_the_gradient_of_the_whole_sum() -> None:
    """Also of the mean, which depends on the model: its share cancels over the clients."""
    v = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(0.25 * (v - v.mean(0)).square().sum(), v)
    torch.testing.assert_close(whole, 0.5 * (v - v.mean(0)).detach())


def test_mtls_server_keeps_the_mean_of_all_models_selected_or_not(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(MTL(lr=LR, batch_size=4), network, dataset, partition, Settings(rounds=4, participation=0.67))
    assert len(run.run()[-1]["clients"]) == 2
    kept = run.engine.state()
    assert kept["personal/clients"].tolist() == [0, 1, 2]
    torch.testing.assert_close(run.server["mean"], kept["personal/rows"].mean(0), rtol=0, atol=1e-13)
    assert not torch.equal(*kept["personal/rows"][:2])


def test_clients_that_cannot_be_selected_yet_do_not_count_in_mtls_mean(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(MTL(lr=LR, batch_size=4), network, dataset, partition, Settings(rounds=3, new_clients=1))
    run.run()
    kept = run.engine.state()
    assert kept["personal/clients"].tolist() == [0, 1]
    torch.testing.assert_close(run.server["mean"], kept["personal/rows"][:2].mean(0), rtol=0, atol=1e-13)


def test_the_initial_models_of_clients_that_join_come_into_mtls_mean(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=4, new_clients=1, join_round=3, participation=0.67)
    run = Federation(MTL(lr=LR, batch_size=4), network, dataset, partition, settings)
    for record in run.rounds():
        store = run.engine.store  # type: ignore[attr-defined]
        rows = torch.stack([store.read(k, "personal") for k in range(2 if record["round"] < 3 else 3)])
        torch.testing.assert_close(run.server["mean"], rows.mean(0), rtol=0, atol=1e-13)


def test_mtl_without_its_term_is_standalone_and_with_it_is_not(turn: Turn) -> None:
    found = []
    for method in (MTL(lr=LR, batch_size=4, lam=0.0), Standalone(lr=LR, batch_size=4), MTL(lr=LR, batch_size=4)):
        runtime, client = turn(method)
        client["personal"] = client["personal"] + 0.5
        method.train(client, dict(runtime.server))
        found.append(client["personal"])
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 1e-3


# ---- pFedMe ----------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("pfedme")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_pfedme_solves_the_inner_problem_and_steps_towards_its_solution(turn: Turn, momentum: float) -> None:
    lam, inner, personal_lr, lr = 2.0, 3, 0.05, 0.2
    method = PFedMe(lr=lr, batch_size=4, lam=lam, inner_steps=inner, personal_lr=personal_lr, momentum=momentum)
    runtime, client = turn(method)
    w = runtime.server["model"]
    local, theta, buffer = w, w, torch.zeros_like(w)
    for batch in client.batches(4):
        for _ in range(inner):
            buffer = momentum * buffer + gradient(client, theta, batch) + lam * (theta - local)
            theta = theta - personal_lr * buffer
        local = local - lr * lam * (local - theta)
    sent = runtime.method.train(client, {"model": w})
    torch.testing.assert_close(client["personal"], theta, rtol=0, atol=1e-14)
    torch.testing.assert_close(sent["model"], local, rtol=0, atol=1e-14)
    assert torch.equal(models(runtime, client, model=w)["personal"], client["personal"])


def test_pfedmes_proximal_term_is_not_dead(turn: Turn) -> None:
    """Held strongly the personal model stays close to w; a term without a gradient would let it go."""
    distances = []
    for lam in (0.01, 20.0):
        runtime, client = turn(PFedMe(batch_size=4, lam=lam, inner_steps=5, personal_lr=0.05, lr=1e-6, local_epochs=5))
        w = runtime.server["model"]
        runtime.method.train(client, {"model": w})
        distances.append(float((client["personal"] - w).norm()))
    assert distances[1] < 0.2 * distances[0]


def test_where_pfedmes_inner_problem_is_solved_its_step_is_by_the_moreau_envelopes_gradient(turn: Turn) -> None:
    """grad F(w) = lambda (w - theta(w)), and grad L(theta) + lambda (theta - w) = 0 at the solution."""
    lam = 5.0
    # A client whose solution is no kink of a ReLU.
    runtime, client = turn(PFedMe(lr=1e-9, batch_size=8, lam=lam, inner_steps=100, personal_lr=0.1), client=2)
    w = runtime.server["model"]
    runtime.method.train(client, {"model": w})
    (batch,) = client.batches(8)
    theta = client["personal"]
    torch.testing.assert_close(gradient(client, theta, batch), lam * (w - theta), rtol=0, atol=1e-12)
    assert (theta - w).norm() > 0.01


def test_pfedmes_server_goes_towards_the_plain_mean(network: nn.Module) -> None:
    w, a, b = (torch.tensor([x, -x], dtype=torch.float64) for x in (1.0, 2.0, 4.0))
    for beta in (1.0, 0.5, 2.0):
        server = server_of(network, model=w)
        PFedMe(beta=beta).aggregate(server, Uploads([0, 1], [3, 1], [{"model": a}, {"model": b}]))
        torch.testing.assert_close(server["model"], (1 - beta) * w + beta * (a + b) / 2, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["apfl", "ditto", "fedasync", "fedbuff", "fedrod", "perada", "pfedme", "scd"])
def test_a_client_that_never_took_part_has_the_global_model_as_it_is_now(turn: Turn, name: str) -> None:
    runtime, client = turn(METHODS[name](**({"kd_steps": 0} if name == "perada" else {})))
    w = runtime.server["model"] + 0.25
    found = models(runtime, client, model=w)
    assert set(found) == {"global", "personal"}
    assert torch.equal(found["global"], w) and torch.equal(found["personal"], w)


# ---- APFL ------------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("apfl")
@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_steps_both_models_and_the_weight(turn: Turn, adaptive: bool) -> None:
    alpha = 0.4
    runtime, client = turn(APFL(lr=LR, batch_size=4, alpha=alpha, adaptive=adaptive))
    start = runtime.server["model"]
    w, v = start, start + 0.2 * torch.linspace(-1, 1, SIZE, dtype=start.dtype)
    client["local"] = v
    for step, batch in enumerate(client.batches(4)):
        if adaptive and step == 0:
            a = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
            shift = torch.dot(gradient(client, alpha * v + (1 - alpha) * w, batch), a * v + (1 - a) * w)
            (slope,) = torch.autograd.grad(shift, a)
            assert slope != 0
            alpha = float(alpha - LR * slope)
        of_w, of_mixture = gradient(client, w, batch), gradient(client, alpha * v + (1 - alpha) * w, batch)
        w, v = w - LR * of_w, v - LR * alpha * of_mixture
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-14)
    torch.testing.assert_close(client["local"], v, rtol=0, atol=1e-14)
    assert float(client["alpha"]) == pytest.approx(alpha, abs=1e-14)
    mixed = models(runtime, client, model=start)["personal"]
    torch.testing.assert_close(mixed, alpha * v + (1 - alpha) * start, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("better", "expected"), [("global", 0.0), ("local", 1.0)])
def test_the_weight_goes_to_the_better_model_and_no_further_than_to_it(
    turn: Turn, better: str, expected: float
) -> None:
    runtime, client = turn(APFL(lr=100.0, batch_size=8, alpha=0.5))
    w = runtime.server["model"]
    (batch,) = client.batches(8)
    uphill = 0.1 * gradient(client, w, batch)
    client["local"] = w + uphill if better == "global" else w - uphill
    runtime.method.train(client, {"model": w})
    assert float(client["alpha"]) == expected


@pytest.mark.usefixtures("by_autograd")
def test_apfls_copy_of_the_global_model_is_fedavgs(turn: Turn) -> None:
    options = {"lr": LR, "batch_size": 4, "momentum": 0.5}
    runtime, client = turn(APFL(**options))
    plain, other = turn(FedAvg(**options))
    w = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, w)["model"], plain.method.train(other, w)["model"])


@pytest.mark.usefixtures("by_autograd")
def test_apfl_of_weight_one_is_standalone_and_of_weight_zero_the_global_model(turn: Turn) -> None:
    options = {"lr": LR, "batch_size": 4, "momentum": 0.5, "weight_decay": 0.01}
    runtime, client = turn(APFL(**options, alpha=1.0, adaptive=False))
    alone, other = turn(Standalone(**options))
    w = runtime.server["model"]
    client["local"] = other["personal"] = w + 0.5
    runtime.method.train(client, {"model": w})
    alone.method.train(other, {})
    assert torch.equal(models(runtime, client, model=w)["personal"], other["personal"])
    runtime, client = turn(APFL(lr=LR, alpha=0.0, adaptive=False))
    client["local"] = w + 0.5
    runtime.method.train(client, {"model": w})
    assert torch.equal(models(runtime, client, model=w)["personal"], w)
    assert torch.equal(client["local"], w + 0.5)


def test_apfls_server_counts_clients_alike(network: nn.Module) -> None:
    server = server_of(network)
    APFL().aggregate(server, Uploads([0, 1], [3, 1], [{"model": torch.tensor([x])} for x in (1.0, 2.0)]))
    assert server["model"].tolist() == [1.5]


@pytest.mark.parametrize(
    ("cls", "option", "value"),
    [
        (MTL, "lam", -1.0),
        (PFedMe, "lam", 0.0),
        (PFedMe, "inner_steps", 0),
        (PFedMe, "personal_lr", 0.0),
        (PFedMe, "personal_lr", 0.2),  # times lambda, which is 15, it is above 2
        (PFedMe, "beta", 0.0),
        (APFL, "alpha", 1.1),
    ],
)
def test_options_out_of_range_are_refused(cls: type, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        cls(**{option: value})
