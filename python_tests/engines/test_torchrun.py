"""Runs on ranks that torchrun starts: the bits of one process, whatever their number, and what a lost rank leads to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import differences, ranks_of
from ranks_process import SWEEP, federation, outcome

from pfl_ext.algorithms import METHODS, Ditto
from pfl_ext.cli import main
from pfl_ext.data import PARTITIONERS, load
from pfl_ext.engines import EngineOptions, InProcess, LostRank, make_engine
from pfl_ext.engines.ranks import Ranks
from pfl_ext.engines.site import portion
from pfl_ext.engines.torchrun import _check_device, dealt
from pfl_ext.federation import DamagedCheckpoint, ForeignCheckpoint, Plan, Settings, checkpoint, stream
from pfl_ext.federation.interruption import interruptible
from pfl_ext.tasks import Classification

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without torch.distributed")

SUPPORT = Path(__file__).parents[1] / "support"
Start = Callable[..., "subprocess.Popen[str]"]
_LIMIT = 120.0


def _path() -> str:
    """Where Python finds what tests share, and what it finds without."""
    return os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts torchrun with some ranks, and ends what is left of them."""
    started: list[subprocess.Popen[str]] = []

    def start(
        ranks: int, *command: object, restarts: int = 0, among: Sequence[object] = ("--standalone",), **variables: str
    ) -> subprocess.Popen[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *among]
        process = subprocess.Popen(
            [*map(str, torchrun), "--max-restarts", str(restarts), *map(str, command)],
            cwd=tmp_path,  # not the tree's: the package that runs is the one of these tests
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        # Each rank is in a session of its own; one that was stopped would stay for ever.
        ranks = list(ranks_of(process.pid).values()) if process.poll() is None else []
        for group in (process.pid, *ranks):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        process.wait()


@pytest.fixture
def answers(start: Start, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What came of scenarios of ``ranks_process.py``: on so many ranks of one machine, or of each of several nodes."""

    def answers(ranks: int | tuple[int, ...], *scenarios: str) -> dict[str, Any]:
        answer = tmp_path / "answer.json"
        command = (SUPPORT / "ranks_process.py", answer, tmp_path, *scenarios)
        for process in [start(ranks, *command)] if isinstance(ranks, int) else _on_nodes(start, ranks, *command):
            output, _ = process.communicate(timeout=_LIMIT)
            assert process.returncode == 0, output
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    return answers


def _on_nodes(start: Start, ranks: Sequence[int], *command: object) -> list[subprocess.Popen[str]]:
    """A torchrun for each node, with so many ranks."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    meet = ("--nnodes", len(ranks), "--master-addr", "localhost", "--master-port", port, "--node-rank")
    return [start(count, *command, among=(*meet, node)) for node, count in enumerate(ranks)]


def _run(folder: Path, method: str = "ditto", **options: object) -> list[str]:
    common = {"rounds": 6, "lr": 0.1, "clients": 5, "checkpoint_every": 1, "output": folder}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (common | options).items()]
    return ["run", method, *flags, "--quiet", "--no-plots"]


def _until(condition: Callable[[], Any], what: Callable[[], str] = str, seconds: float = _LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def _rounds(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


# ---- the same bits ---------------------------------------------------------------------------------------------------


def test_every_method_gives_the_bits_of_one_process_on_two_ranks(answers: Callable[..., dict[str, Any]]) -> None:
    found = answers(2, "every_method")["every_method"]
    assert found == dict.fromkeys(METHODS, True)


def test_three_ranks_on_two_nodes_with_uneven_clients_stores_protocols_faults_and_a_sweep_are_as_one_process(
    answers: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    same = ("stores_and_protocols", "networks", "stored")
    found = answers((2, 1), *same, "own_code", "faults_of_clients", "saved", "fast", "sweep")
    assert all(all(found[scenario].values()) for scenario in same), found
    assert found["own_code"] == [0, 0]
    assert differences(tmp_path / "own-process", tmp_path / "own-torchrun") == []
    faults = found["faults_of_clients"]
    assert faults["dropped"] and faults["after"], faults
    assert faults["nan"][0] == "Diverged" and "client 2 diverged in round 2" in faults["nan"][1]
    assert faults["raise"][:2] == ["ZeroDivisionError", "a fault in the method"]
    assert re.match(r"at rank \d:\nTraceback .*in train", faults["raise"][2], re.DOTALL) or faults["raise"][2] == "None"
    _check_traffic(found["fast"])
    _check_identity(found["fast"], tmp_path)
    _check_saved(found["saved"], tmp_path)
    assert found["sweep"] == 0 and main([*SWEEP, "--output", str(tmp_path / "one")]) == 0
    assert _check_comparison(tmp_path / "one", tmp_path / "sweep", "sweep.csv") == 3


def _check_traffic(found: dict[str, Any]) -> None:
    """5 clients on 3 ranks; an all-reduce sends less, and has another order of sums."""
    model = found["model"]
    slice_size = -(-model // 4 // 3) * 4
    for rank, (exact, fast) in enumerate(zip(found["exact"], found["fast"], strict=True)):
        # A client's upload goes to two others in slices; the last slice may be shorter.
        clients = exact["uploads"] / (2 * slice_size)
        assert 1 - 0.1 < clients <= 2, (rank, exact)
        assert exact["averages"] == 2 * slice_size
        assert fast["uploads"] == 0 and fast["averages"] == 2 * 2 * model // 3
    total = sum(exact["uploads"] for exact in found["exact"])
    assert 5 * 2 * model / 3 * 0.95 < total <= 5 * 2 * slice_size
    # Five terms of rounding 2 ** -24 each in three rounds, which training amplifies a little.
    assert 0 <= found["apart"] < 1e-4 * found["largest"]


def _check_comparison(one: Path, other: Path, table: str) -> int:
    """Two folders of several runs hold the same; how many runs that are."""
    # The last column is the time that a round took.
    first, second = ((folder / table).read_text().splitlines() for folder in (one, other))
    assert [line.rpartition(",")[0] for line in first] == [line.rpartition(",")[0] for line in second]
    runs = [path.parent.relative_to(one) for path in sorted(one.rglob("metrics.jsonl"))]
    assert all(differences(one / run, other / run) == [] for run in runs)
    return len(runs)


def _check_identity(found: dict[str, Any], folder: Path) -> None:
    """A run goes on with the reduction that it began with; fast ones, on as many ranks."""
    assert "reduction: None there, 'fast, on 3 ranks' here" in found["exact refused"]
    assert "reduction: 'fast, on 3 ranks' there, None here" in found["fast refused"]
    assert found["rounds"] == [4]
    with pytest.raises(ForeignCheckpoint, match="reduction: 'fast, on 3 ranks' there, None here"):
        federation("fedavg", InProcess(), Settings(rounds=4), folder=folder / "fast", resume=True)
    looked_at = federation("fedavg", InProcess(), Settings(rounds=4))
    looked_at.read(folder / "fast")
    assert looked_at.round == 4


def _check_saved(found: dict[str, Any], folder: Path) -> None:
    """Each rank has written a part; one process goes on from them."""
    parts = [f"clients-{rank}-of-3.safetensors" for rank in range(3)]
    steps = ("checkpoint-00000001", "checkpoint-00000002")
    assert found["ditto"] == [f"{step}.{part}" for step in steps for part in (*parts, "safetensors")]
    settings = Settings(rounds=4, checkpoint_every=1, clock="log-normal")
    for name in ("ditto", "fedbuff", "fedbabu"):
        if name == "fedbabu":  # it has personalised its clients: more rounds are refused, as of one process
            with pytest.raises(ValueError, match="cannot be given more rounds"):
                federation(name, InProcess(), settings, folder=folder / name, resume=True)
            continue
        whole = json.loads(outcome(name, InProcess(), settings))
        rest = json.loads(outcome(name, InProcess(), settings, folder=folder / name, resume=True))
        assert rest["digests"] == whole["digests"], name
        assert rest["records"] == whole["records"][2:], name


def test_a_run_goes_on_with_another_number_of_ranks(answers: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    settings = Settings(rounds=2, checkpoint_every=1, clock="log-normal")
    for name in ("ditto", "fedbuff"):
        federation(name, InProcess(), settings, folder=tmp_path / name).run()
    found = answers(2, "resumed")["resumed"]
    whole = Settings(rounds=4, checkpoint_every=1, clock="log-normal")
    for name in ("ditto", "fedbuff"):
        ours, theirs = json.loads(found[name]), json.loads(outcome(name, InProcess(), whole))
        assert ours["digests"] == theirs["digests"] and ours["records"] == theirs["records"][2:], name


def test_clients_are_dealt_by_cost_the_largest_first() -> None:
    assert dealt([0, 1, 2, 3], [1, 5, 3, 3], 2) == {1: 0, 2: 1, 3: 1, 0: 0}
    assert dealt([7], [0], 3) == {7: 0}


def test_a_rank_is_given_the_samples_of_its_clients_alone() -> None:
    digits = load("digits")
    cut = PARTITIONERS["iid"](digits, 4, generator=stream(0, "partition"))
    plan = Plan.of(Ditto(), Classification(), torch.nn.Linear(64, 10), digits, cut, Settings(), {}, None)
    own = portion(plan, [1, 3], rank=1, ranks=2)
    samples = [len(rows) for k in (1, 3) for rows in plan.rows[k]]
    assert len(own.dataset) == sum(samples) < len(digits) and own.rows.keys() == {1, 3}
    for k in (1, 3):
        for mine, all_of in zip(own.rows[k], plan.rows[k], strict=True):
            for ours, theirs in zip(own.dataset.batch(mine), digits.batch(all_of), strict=True):
                assert torch.equal(ours, theirs)
    # The global test has one piece, which rank 0 has; rank 1 of these samples only those that its clients have too.
    (_, rows), (_, whole) = own.tests["global_test"][0], plan.tests["global_test"][0]
    assert len(rows) == len(whole) and bool((rows == -1).any())
    first = portion(plan, [0, 2], rank=0, ranks=2)
    (data, rows), (_, whole) = first.tests["global_test"][0], plan.tests["global_test"][0]
    assert torch.equal(data.batch(rows)[0], digits.batch(whole)[0])


def test_options_choose_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="none of torchrun's: torchrun --nproc-per-node 2 -m pfl_ext run METHOD"):
        make_engine(EngineOptions(engine="torchrun"))
    with pytest.raises(ValueError, match="workers is 2; accepted is a value of 1 with engine=process"):
        EngineOptions(engine="process", workers=2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="lead"):
        make_engine(EngineOptions())
    with pytest.raises(ValueError, match="workers is 2 under torchrun"):
        make_engine(EngineOptions(workers=2))
    assert isinstance(make_engine(EngineOptions(engine="process")), InProcess)


# ---- GPUs: NCCL cannot run here; what a rank decides before it can --------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "local", "backend", "taken"),
    [(2, (2, 1), "cpu:gloo,cuda:nccl", [1]), (4, (2, 0), "cpu:gloo,cuda:nccl", [0]), (1, (2, 1), "gloo", [])],
)
def test_a_rank_takes_the_gpu_of_its_number_where_there_is_one_for_each(
    gpus: int, local: tuple[int, int], backend: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    backends: list[str] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local[0]))
    monkeypatch.setenv("LOCAL_RANK", str(local[1]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **more: backends.append(name))
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend, **more: backends.append(backend))
    store = torch.distributed.HashStore()
    ranks = Ranks(store, rank=local[1], size=4)
    ranks._connect()
    assert (found, backends, ranks.gpus) == (taken, [backend, backend], bool(taken))


def test_a_device_that_ranks_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    store = torch.distributed.HashStore()
    ranks = Ranks(store, rank=0, size=2)
    _check_device("cpu", ranks)
    with pytest.raises(ValueError, match=r"device is cuda, and this machine has 1 GPUs: a rank needs one of its own"):
        _check_device("cuda", ranks)
    ranks.gpus = True
    _check_device("cuda", ranks)
    with pytest.raises(
        ValueError, match=r"device is cuda:1, and each of 2 ranks has a GPU of its own: use device=cuda"
    ):
        _check_device("cuda:1", ranks)


# ---- checkpoints in parts --------------------------------------------------------------------------------------------


def _in_parts(folder: Path) -> list[Path]:
    """Two checkpoints of a run of which two places have written the clients."""
    for step in (1, 2):
        stem = folder / f"checkpoint-{step:08d}"
        rows = torch.arange(8.0).view(4, 2) + step
        parts = []
        for place, clients in enumerate(([0, 3], [1, 2])):
            kept = {"v/clients": torch.tensor(clients), "v/rows": rows[clients]}
            parts.append(checkpoint.write_shard(stem, place, 2, kept))
        server = {"server/model": torch.ones(3)}
        checkpoint.save(folder, step, {"seed": 0}, {"round": step}, server, parts)
    return parts


def test_a_checkpoint_in_parts_is_read_as_that_of_one_place(tmp_path: Path) -> None:
    _in_parts(tmp_path)
    state, tensors = checkpoint.newest(tmp_path, {"seed": 0}) or ({}, {})
    assert state == {"round": 2} and tensors.keys() == {"server/model", "clients/v/clients", "clients/v/rows"}
    assert tensors["clients/v/clients"].tolist() == [0, 1, 2, 3]
    assert torch.equal(tensors["clients/v/rows"], torch.arange(8.0).view(4, 2) + 2)


@pytest.mark.parametrize("fault", ["missing", "damaged", "of another"])
def test_a_part_that_is_not_what_was_written_is_named_and_the_checkpoint_before_is_taken(
    fault: str, tmp_path: Path
) -> None:
    part = _in_parts(tmp_path)[1]
    if fault == "missing":
        part.unlink()
    elif fault == "damaged":
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
    else:
        part.write_bytes((tmp_path / part.name.replace("00000002", "00000001")).read_bytes())
    with pytest.warns(RuntimeWarning, match=re.escape(part.name) + ".*the checkpoint before it is tried"):
        found = checkpoint.newest(tmp_path, {"seed": 0})
    assert found is not None and found[0] == {"round": 1}


def test_parts_without_a_checkpoint_count_for_nothing_and_are_removed(tmp_path: Path) -> None:
    _in_parts(tmp_path)
    kept = {"v/clients": torch.tensor([0]), "v/rows": torch.zeros(1, 2)}
    checkpoint.write_shard(tmp_path / "checkpoint-00000003", 0, 3, kept)  # the writer was killed before the rest
    state, _ = checkpoint.newest(tmp_path, {"seed": 0}) or ({}, {})
    assert state == {"round": 2}
    parts = [checkpoint.write_shard(tmp_path / "checkpoint-00000004", place, 2, kept) for place in range(2)]
    checkpoint.save(tmp_path, 4, {"seed": 0}, {"round": 4}, {}, parts)
    steps = {re.sub(r"\..*", "", path.name) for path in tmp_path.iterdir()}
    assert steps == {"checkpoint-00000002", "checkpoint-00000004"}


def test_a_folder_that_another_machine_does_not_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"clients-1-of-2.*all machines must see the folder under one path"):
        checkpoint.save(
            tmp_path, 1, {}, {"round": 1}, {}, [tmp_path / "checkpoint-00000001.clients-1-of-2.safetensors"]
        )
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_names_a_file_elsewhere_reads_nothing_there(tmp_path: Path) -> None:
    inside = tmp_path / "checkpoints"
    part = checkpoint.write_shard(tmp_path / "checkpoint-00000001", 0, 1, {"v/clients": torch.tensor([0])})
    checkpoint.save(inside, 1, {}, {"round": 1}, {}, [inside / ".." / part.name])
    (inside / "checkpoint-00000001.safetensors").rename(inside / "checkpoint-00000002.safetensors")
    content = (inside / "checkpoint-00000002.safetensors").read_bytes()
    assert part.name.encode() in content
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        checkpoint.load(inside / "checkpoint-00000002.safetensors")


# ---- a rank that is lost ---------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_costs_the_rounds_since_the_last_checkpoint_and_no_bit(
    start: Start, tmp_path: Path
) -> None:
    moments = random.Random(int.from_bytes(os.urandom(4), "little"))
    assert main(_run(tmp_path / "one")) == 0
    process = start(2, "-m", "pfl_ext", *_run(tmp_path / "two"), restarts=2)
    for kill in range(2):
        after = moments.randint(0, 4)
        _until(lambda after=after: _rounds(tmp_path / "two") >= after or process.poll() is not None)  # type: ignore[misc]
        time.sleep(moments.uniform(0, 0.1))
        ranks = ranks_of(process.pid)
        if process.poll() is None and ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[kill if kill in ranks else 0], signal.SIGKILL)
    output, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0, output
    assert differences(tmp_path / "one", tmp_path / "two") == []


