from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, personalize
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.algorithms import SCD, Ditto, FedAvg, FedRoD, Standalone
from pfl_ext.federation import Client, ClientRuntime, Federation, InProcess, Request, Settings, fine_tune


def _whole_turn(runtime: ClientRuntime, client: Client, received: dict[str, Tensor]) -> dict[str, Tensor]:
    """The generic part, then the personal one; what was sent."""
    sent = runtime.method.train(client, received)
    personalize(runtime, client, received, sent)
    return sent


def _divergence(p: Tensor, q: Tensor, tau: float, form: str) -> Tensor:
    """The definition, on the whole length-d spectrum."""
    count = math.ceil(tau * len(p))
    s, r = torch.fft.fft(p).abs()[:count], torch.fft.fft(q).abs()[:count]
    if form == "normalized":
        s, r = s / s.sum(), r / r.sum()
    elif form == "mean":
        s, r = s / s.mean(), r / r.mean()
    value = (s * (s.log() - r.log())).sum()
    return value + (r - s).sum() if form == "generalized" else value


def _step(client: Client, state: Tensor, teacher: Tensor, lam: float, tau: float, form: str, batch: Any) -> Tensor:
    w = state.clone().requires_grad_()
    sizes = [shape.numel() for shape in client.model.shapes]
    weights = [x.view(shape) for x, shape in zip(w.split(sizes), client.model.shapes, strict=True)]
    logits = F.linear(F.relu(F.linear(batch.inputs, weights[0], weights[1])), weights[2], weights[3])
    loss = F.cross_entropy(logits, batch.targets) + lam * _divergence(w, teacher, tau, form)
    (gradient,) = torch.autograd.grad(loss, w)
    return state - LR * gradient


@pytest.mark.by_hand("scd")
@pytest.mark.parametrize(
    ("form_g", "form_p"),
    [("normalized", "mean"), ("mean", "normalized"), ("paper", "generalized"), ("generalized", "paper")],
)
def test_both_models_take_the_steps_of_equations_4_and_5(turn: Turn, form_g: str, form_p: str) -> None:
    forms = {"form_g": form_g, "form_p": form_p}
    method = SCD(lr=LR, momentum=0.0, batch_size=4, lam_g=0.3, lam_p=0.2, tau=0.4, personal_epochs=2, **forms)
    runtime, client = turn(method)
    w = runtime.server["model"]
    start = w + 0.1 * torch.randn(len(w), generator=torch.Generator().manual_seed(0), dtype=w.dtype)
    client["personal"] = start
    generic, personal = w, start
    for batch in client.batches(4, epochs=1):
        generic = _step(client, generic, start, 0.3, 0.4, form_g, batch)
    for batch in client.batches(4, epochs=2):
        personal = _step(client, personal, generic, 0.2, 1.0, form_p, batch)
    sent = _whole_turn(runtime, client, {"model": w})
    torch.testing.assert_close(sent["model"], generic, rtol=0, atol=1e-11)
    torch.testing.assert_close(client["personal"], personal, rtol=0, atol=1e-11)


def test_beta_draws_the_personal_model_to_the_generic_one_by_a_distance_that_is_not_squared(turn: Turn) -> None:
    beta = 0.3
    runtime, client = turn(SCD(lr=LR, momentum=0.0, batch_size=4, lam_g=0.0, lam_p=0.2, beta=beta))
    w = runtime.server["model"]
    personal = w + 0.1 * torch.randn(len(w), generator=torch.Generator().manual_seed(0), dtype=w.dtype)
    client["personal"] = personal
    sent = runtime.method.train(client, {"model": w})
    for batch in client.batches(4):
        apart = personal - sent["model"]
        step = _step(client, personal, sent["model"], 0.2, 1.0, "mean", batch)
        personal = step - LR * beta * apart / apart.norm()  # a gradient of length beta, however far apart
    personalize(runtime, client, {"model": w}, sent)
    torch.testing.assert_close(client["personal"], personal, rtol=0, atol=1e-11)
    client["personal"] = w  # where both are the same there is no direction, and no NaN
    personalize(runtime, client, {"model": w}, {"model": w})
    assert bool(client["personal"].isfinite().all())


