"""Whole steps in one native call are the steps of autograd, and are taken where they can be."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from pfl_ext import _native
from pfl_ext.algorithms import SCAFFOLD, Ditto, FedAvg, FedProx, FedSAM, PerFedAvg, PersFL
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, Federation, Method, Settings, steps
from pfl_ext.tasks import Classification, Task

needs_library = pytest.mark.skipif(_native.isa() is None, reason="needs the CPU library")


def _noted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The numbers of samples that a native function is called with."""
    seen: list[int] = []
    original = getattr(steps, name)

    def noted(params: list[Tensor], x: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(len(x))
        return original(params, x, *rest, **options)

    monkeypatch.setattr(steps, name, noted)
    return seen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of samples of the native steps."""
    return _noted(monkeypatch, "train_steps_")


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of samples of the native gradients."""
    return _noted(monkeypatch, "loss_and_gradients")


def _trained(
    method: Method, network: nn.Module, dataset: Dataset, partition: Partition, task: Task | None = None, **options: Any
) -> Tensor:
    settings = Settings(rounds=3, evaluate_every=3, **options)
    run = Federation(method, copy.deepcopy(network), dataset, partition, settings, task=task)
    run.run()
    return run.server["model"]


def _assert_close(mine: Tensor, theirs: Tensor, network: nn.Module) -> None:
    """Within rounding of each other, and far from where both began.

    A step of the size 0.1 on gradients around 1, each of some ten sums of at most a hundred terms, is off by at most
    some 100 units of 6e-8, of which a round averages 20 steps: below 2e-5, and a thousandth of what is learned.
    """
    begin = torch.cat([p.detach().flatten() for p in network.parameters()])
    assert (theirs - begin).abs().max() > 0.02
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


METHODS = {
    "fedavg": FedAvg(lr=0.1, batch_size=4, local_epochs=2),
    "momentum and decay": FedAvg(lr=0.1, batch_size=4, momentum=0.9, weight_decay=0.01),
    "fedprox": FedProx(lr=0.1, batch_size=4, mu=0.5),
    "ditto": Ditto(lr=0.1, batch_size=4),
    "a step size that changes": FedAvg(lr=0.1, batch_size=4, lr_steps="cosine"),
}


@needs_library
@pytest.mark.parametrize("name", METHODS)
def test_the_bits_do_not_depend_on_how_many_steps_a_call_takes(
    name: str, network: nn.Module, dataset: Dataset, partition: Partition, calls: list[int], monkeypatch: Any
) -> None:
    mine = _trained(METHODS[name], network, dataset, partition)
    together = len(calls)
    monkeypatch.setattr("pfl_ext.federation.client._FETCHED_AHEAD", 1)
    theirs = _trained(METHODS[name], network, dataset, partition)
    assert torch.equal(mine, theirs)
    # A step size that changes from step to step takes a call for each.
    assert (together < len(calls) - together) == (METHODS[name].lr_steps == "constant")


@needs_library
def test_images_are_stepped_in_one_call_too(calls: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(40, 3, 10, 10, generator=generator)
    dataset = Dataset("images", images, torch.arange(40) % 4, ("a", "b", "c", "d"), torch.zeros(40, dtype=torch.bool))
    none = torch.empty(0, dtype=torch.int64)
    partition = Partition(tuple(torch.arange(40).split(10)), (none,) * 4, (none,) * 4, none, none)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(80, 7), nn.ReLU(), nn.Linear(7, 4)
    )
    mine = _trained(METHODS["fedprox"], network, dataset, partition)
    assert calls
    theirs = _trained(METHODS["fedprox"], network, dataset, partition, fused_steps=False)
    _assert_close(mine, theirs, network)


def _sgd(params: list[Tensor], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr, weight_decay=weight_decay)


BY_GRADIENTS = {
    "clipped": FedAvg(lr=0.1, batch_size=4, clip=1.0),
    "a second gradient": FedSAM(lr=0.1, batch_size=4),
    "something added": SCAFFOLD(lr=0.1, batch_size=4),
    "another optimiser": FedAvg(lr=0.1, batch_size=4, optimizer=_sgd),
    # Differences of gradients over 2 delta: rounding of a gradient is alpha / delta times as large in a step.
    "differences": PerFedAvg(lr=0.1, batch_size=4, alpha=0.1, delta=0.1),
}


@needs_library
@pytest.mark.parametrize("name", [*METHODS, *BY_GRADIENTS])
def test_a_run_is_that_of_autograd_but_for_rounding(
    name: str,
    network: nn.Module,
    dataset: Dataset,
    partition: Partition,
    calls: list[int],
    gradients: list[int],
) -> None:
    method = (METHODS | BY_GRADIENTS)[name]
    mine = _trained(method, network, dataset, partition)
    assert calls if name in METHODS else gradients and not calls
    before = len(calls) + len(gradients)
    theirs = _trained(method, network, dataset, partition, fused_steps=False)
    assert len(calls) + len(gradients) == before
    _assert_close(mine, theirs, network)


@needs_library
@pytest.mark.parametrize("options", [{}, {"soft": "ce"}, {"soft_mean": "elements"}, {"momentum": 0.9}], ids=str)
def test_distillation_in_native_calls_is_that_of_autograd_but_for_rounding(
    options: dict[str, Any], network: nn.Module, dataset: Dataset, partition: Partition, calls: list[int]
) -> None:
    persfl = PersFL(lr=0.1, batch_size=4, temperatures=(3.0,), lambdas=(0.5,), distill_epochs=2, **options)

    def students(**more: Any) -> list[Tensor]:
        run = Federation(persfl, copy.deepcopy(network), dataset, partition, Settings(rounds=2, **more))
        *_, in_rounds, _ = (len(calls) for _ in run.rounds())
        assert len(calls) - in_rounds == (0 if more else 2 * partition.clients)
        return [torch.cat([p.flatten() for p in run.personal_model(k).parameters()]).detach() for k in range(6)]

    for mine, theirs in zip(students(), students(fused_steps=False), strict=True):
        _assert_close(mine, theirs, network)


OTHERS: dict[str, tuple[Method, Task | None]] = {
    "clipped": (FedAvg(batch_size=4, clip=1.0), None),
    "a second gradient": (FedSAM(batch_size=4), None),
    "something added": (SCAFFOLD(batch_size=4), None),
    "another optimiser": (FedAvg(batch_size=4, optimizer="adam"), None),
    "smooth labels": (FedAvg(batch_size=4), Classification(label_smoothing=0.1)),
    "large batches": (FedAvg(batch_size=100, local_steps=1), None),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_steps_are_taken_by_themselves(
    what: str, network: nn.Module, dataset: Dataset, partition: Partition, calls: list[int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(steps, "_MOST_ROWS", 8)
    method, task = OTHERS[what]
    _trained(method, network, dataset, partition, task)
    assert not calls


def test_a_network_with_a_hook_is_run_by_autograd(
    network: nn.Module, dataset: Dataset, partition: Partition, calls: list[int]
) -> None:
    network[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    _trained(METHODS["fedavg"], network, dataset, partition)
    assert not calls


@needs_library
def test_the_switch_is_part_of_a_runs_identity(network: nn.Module, dataset: Dataset, partition: Partition) -> None:
    runs = [
        Federation(METHODS["fedavg"], copy.deepcopy(network), dataset, partition, Settings(fused_steps=fused))
        for fused in (True, False)
    ]
    assert runs[0].identity != runs[1].identity


class _Part(FedAvg):
    """FedAvg that leaves a part of the network in evaluation mode."""

    name = "part"
    seen: ClassVar[list[bool]] = []

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As FedAvg, and then the change."""
        sent = super().train(client, received)
        part = next(client.model.module.children())
        self.seen.append(part.training)
        part.eval()
        return sent


def test_a_turn_begins_with_the_whole_network_in_training_mode(
    network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    settings = Settings(rounds=1)
    Federation(_Part(lr=0.1, batch_size=4), network, dataset, partition, settings).run()
    assert _Part.seen == [True] * partition.clients
