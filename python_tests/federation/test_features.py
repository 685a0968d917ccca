"""Features of the network, modules beside it, models that are no state, and clients that a method selects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FedAvg
from pfl_ext.data import Dataset, Inputs, Partition
from pfl_ext.federation import (
    Client,
    Features,
    Federation,
    Models,
    Record,
    Server,
    Settings,
    SideModule,
    Steps,
    Uploads,
    WorkingModel,
)
from pfl_ext.nn import lenet

# ---- features --------------------------------------------------------------------------------------------------------


def test_features_are_what_enters_the_last_layer(network: nn.Module) -> None:
    model, x = WorkingModel(network), torch.randn(7, 4)
    expected = F.relu(F.linear(x, network[0].weight, network[0].bias))
    with Features(model) as features:
        assert torch.equal(features(x), expected)
        logits = model(x)
        assert torch.equal(features.last, expected)
    assert torch.equal(F.linear(expected, network[2].weight, network[2].bias), logits)
    assert not network[2]._forward_pre_hooks  # nothing stays behind


def test_gradients_flow_through_features(network: nn.Module) -> None:
    model = WorkingModel(network)
    with Features(model) as features:
        features(torch.randn(7, 4)).sum().backward()
    assert network[0].weight.grad is not None and network[2].weight.grad is None


def test_another_head_has_other_features(network: nn.Module) -> None:
    model, x = WorkingModel(network), torch.randn(7, 4)
    with Features(model, "0") as features:
        assert torch.equal(features(x), x)


def test_features_of_a_network_whose_layers_are_fused() -> None:
    model = WorkingModel(lenet((3, 32, 32), 10))
    with Features(model) as features:
        assert features(torch.rand(2, 3, 32, 32)).shape == (2, 84)


def test_a_head_that_is_not_there_or_takes_no_rows_is_refused() -> None:
    model = WorkingModel(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)))
    with pytest.raises(ValueError, match="no module 'fc' to be the head; it has"):
        Features(model, "fc")
    with Features(model, "0") as features, pytest.raises(ValueError, match=r"\[2, 1, 4, 4\] entered the head '0'"):
        features(torch.rand(2, 1, 4, 4))
    with Features(model) as features, pytest.raises(ValueError, match="no tensor entered"):
        features.last  # noqa: B018 (it raises)


# ---- modules beside the network --------------------------------------------------------------------------------------


def _side() -> SideModule:
    return SideModule(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))


def test_a_side_module_is_a_function_of_its_vector(network: nn.Module) -> None:
    side, stream = _side(), torch.Generator().manual_seed(5)
    vector = side.drawn(stream, WorkingModel(network.double()))
    assert vector.dtype == torch.float64 and len(vector) == side.size == 16 + 10
    assert torch.equal(vector, side.drawn(torch.Generator().manual_seed(5), WorkingModel(network)))
    assert not torch.equal(vector, side.drawn(torch.Generator().manual_seed(6), WorkingModel(network)))
    x = torch.randn(5, 3, dtype=torch.float64)
    a, b, c, d = vector[:12].view(4, 3), vector[12:16], vector[16:24].view(2, 4), vector[24:]
    torch.testing.assert_close(side(vector, x), F.linear(F.relu(F.linear(x, a, b)), c, d), rtol=0, atol=1e-15)
    leaf = vector.clone().requires_grad_()
    (slope,) = torch.autograd.grad(side(leaf, x).sum(), leaf)
    assert torch.equal(slope[24:], torch.full((2,), 5.0, dtype=torch.float64))


def test_a_step_of_a_leaf_is_a_step_of_the_vector() -> None:
    side = _side()
    vector = torch.zeros(side.size)
    leaves = side.leaves(vector)
    with torch.no_grad():
        leaves["2.bias"] += 3
    assert vector[-2:].tolist() == [3, 3] and float(vector.sum()) == 6
    assert torch.equal(side(leaves, torch.ones(1, 3)), torch.full((1, 2), 3.0))


def test_side_modules_with_buffers_and_vectors_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="26"):
        _side()(torch.zeros(25), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="BatchNorm1d has buffers"):
        SideModule(lambda: nn.BatchNorm1d(3)).size  # noqa: B018 (it raises)


# ---- models that are no state ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Both(FedAvg):
    """FedAvg whose personal model is the mean of two states' logits."""

    name = "both"

    def models(self, client: Client, received: Mapping[str, Tensor]) -> Models:
        states = [received["model"], received["model"]]

        def predict(model: WorkingModel, inputs: Inputs) -> Tensor:
            assert not model.module.training
            outputs = []
            for state in states:
                model.load(state)
                outputs.append(model(inputs))
            return torch.stack(outputs).mean(0)

        return {"personal": predict}


