from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, ClientRuntime, ClientStore, Plan, Request, Settings, WorkingModel
from pfl_ext.federation.client import Rows
from pfl_ext.tasks import Classification


def _rows(partition: Partition, client: int = 0) -> Rows:
    return Rows(partition.train[client], partition.validation[client], partition.test[client])


@pytest.fixture
def client(dataset: Dataset, partition: Partition, network: nn.Module) -> Client:
    store = ClientStore(6, {"v": torch.zeros(2)})
    return Client(0, 1, "train", Classification(), WorkingModel(network), dataset, _rows(partition), store, Settings())


def _order(client: Client, **options: object) -> list[int]:
    return [int(row) for batch in client.batches(4, **options) for row in batch.rows]  # type: ignore[arg-type]


def test_a_pass_takes_every_sample_once(client: Client) -> None:
    assert sorted(_order(client)) == list(range(client.samples))
    assert sorted(_order(client, epochs=3)) == sorted(list(range(client.samples)) * 3)


def test_the_order_depends_on_stream_round_and_client(
    client: Client, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    assert _order(client) == _order(client)
    assert _order(client) != _order(client, name="personal")
    first = _order(client)
    assert first[: client.samples] != _order(client, epochs=2)[client.samples :]
    client.round = 2
    assert _order(client) != first
    store, rows = ClientStore(6, {}), _rows(partition)
    reseeded = Client(0, 1, "train", Classification(), client.model, dataset, rows, store, Settings(seed=1))
    assert _order(reseeded) != first
    another = Client(1, 1, "train", Classification(), client.model, dataset, rows, store, Settings())
    assert _order(another) != first


def test_steps_count_batches_over_as_many_passes_as_it_takes(client: Client) -> None:
    per_pass = -(-client.samples // 4)
    assert len(list(client.batches(4, steps=2))) == 2
    assert len(list(client.batches(4, steps=2 * per_pass + 1))) == 2 * per_pass + 1
    assert list(client.batches(4, steps=0)) == [] and list(client.batches(4, epochs=0)) == []


def test_rows_say_where_a_batch_stands_in_the_training_data(client: Client, dataset: Dataset) -> None:
    for batch in client.batches(4):
        inputs, targets = dataset.batch(client.train[batch.rows])
        assert torch.equal(batch.inputs, inputs) and torch.equal(batch.targets, targets)


def test_batches_are_fetched_together_and_no_more_than_the_steps_take(
    client: Client, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    batch = type(dataset).batch

    def counted(self: Dataset, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fetched.append(len(indices))
        return batch(self, indices)

    monkeypatch.setattr(type(dataset), "batch", counted)
    assert client.samples > 2 * 3
    list(client.batches(2))
    assert fetched == [client.samples]
    fetched.clear()
    list(client.batches(2, steps=3))
    assert fetched == [2 * 3]


@dataclass(frozen=True)
class _Keeping(FedAvg):
    """Sets a vector and looks at what is kept meanwhile; fails in round 2."""

    name = "keeping"

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        return {"v": torch.zeros(2)}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        before = client["v"]
        client["v"] = before + 1
        assert client["v"].tolist() == (before + 1).tolist() and "v" in client
        assert client._store.read(0, "v").tolist() == before.tolist()
        if client.round == 2:
            raise ZeroDivisionError
        return {"model": received["model"]}


def test_what_is_set_is_kept_when_the_turn_ends_without_an_error_and_not_before(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    plan = Plan(_Keeping(), Classification(), network, dataset, {0: _rows(partition)}, Settings())
    (model,) = plan.working_models()
    store = plan.store()
    runtime = ClientRuntime(plan, store)
    runtime.server = {"model": model.state()}
    assert not store.written(0, "v")
    runtime(Request(0, 1, "train"))
    assert store.written(0, "v") and store.read(0, "v").tolist() == [1, 1]
    with pytest.raises(ZeroDivisionError):
        runtime(Request(0, 2, "train"))
    assert store.read(0, "v").tolist() == [1, 1]


def test_logits_leave_the_models_mode_and_do_not_depend_on_how_many_are_asked_for(client: Client) -> None:
    client.model.module.train()
    logits, targets = client.outputs(client.train)
    assert client.model.module.training and logits.shape == (client.samples, 3) and len(targets) == client.samples
    assert not logits.requires_grad
    one, _ = client.outputs(client.train[:1])
    torch.testing.assert_close(one[0], logits[0])


def test_logits_are_those_of_evaluation_whatever_mode_the_model_is_in(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    module = nn.Sequential(network, nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    client = Client(
        0, 1, "train", Classification(), WorkingModel(module), dataset, _rows(partition), ClientStore(6, {}), Settings()
    )
    before = client.model.state()
    logits, _ = client.outputs(client.train)
    assert torch.equal(client.model.state(), before)  # no statistics were updated
    assert torch.equal(logits, module.eval()(dataset.batch(client.train)[0]))


def test_smaller_last_batches_can_be_left_out(
    client: Client, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    store = ClientStore(6, {})
    full = Client(
        0, 1, "train", Classification(), client.model, dataset, _rows(partition), store, Settings(drop_last=True)
    )
    size = client.samples // 2 + 1
    assert [len(b.rows) for b in client.batches(size, epochs=2)] == 2 * [size, client.samples - size]
    assert [len(b.rows) for b in full.batches(size, epochs=2)] == 2 * [size]
    assert [len(b.rows) for b in full.batches(size, steps=3)] == 3 * [size]
    assert [len(b.rows) for b in full.batches(2 * client.samples)] == [client.samples]  # the only one of its pass


@pytest.mark.parametrize(
    ("options", "settings", "budget"),
    [
        ({"epochs": 2}, {}, None),
        ({"steps": 5}, {}, None),
        ({"epochs": 2}, {"drop_last": True}, None),
        ({}, {"augmentation": "flip"}, None),
        ({}, {}, 7),
        ({}, {}, 0),
    ],
)
def test_batches_in_a_row_are_the_same_batches_and_are_counted_alike(
    dataset: Dataset, partition: Partition, network: nn.Module, options: Any, settings: Any, budget: int | None
) -> None:
    images = dataclasses.replace(dataset, inputs=torch.rand(len(dataset.targets), 1, 2, 3))

    def client() -> Client:
        model, store = WorkingModel(network), ClientStore(6, {})
        made = Client(
            0, 1, "train", Classification(), model, images, _rows(partition), store, Settings(**settings)
        )  # fmt: skip
        if budget is not None:
            made.begin_personal(budget)
        return made

    one, several = client(), client()
    expected = list(one.batches(3, **options))
    found = [batch for part in several.batches_in_a_row(3, **options) for batch in part.cut(3)]
    assert len(found) == len(expected) and bool(expected) == (budget != 0)
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    counts = [(c.trained, c.trained_personally) for c in (one, several)]
    assert counts[0] == counts[1] and (sum(counts[0]) > 0 or budget == 0)
