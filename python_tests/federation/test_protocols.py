"""Wait-free, compute-and-wait, until-arrival: what clients do when, and that only the last changes what they become."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import SCD, Ditto, FedAvg, FedRoD
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Workers
from pfl_ext.federation import ClientRuntime, Engine, Federation, InProcess, Record, Request, Settings
from pfl_ext.federation.rounds import Synchronous

QUICK = {"lr": 0.1, "batch_size": 4}
METHODS = [SCD(**QUICK), Ditto(**QUICK), FedRoD(**QUICK)]
VARYING = ("seconds", "seconds_training", "clock")


def _history(records: list[Record]) -> str:
    return json.dumps([{key: value for key, value in record.items() if key not in VARYING} for record in records])


def _vectors(run: Federation) -> list[Tensor]:
    """The server's, and all that clients keep."""
    assert isinstance(run.engine, InProcess | Workers)
    store = run.engine.store
    rows = [store.read(k, name) for k in range(run.partition.clients) for name in sorted(store.labels)]
    return [*(run.server[name] for name in sorted(run.server)), *rows]


def _assert_same_vectors(first: Federation, second: Federation) -> None:
    assert all(torch.equal(a, b) for a, b in zip(_vectors(first), _vectors(second), strict=True))


def _assert_same_runs(first: Federation, second: Federation) -> tuple[list[Record], list[Record]]:
    """Run both; their records."""
    ours, theirs = first.run(), second.run()
    assert _history(ours) == _history(theirs)
    _assert_same_vectors(first, second)
    return ours, theirs


@pytest.fixture
def dropping() -> nn.Module:
    """A network whose training draws random numbers, and large enough for its uploads to go to files."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Dropout(0.3), nn.Linear(3000, 3))


@pytest.mark.parametrize(
    ("method", "store", "engine"),
    [*((m, store, InProcess()) for m in METHODS for store in ("memory", "mapped")), (METHODS[0], "memory", Workers(2))],
    ids=[*(f"{m.name}-{store}" for m in METHODS for store in ("memory", "mapped")), f"{METHODS[0].name}-workers"],
)
def test_personal_training_beside_the_upload_gives_the_bits_of_the_sequential_order(
    method: Any, store: str, engine: Engine, dataset: Dataset, partition: Partition, dropping: nn.Module
) -> None:
    settings = Settings(rounds=2, seed=3, store=store)
    wait_free = Federation(method, dropping, dataset, partition, settings, engine=engine)
    waiting = Settings(rounds=2, seed=3, protocol="compute-and-wait")
    sequential = Federation(method, dropping, dataset, partition, waiting)
    _assert_same_runs(wait_free, sequential)


def _runtime(run: Federation) -> ClientRuntime:
    """Where clients' turns run, the server's vectors there."""
    assert isinstance(run.engine, InProcess)
    run.engine.publish(run.server)
    return run.engine.runtime


@pytest.mark.parametrize("protocol", ["wait-free", "compute-and-wait"])
def test_the_upload_is_delivered_while_the_personal_model_is_trained(
    protocol: str, dataset: Dataset, partition: Partition, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delivery waits for the personal training, or the other way round: in one order alone it cannot end."""
    training, delivering = threading.Event(), threading.Event()
    order: list[str] = []

    def deliver(request: Request, kind: str, vectors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        assert kind == "sent"
        order.append("upload begins")
        delivering.set()
        if protocol == "wait-free":
            assert training.wait(10)
        order.append("upload ends")
        return vectors

    original = Ditto.personalize

    def personalize(self: Ditto, *arguments: Any) -> None:
        if protocol == "wait-free":
            assert delivering.wait(10)
        original(self, *arguments)
        order.append("trained")
        training.set()

    monkeypatch.setattr(Ditto, "personalize", personalize)
    run = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=1, protocol=protocol))
    runtime = _runtime(run)
    runtime.deliver = deliver
    runtime(Request(0, 1, "train"))
    expected = ["upload begins", "trained", "upload ends"]
    assert order == (expected if protocol == "wait-free" else ["trained", "upload begins", "upload ends"])


