"""How much is trained and sent, for the network of PerAda's Table 1."""

from __future__ import annotations

import pytest
import torch

from pfl_ext import nn
from pfl_ext.algorithms import METHODS
from pfl_ext.federation import WorkingModel

RESNET18 = 11_181_642
BATCH_NORM = 9_600  # scales and shifts; as many means and variances, and 20 counters, are buffers
HEAD = 5_130


@pytest.fixture(scope="module")
def model() -> WorkingModel:
    return WorkingModel(nn.build("resnet18", (3, 32, 32), 10, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("names", "models"),
    [
        (
            ("standalone", "mtl", "fedavg-ft", "fedavg", "fedprox", "feddyn", "fedbn", "lg-fedavg", "fedrep", "fedper"),
            1,
        ),
        (("pfedme", "apfl", "ditto", "scd"), 2),
    ],
)
def test_one_or_two_whole_models_are_trained(model: WorkingModel, names: tuple[str, ...], models: int) -> None:
    for name in names:
        assert METHODS[name]().trained_parameters(model) == models * RESNET18, name


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("fedavg", RESNET18 + BATCH_NORM + 20),
        ("mtl", RESNET18 + BATCH_NORM + 20),
        ("fedbn", RESNET18 - BATCH_NORM),
        ("lg-fedavg", HEAD),
        ("fedper", RESNET18 + BATCH_NORM + 20 - HEAD),
        ("fedbabu", RESNET18 + BATCH_NORM + 20 - HEAD),
    ],
)
def test_what_a_client_receives_is_what_is_shared(model: WorkingModel, name: str, sent: int) -> None:
    method = METHODS[name]()
    server = method.server_state(model)
    assert sum(server[vector].numel() for vector in method.received()) == sent
