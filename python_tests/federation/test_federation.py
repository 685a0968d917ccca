from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import Faulty
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS, Ditto, FedAvg, FedAvgFT, Standalone
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Workers
from pfl_ext.federation import (
    Client,
    ClientRuntime,
    ClientStore,
    Diverged,
    Federation,
    ForeignCheckpoint,
    InProcess,
    Interrupted,
    Method,
    Options,
    Plan,
    Record,
    Reply,
    Request,
    Settings,
    Stage,
    WorkingModel,
    selected_clients,
)
from pfl_ext.federation.runtime import threads
from pfl_ext.reports import ResultsFolder, recorded

TIMES = ("seconds", "seconds_training")
QUICK = {"lr": 0.1, "batch_size": 4}


SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0, 5.0), "lambdas": (0.0, 0.5)},
    "fedgen": {"generator_steps": 3},
}


def _options(name: str) -> dict[str, Any]:
    return {**QUICK, **SHORT.get(name, {})}


def _network(name: str, network: nn.Module) -> nn.Module:
    """The network, with batch normalisation for the method that is about it."""
    return nn.Sequential(*network[:1], nn.BatchNorm1d(5), *network[1:]) if name == "fedbn" else network


def _history(records: Sequence[Record]) -> str:
    """Everything that records say but times."""
    return json.dumps([{key: value for key, value in record.items() if key not in TIMES} for record in records])


def _store(run: Federation) -> ClientStore:
    assert isinstance(run.engine, InProcess | Workers)
    return run.engine.store


def _kept(run: Federation) -> list[dict[str, Tensor]]:
    store = _store(run)
    return [{name: store.read(k, name) for name in store.labels} for k in range(run.partition.clients)]


def _assert_identical(first: Federation, second: Federation) -> None:
    """The server's vectors and those of all clients."""
    for x, y in [(dict(first.server), dict(second.server)), *zip(_kept(first), _kept(second), strict=True)]:
        assert x.keys() == y.keys()
        for name in x:
            assert torch.equal(x[name], y[name]), name


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
def test_a_resumed_run_is_bit_identical_to_an_unbroken_one(
    name: str, dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    network = _network(name, network)
    method = METHODS[name](**_options(name))
    settings = Settings(rounds=4, participation=0.5, seed=3, checkpoint_every=1)
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    whole = Federation(method, network, dataset, partition, settings, auxiliary=auxiliary)
    records = whole.run()
    results = ResultsFolder.create(tmp_path / "run")
    saved: dict[str, Any] = {"folder": tmp_path / "run", "auxiliary": auxiliary}
    broken = Federation(method, network, dataset, partition, settings, **saved)
    with pytest.raises(Interrupted, match="after round 2"):
        for record in recorded(broken, results):
            if record["round"] == 2:
                os.kill(os.getpid(), signal.SIGINT)
    resumed = Federation(method, network, dataset, partition, settings, resume=True, **saved)
    assert resumed.round == resumed.recorded == 2
    rest = list(recorded(resumed, results))
    assert _history(rest) == _history(records[2:])
    assert _history(results.records()) == _history(records)
    _assert_identical(resumed, whole)
    assert repr(resumed.client_results) == repr(whole.client_results)


def test_rounds_after_the_checkpoint_are_run_again(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    settings = Settings(rounds=5, checkpoint_every=2)
    results = ResultsFolder.create(tmp_path)
    broken = Federation(Ditto(**QUICK), network, dataset, partition, settings, folder=tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        for record in recorded(broken, results):
            if record["round"] == 3:
                raise RuntimeError("killed")
    assert [r["round"] for r in results.records()] == [1, 2, 3]
    resumed = Federation(Ditto(**QUICK), network, dataset, partition, settings, folder=tmp_path, resume=True)
    assert resumed.round == 2
    again = recorded(resumed, results)
    assert next(again)["round"] == 3 and [r["round"] for r in results.records()] == [1, 2, 3]
    list(again)
    whole = Federation(Ditto(**QUICK), network, dataset, partition, settings)
    assert _history(results.records()) == _history(whole.run())
    _assert_identical(resumed, whole)


def test_a_finished_run_can_be_given_more_rounds(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=2), folder=tmp_path).run()
    longer = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=4), folder=tmp_path, resume=True)
    rest = longer.run()
    whole = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=4))
    assert _history(rest) == _history(whole.run()[2:])
    _assert_identical(longer, whole)


