"""The Flower strategies and clients do what they say, on weights in Flower's Parameters."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_files import load_example
from torch import nn


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def results_of(example, models, samples):
    """As Flower hands a strategy what its clients sent."""
    from flwr.common import FitRes

    return [
        (None, FitRes(None, example.flower_weights.parameters_of(model), n, {}))
        for model, n in zip(models, samples, strict=True)
    ]


def arrays(parameters):
    from flwr.common import parameters_to_ndarrays

    return parameters_to_ndarrays(parameters)


def data():
    torch.manual_seed(3)
    x = torch.randn(60, 4)
    return x, x[:, :3].argmax(1)


def test_the_fused_average_is_flowers():
    example = load_example("averaging_flower")
    clients, samples = [linear(seed) for seed in range(3)], [10, 20, 30]
    results = results_of(example, clients, samples)
    fused, _ = example.FusedFedAvg(linear(9)).aggregate_fit(1, results, [])
    plain, _ = example.FedAvg().aggregate_fit(1, results, [])
    for ours, theirs in zip(arrays(fused), arrays(plain), strict=True):
        # Three float32 products and sums on either side.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=8 * 2.0**-24)


def test_the_fused_average_leaves_out_a_client_that_diverged_and_moves_by_the_learning_rate():
    example = load_example("averaging_flower")
    clients = [linear(0), linear(1)]
    with torch.no_grad():
        clients[1].weight[0, 0] = torch.nan
    server = linear(9)
    start = server.weight.detach().clone()
    example.FusedFedAvg(server, lr=0.5).aggregate_fit(1, results_of(example, clients, [10, 10]), [])
    torch.testing.assert_close(server.weight.detach(), start + 0.5 * (clients[0].weight.detach() - start))


def test_a_round_without_results_changes_nothing():
    example = load_example("averaging_flower")
    assert example.FusedFedAvg(linear(0)).aggregate_fit(1, [], []) == (None, {})


def test_scores_reach_the_clients_and_the_clients_learn():
    example = load_example("sharpness_flower")
    make = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))  # noqa: E731
    torch.manual_seed(0)
    x, y = data()
    strategy = example.ScoredFedAvg(make)
    server = make()
    client = example.LWSAMClient(make(), x, y)
    manager = SimpleNamespace(
        sample=lambda num_clients, **_: [SimpleNamespace(cid="0")] * num_clients,
        num_available=lambda: 2,
        wait_for=lambda *_: True,
    )
    losses, parameters = [], example.flower_weights.parameters_of(server)
    for number in range(4):
        ((_, instructions), *_) = strategy.configure_fit(number, parameters, manager)
        assert sorted(instructions.config) == (["score 0", "score 1"] if number else [])
        weights, samples, metrics = client.fit(arrays(instructions.parameters), instructions.config)
        uploads = [example.flower_weights.load(make(), weights), server]
        results = results_of(example, uploads, [samples, samples])
        parameters, _ = strategy.aggregate_fit(number, results, [])
        assert sum(strategy.scores) == pytest.approx(1.0)
        losses.append(metrics["loss"])
    assert losses[-1] < losses[0]


def test_the_server_stays_nearer_to_its_anchor_the_larger_lambda_is():
    example = load_example("proximal_flower")
    clients = [linear(1), linear(2)]
    distances = []
    for lam in (0.0, 1.0):
        strategy = example.AnchoredFedAvg(linear(0), lam=lam)
        for number in range(5):
            _, metrics = strategy.aggregate_fit(number, results_of(example, clients, [1, 1]), [])
        distances.append(metrics["squared_distance"])
    assert distances[1] < 0.5 * distances[0]


def test_fedprox_clients_learn_near_what_they_received():
    example = load_example("proximal_flower")
    x, y = data()
    start = example.flower_weights.arrays_of(linear(0))
    moved = []
    for mu in (0.0, 10.0):
        weights, samples, metrics = example.FedProxClient(linear(5), x, y, mu=mu).fit(start, {})
        assert samples == 60 and metrics["loss"] < 1.4
        moved.append(sum(float(((a - b) ** 2).sum()) for a, b in zip(weights, start, strict=True)))
    assert 0 < moved[1] < 0.5 * moved[0]


def test_the_strategy_distils_what_the_clients_send():
    example = load_example("distillation_flower")
    torch.manual_seed(0)
    unlabelled = torch.randn(50, 4)
    clients = [linear(seed) for seed in range(3)]
    losses = []
    for steps in (1, 200):
        strategy = example.DistillingFedAvg(lambda: linear(7), unlabelled, steps=steps)
        parameters, metrics = strategy.aggregate_fit(1, results_of(example, clients, [30, 1, 1]), [])
        assert [a.shape for a in arrays(parameters)] == [(3, 4), (3,)]
        losses.append(metrics["distillation_loss"])
    # FedAvg begins near the first client; the ensemble is the even mean.
    assert 0 <= losses[1] < 0.5 * losses[0]
