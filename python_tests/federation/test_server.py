"""What a method can do at the server: train with a model of its own, and send each client something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, Diverged, Federation, Method, Server, Settings, Stage, Uploads
from pfl_ext.tasks import Classification


@dataclass(frozen=True)
class _Noisy(FedAvg):
    """FedAvg whose server passes noise through its model and takes a step against what comes out."""

    name = "noisy"

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        server["model"] = uploads.average()
        server.model.load(server["model"])
        noise = torch.randn(5, 4, generator=server.stream("noise"))
        dropped = nn.functional.dropout(noise, 0.5)  # draws from torch's own generator
        loss = server.model(dropped).square().mean()
        gradients = torch.autograd.grad(loss, server.model.trained)
        server["model"] = server["model"] - 0.1 * torch.cat([g.flatten() for g in gradients])
        server.report["distance"] = loss.item()


@dataclass(frozen=True)
class _OfItsOwn(Method):
    """A client receives three numbers that the server makes of one vector and of the client's number."""

    name = "of-its-own"

    def set_up(self, server: Server) -> None:
        server["seed"] = torch.ones(100)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        assert list(server) == ["seed"] and stage in ("train", "evaluate")
        return {"own": server["seed"][:3] * client}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert received["own"].tolist() == [client.index] * 3
        return {"own": received["own"]}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        assert [x.tolist() for x in uploads.each("own")] == [[k] * 3 for k in uploads.clients]

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert received["own"].tolist() == [client.index] * 3
        return {}


def test_a_server_that_trains_gives_the_same_bits_resumed_and_beside_other_random_numbers(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    settings = Settings(rounds=3)
    whole = Federation(_Noisy(lr=0.1), network, dataset, partition, settings)
    records = whole.run()
    Federation(_Noisy(lr=0.1), network, dataset, partition, Settings(rounds=2), folder=tmp_path).run()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    resumed = Federation(_Noisy(lr=0.1), network, dataset, partition, settings, folder=tmp_path, resume=True)
    rest = resumed.run()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(resumed.server["model"], whole.server["model"])
    reported = [record["server"]["distance"] for record in records]
    assert [record["server"]["distance"] for record in rest] == reported[2:]
    assert len(set(reported)) == 3


def test_the_servers_streams_differ_by_round_and_name(network: nn.Module) -> None:
    server = Server(Classification(), network, Settings(seed=1), clients=6)
    drawn = []
    for server.round in (1, 2):
        drawn += [torch.rand((), generator=server.stream(name)).item() for name in ("noise", "batches")]
    assert len(set(drawn)) == 4
    server.round = 1
    assert torch.rand((), generator=server.stream("noise")).item() == drawn[0]
    other = Server(Classification(), network, Settings(seed=2), clients=6)
    other.round = 1
    assert torch.rand((), generator=other.stream("noise")).item() not in drawn


def test_the_servers_model_is_not_that_of_the_clients(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(FedAvg(), network, dataset, partition, Settings(rounds=1))
    run.server.model.load(torch.zeros(run.server.model.size))
    run.run()
    assert not run.server.model.state().any()


def test_what_a_server_makes_for_each_client_reaches_it_and_is_what_is_counted(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(_OfItsOwn(), network, dataset, partition, Settings(rounds=1))
    (record,) = run.run()
    assert record["communication"]["down_parameters"] == 3 * partition.clients


def test_a_server_that_diverges_is_named(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    @dataclass(frozen=True)
    class Broken(FedAvg):
        def aggregate(self, server: Server, uploads: Uploads) -> None:
            server["model"] = uploads.average() / 0

    with pytest.raises(Diverged, match="the server diverged in round 1: its model is not finite"):
        Federation(Broken(), network, dataset, partition, Settings(rounds=2, diverged="drop")).run()


def test_what_a_server_keeps_for_each_client_is_drawn_from_the_seed_and_resumed(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    @dataclass(frozen=True)
    class Counting(FedAvg):
        def set_up(self, server: Server) -> None:
            super().set_up(server)
            server["turns"] = torch.rand(server.clients, generator=server.stream("turns"))

        def aggregate(self, server: Server, uploads: Uploads) -> None:
            server["model"] = uploads.average()
            server["turns"][uploads.clients] += 1

    settings = Settings(rounds=2, participation=0.5, seed=5)
    whole = Federation(Counting(), network, dataset, partition, settings)
    start = whole.server["turns"].clone()
    whole.run()
    assert len(start) == partition.clients and not torch.equal(start, whole.server["turns"])
    once = Settings(rounds=1, participation=0.5, seed=5)
    Federation(Counting(), network, dataset, partition, once, folder=tmp_path).run()
    resumed = Federation(Counting(), network, dataset, partition, settings, folder=tmp_path, resume=True)
    resumed.run()
    assert torch.equal(resumed.server["turns"], whole.server["turns"])
    other = Federation(Counting(), network, dataset, partition, Settings(seed=6))
    assert not torch.equal(other.server["turns"], start)


def test_a_client_receives_the_servers_vectors_as_they_are(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(FedAvg(local_epochs=0), network, dataset, partition, Settings(rounds=2))
    before = run.server["model"].clone()
    run.run()  # nobody trains: what comes back is what was sent, up to the rounding of an average of equal models
    torch.testing.assert_close(run.server["model"], before, rtol=1e-6, atol=0)