def test_a_run_that_is_finished_already_resumes_to_its_end_and_has_nothing_to_do(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    method = FedAvgFT(**QUICK)
    first = Federation(method, network, dataset, partition, Settings(rounds=2), folder=tmp_path)
    results = ResultsFolder.create(tmp_path)
    records = list(recorded(first, results))
    assert [record["round"] for record in records] == [1, 2, 3] and records[-1]["stage"] == "personalized"
    again = Federation(method, network, dataset, partition, Settings(rounds=2), folder=tmp_path, resume=True)
    assert again.recorded == 3 and list(recorded(again, results)) == []
    assert _history(results.records()) == _history(records)
    _assert_identical(first, again)
    with pytest.raises(ValueError, match="personalised its clients already"):
        Federation(method, network, dataset, partition, Settings(rounds=3), folder=tmp_path, resume=True)


@pytest.mark.parametrize("change", ["seed", "lr", "data", "network", "initial weights"])
def test_a_checkpoint_of_another_run_is_refused(
    change: str, dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1), folder=tmp_path).run()
    method, settings = FedAvg(**QUICK), Settings(rounds=2)
    if change == "seed":
        settings = Settings(rounds=2, seed=1)
    elif change == "lr":
        method = FedAvg(lr=0.2, batch_size=4)
    elif change == "data":
        dataset = dataclasses.replace(dataset, inputs=dataset.inputs + 1)
        partition = dataclasses.replace(partition, description={})
    elif change == "initial weights":
        network = copy.deepcopy(network)
        network[0].bias.data[0] += 1  # type: ignore[index]
    else:
        network = nn.Linear(4, 3)
    with pytest.raises(ForeignCheckpoint, match="of another run"):
        Federation(method, network, dataset, partition, settings, folder=tmp_path, resume=True)


def test_checkpoints_of_another_run_are_not_overwritten(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1), folder=tmp_path).run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path.name for path in before] == ["checkpoint-00000001.safetensors"]
    with pytest.raises(FileExistsError, match="resume that run, or name another folder"):
        Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1), folder=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# ---- engines and stores ----------------------------------------------------------------------------------------------


class _TwoInOne(InProcess):
    """What workers may do: turns in another order, every other one with another copy of the network."""

    def start(self, plan: Plan) -> None:
        super().start(plan)
        other = dataclasses.replace(plan, module=copy.deepcopy(plan.module))
        self._second = ClientRuntime(other, self.store, self._deliver)

    def publish(self, server: Mapping[str, Tensor]) -> None:
        super().publish(server)
        self._second.server = {name: vector.clone() for name, vector in server.items()}

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        found = {}
        for place in reversed(range(len(requests))):
            if place % 2:
                (found[place],) = super().run([requests[place]])
            else:
                with threads(self._threads), torch.random.fork_rng(devices=[]):
                    found[place] = self._second(requests[place])
        yield from (found[place] for place in range(len(requests)))


