"""What would be ignored or look like a result without being one is refused, and said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import FedAvg, FedPer
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, Diverged, Federation, Settings

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
