"""Asynchronous rounds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import Ditto, FedAsync, FedBuff
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Workers
from pfl_ext.federation import Client, Diverged, Engine, Federation, InProcess, Record, Settings, option
from pfl_ext.federation.flight import Flight
from pfl_ext.federation.rounds import Asynchronous

QUICK = {"lr": 0.1, "batch_size": 4}
SPREAD = {"clock": "log-normal", "clock_spread": 1.0, "clock_up": 1e4, "clock_compute": 0.01}
TIMES = ("seconds", "seconds_training")


def _personal(run: Federation, client: int) -> Tensor | None:
    """What the client keeps, None where that is nothing of its own."""
    assert isinstance(run.engine, InProcess | Workers)
    return run.engine.store.read(client, "personal") if run.engine.store.written(client, "personal") else None


def _flight(run: Federation) -> Flight:
    assert isinstance(run._state.rounds, Asynchronous)
    return run._state.rounds.flight


def _history(records: list[Record]) -> str:
    return json.dumps([{key: value for key, value in record.items() if key not in TIMES} for record in records])


def _assert_same_models(first: Federation, second: Federation) -> None:
    assert torch.equal(first.server["model"], second.server["model"])
    for k in range(6):
        ours, theirs = _personal(first, k), _personal(second, k)
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


class _Ages(FedAsync):
    """FedAsync that reports the staleness it saw."""

    def aggregate(self, server: Any, uploads: Any) -> None:
        server.report["age"] = float(uploads.staleness[0])
        super().aggregate(server, uploads)


def test_uploads_come_in_the_order_of_their_finish_times_and_know_their_staleness(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=20, protocol="compute-and-wait", **SPREAD)
    run = Federation(_Ages(**QUICK), network, dataset, partition, settings)
    records = run.run()
    times = [record["clock"]["asynchronous"] for record in records]
    assert times == sorted(times) and times[0] > 0
    # By hand: everybody begins at 0; who has sent begins anew at once.
    versions, expected = dict.fromkeys(range(6), 0), []
    for version, record in enumerate(records):
        (k,) = record["clients"]
        expected.append(version - versions[k])
        versions[k] = version + 1
    assert [record["server"]["age"] for record in records] == expected
    assert max(expected) > 5  # slow clients are overtaken more than once
    for record in records:
        work = record["work"][0]
        device = _flight(run).clock.devices[work[0]]
        whole = 2 * device.latency + (work[1] + work[2]) * device.compute + work[3] / device.up + work[4] / device.down
        assert record["clock"]["asynchronous"] - work[5] == pytest.approx(whole)


def test_clients_wait_where_the_protocol_is_to_wait(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    ends = []
    for protocol in ("wait-free", "compute-and-wait"):
        settings = Settings(rounds=6, protocol=protocol, clock_compute=1.0)
        last = Federation(FedAsync(**QUICK), network, dataset, partition, settings).run()[-1]
        ends.append(last["clock"]["asynchronous"])
    assert ends[0] < ends[1]


@pytest.mark.parametrize("protocol", ["wait-free", "compute-and-wait"])
def test_a_buffer_of_all_equal_clients_is_the_synchronous_run(
    protocol: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    network = network.double()
    dataset = dataclasses.replace(dataset, dtype=torch.float64)
    assert len({len(part) for part in partition.train}) == 1
    settings = Settings(rounds=3, protocol=protocol, clock="constant")
    buffered = Federation(FedBuff(**QUICK, buffer=6), network, dataset, partition, settings)
    ditto = Federation(Ditto(**QUICK), network, dataset, partition, settings)
    records, theirs = buffered.run(), ditto.run()
    torch.testing.assert_close(buffered.server["model"], ditto.server["model"], rtol=0, atol=1e-14)
    for k in range(6):
        torch.testing.assert_close(_personal(buffered, k), _personal(ditto, k), rtol=0, atol=1e-14)
    times = [record["clock"]["asynchronous"] for record in records]
    assert times == pytest.approx([record["clock"][protocol] for record in theirs])


@pytest.mark.parametrize("protocol", ["wait-free", "compute-and-wait"])
def test_a_personal_model_is_kept_when_it_is_trained_and_not_before(
    protocol: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=1, protocol=protocol, **SPREAD)
    run = Federation(FedAsync(**QUICK, personal_epochs=40), network, dataset, partition, settings)
    last = run.run()[-1]
    kept = [k for k in range(6) if _personal(run, k) is not None]
    # Beside the upload 40 epochs are not done when it arrives; before it they are.
    assert kept == ([] if protocol == "wait-free" else last["clients"])
    assert len(_flight(run)._turns) == 6 - len(kept)


@pytest.mark.parametrize(
    ("method", "store", "engine"),
    [
        (FedAsync(**QUICK), "mapped", InProcess()),
        (FedBuff(**QUICK, buffer=4), "mapped", InProcess()),
        (FedBuff(**QUICK, buffer=4), "memory", Workers(2)),
    ],
    ids=["fedasync-mapped", "fedbuff-mapped", "fedbuff-workers"],
)
def test_the_bits_do_not_depend_on_where_turns_run(
    method: Any, store: str, engine: Engine, dataset: Dataset, partition: Partition
) -> None:
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3))  # its uploads go to files
    settings = Settings(rounds=5, participation=0.7, **SPREAD)
    plain = Federation(method, wide, dataset, partition, settings)
    other = Federation(method, wide, dataset, partition, dataclasses.replace(settings, store=store), engine=engine)
    assert _history(plain.run()) == _history(other.run())
    _assert_same_models(plain, other)


@pytest.mark.parametrize("protocol", ["wait-free", "compute-and-wait"])
@pytest.mark.parametrize("store", ["memory", "mapped"])
def test_what_is_in_flight_is_saved(
    protocol: str, store: str, dataset: Dataset, partition: Partition, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3))
    method = FedBuff(**QUICK, buffer=2, personal_epochs=4)
    settings = Settings(rounds=8, protocol=protocol, store=store, **{**SPREAD, "clock_compute": 0.3})
    whole = Federation(method, wide, dataset, partition, settings)
    records = whole.run()
    half = dataclasses.replace(settings, rounds=3)
    Federation(method, wide, dataset, partition, half, folder=tmp_path).run()
    resumed = Federation(method, wide, dataset, partition, settings, folder=tmp_path, resume=True)
    flying = _flight(resumed)._turns
    assert any(turn.version < 3 for turn in flying) and any(turn.kept for turn in flying)
    assert _history(resumed.run()) == _history(records[3:])
    _assert_same_models(resumed, whole)


def test_with_fewer_places_clients_are_drawn_for_them(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(FedAsync(**QUICK), network, dataset, partition, Settings(rounds=30, participation=0.34))
    first = [record["clients"] for record in run.run()]
    assert {k for clients in first for k in clients} == set(range(6))
    assert len(_flight(run)._turns) <= 2
    other = Federation(FedAsync(**QUICK), network, dataset, partition, Settings(rounds=30, participation=0.34, seed=1))
    assert first != [record["clients"] for record in other.run()]


def test_late_clients_take_part_from_their_round_on(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    run = Federation(
        FedAsync(**QUICK), network, dataset, partition, Settings(rounds=24, new_clients=2, join_round=10, **SPREAD)
    )
    records = run.run()
    took = [{k for record in part for k in record["clients"]} for part in (records[:9], records[9:])]
    assert not took[0] & {4, 5} and took[1] & {4, 5}


def test_until_arrival_is_refused(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    with pytest.raises(ValueError, match="fedasync is asynchronous"):
        Federation(FedAsync(**QUICK), network, dataset, partition, Settings(protocol="until-arrival"))


def test_clients_that_diverge_are_dropped_or_stop_the_run(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    hot = FedAsync(lr=1e30, batch_size=4)
    for setting, message in (("stop", "diverged"), ("drop", "as that of all others")):
        with pytest.raises(Diverged, match=message):
            Federation(hot, network, dataset, partition, Settings(rounds=2, diverged=setting)).run()


@dataclass(frozen=True)
class _OneDiverges(FedBuff):
    """FedBuff with one client that gives NaN in its first turns."""

    name = "one-diverges"

    turns: int = option(1000, "how many")
    second: int = option(-1, "another such client")

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sent = super().train(client, received)
        diverges = client.index in (2, self.second) and client.round <= self.turns
        return {name: vector * math.nan for name, vector in sent.items()} if diverges else sent


@pytest.mark.parametrize("participation", [1.0, 0.34, 0.17])  # six places, two, one
def test_one_client_that_always_diverges_does_not_end_a_run_that_drops_it(
    participation: float, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=12, participation=participation, diverged="drop", **SPREAD)
    run = Federation(_OneDiverges(**QUICK, buffer=3), network, dataset, partition, settings)
    records = run.run()
    assert [record["round"] for record in records] == list(range(1, 13))
    assert all(len(record["clients"]) == 3 and 2 not in record["clients"] for record in records)
    dropped = [record.get("dropped", []) for record in records]
    assert [2] in dropped and all(each in ([], [2]) for each in dropped)  # at most once between two updates
    assert {k for record in records for k in record["clients"]} == {0, 1, 3, 4, 5}
    assert bool(torch.isfinite(run.server["model"]).all())
    assert _personal(run, 2) is None
    stopping = dataclasses.replace(settings, diverged="stop")
    with pytest.raises(Diverged, match="client 2 diverged"):
        Federation(_OneDiverges(**QUICK, buffer=3), network, dataset, partition, stopping).run()


def test_the_place_of_a_client_that_diverged_once_is_there_again_after_the_servers_update(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    """All others are busy when it diverges, so nobody can take its place at once."""
    settings = Settings(rounds=8, diverged="drop", **SPREAD)
    run = Federation(_OneDiverges(**QUICK, buffer=2, turns=1), network, dataset, partition, settings)
    training = []
    for record in run.rounds():
        flight = _flight(run)
        training.append(sum(turn.sent is not None for turn in flight._turns) + len(flight._places))
        assert record.get("dropped", []) == ([2] if record["round"] == 1 else [])
    assert training == [5, *[6] * 7]
    assert _flight(run)._begun[2] > 1


def test_all_that_diverge_at_once_are_named(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    settings = Settings(rounds=2, diverged="drop")
    method = _OneDiverges(**QUICK, buffer=2, turns=1, second=4)
    first, second = Federation(method, network, dataset, partition, settings).run()
    assert first["dropped"] == [2, 4] and "dropped" not in second
