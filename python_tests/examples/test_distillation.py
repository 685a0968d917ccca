from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    """The models are tiny: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_distillation_beats_averaging_and_personalisation_beats_both_at_home():
    result = load("distillation_ensemble").main()
    assert result["distilled"] > result["average"] + 0.05
    assert result["personal, client 0"] >= result["distilled, client 0"]


def test_flower_strategy_distils_what_the_clients_send():
    common = pytest.importorskip("flwr.common", reason="Flower is not installed")
    example = load("distillation_flower")
    torch.manual_seed(0)
    make = lambda: nn.Linear(4, 3)  # noqa: E731
    strategy = example.DistillingFedAvg(make, torch.randn(50, 4), steps=5)
    status = common.Status(common.Code.OK, "")
    results = []
    for _ in range(3):
        arrays = [x.numpy() for x in make().state_dict().values()]
        results.append((None, common.FitRes(status, common.ndarrays_to_parameters(arrays), 10, {})))
    parameters, metrics = strategy.aggregate_fit(1, results, [])
    assert [a.shape for a in common.parameters_to_ndarrays(parameters)] == [(3, 4), (3,)]
    assert metrics["distillation_loss"] >= 0