def test_a_comparison_that_overwrites_another_overwrites_what_it_had_not_come_to_when_a_rank_was_killed(
    start: Start, tmp_path: Path
) -> None:
    compare = ["compare", "fedavg", "ditto", "--clients=4", "--quiet", "--no-plots", "--checkpoint-every=1"]
    assert main([*compare, "--rounds=1", "--lr=0.3", "--output", str(tmp_path / "two")]) == 0
    other = ["--rounds=3", "--lr=0.1", "--output"]
    assert main([*compare, *other, str(tmp_path / "one")]) == 0
    process = start(2, "-m", "pfl_ext", *compare, *other, tmp_path / "two", "--overwrite", restarts=1)
    first = tmp_path / "two" / "fedavg-seed0" / "config.toml"

    def begun() -> bool:
        """Whether the first run was begun anew: its options are others."""
        return first.exists() and "lr = 0.1" in first.read_text()

    _until(lambda: (begun() and _rounds(first.parent) > 0) or process.poll() is not None)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0 and output.count("results in") == 1, output  # rank 0 alone speaks
    assert _check_comparison(tmp_path / "one", tmp_path / "two", "comparison.csv") == 2


def test_a_rank_that_is_killed_is_named_at_once_where_nothing_restarts_it(start: Start, tmp_path: Path) -> None:
    process = start(3, "-m", "pfl_ext", *_run(tmp_path / "run", rounds=100_000, engine="torchrun"))
    _until(lambda: _rounds(tmp_path / "run") > 1 or process.poll() is not None)
    pid, begin = ranks_of(process.pid)[2], time.monotonic()
    os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - begin < 60 and process.returncode != 0
    assert re.search(rf"pfl-ext run: rank 2 \(process {pid} on .*\) has ended or cannot be reached", output), output
    rounds = _rounds(tmp_path / "run") + 2
    process = start(2, "-m", "pfl_ext", "resume", tmp_path / "run", "--rounds", rounds, "--quiet", "--no-plots")
    output, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0, output
    assert main(_run(tmp_path / "one", rounds=rounds)) == 0
    assert differences(tmp_path / "one", tmp_path / "run") == []


