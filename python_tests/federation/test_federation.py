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
from torch import Tensor, nn

from pfl_ext import engines
from pfl_ext.algorithms import METHODS, Ditto, FedAvg, FedAvgFT, Standalone
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import InProcess
from pfl_ext.federation import (
    Buffers,
    Client,
    Diverged,
    Federation,
    ForeignCheckpoint,
    Interrupted,
    Method,
    Settings,
    selected_clients,
)
from pfl_ext.federation.turns import Turns

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


def _outcome(run: Federation) -> tuple[str, dict[str, Tensor], list[dict[str, Tensor]]]:
    """Everything a run leaves but times: its history, the server's vectors, the clients' vectors."""
    history = [{key: value for key, value in record.items() if key not in TIMES} for record in run.records]
    rows = [{name: run.store.read(k, name) for name in run.store.names} for k in range(run.partition.clients)]
    return json.dumps(history), dict(run.server), rows


def _assert_identical(first: Federation, second: Federation) -> None:
    a, b = _outcome(first), _outcome(second)
    assert a[0] == b[0]
    for x, y in [(a[1], b[1]), *zip(a[2], b[2], strict=True)]:
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
    whole.run()

    def stop_after_second(record: Mapping[str, Any]) -> None:
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    saved: dict[str, Any] = {"folder": tmp_path / "run", "auxiliary": auxiliary}
    broken = Federation(method, network, dataset, partition, settings, notify=stop_after_second, **saved)
    with pytest.raises(Interrupted, match="after round 2"):
        broken.run()
    resumed = Federation(method, network, dataset, partition, settings, resume=True, **saved)
    assert resumed.round == 2
    resumed.run()
    _assert_identical(resumed, whole)
    assert resumed.results is not None and len(resumed.results.records()) == len(whole.records)


def test_rounds_after_the_checkpoint_are_run_again(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    settings = Settings(rounds=5, checkpoint_every=2)

    def die_after_third(record: Mapping[str, Any]) -> None:
        if record["round"] == 3:
            raise RuntimeError("killed")

    broken = Federation(Ditto(**QUICK), network, dataset, partition, settings, folder=tmp_path, notify=die_after_third)
    with pytest.raises(RuntimeError, match="killed"):
        broken.run()
    assert broken.results is not None and [r["round"] for r in broken.results.records()] == [1, 2, 3]
    resumed = Federation(Ditto(**QUICK), network, dataset, partition, settings, folder=tmp_path, resume=True)
    assert resumed.round == 2 and resumed.results is not None
    assert [r["round"] for r in resumed.results.records()] == [1, 2]
    resumed.run()
    whole = Federation(Ditto(**QUICK), network, dataset, partition, settings)
    whole.run()
    _assert_identical(resumed, whole)


def test_a_finished_run_can_be_given_more_rounds(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=2), folder=tmp_path).run()
    longer = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=4), folder=tmp_path, resume=True)
    longer.run()
    whole = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=4))
    whole.run()
    _assert_identical(longer, whole)


def test_a_run_that_is_finished_already_resumes_to_its_end(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    method = FedAvgFT(**QUICK)
    first = Federation(method, network, dataset, partition, Settings(rounds=2), folder=tmp_path)
    last = first.run()
    again = Federation(method, network, dataset, partition, Settings(rounds=2), folder=tmp_path, resume=True)
    assert again.run()["models"] == last["models"]
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


def test_results_of_another_run_are_not_overwritten(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1), folder=tmp_path).run()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="resume that run, or name another folder"):
        Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1), folder=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# ---- engines and stores ----------------------------------------------------------------------------------------------


class _TwoInOne(InProcess):
    """What workers may do: turns in another order, every other one with another copy of the network."""

    def __init__(self, turns: Turns, threads: int = 1) -> None:
        super().__init__(turns, threads)
        other = copy.copy(turns)
        other.model = copy.deepcopy(turns.model)
        self._second = InProcess(other, threads)

    def publish(self, server: Mapping[str, Tensor]) -> None:
        super().publish(server)
        self._second.publish(server)

    def map(self, turn: str, arguments: Sequence[tuple[Any, ...]], costs: Sequence[int] | None = None) -> Iterator[Any]:
        found = {}
        for place in reversed(range(len(arguments))):
            one = super() if place % 2 else self._second
            (found[place],) = one.map(turn, [arguments[place]])
        yield from (found[place] for place in range(len(arguments)))