def test_an_error_of_the_upload_is_not_lost(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    run = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=1))
    runtime = _runtime(run)

    def full(request: Request, kind: str, vectors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        raise OSError("no space left")

    runtime.deliver = full
    with pytest.raises(OSError, match="no space"):
        runtime(Request(0, 1, "train"))
    assert not runtime.store.written(0, "personal")


def test_work_is_counted_without_the_methods_help(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    size = sum(p.nbytes for p in network.parameters())
    samples = [len(part) for part in partition.train]
    for method, epochs in ((Ditto(**QUICK, personal_epochs=3), 3), (FedAvg(**QUICK), 0)):
        last = Federation(method, network, dataset, partition, Settings(rounds=1)).run()[-1]
        assert last["work"] == [[k, n, epochs * n, size, size, 0.0] for k, n in enumerate(samples)]


def test_a_run_with_a_clock_has_both_timelines(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    settings = Settings(rounds=3, clock="log-normal", clock_up=1e3)
    run = Federation(Ditto(**QUICK), network, dataset, partition, settings)
    plain = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=3))
    timed, untimed = _assert_same_runs(run, plain)
    times = [record["clock"] for record in timed]
    assert all(0 < t["wait-free"] < t["compute-and-wait"] for t in times)
    assert times[0]["wait-free"] < times[1]["wait-free"] < times[2]["wait-free"]
    assert "clock" not in untimed[0]


@pytest.mark.parametrize("protocol", ["wait-free", "until-arrival"])
def test_times_go_on_where_they_stopped(
    protocol: str, dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    settings = Settings(rounds=4, clock="log-normal", clock_up=1e3, clock_compute=0.01, protocol=protocol)
    whole = Federation(SCD(**QUICK), network, dataset, partition, settings)
    records = whole.run()
    half = dataclasses.replace(settings, rounds=2)
    Federation(SCD(**QUICK), network, dataset, partition, half, folder=tmp_path).run()
    resumed = Federation(SCD(**QUICK), network, dataset, partition, settings, folder=tmp_path, resume=True)
    rest = resumed.run()
    assert [record["clock"] for record in rest] == [record["clock"] for record in records[2:]]
    assert _history(rest) == _history(records[2:])
    _assert_same_vectors(resumed, whole)


def test_until_arrival_trains_the_personal_model_as_long_as_the_links_take(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    personal = []
    for up in (1e3, 1e4):
        settings = Settings(rounds=2, protocol="until-arrival", clock="constant", clock_up=up, clock_compute=0.01)
        run = Federation(Ditto(**QUICK), network, dataset, partition, settings)
        last = run.run()[-1]
        assert isinstance(run._state.rounds, Synchronous)
        assert list(last["clock"]) == ["until-arrival"]
        personal.append([work[2] for work in last["work"]])
        # Equal clients: idle for the upload, and for the download of what it gave.
        work, device = last["work"][0], run._state.rounds.clock.devices[0]
        idle = 2 * device.latency + work[3] / device.up + work[4] / device.down
        most = max(work[1] for work in last["work"])
        for _, trained, own, *_ in last["work"]:
            assert 0 <= idle + (most - trained) * 0.01 - own * 0.01 < 4 * 0.01 + 1e-9  # less than a batch is lost
    assert all(slow > fast for slow, fast in zip(*personal, strict=True))


def test_until_arrival_with_room_for_one_pass_is_one_pass(
    dataset: Dataset, partition: Partition, dropping: nn.Module
) -> None:
    sizes = {len(part) for part in partition.train}
    assert len(sizes) == 1  # so that one clock has room for one pass of everybody
    (n,) = sizes
    model = sum(p.nbytes for p in dropping.parameters())
    compute = (2 * 0.05 + model / 1e4 + model / 6.25e6) / (n + 0.5)
    options = {"clock": "constant", "clock_up": 1e4, "clock_compute": compute}
    until = Settings(rounds=2, protocol="until-arrival", **options)
    for method in METHODS:
        first = Federation(method, dropping, dataset, partition, until)
        second = Federation(method, dropping, dataset, partition, Settings(rounds=2, **options))
        ours, _ = _assert_same_runs(first, second)
        assert all(work[2] == n for work in ours[-1]["work"])


@pytest.mark.parametrize("protocol", ["wait-free", "compute-and-wait", "until-arrival"])
def test_the_cap_ends_personal_training_and_not_what_is_sent(
    protocol: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    options = {"rounds": 1, "protocol": protocol, "clock_up": 100.0, "clock_compute": 0.02}
    capped = Federation(
        SCD(**QUICK, personal_epochs=9), network, dataset, partition, Settings(personal_cap=2, **options)
    )
    free = Federation(SCD(**QUICK, personal_epochs=9), network, dataset, partition, Settings(**options))
    (first,), (second,) = capped.run(), free.run()
    assert {work[2] for work in first["work"]} == {8}  # two batches of four
    assert [work[1] for work in first["work"]] == [work[1] for work in second["work"]]
    assert all(work[2] > 8 for work in second["work"])
    assert torch.equal(capped.server["model"], free.server["model"])


def test_another_protocol_or_clock_may_resume_a_run_only_where_it_changes_nothing(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    method = SCD(**QUICK)
    whole = Federation(method, network, dataset, partition, Settings(rounds=3))
    whole.run()
    Federation(method, network, dataset, partition, Settings(rounds=1, clock="constant"), folder=tmp_path / "a").run()
    for rounds, clock in ((2, "log-normal"), (3, "none")):
        other = Settings(rounds=rounds, protocol="compute-and-wait", clock=clock)
        resumed = Federation(method, network, dataset, partition, other, folder=tmp_path / "a", resume=True)
        (record,) = resumed.run()
        assert ("clock" in record) == (clock != "none")
    _assert_same_vectors(resumed, whole)
    # A timeline cannot begin in the middle; the records have what it takes to find it afterwards.
    with pytest.raises(ValueError, match=r"ran with clock=none.*virtual-time"):
        timed = Settings(rounds=4, clock="constant")
        Federation(method, network, dataset, partition, timed, folder=tmp_path / "a", resume=True)
    until = Settings(rounds=1, protocol="until-arrival")
    Federation(method, network, dataset, partition, until, folder=tmp_path / "b").run()
    with pytest.raises(RuntimeError, match="differ in clock"):
        slower = dataclasses.replace(until, clock_up=1.0)
        Federation(method, network, dataset, partition, slower, folder=tmp_path / "b", resume=True)


def test_until_arrival_gives_the_same_bits_in_worker_processes(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=2, protocol="until-arrival", clock_compute=0.01)
    first, second = (
        Federation(SCD(**QUICK), network, dataset, partition, settings, engine=engine)
        for engine in (InProcess(), Workers(2))
    )
    _assert_same_runs(first, second)