@pytest.mark.parametrize("name", list(METHODS))
def test_a_turn_depends_on_nothing_that_another_turn_leaves(
    name: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    method, network = METHODS[name](**_options(name)), _network(name, network)
    settings = Settings(rounds=3, participation=0.7)
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    one = Federation(method, network, dataset, partition, settings, auxiliary=auxiliary)
    other = Federation(method, network, dataset, partition, settings, auxiliary=auxiliary, engine=_TwoInOne())
    assert _history(one.run()) == _history(other.run())
    _assert_identical(one, other)


@pytest.mark.parametrize("name", ["persfl", "fedgen"])
def test_workers_and_a_mapped_store_give_the_bits_of_one_process(
    name: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    method = METHODS[name](**_options(name))
    settings = Settings(rounds=3, participation=0.7, evaluate_local=True, personal_global_test=True)
    one = Federation(method, network, dataset, partition, settings)
    mapped = Federation(method, network, dataset, partition, dataclasses.replace(settings, store="mapped"))
    several = Federation(method, network, dataset, partition, settings, engine=Workers(2))
    history = _history(one.run())
    for other in (mapped, several):
        assert _history(other.run()) == history
        _assert_identical(one, other)


def test_a_training_that_gives_nan_names_client_and_round(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    run = Federation(
        Faulty(**QUICK, how="nan"),
        network,
        dataset,
        partition,
        Settings(rounds=3, checkpoint_every=1),
        folder=tmp_path,
    )
    told: list[int] = []
    with pytest.raises(Diverged, match=r"client 2 diverged in round 2.*diverged=drop"):
        for record in run.rounds():
            told.append(record["round"])
    assert told == [1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-00000001.safetensors"]


def test_a_diverged_client_can_be_left_out_of_the_round(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(Faulty(**QUICK, how="nan"), network, dataset, partition, Settings(rounds=3, diverged="drop"))
    _, second, third = run.run()
    assert second["clients"] == [0, 1, 3, 4, 5] and second["dropped"] == [2]
    assert third["clients"] == [0, 1, 2, 3, 4, 5] and "dropped" not in third
    assert bool(torch.isfinite(run.server["model"]).all())


@dataclass(frozen=True)
class _BadFineTuning(FedAvgFT):
    """FedAvg in which one client's fine-tuning gives NaN."""

    name = "bad-fine-tuning"

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        super().personalize(client, received, sent)
        if client.index == 2:
            client["personal"] = client["personal"] * math.nan


def test_a_client_that_diverges_after_the_last_round_can_be_left_out_too(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    method = _BadFineTuning(**QUICK)
    with pytest.raises(Diverged, match="client 2 diverged in round 2: its personal is not finite"):
        Federation(method, network, dataset, partition, Settings(rounds=2)).run()
    run = Federation(method, network, dataset, partition, Settings(rounds=2, diverged="drop"))
    *rounds, last = run.run()
    assert last["stage"] == "personalized" and last["dropped"] == [2]
    assert all("dropped" not in record for record in rounds)
    assert [_store(run).written(k, "personal") for k in range(6)] == [k != 2 for k in range(6)]
    assert ["fine_tune_loss" in result.report for result in run.client_results] == [k != 2 for k in range(6)]
    accuracy = last["models"]["personal"]["test"]["accuracy"]
    assert accuracy["count"] + accuracy["missing"] == 6 and accuracy["missing"] == 1


@dataclass(frozen=True)
class _BadPersonal(Ditto):
    """Ditto in which one client's personal model becomes NaN."""

    name = "bad-personal"

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        super().personalize(client, received, sent)
        if client.index == 2 and client.stage == "personal":
            client["personal"] = client["personal"] * math.nan


@pytest.mark.parametrize("protocol", ["wait-free", "until-arrival"])
def test_a_client_whose_personal_model_diverges_is_named(
    protocol: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=2, diverged="drop", protocol=protocol)
    run = Federation(_BadPersonal(**QUICK), network, dataset, partition, settings)
    for record in run.rounds():
        assert record["dropped"] == [2]
        # Where the upload is a turn of its own it has arrived before.
        assert (2 in record["clients"]) == (protocol == "until-arrival")
    assert [_store(run).written(k, "personal") for k in range(6)] == [k != 2 for k in range(6)]


@dataclass(frozen=True)
class _BadRest(FedAvg):
    """FedAvg in which clients that are not selected do something that gives NaN for one of them."""

    name = "bad-rest"

    @property
    def stages(self) -> tuple[Stage, ...]:
        return ("rest",)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        return {"rested": torch.zeros(1)}

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        client["rested"] = client["rested"] + (math.nan if client.index == 2 else 1)


def test_a_client_that_diverges_while_it_rests_is_named_and_keeps_what_it_had(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=6, participation=0.5, diverged="drop")
    run = Federation(_BadRest(**QUICK), network, dataset, partition, settings)
    records = run.run()
    resting = [2 not in record["clients"] for record in records]
    assert any(resting) and not all(resting)
    assert [record.get("dropped") == [2] for record in records] == resting
    rested = [sum(k not in record["clients"] for record in records) for k in range(6)]
    assert [float(_store(run).read(k, "rested")) for k in range(6)] == [0 if k == 2 else rested[k] for k in range(6)]


def test_a_real_divergence_is_noticed(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    with pytest.raises(Diverged, match="round 1"):
        Federation(FedAvg(lr=1e30, batch_size=4), network, dataset, partition, Settings(rounds=2)).run()


def test_a_fault_in_a_method_is_raised_as_it_is(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    with pytest.raises(ZeroDivisionError, match="a fault in the method"):
        Federation(Faulty(**QUICK), network, dataset, partition, Settings(rounds=3)).run()


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_methods_see_the_same_clients_in_every_round(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    seen = []
    for method in (FedAvg(**QUICK), Ditto(**QUICK), Standalone(**QUICK)):
        run = Federation(method, network, dataset, partition, Settings(rounds=4, participation=0.34, seed=5))
        seen.append([record["clients"] for record in run.run()])
    assert seen[0] == seen[1] == seen[2] == [selected_clients(5, t, 6, 0.34) for t in range(1, 5)]
    assert all(len(clients) == 2 for clients in seen[0])


def test_communication_is_counted(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    size = 4 * 5 + 5 + 5 * 3 + 3
    run = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1, participation=0.5))
    (record,) = run.run()
    assert record["communication"] == {
        "up_parameters": 3 * size,
        "up_bytes": 3 * size * 4,
        "down_parameters": 3 * size,
        "down_bytes": 3 * size * 4,
    }
    assert record["training"]["trained_parameters"] == size
    (alone,) = Federation(Standalone(**QUICK), network, dataset, partition, Settings(rounds=1)).run()
    assert set(alone["communication"].values()) == {0}


def test_the_parameters_of_both_models_count_as_trained(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    size = 4 * 5 + 5 + 5 * 3 + 3
    for protocol in ("wait-free", "compute-and-wait", "until-arrival"):
        settings = Settings(rounds=1, protocol=protocol, clock_compute=0.01)
        (record,) = Federation(Ditto(**QUICK), network, dataset, partition, settings).run()
        assert record["training"]["trained_parameters"] == 2 * size, protocol


def test_late_clients_take_no_part_before_they_join_and_are_reported_apart(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    never = Federation(FedAvgFT(**QUICK), network, dataset, partition, Settings(rounds=3, new_clients=2))
    records = never.run()
    last = records[-1]
    assert [max(record["clients"]) for record in records if "clients" in record] == [3, 3, 3]
    assert last["models"]["personal"]["test"]["accuracy"]["count"] == 4
    assert last["new_clients"]["personal"]["test"]["accuracy"]["count"] == 2
    assert _store(never).written(5, "personal")
    assert all("fine_tune_loss" in result.report for result in never.client_results)
    assert [result.new for result in never.client_results] == [False] * 4 + [True] * 2
    later = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=3, new_clients=2, join_round=3))
    assert [max(record["clients"]) for record in later.run()] == [3, 3, 5]


def test_evaluations_say_what_they_are_of(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    settings = Settings(rounds=3, evaluate_every=2, evaluate_train=True, evaluate_local=True, personal_global_test=True)
    run = Federation(Ditto(**QUICK), network, dataset, partition, settings)
    records = run.run()
    assert ["models" in record for record in records] == [False, True, True]
    models = records[-1]["models"]
    assert set(models) == {"global", "personal"}
    assert set(models["personal"]) == {"test", "validation", "train", "global_test"}
    assert isinstance(models["global"]["global_test"]["accuracy"], float)
    assert models["personal"]["global_test"]["accuracy"]["count"] == 6
    assert {"before_training/accuracy", "after_training/accuracy"} <= set(records[-1]["training"])
    assert len(run.client_results) == 6 and "auc" in run.client_results[0].metrics["personal", "test"]


def test_the_reported_accuracy_is_that_of_the_servers_model(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=2))
    last = run.run()[-1]
    torch.nn.utils.vector_to_parameters(run.server["model"], network.parameters())
    x, y = dataset.batch(partition.global_test)
    accuracy = float((network(x).argmax(-1) == y).double().mean())
    assert last["models"]["global"]["global_test"]["accuracy"] == pytest.approx(accuracy, abs=1e-12)


def test_the_users_network_and_random_state_are_left_alone(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    before, state = [p.clone() for p in network.parameters()], torch.get_rng_state()
    Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1)).run()
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_that_draw_see_other_numbers_in_each_round_and_for_each_client(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    @dataclass(frozen=True)
    class Drawing(FedAvg):
        def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            client.report["drawn"] = torch.rand(()).item()
            return {"model": received["model"].clone()}

    def drawn(rounds: int) -> list[float]:
        run = Federation(Drawing(), network, dataset, partition, Settings(rounds=rounds))
        run.run()
        return [result.report["drawn"] for result in run.client_results]

    assert drawn(2) == drawn(2) and len({*drawn(1), *drawn(2)}) == 2 * 6


# ---- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["average", "local", "server"])
def test_running_statistics_follow_their_policy(policy: str, dataset: Dataset, partition: Partition) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    options: dict[str, Any] = {} if policy == "average" else {f"{policy}_buffers": ("BatchNorm1d",)}
    run = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=2, **options))
    run.run()
    statistics = run.server["model"][-11:]  # mean, variance, counter
    untouched = torch.cat([torch.zeros(5), torch.ones(5), torch.zeros(1)])
    assert torch.equal(statistics, untouched) == (policy != "average")
    kept = [name for name in _store(run).labels if "buffers" in name]
    assert bool(kept) == (policy == "local")
    if kept:
        rows = [_store(run).read(k, kept[0]) for k in range(6)]
        assert not torch.equal(rows[0], rows[1]) and rows[0][-1] == 2 * math.ceil(partition.train[0].numel() / 4)


def test_a_last_batch_of_one_is_left_out_for_batch_normalisation(dataset: Dataset, partition: Partition) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    size = partition.train[0].numel()
    method = FedAvg(lr=0.1, batch_size=size - 1)
    Federation(method, network, dataset, partition, Settings(rounds=1)).run()  # would raise in torch's batch norm


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("rounds", -1), ("participation", 0.0), ("threads", 0), ("store", "disk"), ("diverged", "ignore")],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        Settings(**{name: value})


def test_more_late_clients_than_clients_are_refused(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    with pytest.raises(ValueError, match="6 of 6 clients"):
        Federation(FedAvg(), network, dataset, partition, Settings(new_clients=6))


def test_a_partition_of_other_data_is_refused(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    other = dataclasses.replace(dataset, inputs=dataset.inputs + 1)
    with pytest.raises(ValueError, match="make a partition of this dataset"):
        Federation(FedAvg(), network, other, partition)


def test_clients_of_one_class_and_without_test_data_are_trained_and_counted_as_missing(
    dataset: Dataset, network: nn.Module
) -> None:
    classes = [torch.arange(c, 120, 3) for c in range(3)]
    empty = torch.empty(0, dtype=torch.int64)
    partition = Partition(tuple(classes), (empty,) * 3, (empty,) * 3, empty, empty)
    (last,) = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1, evaluate_train=True)).run()
    assert set(last["models"]["global"]) == {"train"}
    assert last["models"]["global"]["train"]["auc"]["missing"] == 3  # one class has no ranking


def test_an_unwritable_folder_is_refused_before_anything_runs(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Federation(FedAvg(), network, dataset, partition, folder=tmp_path / "file" / "run")


def test_a_name_that_the_method_did_not_announce_is_refused(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    @dataclass(frozen=True)
    class Careless(FedAvg):
        def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            client["secret"] = received["model"]
            return {}

    with pytest.raises(KeyError, match="secret is not in what the method keeps: nothing"):
        Federation(Careless(), network, dataset, partition, Settings(rounds=1)).run()


def test_a_device_that_is_not_there_is_refused(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    for device in ("cuda:99", "tpu"):
        with pytest.raises(ValueError, match=f"device is '{device}', which cannot be used here"):
            Federation(FedAvg(), network, dataset, partition, Settings(device=device))


def test_before_and_after_local_training_are_what_they_say(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    alone = dataclasses.replace(
        partition, train=partition.train[:1], validation=partition.validation[:1], test=partition.test[:1]
    )
    settings = Settings(rounds=3, evaluate_local=True)
    run = Federation(FedAvg(lr=0.5, batch_size=4), network, dataset, alone, settings)
    results = [run.client_results[0] for _ in run.rounds()]
    for earlier, later in itertools.pairwise(results):  # the only client's model is the next global one
        after = earlier.metrics["global", "test"]["loss"]
        assert later.report["before_training/loss"] == after == earlier.report["after_training/loss"]
    assert len({result.report["after_training/loss"] for result in results}) == 3


def test_a_method_without_its_two_turns_cannot_be_made() -> None:
    @dataclass(frozen=True)
    class Unfinished(Method):
        name = "unfinished"

    with pytest.raises(TypeError, match=r"aggregate\W+train"):
        Unfinished()


def test_a_method_has_at_most_nine_hooks() -> None:
    public = {name for name in dir(Method) if not name.startswith("_")} - set(dir(Options))
    hooks = {name for name in public if callable(getattr(Method, name))}
    assert {"train", "aggregate"} < hooks and len(hooks) <= 9, sorted(hooks)
    # What is not called is a value or an option, or a property that follows from options.
    options = {field.name for field in dataclasses.fields(Method)}
    values = {"private", "needs", "needs_validation", "several_networks", "public", "refuses", "stages", "buffer"}
    assert public - hooks - options == values