def test_ranks_on_two_nodes_go_on_together_whichever_node_has_lost_one(start: Start, tmp_path: Path) -> None:
    """Each node counts the restarts that its own ranks were the cause of: they differ after the first kill."""
    assert main(_run(tmp_path / "one", rounds=40)) == 0
    with socket.socket() as server:
        server.bind(("localhost", 0))
        meet = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{server.getsockname()[1]}")
    run = ("-m", "pfl_ext", *_run(tmp_path / "two", rounds=40))
    nodes = [start(1, *run, among=meet, restarts=2) for _ in range(2)]
    for rank in (1, 0):
        before = _rounds(tmp_path / "two")

        def ranks() -> dict[int, int]:
            return ranks_of(nodes[0].pid) | ranks_of(nodes[1].pid)

        _until(lambda before=before: _rounds(tmp_path / "two") > before and len(ranks()) == 2)  # type: ignore[misc]
        os.kill(ranks()[rank], signal.SIGKILL)
    outputs = [node.communicate(timeout=_LIMIT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert differences(tmp_path / "one", tmp_path / "two") == []


def test_a_rank_that_was_there_before_waits_for_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    store, limit = torch.distributed.HashStore(), timedelta(seconds=20)

    def met(*ranks: int) -> list[int]:
        """Which start these ranks, which come one after the other, have found each other in."""
        every = [Ranks(store, rank, size=3) for rank in ranks]
        with ThreadPoolExecutor(3) as pool:
            under_way = []
            for rank in every:
                under_way.append(pool.submit(rank._meet, limit))
                time.sleep(0.1)
            for one in under_way:
                one.result()
        return [rank.start for rank in every]

    assert met(1, 0, 2) == [1, 1, 1]
    assert met(1, 2, 0) == [2, 2, 2]  # rank 0 alone says when the start before is over
    with pytest.raises(LostRank, match="rank 0 of 3 did not start"):
        Ranks(store, 1, size=3)._meet(timedelta(seconds=0.2))
    first, again = Ranks(store, 0, size=3), Ranks(store, 0, size=3)
    first.start, again.start = 1, 2
    first.note("folder")
    assert again.noted_before("folder") and not first.noted_before("folder") and not again.noted_before("other")


def test_a_rank_that_cannot_take_part_in_an_average_ends_the_job_and_says_why(start: Start, tmp_path: Path) -> None:
    # Uploads go on their way beside the training where ranks are on several nodes, else when they are averaged.
    scenario = (SUPPORT / "ranks_process.py", tmp_path / "answer.json", tmp_path, "full_disk")
    for torchruns in ([start(2, *scenario)], _on_nodes(start, (1, 1), *scenario)):
        output = "".join(process.communicate(timeout=60)[0] for process in torchruns)
        assert all(process.returncode != 0 for process in torchruns)
        told = r"rank 1 cannot go on, nor can the others without it: \[Errno 28\] No space left on device"
        assert re.search(told, output), output


def test_a_rank_that_hangs_is_named(start: Start, tmp_path: Path) -> None:
    command = ["-m", "pfl_ext", *_run(tmp_path / "run", rounds=100_000)]
    process = start(2, *command, PFL_EXT_RANK_TIMEOUT="3")
    _until(lambda: _rounds(tmp_path / "run") > 1 or process.poll() is not None)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    assert process.stdout is not None
    told = ""
    for line in process.stdout:  # torchrun itself waits half a minute until it kills the one that hangs
        told += line
        if "rank 0 ends" in line:
            break
    assert re.search(rf"rank 0 ends: rank 1 \(process {ranks[1]} on .*\) has given no sign of life for 3 s", told), told


def test_a_rank_that_does_not_start_is_named(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29731"}
    done = subprocess.run(
        [sys.executable, "-m", "pfl_ext", *_run(tmp_path / "run")],
        env={**os.environ, **variables, "PFL_EXT_RANK_TIMEOUT": "2"},
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    assert "pfl-ext run: ranks 1, 2 of 3 did not start within 2 seconds" in done.stderr, done.stderr


def test_a_signal_ends_the_run_after_the_round_and_saves(start: Start, tmp_path: Path) -> None:
    options = {"rounds": 100_000, "checkpoint_every": 100_000}
    process = start(2, "-m", "pfl_ext", *_run(tmp_path / "run", **options))
    _until(lambda: _rounds(tmp_path / "run") > 1 or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does; torchrun passes it on to its own once more
    output, _ = process.communicate(timeout=60)
    done = _rounds(tmp_path / "run")
    assert f"stopped after round {done}; " in output, output
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{done:08d}.safetensors").exists()


def test_two_signals_are_one_where_torchrun_passes_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> bool:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        try:
            with interruptible() as asked:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                return asked.is_set()
        finally:
            signal.signal(signal.SIGINT, before)

    with pytest.raises(KeyboardInterrupt):
        twice()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert twice()
    monkeypatch.setattr("pfl_ext.federation.interruption._TOGETHER", 0.0)  # the second comes later than that
    with pytest.raises(KeyboardInterrupt):
        twice()


def test_a_wrong_option_is_said_once(start: Start, tmp_path: Path) -> None:
    process = start(2, "-m", "pfl_ext", "run", "ditto", "--lamb", "1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and output.count("did you mean --lam") == 1, output
