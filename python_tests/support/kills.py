"""Runs that are killed and resumed until they end, and whether they end as unbroken ones do."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import reliable_process
import torch

from pfl_ext.federation import checkpoint
from pfl_ext.reports import ResultsFolder

_LIMIT = 120.0  # seconds in which something must happen


@dataclass(frozen=True)
class Case:
    """A run of a few hundredths of a second a round."""

    method: str
    options: dict[str, object] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How many there are."""
        return int(str(self.options.get("rounds", 16)))

    def command(self, folder: Path, **more: object) -> list[str]:
        """The command line."""
        common = {
            "rounds": 16,
            "lr": 0.1,
            "clients": 12,
            "participation": 0.25,
            "checkpoint_every": 1,
            "output": folder,
        }
        return ["run", self.method, *reliable_process.options(common | self.options | more), "--quiet", "--no-plots"]


CASES = {
    "ditto": Case("ditto"),
    "fedbabu": Case("fedbabu"),  # clients go on after the last round
    "fedbuff": Case("fedbuff", {"buffer": 2, "clock": "log-normal"}),
}
MORE_CASES = {
    **CASES,
    "fedavgm": Case("fedavgm"),
    "feddyn": Case("feddyn"),
    "persfl": Case("persfl", {"temperatures": "1,5", "lambdas": "0,0.5", "rounds": 8}),
    "scd": Case("scd", {"protocol": "until-arrival", "clock": "log-normal"}),
    "fedasync": Case("fedasync", {"clock": "log-normal"}),
    "apfl": Case("apfl"),
}


def ended(process: BaseProcess) -> int:
    """Wait for the end of a process; its exit code."""
    process.join(_LIMIT)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def records(folder: Path) -> int:
    """How many rounds are recorded."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(process: BaseProcess, folder: Path, rounds: int) -> None:
    """Until so many rounds are recorded, or the process has ended."""
    begin = time.monotonic()
    while process.is_alive() and records(folder) < rounds:
        assert time.monotonic() - begin < _LIMIT, "it hangs"
        time.sleep(0.002)


def kill(process: BaseProcess, group: bool = False) -> bool:
    """Kill it, and whatever it has started with ``group``; whether it was alive."""
    assert process.pid is not None
    alive = process.is_alive()
    if alive and group:
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join(_LIMIT)
    return alive and process.exitcode == -signal.SIGKILL


def whole(case: Case, folder: Path) -> Path:
    """An unbroken run, in one process, in memory: what engine and store there are must not matter."""
    log = folder.with_suffix(".log")
    assert ended(reliable_process.start(case.command(folder), log)) == 0, log.read_text()
    return folder


def killed_and_resumed(case: Case, folder: Path, most: int, moments: random.Random, **more: object) -> int:
    """Begin a run, kill it up to ``most`` times, resume it until its end; how often it was killed."""
    kills, begun, log = 0, False, folder.with_suffix(".log")
    while True:
        every = moments.choice((1, 1, 2, 5))
        resume = ["--resume"] if begun else []
        process = reliable_process.start([*case.command(folder, checkpoint_every=every, **more), *resume], log)
        if kills < most:
            before = records(folder)
            # Often while it starts and restores; else some rounds later, up to the clients' part after the last.
            ahead = 0 if moments.random() < 0.25 else moments.randint(1, 5)
            if ahead:
                wait_for(process, folder, min(before + ahead, case.rounds))
            time.sleep(moments.uniform(0, 0.15 if not ahead else 0.04))
            begun = begun or folder.exists()
            if kill(process, group=moments.random() < 0.5):
                kills += 1
                continue
        assert ended(process) == 0, log.read_text()
        return kills


def ranks_of(torchrun: int) -> dict[int, int]:
    """The processes that a torchrun has started, by rank, as their environments have it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # one may end while it is looked at
            parent = re.search(r"^PPid:\s+(\d+)$", (folder / "status").read_text(), re.MULTILINE)
            variables = dict(
                entry.split("=", 1) for entry in (folder / "environ").read_text().split("\0") if "=" in entry
            )
            if parent is not None and int(parent[1]) == torchrun:
                found[int(variables["RANK"])] = int(folder.name)
    return found


@contextlib.contextmanager
def _torchrun(command: Sequence[str], folder: Path, ranks: int, restarts: int) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with its ranks; none of them is left at the end."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with folder.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [*launch, "--max-restarts", str(restarts), "-m", "pfl_ext", *command],
            cwd=folder.parent,  # not the tree's: the installed package is what runs
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        left = ranks_of(process.pid)
        process.kill()
        process.wait()
        for pid in left.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ranks_killed_and_resumed(
    case: Case, folder: Path, most: int, moments: random.Random, ranks: int = 2, **more: object
) -> int:
    """Likewise under torchrun: one rank is killed, which torchrun answers by starting all again, or all at once.

    Returns:
        how often something was killed.
    """
    kills, begun, log = 0, False, folder.with_suffix(".log")
    while True:
        resume = ["--resume"] if begun else []
        with _torchrun([*case.command(folder, **more), *resume], folder, ranks, restarts=most) as process:
            everything = False
            while kills < most and process.poll() is None and not everything:
                ahead = min(records(folder) + moments.randint(0, 4), case.rounds)
                end = time.monotonic() + _LIMIT
                while process.poll() is None and (records(folder) < ahead or len(ranks_of(process.pid)) < ranks):
                    assert time.monotonic() < end, f"it hangs: {log.read_text()[-3000:]}"
                    time.sleep(0.01)
                time.sleep(moments.uniform(0, 0.15))
                alive = ranks_of(process.pid)
                everything = moments.random() < 0.3
                if everything:
                    process.kill()  # torchrun itself first, so that it restarts nobody
                for rank in alive if everything else [moments.choice(sorted(alive))] if alive else []:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(alive[rank], signal.SIGKILL)
                kills += bool(alive) or everything
                begun = begun or folder.exists()
            if everything:
                continue
            try:
                status = process.wait(_LIMIT)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it hangs: {log.read_text()[-3000:]}") from None
            assert status == 0, log.read_text()[-3000:]
            return kills


