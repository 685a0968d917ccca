"""Worker processes: what goes wrong in one, what they leave, what they cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import Faulty
from torch import nn

from pfl_ext.algorithms import Ditto, FedAvg
from pfl_ext.data import PARTITIONERS, Dataset, Partition
from pfl_ext.engines import EngineOptions, Workers, kept_processes, make_engine, processes
from pfl_ext.engines.workers import _messages, _Slots
from pfl_ext.federation import Diverged, Engine, Federation, InProcess, Method, Plan, Record, Settings, Uploads
from pfl_ext.tasks import Classification

QUICK: dict[str, Any] = {"lr": 0.1, "batch_size": 4}


@pytest.fixture
def dataset() -> Dataset:
    """120 points of three classes in four dimensions."""
    y = torch.arange(120) % 3
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(4)[y]
    return Dataset("points", x, y, ("a", "b", "c"), torch.zeros(120, dtype=torch.bool))


@pytest.fixture
def partition(dataset: Dataset) -> Partition:
    return PARTITIONERS["iid"](dataset, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def _told(records: list[Record]) -> str:
    return json.dumps([{k: v for k, v in record.items() if not k.startswith("seconds")} for record in records])


def _ids(engine: Workers) -> list[int]:
    """Of the processes that it has."""
    assert engine._processes is not None
    return list(engine._processes.ids)


def _end(processes: list[int]) -> None:
    """They end, soon."""
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)


def test_a_worker_that_is_killed_between_two_rounds_is_one_clear_error_and_the_run_can_go_on(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    # The other worker may do a few more rounds before the death is noticed.
    settings = Settings(rounds=10_000, checkpoint_every=1, evaluate_every=10_000)
    engine = Workers(2)
    run = Federation(FedAvg(**QUICK), network, dataset, partition, settings, folder=tmp_path, engine=engine)
    told = r"a worker process ended in the stage 'train' of round \d+ .*workers=1"
    with pytest.raises(ChildProcessError, match=told):
        for record in run.rounds():
            if record["round"] == 2:
                ids = _ids(engine)
                os.kill(ids[0], signal.SIGKILL)
    assert 2 <= run.round < 10_000
    _end(ids)
    settings = dataclasses.replace(settings, rounds=run.round + 2)
    resumed = Federation(FedAvg(**QUICK), network, dataset, partition, settings, folder=tmp_path, resume=True)
    assert resumed.round == run.round
    whole = Federation(FedAvg(**QUICK), network, dataset, partition, settings)
    assert _told(resumed.run()) == _told(whole.run()[-2:])
    assert torch.equal(resumed.server["model"], whole.server["model"])


def test_a_worker_that_is_killed_in_a_turn_is_one_clear_error(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    engine = Workers(2)
    run = Federation(Faulty(**QUICK, how="die"), network, dataset, partition, Settings(rounds=3), engine=engine)
    rounds = run.rounds()
    assert next(rounds)["round"] == 1
    ids = _ids(engine)
    told = r"in the stage 'train' of round 2 \(killed: out of memory\?.*fewer workers"
    with pytest.raises(ChildProcessError, match=told):
        next(rounds)
    _end(ids)


def test_a_fault_in_a_method_comes_back_as_it_is(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    engine = Workers(2)
    run = Federation(Faulty(**QUICK), network, dataset, partition, Settings(rounds=3), engine=engine).rounds()
    next(run)
    ids = _ids(engine)
    with pytest.raises(ZeroDivisionError, match="a fault in the method"):
        list(run)
    _end(ids)


def test_a_client_that_diverges_stops_the_run_or_is_dropped_as_in_one_process(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    method = Faulty(**QUICK, how="nan")
    with pytest.raises(Diverged, match=r"client 2 diverged in round 2.*diverged=drop"):
        Federation(method, network, dataset, partition, Settings(rounds=3), engine=Workers(2)).run()
    settings = Settings(rounds=3, diverged="drop")
    one, two = (Federation(method, network, dataset, partition, settings, engine=e) for e in (InProcess(), Workers(2)))
    records = one.run()
    assert records[1]["dropped"] == [2]
    assert _told(two.run()) == _told(records)
    assert torch.equal(one.server["model"], two.server["model"])


@pytest.mark.parametrize("stop", ["end", "break", "raise"])
def test_whoever_stops_looking_at_a_run_leaves_no_process(
    stop: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    engine = Workers(2)
    run = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=2), engine=engine)
    rounds = run.rounds()
    for _ in rounds:
        ids = _ids(engine)
        assert len(ids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in ids)
        if stop == "break":
            break
        if stop == "raise":
            with pytest.raises(KeyError):
                rounds.throw(KeyError)  # type: ignore[attr-defined]
            break
    del rounds
    assert not any(Path(f"/proc/{pid}").exists() for pid in ids)
    engine.close()  # once more does nothing
    Workers(2).close()


def test_runs_in_a_block_share_their_processes_and_give_the_bits_of_one_process(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    told: list[str] = []
    seen: list[list[int]] = []

    def run(engine: Engine, method: Method, faulty: bool = False) -> str:
        made = Federation(method, network, dataset, partition, Settings(rounds=2), engine=engine)
        records = []
        with pytest.raises(ZeroDivisionError) if faulty else contextlib.nullcontext():
            for record in made.rounds():
                records.append(record)
                seen.extend([_ids(engine)] if isinstance(engine, Workers) else [])
        return _told(records)

    ditto = Ditto(**QUICK, lam=0.5)
    expected = run(InProcess(), FedAvg(**QUICK)), run(InProcess(), ditto)
    with kept_processes(told.append):
        assert run(Workers(2), FedAvg(**QUICK)) == expected[0]
        with kept_processes(told.append):  # part of the outer one
            assert run(Workers(2), ditto) == expected[1]
        assert seen[0] == seen[-1] and told == []
        # One that dies between two runs is replaced, with the others.
        os.kill(seen[0][0], signal.SIGKILL)
        assert run(Workers(2), ditto) == expected[1]
        assert set(seen[-1]).isdisjoint(seen[0])
        _end(seen[0])
        assert all(Path(f"/proc/{pid}").exists() for pid in seen[-1])
        run(Workers(2), Faulty(**QUICK), faulty=True)  # whatever the others are doing then
    _end(seen[-1])
    assert len(told) == 1
    assert re.fullmatch(r"starting worker processes took \d+\.\d s, and they saved \d+\.\d s: .*workers=1", told[0])


def test_nothing_is_told_of_workers_that_pay() -> None:
    told: list[str] = []
    with kept_processes(told.append):
        processes._kept.started_in, processes._kept.saved = 2.0, 2.5  # type: ignore[union-attr]
    with kept_processes(told.append):
        pass
    with pytest.raises(KeyError), kept_processes(told.append):
        processes._kept.started_in = 2.0  # type: ignore[union-attr]
        raise KeyError
    assert told == [] and processes._kept is None


def test_uploads_take_no_more_memory_the_longer_a_run_is(dataset: Dataset, partition: Partition) -> None:
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 3))
    engine = Workers(2)
    settings = Settings(rounds=30, evaluate_every=5)
    run = Federation(FedAvg(**QUICK), wide, dataset, partition, settings, engine=engine)
    sent, files, sizes = 0, [], []
    for record in run.rounds():
        sent += record["communication"]["up_bytes"]
        found = [path.stat() for path in engine._folder.rglob("*") if path.is_file()]
        files.append(len(found))
        sizes.append(sum(status.st_blocks * 512 for status in found))
    model = run.server["model"].nbytes
    assert sent == 30 * 6 * model
    # A slot for each client in each worker at most, whoever comes to which; and logits of the evaluation.
    page = 4096
    assert sizes[-1] - sizes[0] < 2 * 6 * (model + page) and max(sizes) < sent / 4
    assert files[-1] - files[0] <= 2 * 6
    assert len(list((engine._folder / "slots").iterdir())) <= 2 * 6 + 2


def test_a_checkpoint_does_not_depend_on_the_engine(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    engines: list[Callable[[], InProcess | Workers]] = [InProcess, lambda: Workers(2), InProcess]
    whole = Federation(Ditto(**QUICK), network, dataset, partition, Settings(rounds=3))
    records = whole.run()
    for rounds, engine in enumerate(engines, 1):
        run = Federation(
            Ditto(**QUICK), network, dataset, partition, Settings(rounds=rounds),
            folder=tmp_path, resume=rounds > 1, engine=engine(),
        )  # fmt: skip
        assert _told([record | {"round": 0} for record in run.run()]) == _told([records[rounds - 1] | {"round": 0}])
    assert torch.equal(run.server["model"], whole.server["model"])
    assert isinstance(run.engine, InProcess) and isinstance(whole.engine, InProcess)
    for k in range(6):
        assert torch.equal(run.engine.store.read(k, "personal"), whole.engine.store.read(k, "personal"))


def test_data_on_another_device_are_refused(
    dataset: Dataset, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dataset, "device", torch.device("cuda:1"))
    with pytest.raises(ValueError, match="2 workers on cuda:1; workers train on the cpu"):
        Workers(2).start(Plan(FedAvg(), Classification(), network, dataset, {}, Settings()))


def test_options_choose_the_engine() -> None:
    assert isinstance(make_engine(EngineOptions()), InProcess)
    several = make_engine(EngineOptions(workers=3))
    assert isinstance(several, Workers) and several.workers == 3
    assert EngineOptions(workers=3).identity() == EngineOptions().identity() == {"reduction": "exact"}
    with pytest.raises(ValueError, match="workers is 0; accepted is a value from 1 to 1024"):
        EngineOptions(workers=0)


def test_uploads_taken_one_by_one_do_not_stay(tmp_path: Path) -> None:
    workers = Workers(2)
    workers._slots, workers._fetched = _Slots(tmp_path), {}
    files = [workers._slots.write(f"upload-{k}", torch.full((3,), float(k))) for k in range(2)]
    uploads = Uploads([0, 1], [1, 1], [{"w": file} for file in files], access=workers)
    taken = dict(uploads.one_by_one("w"))
    assert [w.tolist() for w in taken.values()] == [[0.0] * 3, [1.0] * 3] and not workers._fetched
    workers._slots.write("upload-0", torch.full((3,), 9.0))  # of the next round
    assert taken[0].tolist() == [0.0] * 3
    uploads.each("w")
    assert len(workers._fetched) == 2


@pytest.mark.parametrize("seconds", [0.0, 1e-4, 1e-3, 0.15])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("costs", [[1] * 50, [1] * 7, [], [0] * 50, [100, *[1] * 40], list(range(30))], ids=str)
def test_every_request_is_in_one_message_and_the_last_ones_are_short(
    costs: list[int], workers: int, seconds: float
) -> None:
    messages = _messages(costs, workers, seconds)
    sent = [i for message in messages for i in message]
    assert sorted(sent) == list(range(len(costs)))
    assert [costs[i] for i in sent] == sorted(costs, reverse=True)  # the longest begin first
    if sum(costs):
        ends = [0.0] * workers  # whoever is free first takes the next message
        for message in messages:
            ends.sort()
            ends[0] += sum(costs[i] for i in message)
        short = 0.004 / seconds if seconds else 0.0
        assert max(ends) - min(ends) <= max(short, *costs)
    if costs == [1] * 50 and workers == 2 and not seconds:
        assert max(map(len, messages)) == 3 and [len(message) for message in messages[-4:]] == [1] * 4


def test_messages_are_not_short_where_requests_are_and_not_long_where_requests_are() -> None:
    half_a_millisecond, hundredth, half_a_second = (_messages([1] * 50, 2, s) for s in (0.0005, 0.01, 0.5))
    assert len(half_a_millisecond) <= 8 and min(map(len, half_a_millisecond[:-1])) == 8
    assert 10 <= len(hundredth) <= 20 and [len(message) for message in hundredth[-4:]] == [1] * 4
    assert len(half_a_second) == 50  # a display of how far the round is moves with each


def test_what_requests_take_is_known_from_the_round_before(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    engine = Workers(2)
    run = Federation(FedAvg(**QUICK), network, dataset, partition, Settings(rounds=2), engine=engine).rounds()
    next(run)
    known = dict(engine._seconds)
    assert set(known) == {"train", "test", "evaluate"} and min(known.values()) > 0
    assert len(list(run)) == 1 and engine._seconds.keys() == known.keys() and engine._seconds != known
