"""Timing, memory and bandwidth, measured so that a shared and drifting machine is unfair to nobody."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from .case import Case, Contestant
from .machine import last_level_cache

__all__ = ["MIN_ROUNDS", "ReadBandwidth", "Result", "peak_extra_bytes", "race", "status_bytes", "threads"]

MIN_ROUNDS = 3
"""Rounds that every contestant runs, whatever they cost."""

_MIN_BUFFER = 256 * 10**6


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use that many threads in torch and the BLAS."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- memory --------------------------------------------------------------------------------------------------------


def status_bytes(key: str) -> int:
    """A size that Linux tells of this process, such as ``VmRSS``.

    Raises:
        OSError: it does not.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def peak_extra_bytes(run: Callable[[], Any]) -> tuple[Any, int | None]:
    """The result of ``run``, and the most memory it held at once beyond what was there before, result included.

    Linux keeps a high-water mark of the resident memory that a process may reset, so this sees every allocator:
    torch's, NumPy's and the native kernels'. Exact to some pages per thread. None where there is no such mark.
    """
    try:
        # Memory that the C library keeps for later would be used without showing up, so give it back first.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
    except (OSError, AttributeError):
        return run(), None
    result = run()
    return result, max(0, status_bytes("VmHWM") - before)


# ---- bandwidth -----------------------------------------------------------------------------------------------------


class ReadBandwidth:
    """How fast this process can read memory now, by the best of several ways.

    No single call is the fastest reader everywhere: with one thread a matrix-vector product beats a sum, with several
    it is the other way round.
    """

    def __init__(self) -> None:
        self._own = torch.empty(0)
        self.floor = max(_MIN_BUFFER, 4 * last_level_cache())
        """The smallest buffer, in bytes, that no cache can hold."""

    def size(self, data_bytes: int) -> int:
        """Bytes that are read beside a case of that size: as many, and more than the caches hold."""
        return -(-max(data_bytes, self.floor) // 4) * 4

    def ways(self, data_bytes: int, offered: Tensor | None = None) -> dict[str, Callable[[], Any]]:
        """Calls that read :meth:`size` bytes once, of the tensor ``offered`` if that is large enough."""
        data = self._buffer(self.size(data_bytes) // 4, offered)
        matrix = data[: data.numel() // 2**16 * 2**16].view(-1, 2**16)
        vector = torch.ones(2**16)
        return {"sum": data.sum, "max": data.max, "matrix @ vector": lambda: matrix @ vector}

    def _buffer(self, numel: int, offered: Tensor | None) -> Tensor:
        if offered is not None and offered.dtype == torch.float32 and offered.numel() >= numel:
            return offered.view(-1)[:numel]
        if self._own.numel() < numel:
            self._own = torch.empty(0)  # free the old one before the new one is made
            self._own = torch.ones(numel)
        return self._own[:numel]


# ---- time ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What was measured of one contestant. Times in milliseconds."""

    contestant: Contestant
    times: Sequence[float]
    ratio_to_ours: float
    """Median over the rounds of its time by ours: a slow spell of the machine hits both sides of each ratio."""
    ratio_of_medians: float
    read_bandwidth: float
    """Bytes a second that were read from memory in the same rounds, on the same threads."""
    peak_extra_bytes: int | None

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median, third quartile."""
        low, middle, high = quantiles(self.times, n=4, method="inclusive")
        return low, middle, high


def race(case: Case, rounds: int, seconds: float, bandwidth: ReadBandwidth) -> list[Result]:
    """Check every contestant, then time them all in turns.

    A round times each contestant once and reads the bandwidth buffer in each way once; who begins moves on by one a
    round. An opponent that has used its share of ``seconds`` sits out the later rounds, but not before
    :data:`MIN_ROUNDS`. There are at most ``rounds``, and none without an opponent.

    Raises:
        WrongResult: a contestant does not compute the expected result. Nothing has been timed then.
    """
    # What fits a cache is timed as `timeit` would, right after a call of its own; otherwise the one before decides
    # what a contestant finds there. Larger data leave the cache by themselves.
    settle = case.data_bytes < bandwidth.floor
    ours, *opponents = case.contestants
    share = seconds * 1e3 / len(case.contestants)
    times: dict[str, list[float]] = {c.name: [] for c in case.contestants}
    memory: dict[str, int | None] = {}
    with threads(case.spec.threads), torch.no_grad():
        for contestant in case.contestants:
            if settle:
                contestant.run()  # code that is loaded at the first call is not its memory
            result, memory[contestant.name] = peak_extra_bytes(contestant.run)
            case.check(contestant, result)
            del result
        ways = bandwidth.ways(case.data_bytes, case.large_buffer)
        reads: dict[str, list[float]] = {name: [] for name in ways}
        with _no_garbage_collection():
            done = 0
            while opponents and done < rounds:
                for name, read in ways.items():
                    reads[name].append(_milliseconds(read))
                runners = [ours, *opponents]
                for turn in range(len(runners)):
                    contestant = runners[(turn + done) % len(runners)]
                    if settle:
                        contestant.run()
                    times[contestant.name].append(_milliseconds(contestant.run))
                done += 1
                opponents = [c for c in opponents if done < MIN_ROUNDS or sum(times[c.name]) < share]
    fastest = min(median(samples) for samples in reads.values())
    return _results(case.contestants, times, memory, bandwidth.size(case.data_bytes) / fastest * 1e3)


def _milliseconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter_ns()
    result = run()
    end = time.perf_counter_ns()
    del result  # freeing it is not part of the time
    return (end - begin) / 1e6


def _results(
    contestants: Sequence[Contestant],
    times: Mapping[str, Sequence[float]],
    memory: Mapping[str, int | None],
    read_bandwidth: float,
) -> list[Result]:
    ours = times[contestants[0].name]
    return [
        Result(
            contestant=c,
            times=times[c.name],
            # Ours ran in every round, an opponent perhaps in the first ones only.
            ratio_to_ours=median(theirs / own for theirs, own in zip(times[c.name], ours, strict=False)),
            ratio_of_medians=median(times[c.name]) / median(ours),
            read_bandwidth=read_bandwidth,
            peak_extra_bytes=memory[c.name],
        )
        for c in contestants
    ]