def differences(one: Path, other: Path) -> list[str]:
    """What two finished runs differ in, the times that they took aside."""
    first, second = (ResultsFolder.open(folder) for folder in (one, other))
    found = [
        f"record {i}"
        for i, (a, b) in enumerate(zip(first.records(), second.records(), strict=True), 1)
        if repr(_timeless(a)) != repr(_timeless(b))
    ]
    if repr([sorted(row.items()) for row in first.clients()]) != repr(
        [sorted(row.items()) for row in second.clients()]
    ):
        found.append("clients.csv")
    (_, state, tensors), (_, their_state, their_tensors) = (
        checkpoint.load(sorted((folder / "checkpoints").iterdir())[-1]) for folder in (one, other)
    )
    if repr(state) != repr(their_state):
        found.append("state of the last checkpoint")
    if tensors.keys() != their_tensors.keys():
        found.append("names in the last checkpoint")
    return found + [
        name for name in tensors.keys() & their_tensors.keys() if not _same(tensors[name], their_tensors[name])
    ]


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what a clock on the wall says, its names in order: a resumed run may report them in another."""
    plain = {name: value for name, value in record.items() if not name.startswith("seconds")}
    return {name: dict(sorted(value.items())) if isinstance(value, dict) else value for name, value in plain.items()}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, NaN and the sign of 0 included."""
    return a.dtype == b.dtype and a.shape == b.shape and checkpoint.digest(a) == checkpoint.digest(b)


def many(case: Case, reference: Path, folder: Path, kills: int, seed: int, **more: object) -> Sequence[str]:
    """Kill runs of a case until there were so many kills, each run compared with the reference; what differed."""
    moments, done, run = random.Random(seed), 0, 0
    found: list[str] = []
    while done < kills:
        path = folder / f"run{run}"
        done += killed_and_resumed(case, path, kills - done, moments, **more)
        found += [f"run {run} of seed {seed}: {what}" for what in differences(reference, path)]
        run += 1
    return found


# ---- other faults ----------------------------------------------------------------------------------------------------


def _resumed(case: Case, folder: Path, **more: object) -> None:
    log = folder.with_suffix(".log")
    assert ended(reliable_process.start([*case.command(folder, **more), "--resume"], log)) == 0, log.read_text()


def terminated_as_a_group(case: Case, folder: Path, moments: random.Random, **more: object) -> None:
    """SIGTERM to all processes of a run, as systemd and Slurm send it: it ends after the round, saved."""
    log = folder.with_suffix(".log")
    process = reliable_process.start(case.command(folder, checkpoint_every=1000, **more), log)
    wait_for(process, folder, moments.randint(1, case.rounds // 3))
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGTERM)
    assert ended(process) == 130, log.read_text()
    saved = sorted((folder / "checkpoints").iterdir())[-1]
    assert checkpoint.load(saved)[1]["round"] == records(folder) < case.rounds, "rounds were lost"
    _resumed(case, folder, **more)


def with_a_killed_worker(case: Case, folder: Path, moments: random.Random, **more: object) -> None:
    """SIGKILL to one of two workers: the run ends with a line, leaves nobody behind, and is resumed."""
    log = folder.with_suffix(".log")
    process = reliable_process.start(case.command(folder, workers=2, **more), log)
    wait_for(process, folder, moments.randint(1, case.rounds // 3))
    assert process.pid is not None
    workers = reliable_process.workers(process.pid)
    os.kill(moments.choice(workers), signal.SIGKILL)
    assert ended(process) == 1 and log.read_text().count("\n") == 1, log.read_text()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "a worker is left"
    _resumed(case, folder, workers=2, **more)


def two_in_one_folder(case: Case, folder: Path, moments: random.Random, **more: object) -> None:
    """A second run in the folder of one that is alive is refused, and the first is as if it had never been."""
    log, second = folder.with_suffix(".log"), folder.with_suffix(".second")
    process = reliable_process.start(case.command(folder, **more), log)
    wait_for(process, folder, moments.randint(1, case.rounds // 3))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)  # so that it is alive for as long as the other needs
    try:
        for how in ("--resume", "--overwrite"):
            other = reliable_process.start([*case.command(folder, **more), how], second)
            assert ended(other) == 1 and f"(process {process.pid})" in second.read_text(), second.read_text()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert ended(process) == 0, log.read_text()


def on_a_full_disk(case: Case, folder: Path, moments: random.Random, **more: object) -> None:
    """Files that cannot grow any more: one line that names one, and the run is resumed when there is room."""
    log = folder.with_suffix(".log")
    size = moments.choice((5_000, 20_000, 40_000, 60_000))
    process = reliable_process.start(case.command(folder, **more), log, file_size=size)
    told = (ended(process), log.read_text())
    assert told[0] == 1 and told[1].count("\n") == 1 and str(folder) in told[1], told
    if folder.exists():
        _resumed(case, folder, **more)
    else:  # it could not begin
        whole(case, folder)
