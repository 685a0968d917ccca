"""Differential privacy: the accountant against Opacus itself, and noise that nobody can draw again."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pfl_ext.algorithms import FedAvg
from pfl_ext.federation import Federation, ForeignCheckpoint, InProcess, Request, Settings
from pfl_ext.federation.privacy import epsilon, sampling, secure_normal

Make = Callable[..., Federation]
PRIVATE = {"dp_clip": 1.0, "dp_noise": 1.2}

_SETTINGS = list(itertools.product((0.001, 1 / 36, 0.2, 0.5, 1.0), (0.7, 1.0, 2.0, 5.0), (1, 100, 5000)))


@pytest.mark.parametrize(("rate", "noise", "steps"), _SETTINGS)
def test_epsilon_is_that_of_opacus(rate: float, noise: float, steps: int) -> None:
    accountants = pytest.importorskip("opacus.accountants", reason="make installs it")
    account = accountants.RDPAccountant()
    account.history = [(noise, rate, steps)]
    for delta in (1e-5, 1e-7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the best order may be the last one
            expected = account.get_epsilon(delta)
        assert epsilon(rate, noise, steps, delta) == pytest.approx(max(0.0, expected), rel=1e-9, abs=1e-12)


def test_secure_noise_is_the_formula_on_the_systems_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    u1, u2 = (3, 1 << 52), (1 << 51, (1 << 53) - 1)
    content = b"".join((bits | 1 << 60).to_bytes(8, "little") for bits in (*u1, *u2))
    monkeypatch.setattr(os, "urandom", lambda count: content[:count] if count == 32 else None)
    first, second = ([(bits + 1) / 2**53 for bits in u] for u in (u1, u2))
    length = [math.sqrt(-2 * math.log(u)) for u in first]
    by_hand = [r * math.cos(2 * math.pi * u) for r, u in zip(length, second, strict=True)]
    by_hand += [r * math.sin(2 * math.pi * u) for r, u in zip(length, second, strict=True)]
    found = secure_normal((3,))
    assert found.tolist() == pytest.approx(by_hand[:3], rel=1e-12, abs=1e-12)


def test_secure_noise_is_normal() -> None:
    numbers = secure_normal((200_000,)).sort().values
    exact = torch.special.ndtr(numbers)
    distance = (exact - (torch.arange(200_000) + 0.5) / 200_000).abs().max()
    assert distance * math.sqrt(200_000) < 2.2  # Kolmogorov: more than that once in 8,000 times
    halves = secure_normal((2, 100_000))
    assert abs(float((halves[0] * halves[1]).mean())) < 4.5 / math.sqrt(100_000)
    assert secure_normal((0, 3)).shape == (0, 3) and secure_normal((2, 3), torch.float32).dtype == torch.float32


def test_secure_noise_is_never_the_same_and_the_seeds_always_is(make_run: Make) -> None:
    models = {}
    for secure, number in itertools.product((False, True), (1, 2)):
        run = make_run(FedAvg(lr=0.1, batch_size=5), dp_secure=secure, **PRIVATE)
        run.run()
        models[secure, number] = run.server["model"]
    assert torch.equal(models[False, 1], models[False, 2])
    assert not torch.equal(models[True, 1], models[True, 2]) and not torch.equal(models[True, 1], models[False, 1])


def test_secure_batches_are_not_those_of_the_seed_and_hold_as_many_samples(make_run: Make) -> None:
    runs = [make_run(FedAvg(lr=0.1, batch_size=5), dp_secure=secure, **PRIVATE) for secure in (False, True, True)]
    drawn = []
    for run in runs:
        assert isinstance(run.engine, InProcess)
        client, _ = run.engine.runtime.begin(Request(0, 1, "train", received={}))
        rows = [batch.rows.tolist() for batch in client.poisson_batches(5, steps=400)]
        drawn.append(rows)
        rate = sampling(client.samples, 5)[0]
        spread = math.sqrt(400 * client.samples * rate * (1 - rate))
        assert abs(sum(map(len, rows)) - 400 * client.samples * rate) < 5 * spread
    assert drawn[0] != drawn[1] != drawn[2]


def test_a_secure_run_goes_on_with_its_account_and_only_as_one(make_run: Make, tmp_path: Path) -> None:
    method = FedAvg(lr=0.1, batch_size=5)
    whole = make_run(method, dp_secure=True, **PRIVATE)
    whole.run()
    make_run(method, tmp_path, rounds=1, dp_secure=True, **PRIVATE).run()
    resumed = make_run(method, tmp_path, resume=True, dp_secure=True, **PRIVATE)
    resumed.run()
    spent = [[result.report["epsilon"] for result in run.client_results] for run in (whole, resumed)]
    assert spent[0] == spent[1] and min(spent[0]) > 0
    with pytest.raises(ForeignCheckpoint, match="dp_secure: True there, False here"):
        make_run(method, tmp_path, resume=True, **PRIVATE)


def test_secure_noise_without_privacy_is_refused() -> None:
    with pytest.raises(ValueError, match="dp_secure is True; accepted is a value of false without dp_clip"):
        Settings(dp_secure=True)
