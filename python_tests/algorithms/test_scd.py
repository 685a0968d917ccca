from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.algorithms import SCD, FedAvg, Standalone
from pfl_ext.federation import Client

Turn = Callable[..., tuple[Any, Client]]
LR = 0.1


def _divergence(p: Tensor, q: Tensor, tau: float, form: str) -> Tensor:
    """The definition, on the whole length-d spectrum."""
    count = math.ceil(tau * len(p))
    s, r = torch.fft.fft(p).abs()[:count], torch.fft.fft(q).abs()[:count]
    if form == "normalized":
        s, r = s / s.sum(), r / r.sum()
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


@pytest.mark.parametrize("form", ["normalized", "paper", "generalized"])
def test_both_models_take_the_steps_of_equations_4_and_5(turn: Turn, form: str) -> None:
    method = SCD(lr=LR, momentum=0.0, batch_size=4, lam_g=0.3, lam_p=0.2, tau=0.4, form=form)
    turns, client = turn(method)
    w = turns.server["model"]
    start = w + 0.1 * torch.randn(len(w), generator=torch.Generator().manual_seed(0), dtype=w.dtype)
    client["personal"] = start
    generic, personal = w, start
    batches = list(client.batches(4, epochs=1))
    for batch in batches:
        generic = _step(client, generic, start, 0.3, 0.4, form, batch)
    for batch in batches:
        personal = _step(client, personal, generic, 0.2, 1.0, form, batch)
    sent = method.client_round(client, {"model": w})
    torch.testing.assert_close(sent["model"], generic, rtol=0, atol=1e-11)
    torch.testing.assert_close(client["personal"], personal, rtol=0, atol=1e-11)


def test_without_both_terms_it_is_fedavg_and_standalone(turn: Turn) -> None:
    options = {"lr": LR, "momentum": 0.5, "batch_size": 4}
    turns, client = turn(SCD(**options, lam_g=0.0, lam_p=0.0))
    w = turns.server["model"]
    client["personal"] = w + 0.5
    sent = turns.method.client_round(client, {"model": w})
    plain, other = turn(FedAvg(**options))
    assert torch.equal(sent["model"], plain.method.client_round(other, {"model": w})["model"])
    alone, third = turn(Standalone(**options))
    third["personal"] = w + 0.5
    alone.method.client_round(third, {})
    assert torch.equal(client["personal"], third["personal"])


@pytest.mark.parametrize("which", ["lam_g", "lam_p"])
def test_neither_term_is_dead(turn: Turn, which: str) -> None:
    results = []
    for lam in (0.0, 0.5):
        turns, client = turn(SCD(lr=LR, batch_size=4, **{"lam_g": 0.0, "lam_p": 0.0, which: lam}))
        client["personal"] = turns.server["model"] * torch.linspace(0.5, 1.5, turns.model.size)
        sent = turns.method.client_round(client, {"model": turns.server["model"]})
        results.append(sent["model"] if which == "lam_g" else client["personal"])
    assert (results[0] - results[1]).abs().max() > 1e-4


def test_tau_zero_is_no_generic_term(turn: Turn) -> None:
    results = []
    for options in ({"tau": 0.0}, {"lam_g": 0.0}):
        turns, client = turn(SCD(lr=LR, batch_size=4, **options))
        results.append(turns.method.client_round(client, {"model": turns.server["model"]})["model"])
    assert torch.equal(*results)