@pytest.mark.parametrize("name", list(METHODS))
def test_a_turn_depends_on_nothing_that_another_turn_leaves(
    name: str, dataset: Dataset, partition: Partition, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, network = METHODS[name](**_options(name)), _network(name, network)
    settings = Settings(rounds=3, participation=0.7)
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    one = Federation(method, network, dataset, partition, settings, auxiliary=auxiliary)
    one.run()
    monkeypatch.setattr(engines, "InProcess", _TwoInOne)
    other = Federation(method, network, dataset, partition, settings, auxiliary=auxiliary)
    other.run()
    _assert_identical(one, other)


@pytest.mark.parametrize("name", ["persfl", "fedgen"])
def test_workers_and_a_mapped_store_give_the_bits_of_one_process(
    name: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    method = METHODS[name](**_options(name))
    settings = Settings(rounds=3, participation=0.7, evaluate_local=True, personal_global_test=True)
    one = Federation(method, network, dataset, partition, settings)
    one.run()
    mapped = Federation(method, network, dataset, partition, dataclasses.replace(settings, store="mapped"))
    mapped.run()
    several = Federation(method, network, dataset, partition, dataclasses.replace(settings, workers=2))
    several.run()
    _assert_identical(one, mapped)
    _assert_identical(one, several)


@dataclass(frozen=True)
class _Broken(FedAvg):
    """A method with a fault in one client's turn."""

    how: str = dataclasses.field(default="raise", metadata={"help": "", "choices": None})

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if client.index == 2 and client.round == 2:
            if self.how == "nan":
                client.model.load(received["model"])
                return {"model": client.model.state() * math.nan}
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("a fault in the method")
        return super().client_round(client, received)


def test_a_training_that_gives_nan_names_client_and_round(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    run = Federation(
        _Broken(**QUICK, how="nan"),
        network,
        dataset,
        partition,
        Settings(rounds=3, checkpoint_every=1),
        folder=tmp_path,
    )
    with pytest.raises(Diverged, match=r"client 2 diverged in round 2.*diverged=drop"):
        run.run()
    assert [record["round"] for record in run.records] == [1]
    assert list((tmp_path / "checkpoints").iterdir())


def test_a_diverged_client_can_be_left_out_of_the_round(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(_Broken(**QUICK, how="nan"), network, dataset, partition, Settings(rounds=3, diverged="drop"))
    run.run()
    assert run.records[1]["clients"] == [0, 1, 3, 4, 5] and run.records[1]["dropped"] == [2]
    assert run.records[2]["clients"] == [0, 1, 2, 3, 4, 5] and "dropped" not in run.records[2]
    assert bool(torch.isfinite(run.server["model"]).all())


def test_a_real_divergence_is_noticed(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    with pytest.raises(Diverged, match="round 1"):
        Federation(FedAvg(lr=1e30, batch_size=4), network, dataset, partition, Settings(rounds=2)).run()


def test_a_fault_in_a_method_is_raised_as_it_is(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    with pytest.raises(ZeroDivisionError, match="a fault in the method"):
        Federation(_Broken(**QUICK), network, dataset, partition, Settings(rounds=3)).run()


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_methods_see_the_same_clients_in_every_round(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    seen = []
    for method in (FedAvg(**QUICK), Ditto(**QUICK), Standalone(**QUICK)):
        run = Federation(method, network, dataset, partition, Settings(rounds=4, participation=0.34, seed=5))
        run.run()
        seen.append([record["clients"] for record in run.records])
    assert seen[0] == seen[1] == seen[2] == [selected_clients(5, t, 6, 0.34) for t in range(1, 5)]
    assert all(len(clients) == 2 for clients in seen[0])


def test_communication_is_counted(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    size = 4 * 5 + 5 + 5 * 3 + 3
    run = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1, participation=0.5))
    assert run.run()["communication"] == {
        "up_parameters": 3 * size,
        "up_bytes": 3 * size * 4,
        "down_parameters": 3 * size,
        "down_bytes": 3 * size * 4,
    }
    assert run.trained_parameters == size
    alone = Federation(Standalone(**QUICK), network, dataset, partition, Settings(rounds=1)).run()
    assert set(alone["communication"].values()) == {0}


def test_the_parameters_of_both_models_count_as_trained(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    size = 4 * 5 + 5 + 5 * 3 + 3
    assert Federation(Ditto(), network, dataset, partition).trained_parameters == 2 * size


def test_late_clients_take_no_part_before_they_join_and_are_reported_apart(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    never = Federation(FedAvgFT(**QUICK), network, dataset, partition, Settings(rounds=3, new_clients=2))
    last = never.run()
    assert all(max(record["clients"]) < 4 for record in never.records if "clients" in record)
    assert last["models"]["personal"]["test"]["accuracy"]["count"] == 4
    assert last["new_clients"]["personal"]["test"]["accuracy"]["count"] == 2
    assert never.store.written(5, "personal")
    assert all("fine_tune_loss" in row for row in never.client_rows)
    later = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=3, new_clients=2, join_round=3))
    later.run()
    assert [max(record["clients"]) for record in later.records] == [3, 3, 5]


def test_evaluations_say_what_they_are_of(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    settings = Settings(rounds=3, evaluate_every=2, evaluate_train=True, evaluate_local=True, personal_global_test=True)
    run = Federation(Ditto(**QUICK), network, dataset, partition, settings)
    run.run()
    assert ["models" in record for record in run.records] == [False, True, True]
    models = run.records[-1]["models"]
    assert set(models) == {"global", "personal"}
    assert set(models["personal"]) == {"test", "validation", "train", "global_test"}
    assert isinstance(models["global"]["global_test"]["accuracy"], float)
    assert models["personal"]["global_test"]["accuracy"]["count"] == 6
    assert {"before_training/accuracy", "after_training/accuracy"} <= set(run.records[-1]["training"])
    assert len(run.client_rows) == 6 and "personal/test/auc" in run.client_rows[0]


def test_the_reported_accuracy_is_that_of_the_servers_model(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=2))
    last = run.run()
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
        def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            client.report["drawn"] = torch.rand(()).item()
            return {"model": received["model"].clone()}

    def drawn(rounds: int) -> list[float]:
        run = Federation(Drawing(), network, dataset, partition, Settings(rounds=rounds))
        run.run()
        return [row["drawn"] for row in run.client_rows]

    assert drawn(2) == drawn(2) and len({*drawn(1), *drawn(2)}) == 2 * 6


# ---- buffers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["average", "local", "server"])
def test_running_statistics_follow_their_policy(policy: str, dataset: Dataset, partition: Partition) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    types = (nn.BatchNorm1d,)
    buffers = {
        "average": Buffers(),
        "local": Buffers(local=types),
        "server": Buffers(server=types),
    }[policy]
    run = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=2), buffers=buffers)
    run.run()
    statistics = run.server["model"][-11:]  # mean, variance, counter
    untouched = torch.cat([torch.zeros(5), torch.ones(5), torch.zeros(1)])
    assert torch.equal(statistics, untouched) == (policy != "average")
    kept = [name for name in run.store.names if "buffers" in name]
    assert bool(kept) == (policy == "local")
    if kept:
        rows = [run.store.read(k, kept[0]) for k in range(6)]
        assert not torch.equal(rows[0], rows[1]) and rows[0][-1] == 2 * math.ceil(partition.train[0].numel() / 4)


def test_a_last_batch_of_one_is_left_out_for_batch_normalisation(dataset: Dataset, partition: Partition) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    size = partition.train[0].numel()
    method = FedAvg(lr=0.1, batch_size=size - 1)
    Federation(method, network, dataset, partition, Settings(rounds=1)).run()  # would raise in torch's batch norm


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("rounds", -1), ("participation", 0.0), ("workers", 0), ("store", "disk"), ("diverged", "ignore")],
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
    last = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=1, evaluate_train=True)).run()
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
        def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            client["secret"] = received["model"]
            return {}

    with pytest.raises(KeyError, match="secret is not in client_state, which has: nothing"):
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
    rows: list[dict[str, Any]] = []
    settings = Settings(rounds=3, evaluate_local=True)
    run = Federation(
        FedAvg(lr=0.5, batch_size=4),
        network,
        dataset,
        alone,
        settings,
        notify=lambda _: rows.append(run.client_rows[0]),
    )
    run.run()
    for earlier, later in itertools.pairwise(rows):  # the only client's model is the next global one
        assert later["before_training/loss"] == earlier["global/test/loss"] == earlier["after_training/loss"]
    assert len({row["after_training/loss"] for row in rows}) == 3


def test_a_method_without_its_two_turns_cannot_be_made() -> None:
    @dataclass(frozen=True)
    class Unfinished(Method):
        name = "unfinished"

    with pytest.raises(TypeError, match="client_round"):
        Unfinished()
