"""Wait-free against compute-and-wait over a link of limited bandwidth, beside what the virtual clock predicts.

``python -m pfl_ext.benchmarks.limited_link`` makes two network namespaces that only see each other, limits the link
between them (``tc`` with a token bucket), starts a node of torchrun in each, and runs Ditto with one client per rank
under both protocols. It needs root and iproute2 (Debian: ``apt install iproute2``), takes no longer than ``--limit``
seconds, and removes the namespaces, and with them the link, whatever happens. No packet leaves them.

The clock is given the bandwidth of the link, the bytes that a rank sends and receives, and the seconds that a training
sample takes, which a first run without a limit shows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from pfl_ext.algorithms import Ditto
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Torchrun, lead
from pfl_ext.federation import Clock, Device, Federation, Settings, Timeline, Work, stream
from pfl_ext.federation.checkpoint import digest

from . import machine

__all__ = ["main"]

_PROTOCOLS = ("compute-and-wait", "wait-free")
_NETWORK, _PORT = "10.77.0", 29571


# ---- on a rank -------------------------------------------------------------------------------------------------------


def _federation(protocol: str, samples: int, width: int, count: int) -> Federation:
    """Two clients, each with this many made-up images, and two linear layers."""
    generator = stream(0, "images")
    inputs = torch.randn(2 * samples, 784, generator=generator)
    labels = torch.randint(0, 10, (2 * samples,), generator=generator)
    dataset = Dataset("made up", inputs, labels, tuple("0123456789"), torch.zeros(2 * samples, dtype=torch.bool))
    none = torch.empty(0, dtype=torch.int64)
    partition = Partition(tuple(torch.arange(2 * samples).split(samples)), (none,) * 2, (none,) * 2, none, none)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    settings = Settings(rounds=count, protocol=protocol, evaluate_every=count)
    return Federation(Ditto(lr=0.01), network, dataset, partition, settings, engine=Torchrun())


def _on_rank(answer: Path, samples: int, width: int, count: int, repetitions: int) -> int:
    """On rank 0: both protocols in turns; seconds of rounds, the work of a round, bytes sent, digests of models."""
    found: dict[str, Any] = {"seconds": {protocol: [] for protocol in _PROTOCOLS}, "models": []}
    for _ in range(repetitions):
        for protocol in _PROTOCOLS:
            run = _federation(protocol, samples, width, count)
            engine = run.engine
            assert isinstance(engine, Torchrun)
            for record in run.rounds():
                if record["round"] == 1:
                    before, on_wire = engine.sent(), _on_wire()  # the first round also sends data and warms up
                else:
                    found["seconds"][protocol].append(record["seconds_training"])
                    found["work"] = record["work"]
                if record["round"] == count:
                    after, wire = engine.sent(), (_on_wire() - on_wire) / (count - 1)
            found["wire"] = wire
            found["models"].append(digest(run.server["model"]))
            found["sent"] = [
                {kind: (size - old.get(kind, 0)) / (count - 1) for kind, size in new.items()}
                for old, new in zip(before, after, strict=True)
            ]
    answer.write_text(json.dumps(found))
    return 0


def _on_wire() -> int:
    """Bytes that this rank's end of the link has sent, headers and all."""
    return int((Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics" / "tx_bytes").read_text())


# ---- the link --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with a link between them; removed at the end."""
    names = (f"pfl{os.getpid()}a", f"pfl{os.getpid()}b")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for host, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"{_NETWORK}.{host}/30", "dev", name)
            for device in ("lo", name):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _limit(names: Sequence[str], megabits: float) -> None:
    """Let each end send no more than that a second."""
    for name in names:
        bucket = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "limit", "16mb"]
        _called(["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", name, *bucket])


def _ip(*arguments: str) -> None:
    _called(["ip", *arguments])


def _called(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}; it needs root, and iproute2 with tc")