@pytest.mark.usefixtures("by_autograd")
def test_without_both_terms_it_is_fedavg_and_standalone(turn: Turn) -> None:
    options = {"lr": LR, "momentum": 0.5, "batch_size": 4}
    runtime, client = turn(SCD(**options, lam_g=0.0, lam_p=0.0))
    w = runtime.server["model"]
    client["personal"] = w + 0.5
    sent = _whole_turn(runtime, client, {"model": w})
    plain, other = turn(FedAvg(**options))
    assert torch.equal(sent["model"], plain.method.train(other, {"model": w})["model"])
    alone, third = turn(Standalone(**options))
    third["personal"] = w + 0.5
    alone.method.train(third, {})
    assert torch.equal(client["personal"], third["personal"])


@pytest.mark.parametrize("which", ["lam_g", "lam_p"])
def test_neither_term_is_dead(turn: Turn, which: str) -> None:
    results = []
    for lam in (0.0, 0.5):
        runtime, client = turn(SCD(lr=LR, batch_size=4, **{"lam_g": 0.0, "lam_p": 0.0, which: lam}))
        client["personal"] = runtime.server["model"] * torch.linspace(0.5, 1.5, runtime.model.size)
        sent = _whole_turn(runtime, client, {"model": runtime.server["model"]})
        results.append(sent["model"] if which == "lam_g" else client["personal"])
    assert (results[0] - results[1]).abs().max() > 1e-4


def test_beta_pulls_the_personal_model_towards_the_generic_one_by_a_distance_that_is_not_squared(turn: Turn) -> None:
    results = []
    for beta in (0.0, 0.5):
        method = SCD(lr=LR, momentum=0.0, batch_size=8, lam_g=0.0, lam_p=0.0, beta=beta, local_epochs=0)
        runtime, client = turn(method)
        w = runtime.server["model"]
        start = w + 0.1 * torch.randn(len(w), generator=torch.Generator().manual_seed(0), dtype=w.dtype)
        client["personal"] = start
        personalize(runtime, client, {}, {"model": w})
        results.append(client["personal"])
    # One step on one batch: the difference is the gradient of 0.5 |v - w|, of the length 0.5 wherever v is.
    pulled = (results[0] - results[1]) / LR
    torch.testing.assert_close(pulled, 0.5 * (start - w) / (start - w).norm(), rtol=0, atol=1e-11)


def test_beta_gives_no_nan_where_both_models_are_equal(turn: Turn) -> None:
    runtime, client = turn(SCD(lr=LR, batch_size=8, lam_p=0.0, beta=0.5))
    client["personal"] = runtime.server["model"]
    personalize(runtime, client, {}, {"model": runtime.server["model"]})
    assert client["personal"].isfinite().all()


def test_tau_zero_is_no_generic_term(turn: Turn) -> None:
    results = []
    for options in ({"tau": 0.0}, {"lam_g": 0.0}):
        runtime, client = turn(SCD(lr=LR, batch_size=4, **options))
        results.append(runtime.method.train(client, {"model": runtime.server["model"]})["model"])
    assert torch.equal(*results)


@pytest.mark.parametrize(("lam_g", "lam_p", "same"), [(0.05, 0.0, "personal"), (0.0, 0.01, "model")])
@pytest.mark.usefixtures("by_autograd")
def test_without_one_term_that_model_is_standalones_or_fedavgs(
    turn: Turn, lam_g: float, lam_p: float, same: str
) -> None:
    options = {"lr": LR, "momentum": 0.5, "batch_size": 4}
    runtime, client = turn(SCD(**options, lam_g=lam_g, lam_p=lam_p))
    w = runtime.server["model"]
    client["personal"] = w * torch.linspace(0.5, 1.5, runtime.model.size)
    plain, other = turn(Standalone(**options) if same == "personal" else FedAvg(**options))
    if same == "personal":
        other["personal"] = client["personal"]
    sent = _whole_turn(runtime, client, {"model": w})
    theirs = plain.method.train(other, {"model": w})
    ours, expected = (client["personal"], other["personal"]) if same == "personal" else (sent["model"], theirs["model"])
    assert torch.equal(ours, expected)
    different = sent["model"] if same == "personal" else client["personal"]
    assert not torch.equal(different, expected)