def _told(records: list[Record]) -> Any:
    return records[-1]["models"]


def test_a_predictor_is_evaluated_as_a_state_is(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    """The mean of twice the same outputs is these: every metric of every split must be the global model's."""
    settings = Settings(rounds=1, evaluate_train=True, personal_global_test=True, prediction_distance=True)
    models = _told(Federation(_Both(lr=0.1), network, dataset, partition, settings).run())
    for split in ("train", "validation", "test"):
        found = models["personal"][split]
        assert found["distance"]["mean"] == 0
        assert {name: found[name] for name in models["global"][split]} == models["global"][split]
    assert models["personal"]["global_test"]["accuracy"]["mean"] == models["global"]["global_test"]["accuracy"]


@dataclass(frozen=True)
class _Louder(FedAvg):
    """FedAvg whose personal model triples the logits."""

    name = "louder"

    def models(self, client: Client, received: Mapping[str, Tensor]) -> Models:
        def predict(model: WorkingModel, inputs: Inputs) -> Tensor:
            model.load(received["model"])
            return 3 * model(inputs)

        return {"personal": predict}


def test_what_a_predictor_returns_is_what_is_evaluated(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(_Louder(lr=0.1), network, dataset, partition, Settings(rounds=1))
    models = _told(run.run())
    run.server.model.load(run.server["model"])
    x, y = dataset.batch(partition.test[2])
    run.server.model.module.eval()
    expected = float(F.cross_entropy(3 * run.server.model(x), y).detach())
    assert run.client_results[2].metrics["personal", "test"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert models["personal"]["test"]["accuracy"] == models["global"]["test"]["accuracy"]
    with pytest.raises(ValueError, match="the personal model of this method is not one network's weights"):
        run.personal_model(2)


# ---- clients that a method selects -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LastFirst(FedAvg):
    name = "last-first"

    def select(self, server: Server, count: int) -> list[int]:
        assert server.round > 0
        return [(server.members - 1 - i) % 6 for i in range(count)]


def test_a_method_can_select_the_clients(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    settings = Settings(rounds=2, participation=0.5, new_clients=1, join_round=2)
    records = Federation(_LastFirst(), network, dataset, partition, settings).run()
    assert [record["clients"] for record in records] == [[2, 3, 4], [3, 4, 5]]


@dataclass(frozen=True)
class _Twice(FedAvg):
    name = "twice"

    def select(self, server: Server, count: int) -> list[int]:
        return [0] * count


def test_a_selection_that_is_none_is_refused(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    run = Federation(_Twice(), network, dataset, partition, Settings(rounds=1))
    with pytest.raises(ValueError, match=r"twice selects the clients .* 6 different ones of 0 to 5"):
        run.run()


# ---- uploads ---------------------------------------------------------------------------------------------------------


def test_uploads_come_one_by_one() -> None:
    fetched: list[int] = []

    class Access:
        def fetch(self, vector: Tensor, hold: bool = True) -> Tensor:
            fetched.append(int(vector))
            return vector

    uploads = Uploads([3, 5], [1, 1], [{"x": torch.tensor(3)}, {"x": torch.tensor(5)}], access=Access())  # type: ignore[arg-type]
    for seen, (client, vector) in enumerate(uploads.one_by_one("x"), 1):
        assert client == int(vector) and len(fetched) == seen


def test_what_is_sent_may_differ_in_size_and_is_counted() -> None:
    uploads = Uploads([0, 1], [1, 1], [{"a": torch.zeros(3)}, {"a": torch.zeros(5), "b": torch.zeros(2)}])
    assert uploads.parameters() == 10 and uploads.bytes() == 40


def test_features_are_watched_in_training(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    """A loss of features alone trains the body and leaves the head."""

    @dataclass(frozen=True)
    class OfFeatures(FedAvg):
        name = "of-features"

        def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            client.model.load(received["model"])
            with Features(client.model) as features:
                Steps(client, self).train(lambda outputs, batch: features.last.square().mean())
            return {"model": client.model.state()}

    run = Federation(OfFeatures(lr=0.1), network, dataset, partition, Settings(rounds=1))
    before = run.server["model"].clone()
    run.run()
    changed = run.server["model"] != before
    assert bool(changed[:25].any())
    torch.testing.assert_close(run.server["model"][25:], before[25:], rtol=0, atol=1e-7)  # an average of equals
