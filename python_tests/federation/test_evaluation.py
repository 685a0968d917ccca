"""What an evaluation costs, and that it misses nothing."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import Ditto, FedAvg, Standalone
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Method, Settings, WorkingModel


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers were loaded, a number a load."""
    seen: list[int] = []
    original = WorkingModel.load

    def noted(model: WorkingModel, state: Tensor) -> None:
        seen.append(state.numel())
        original(model, state)

    monkeypatch.setattr(WorkingModel, "load", noted)
    return seen


def _run(method: Method, network: nn.Module, dataset: Dataset, partition: Partition, **options: Any) -> list[Any]:
    run = Federation(method, copy.deepcopy(network), dataset, partition, Settings(rounds=1, **options))
    return list(run.run())


@pytest.mark.parametrize(("method", "saved"), [(FedAvg(batch_size=4), 5), (Ditto(batch_size=4), 0)], ids=["one", "two"])
def test_a_model_that_all_clients_share_is_loaded_once(
    method: Method,
    saved: int,
    network: nn.Module,
    dataset: Dataset,
    partition: Partition,
    loads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = _run(method, network, dataset, partition)[-1]["models"]
    few = len(loads)
    loads.clear()
    monkeypatch.setattr(WorkingModel, "loaded", lambda model, state: False)
    assert _run(method, network, dataset, partition)[-1]["models"] == mine
    assert few == len(loads) - saved  # of six clients; where each has a personal model, it is in between


def test_a_model_that_was_written_to_is_loaded_again(network: nn.Module) -> None:
    model = WorkingModel(network)
    state = model.state()
    assert not model.loaded(state)
    model.load(state)
    assert model.loaded(state) and not model.loaded(state.clone())
    with torch.no_grad():
        model.trained[1].add_(1)
    assert not model.loaded(state)
    model.load(state)
    state[0] = 5
    assert not model.loaded(state)
    model.load(state)
    other = model.second()
    model.exchange(other)
    assert not model.loaded(state)


@pytest.mark.parametrize("evaluate_every", [1, 5])
def test_without_local_tests_the_global_model_is_tested_on_the_global_test_set(
    evaluate_every: int, network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    none = (torch.empty(0, dtype=torch.int64),) * partition.clients
    rows = torch.cat(partition.test).sort().values
    apart = dataclasses.replace(partition, validation=none, test=none, global_test=rows)
    found = _run(FedAvg(batch_size=4), network, dataset, apart, evaluate_every=evaluate_every)[-1]["models"]
    assert set(found["global"]) == {"global_test"}
    assert 0 <= found["global"]["global_test"]["accuracy"] <= 1


def _with_global_test(partition: Partition) -> Partition:
    none = (torch.empty(0, dtype=torch.int64),) * partition.clients
    return dataclasses.replace(partition, validation=none, global_test=torch.cat(partition.validation).sort().values)


def test_the_global_model_is_tested_alone_where_that_is_asked_for(
    network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    apart = _with_global_test(partition)
    every = Federation(FedAvg(batch_size=4), copy.deepcopy(network), dataset, apart, Settings(rounds=2))
    alone = Federation(
        FedAvg(batch_size=4), copy.deepcopy(network), dataset, apart, Settings(rounds=2, evaluate="global")
    )
    for full, short in zip(every.run(), alone.run(), strict=True):
        assert set(short["models"]) == {"global"}
        assert short["models"]["global"] == {"global_test": full["models"]["global"]["global_test"]}
    assert every.identity == alone.identity
    assert [(r.client, r.metrics) for r in alone.client_results] == [(k, {}) for k in range(partition.clients)]
    assert "loss" in alone.client_results[0].report


def test_clients_are_evaluated_every_so_many_rounds_and_in_the_last(
    network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    settings = Settings(rounds=5, evaluate_clients_every=2)
    records = Federation(
        FedAvg(batch_size=4), copy.deepcopy(network), dataset, _with_global_test(partition), settings
    ).run()
    assert ["test" in record["models"]["global"] for record in records] == [False, True, False, True, True]
    assert all("global_test" in record["models"]["global"] for record in records)


def test_a_run_of_which_nothing_would_be_evaluated_is_refused(
    network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    without = dataclasses.replace(partition, global_test=torch.empty(0, dtype=torch.int64))
    for options in ({"evaluate": "global"}, {"evaluate_clients_every": 3}):
        with pytest.raises(ValueError, match="needs a global test set"):
            Federation(FedAvg(), copy.deepcopy(network), dataset, without, Settings(**options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a method that has a global model"):
        Federation(Standalone(), network, dataset, _with_global_test(partition), Settings(evaluate="global"))
    with pytest.raises(ValueError, match="evaluate is 'some'"):
        Settings(evaluate="some")


def test_the_clients_of_a_round_have_means_of_their_own(
    network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    settings = Settings(rounds=3, participation=0.5, evaluate_participants=True, personal_global_test=True)
    run = Federation(Ditto(batch_size=4), copy.deepcopy(network), dataset, _with_global_test(partition), settings)
    for record in run.rounds():
        took_part = [run.client_results[k].metrics for k in record["clients"]]
        assert 0 < len(took_part) < partition.clients
        for split in ("test", "global_test"):
            means = [metrics["personal", split]["accuracy"] for metrics in took_part]
            assert record["participants"]["personal"][split]["accuracy"]["mean"] == pytest.approx(
                sum(means) / len(means)
            )
    without = Federation(
        Ditto(batch_size=4), copy.deepcopy(network), dataset, _with_global_test(partition), Settings(rounds=1)
    )
    assert "participants" not in without.run()[-1]
