"""How much is trained and sent: measured in a turn, for PerAda's Table 1 too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext import nn as networks
from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import ClientRuntime, Federation, Method, Plan, Request, Server, Settings
from pfl_ext.federation.client import Rows
from pfl_ext.tasks import Classification

RESNET18 = 11_181_642
BATCH_NORM = 9_600  # scales and shifts; as many means and variances, and 20 counters, are buffers
HEAD = 5_130


def _resnet18(**options: Any) -> nn.Module:
    return networks.build("resnet18", (3, 32, 32), 10, torch.Generator().manual_seed(0), **options)


@pytest.fixture(scope="module")
def resnet18() -> nn.Module:
    return _resnet18()


def _set_up(method: Method, network: nn.Module) -> Server:
    server = Server(Classification(), network, Settings(), 1)
    method.set_up(server)
    return server


def _trained_parameters(method: Method, network: nn.Module) -> int:
    """How many parameters a turn with two images trains."""
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    nothing = torch.empty(0, dtype=torch.int64)
    images = Dataset.from_tensors(x, torch.arange(2), classes=[str(c) for c in range(10)])
    server = _set_up(method, network)
    plan = Plan(
        method,
        Classification(),
        copy.deepcopy(network),
        images,
        {0: Rows(torch.arange(2), nothing, nothing)},
        Settings(),
    )
    runtime = ClientRuntime(plan, plan.store())
    runtime.server = server
    reply = runtime(Request(0, 1, "train"))
    assert reply.error is None
    return reply.trained_parameters


_ONE_MODEL = ["standalone", "mtl", "fedavg-ft", "fedavg", "fedprox", "feddyn", "fedbn", "lg-fedavg", "fedrep", "fedper"]


@pytest.mark.parametrize(
    ("name", "models"),
    [*((name, 1) for name in _ONE_MODEL), *((name, 2) for name in ("pfedme", "apfl", "ditto", "scd"))],
)
def test_one_or_two_whole_models_are_trained(resnet18: nn.Module, name: str, models: int) -> None:
    assert _trained_parameters(METHODS[name](lr=1e-6, local_steps=1), resnet18) == models * RESNET18


def test_adapters_and_what_they_are_in_have_the_counts_of_table_1() -> None:
    perada = METHODS["perada"](lr=1e-6, local_steps=1, kd_steps=0)
    assert _trained_parameters(perada, _resnet18(adapters=True, freeze="backbone")) == 2_826_516  # 2.82 M
    fedalt = METHODS["fedalt"](lr=1e-6, local_steps=1, personal="adapter")
    assert _trained_parameters(fedalt, _resnet18(adapters=True)) == 12_581_962  # 12.59 M


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
def test_what_a_client_receives_is_what_is_shared(resnet18: nn.Module, name: str, sent: int) -> None:
    method = METHODS[name]()
    received = method.sends(_set_up(method, resnet18), 0, "train")
    assert sum(vector.numel() for vector in received.values()) == sent


# What a client of a method trains beside, or in place of, one whole model.
_TWO = ("apfl", "ditto", "fedasync", "fedbuff", "fml", "perada", "pfedme", "plgu-lf", "scd")
_OPTIONS: dict[str, dict[str, Any]] = {"perada": {"kd_steps": 0}, "feddf": {"kd_steps": 0}}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_round_says_how_many_parameters_a_client_has_trained(
    dataset: Dataset, partition: Partition, name: str, frozen: bool
) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    network[0].weight.requires_grad_(not frozen)
    body, head = (0 if frozen else 4 * 5) + 5 + (5 + 5), 5 * 3 + 3
    others = {
        "fedbabu": body,
        "fedrod": body + head + head,
        "fedrod-h": body + head + (3 * 16 + 16) + (16 + 1) * head,
        "fedem": 3 * (body + head),
        "gpfl": body + head + 2 * (5 * 5 + 5 + 2 * 5) + 3 * 5,
    }
    expected = others.get(name, (1 + (name in _TWO)) * (body + head))
    method = METHODS[name](batch_size=4, **_OPTIONS.get(name, {}))
    settings = Settings(rounds=1, participation=0.7)
    public = dataset.unlabelled(dataset) if method.public else None
    run = Federation(method, network, dataset, partition, settings, auxiliary=public)
    record = next(run.rounds())
    assert record["training"]["trained_parameters"] == expected


@pytest.mark.parametrize(("options", "models"), [({"personal_epochs": 0}, 1), ({"local_epochs": 0}, 1), ({}, 2)])
def test_a_model_that_takes_no_step_is_not_counted(
    dataset: Dataset, partition: Partition, network: nn.Module, options: dict[str, int], models: int
) -> None:
    method = METHODS["ditto"](batch_size=4, **options)
    (record,) = Federation(method, network, dataset, partition, Settings(rounds=1)).run()
    assert record["training"]["trained_parameters"] == models * 43
