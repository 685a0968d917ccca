from __future__ import annotations

import pytest
import torch
from by_hand import LR, Turn, entries, gradient, joined, models
from torch import Tensor, nn

from pfl_ext.algorithms import FedBN
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, InProcess, Settings, Uploads


class Residual(nn.Module):
    """A network whose second batch normalisation does not say so in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.downsample = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.bn1(self.conv1(x)) + self.downsample(x)))


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(3)
    return Residual().double()


# Scale, shift, mean, variance and counter of bn1 and of downsample.1.
NORMS = 2 * (5 + 5 + 5 + 5 + 1)


@pytest.mark.by_hand("fedbn")
def test_every_batch_normalisation_stays_and_all_is_trained(turn: Turn) -> None:
    runtime, client = turn(FedBN(lr=LR, batch_size=4))
    model = client.model
    norms = entries(model, "bn1", "downsample.1")
    received = {"shared": runtime.server["shared"] + 0.1}
    start = client["norms"] + 0.25
    client["norms"] = start
    v = joined(norms, start, received["shared"])
    for batch in client.batches(4):
        step = LR * gradient(client, v, batch)
        v = model.state() - step  # the state has the statistics of this batch
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(sent["shared"], v[~norms], rtol=0, atol=1e-14)
    torch.testing.assert_close(client["norms"], v[norms], rtol=0, atol=1e-14)
    assert len(start) == NORMS and bool((client["norms"] != start).all())
    found = models(runtime, client, **received)
    assert set(found) == {"personal"}
    assert torch.equal(found["personal"], joined(norms, client["norms"], received["shared"]))


def test_the_rest_is_averaged_by_samples() -> None:
    uploads = Uploads([0, 2], [3, 1], [{"shared": torch.tensor([1.0])}, {"shared": torch.tensor([5.0])}])
    server: dict[str, Tensor] = {}
    FedBN().aggregate(server, uploads)  # type: ignore[arg-type]
    assert server["shared"].tolist() == [2.0]


def test_scales_shifts_and_statistics_are_never_sent_and_differ_between_clients(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    engine = InProcess()
    run = Federation(FedBN(lr=LR, batch_size=4), network, dataset, partition, Settings(rounds=2), engine=engine)
    last = run.run()[-1]
    sent = last["communication"]
    linear = 2 * (4 * 5 + 5) + 5 * 3 + 3
    assert sent["up_parameters"] == sent["down_parameters"] == 3 * linear
    assert last["training"]["trained_parameters"] == linear + 2 * (5 + 5)
    first, second = (engine.store.read(k, "norms") for k in range(2))
    assert int((first == second).sum()) == 2  # the counters of batches alone


def test_a_network_without_batch_normalisation_is_refused(dataset: Dataset, partition: Partition) -> None:
    with pytest.raises(ValueError, match="this network has none: use fedavg"):
        Federation(FedBN(), nn.Linear(4, 3).double(), dataset, partition)
