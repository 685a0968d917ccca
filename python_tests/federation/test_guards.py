"""What would be ignored or look like a result without being one is refused, and said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS, FedAvg, FedPer
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, Diverged, Federation, Settings
from pfl_ext.federation.requirements import check_run
from pfl_ext.nn import Networks
from pfl_ext.tasks import TASKS

QUICK = {"lr": 0.1, "batch_size": 4}


@pytest.mark.parametrize("policy", ["local_buffers", "server_buffers"])
def test_buffers_cannot_stay_where_a_method_sends_parts_of_a_model(
    policy: str, dataset: Dataset, partition: Partition
) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    settings = Settings(rounds=1, **{policy: ("BatchNorm1d",)})
    with pytest.raises(ValueError, match="fedper does not send whole models"):
        Federation(FedPer(**QUICK), network, dataset, partition, settings)
    Federation(FedAvg(**QUICK), network, dataset, partition, settings).run()


@dataclass(frozen=True)
class _OwnLoop(FedAvg):
    """Says that it is private, as FedAvg is, and takes batches of its own."""

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        list(client.batches(self.batch_size))
        return super().train(client, received)


def test_batches_of_a_methods_own_are_refused_under_differential_privacy(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    with pytest.raises(ValueError, match="batches of its own has no differentially private form"):
        Federation(_OwnLoop(**QUICK), network, dataset, partition, Settings(rounds=1, dp_clip=1.0, dp_noise=1.0)).run()
    Federation(_OwnLoop(**QUICK), network, dataset, partition, Settings(rounds=1)).run()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_a_method_says_of_itself_decides_what_it_is_refused_for(
    name: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    method, classes = METHODS[name](), TASKS["classification"]()
    no_validation = replace(partition, validation=(torch.empty(0, dtype=torch.int64),) * partition.clients)
    two_networks = Networks([nn.Linear(4, 3), network])
    outputs = TASKS["regression"]()

    def refused(holds: bool, message: str, *what: Any) -> None:
        task, module, part, settings = what
        if not holds:
            check_run(method, task, module, dataset, part, settings, {})
            return
        with pytest.raises(ValueError, match=message):
            check_run(method, task, module, dataset, part, settings, {})

    private = Settings(rounds=1, dp_clip=1.0, dp_noise=1.0)
    refused(not method.private, f"{name} has no differentially private form", classes, network, partition, private)
    refused(method.needs_validation, "chooses models on validation data", classes, network, no_validation, Settings())
    refused(method.needs != "nothing", f"{name} needs ", outputs, network, partition, Settings())
    refused(not method.several_networks, "all need one network", classes, two_networks, partition, Settings())


@pytest.mark.parametrize(("name", "value"), [("private", "no"), ("needs", "class"), ("needs_validation", None)])
def test_a_value_that_no_guard_would_see_is_refused_where_the_class_is_made(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} of Mistaken is {value!r}; accepted: "):
        type("Mistaken", (FedAvg,), {name: value})


class _NoOutput(nn.Linear):
    """Trains as usual, and gives NaN when it is evaluated: what a negative running variance does."""

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        return found if self.training else found * torch.nan


def test_nan_in_an_evaluation_names_the_model_and_is_no_accuracy(dataset: Dataset, partition: Partition) -> None:
    with pytest.raises(Diverged, match="its global model's output on test is not finite"):
        Federation(FedAvg(**QUICK), _NoOutput(4, 3), dataset, partition, Settings(rounds=1)).run()
    with pytest.raises(Diverged, match=r"the server diverged.*global model's output on global_test"):
        Federation(FedAvg(**QUICK), _NoOutput(4, 3), dataset, partition, Settings(rounds=1, diverged="drop")).run()
