from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from example_files import load_example
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_codistillation_learns(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["spectral_codistillation.py", "--rounds", "3", "--clients", "2"])
    example = runpy.run_path(str(EXAMPLES / "spectral_codistillation.py"))
    history = example["main"]()
    assert len(history) == 3
    assert history[-1] > 0.8


def test_flower_clients_learn_both_models_and_the_strategy_sees_their_spectra():
    example = load_example("spectral_flower")
    from flwr import common  # the real one or the stand-in

    torch.manual_seed(0)
    strategy = example.SpectralFedAvg()
    start = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    points = torch.randn(60, 4)
    clients = [
        example.CoDistillationClient(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), points, labels)
        for labels in (points[:, :3].argmax(1), points[:, 1:].argmax(1))
    ]
    sent, rounds = example.flower_weights.arrays_of(start), []
    for number in range(3):
        results, losses = [], []
        for client in clients:
            arrays, samples, metrics = client.fit(sent, {})
            losses.append((metrics["generic_loss"], metrics["personal_loss"]))
            results.append((None, common.FitRes(None, common.ndarrays_to_parameters(arrays), samples, {})))
        parameters, spread = strategy.aggregate_fit(number, results, [])
        sent = common.parameters_to_ndarrays(parameters)
        rounds.append(losses)
        assert 0 < spread["mean_divergence"] <= spread["largest_divergence"]
    for first, last in zip(rounds[0], rounds[-1], strict=True):
        assert last[1] < 0.8 * first[1]
    # Two clients that agree are where their average is.
    _, spread = strategy.aggregate_fit(3, results[:1] * 2, [])
    assert spread["largest_divergence"] == pytest.approx(0, abs=1e-6)