@pytest.mark.usefixtures("by_autograd")
def test_whole_runs_without_both_terms_are_fedavgs_and_standalones(dataset: Any, partition: Any, network: Any) -> None:
    options, settings = {"lr": LR, "momentum": 0.5, "batch_size": 4}, Settings(rounds=3)
    run = Federation(SCD(**options, lam_g=0.0, lam_p=0.0), network, dataset, partition, settings)
    fedavg = Federation(FedAvg(**options), network, dataset, partition, settings)
    alone = Federation(Standalone(**options), network, dataset, partition, settings)
    for federation in (run, fedavg, alone):
        federation.run()
    assert torch.equal(run.server["model"], fedavg.server["model"])
    ours, theirs = run.engine.state(), alone.engine.state()
    assert ours["personal/clients"].tolist() == theirs["personal/clients"].tolist() == [0, 1, 2]
    assert torch.equal(ours["personal/rows"], theirs["personal/rows"])


def test_the_scope_of_a_tensor_compares_tensor_by_tensor(turn: Turn) -> None:
    method = SCD(lr=LR, momentum=0.0, batch_size=8, lam_g=0.3, scope="tensor", tau=1.0, personal_epochs=0)
    runtime, client = turn(method)
    w = runtime.server["model"]
    teacher = w * torch.linspace(0.5, 1.5, len(w), dtype=w.dtype)
    client["personal"] = teacher
    (batch,) = client.batches(8)
    v = w.clone().requires_grad_()
    sizes = [shape.numel() for shape in client.model.shapes]
    weights = [x.view(shape) for x, shape in zip(v.split(sizes), client.model.shapes, strict=True)]
    logits = F.linear(F.relu(F.linear(batch.inputs, weights[0], weights[1])), weights[2], weights[3])
    pairs = zip(v.split(sizes), teacher.split(sizes), strict=True)
    divergence = torch.stack([_divergence(p, q, 1.0, "normalized") for p, q in pairs]).sum()
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, batch.targets) + 0.3 * divergence, v)
    sent = method.train(client, {"model": w})
    torch.testing.assert_close(sent["model"], w - LR * gradient, rtol=0, atol=1e-11)


@pytest.mark.parametrize("broadcast", [True, False])
def test_clients_that_are_not_selected_train_their_own_model_only_if_the_generic_one_is_broadcast(
    dataset: Any, partition: Any, network: Any, broadcast: bool
) -> None:
    method = SCD(lr=LR, batch_size=4, broadcast=broadcast)
    run = Federation(method, network, dataset, partition, Settings(rounds=1, participation=0.3))
    (last,) = run.run()
    (selected,) = last["clients"]
    trained = run.engine.state()["personal/clients"].tolist()
    assert trained == ([0, 1, 2] if broadcast else [selected])
    assert last["communication"]["down_bytes"] == (3 if broadcast else 1) * run.server["model"].nbytes
    assert last["communication"]["up_bytes"] == run.server["model"].nbytes
    assert {work[0]: work[1:3] for work in last["work"]} == ({k: [8 if k == selected else 0, 8] for k in trained})


def test_a_broadcast_model_is_the_teacher_of_those_that_were_not_selected(turn: Turn) -> None:
    method = SCD(lr=LR, batch_size=4, lam_p=0.3, broadcast=True)
    resting, client = turn(method, stage="rest")
    w = resting.server["model"] * torch.linspace(0.5, 1.5, resting.model.size, dtype=torch.float64)
    personalize(resting, client, {"model": w}, {})
    selected, other = turn(method)
    personalize(selected, other, {}, {"model": w})
    assert torch.equal(client["personal"], other["personal"])


@pytest.mark.parametrize("cls", [SCD, Ditto, FedRoD])
def test_new_clients_fine_tune_the_generic_model_and_others_keep_their_own(
    dataset: Any, partition: Any, network: Any, cls: Any
) -> None:
    settings = Settings(rounds=2, new_clients=1)
    tuned, untuned = InProcess(), InProcess()
    method = cls(lr=LR, batch_size=4, fine_tune_epochs=5)
    last = Federation(method, network, dataset, partition, settings, engine=tuned).run()[-1]
    plain = Federation(cls(lr=LR, batch_size=4), network, dataset, partition, settings, engine=untuned)
    plain.run()
    assert last["stage"] == "personalized" and "personal" in last["new_clients"]
    for k in (0, 1):
        assert torch.equal(tuned.store.read(k, "personal"), untuned.store.read(k, "personal"))
    assert not untuned.store.written(2, "personal")
    client, _ = untuned.runtime.begin(Request(2, 2, "finish"))
    fine_tune(client, method, plain.server["model"], 5)
    assert torch.equal(tuned.store.read(2, "personal"), client["personal"])
