"""Asynchronous rounds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import Ditto, FedAsync, FedBuff
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Diverged, Federation, Settings

QUICK = {"lr": 0.1, "batch_size": 4}
SPREAD = {"clock": "log-normal", "clock_spread": 1.0, "clock_up": 1e4, "clock_compute": 0.01}
TIMES = ("seconds", "seconds_training")


def _left(run: Federation) -> tuple[str, list[Tensor]]:
    history = [{key: value for key, value in record.items() if key not in TIMES} for record in run.records]
    return json.dumps(history), [run.server["model"], *(run.store.read(k, "personal") for k in range(6))]


def _assert_same(first: Federation, second: Federation) -> None:
    (history, tensors), (others, theirs) = _left(first), _left(second)
    assert history == others
    assert all(torch.equal(a, b) for a, b in zip(tensors, theirs, strict=True))


class _Ages(FedAsync):
    """FedAsync that reports the staleness it saw."""

    def server_round(self, server: Any, uploads: Any) -> None:
        server.report["age"] = float(uploads.staleness[0])
        super().server_round(server, uploads)


def test_uploads_come_in_the_order_of_their_finish_times_and_know_their_staleness(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=20, protocol="compute-and-wait", **SPREAD)
    run = Federation(_Ages(**QUICK), network, dataset, partition, settings)
    run.run()
    times = [record["clock"]["asynchronous"] for record in run.records]
    assert times == sorted(times) and times[0] > 0
    # By hand: everybody begins at 0; who has sent begins anew at once.
    versions, expected = dict.fromkeys(range(6), 0), []
    for version, record in enumerate(run.records):
        (k,) = record["clients"]
        expected.append(version - versions[k])
        versions[k] = version + 1
    assert [record["server"]["age"] for record in run.records] == expected
    assert max(expected) > 5  # slow clients are overtaken more than once
    for record in run.records:
        work = record["work"][0]
        device = run._clock.devices[work[0]]
        whole = 2 * device.latency + (work[1] + work[2]) * device.compute + work[3] / device.up + work[4] / device.down
        assert record["clock"]["asynchronous"] - work[5] == pytest.approx(whole)


def test_clients_wait_where_the_protocol_is_to_wait(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    ends = []
    for protocol in ("wait-free", "compute-and-wait"):
        settings = Settings(rounds=6, protocol=protocol, clock_compute=1.0)
        ends.append(Federation(FedAsync(**QUICK), network, dataset, partition, settings).run()["clock"]["asynchronous"])
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
    buffered.run()
    ditto.run()
    torch.testing.assert_close(buffered.server["model"], ditto.server["model"], rtol=0, atol=1e-14)
    for k in range(6):
        ours, theirs = buffered.store.read(k, "personal"), ditto.store.read(k, "personal")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    times = [record["clock"]["asynchronous"] for record in buffered.records]
    assert times == pytest.approx([record["clock"][protocol] for record in ditto.records])


@pytest.mark.parametrize("protocol", ["wait-free", "compute-and-wait"])
def test_a_personal_model_is_kept_when_it_is_trained_and_not_before(
    protocol: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=1, protocol=protocol, **SPREAD)
    run = Federation(FedAsync(**QUICK, personal_epochs=40), network, dataset, partition, settings)
    last = run.run()
    kept = [k for k in range(6) if run.store.written(k, "personal")]
    # Beside the upload 40 epochs are not done when it arrives; before it they are.
    assert kept == ([] if protocol == "wait-free" else last["clients"])
    assert len(run._flight._turns) == 6 - len(kept)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedAsync(**QUICK), {"store": "mapped"}),
        (FedBuff(**QUICK, buffer=4), {"store": "mapped"}),
        (FedBuff(**QUICK, buffer=4), {"workers": 2}),
    ],
    ids=["fedasync-mapped", "fedbuff-mapped", "fedbuff-workers"],
)
def test_the_bits_do_not_depend_on_where_turns_run(
    method: Any, options: dict[str, Any], dataset: Dataset, partition: Partition
) -> None:
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3))  # its uploads go to files
    runs = [
        Federation(method, wide, dataset, partition, Settings(rounds=5, participation=0.7, **SPREAD, **more))
        for more in ({}, options)
    ]
    for run in runs:
        run.run()
    _assert_same(*runs)


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
    whole.run()
    half = dataclasses.replace(settings, rounds=3)
    Federation(method, wide, dataset, partition, half, folder=tmp_path).run()
    resumed = Federation(method, wide, dataset, partition, settings, folder=tmp_path, resume=True)
    flying = resumed._flight._turns  # type: ignore[union-attr]
    assert any(turn.version < 3 for turn in flying) and any(turn.kept for turn in flying)
    resumed.run()
    _assert_same(resumed, whole)


def test_with_fewer_places_clients_are_drawn_for_them(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(FedAsync(**QUICK), network, dataset, partition, Settings(rounds=30, participation=0.34))
    run.run()
    assert {k for record in run.records for k in record["clients"]} == set(range(6))
    assert len(run._flight._turns) <= 2  # type: ignore[union-attr]
    first = [record["clients"] for record in run.records]
    other = Federation(FedAsync(**QUICK), network, dataset, partition, Settings(rounds=30, participation=0.34, seed=1))
    other.run()
    assert first != [record["clients"] for record in other.records]


def test_late_clients_take_part_from_their_round_on(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    run = Federation(
        FedAsync(**QUICK), network, dataset, partition, Settings(rounds=24, new_clients=2, join_round=10, **SPREAD)
    )
    run.run()
    took = [{k for record in part for k in record["clients"]} for part in (run.records[:9], run.records[9:])]
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