def _measured(names: Sequence[str], arguments: Sequence[object], deadline: float) -> dict[str, Any]:
    """Start a rank in each namespace, and wait for the answer."""
    with tempfile.TemporaryDirectory(prefix="limited-link-") as folder:
        answer = Path(folder) / "answer.json"
        nodes = [_node(host, name, [answer, *arguments]) for host, name in enumerate(names)]
        try:
            for node in nodes:
                output, _ = node.communicate(timeout=max(1.0, deadline - time.monotonic()))
                if node.returncode:
                    raise ChildProcessError(f"a rank ended with status {node.returncode}: {output[-2000:]}")
        finally:
            for node in nodes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
                node.wait()
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def _node(host: int, name: str, arguments: Sequence[object]) -> subprocess.Popen[str]:
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)),
        *("--nproc-per-node", "1", "--master-addr", f"{_NETWORK}.1", "--master-port", str(_PORT)),
    ]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *torchrun, "-m", "pfl_ext.benchmarks.limited_link", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": name, "PFL_EXT_RANK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


# ---- what the clock says ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Seconds of a round by the virtual clock."""

    compute: float
    """Seconds that a training sample takes."""
    bandwidth: float
    """Bytes a second of the limited link."""

    def seconds(self, found: dict[str, Any], protocol: str) -> float:
        """Seconds of a round that the virtual clock predicts, once rounds follow each other."""
        clock = Clock([Device(self.compute, self.bandwidth, self.bandwidth, 0.0)] * 2)
        timeline = Timeline(clock, protocol)
        works = []
        for work, sent in zip(found["work"], found["sent"], strict=True):
            w = Work(*work)
            # A rank sends slices of its client's upload, and then the slice that it has averaged; so do the others.
            works.append(w._replace(up=int(sent["uploads"]), down=int(sent["averages"])))
        timeline.round(works)
        first = timeline.time
        timeline.round(works)
        return timeline.time - first


# ---- the command -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pfl_ext.benchmarks.limited_link", description=__doc__)
    parser.add_argument("--megabits", type=float, default=20.0, help="a second, each way")
    parser.add_argument("--width", type=int, default=2000, help="hidden features: 795 parameters each")
    parser.add_argument("--samples", type=int, default=2000, help="of each client")
    parser.add_argument("--rounds", type=int, default=3, help="of each protocol in each repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that all may take")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    given = _parser().parse_args(arguments)
    if shutil.which("ip") is None or shutil.which("tc") is None:
        print("limited_link: ip and tc are not installed; Debian: apt install iproute2", file=sys.stderr)
        return 1
    deadline = time.monotonic() + given.limit
    work = (given.samples, given.width, given.rounds)
    try:
        with _namespaces() as names:
            free = _measured(names, (*work, 1), deadline)
            _limit(names, given.megabits)
            found = _measured(names, (*work, given.repetitions), deadline)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"limited_link: {error}", file=sys.stderr)
        return 1
    _print(given, free, found)
    return 0 if len({*free["models"], *found["models"]}) == 1 else 1


def _print(given: argparse.Namespace, free: dict[str, Any], found: dict[str, Any]) -> None:
    trained = sum(found["work"][0][1:3])
    compute = median(free["seconds"]["compute-and-wait"]) / trained
    clock = Prediction(compute, given.megabits * 1e6 / 8)
    link = f"{given.megabits:g} Mbit/s"
    print(f"{'':18} {'no limit':>10} {link:>12} {'by the clock':>14}   seconds a round, medians")
    for protocol in _PROTOCOLS:
        seconds = [median(some["seconds"][protocol]) for some in (free, found)]
        print(f"{protocol:18} {seconds[0]:10.3f} {seconds[1]:12.3f} {clock.seconds(found, protocol):14.3f}")
    sent = found["sent"][0]
    same = "are" if len({*free["models"], *found["models"]}) == 1 else "are NOT"
    print(
        f"2 ranks, each with one client; in a round a rank sends {sent['uploads']:,.0f} bytes of its upload and "
        f"{sent['averages']:,.0f} of the average ({found['wire']:,.0f} on the wire, with all headers); {trained:,} "
        f"training samples a client, {compute * 1e6:.0f} us each; models {same} the same under both protocols"
    )
    about = machine.describe()
    print(f"{about['machine']}, torch {about['torch']}, one thread per rank")


if __name__ == "__main__":
    if "PFL_EXT_RANK" in os.environ:
        answer, *numbers = sys.argv[1:]
        sys.exit(lead(partial(_on_rank, Path(answer), *map(int, numbers))))
    sys.exit(main(sys.argv[1:]))
