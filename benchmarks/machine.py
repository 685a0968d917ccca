"""Where and with what a measurement was made."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

import pfl_ext
from pfl_ext import _native

__all__ = ["OtherPrograms", "available_memory", "commit", "cores", "describe", "last_level_cache"]


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """The number of cores of this machine; 1 where it is not known."""
    return os.cpu_count() or 1


def last_level_cache() -> int:
    """Size of the largest cache of the first core in bytes; 0 where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * units.get(text[-1:], 1))
    return max(sizes)


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _git(folder: Path, *arguments: str) -> str | None:
    # Without optional locks "status" writes nothing, so a benchmark never stands in the way of someone's commit.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> str:
    """The commit of the source tree this runs in, marked ``-dirty`` if native or Python sources differ from it.

    Empty outside of one.
    """
    for folder in (Path(__file__).parent, Path.cwd()):
        root = _git(folder, "rev-parse", "--show-toplevel")
        # Another project's repository may lie around an installed package.
        if root is None or not (Path(root) / "csrc").is_dir() or not (Path(root) / "pfl_ext").is_dir():
            continue
        head = _git(Path(root), "rev-parse", "--short", "HEAD")
        if head:
            changes = _git(Path(root), "status", "--porcelain", "--", "csrc", "pfl_ext")
            return f"{head}-dirty" if changes else head
    return ""


def describe() -> dict[str, str]:
    """The columns of a result that are the same for a whole run."""
    return {
        "machine": f"{_cpu_model()}, {cores()} core{'' if cores() == 1 else 's'}",
        "isa": _native.isa() or "none (plain torch)",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "pfl_ext": pfl_ext.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


class OtherPrograms:
    """How much of the machine other programs use, from when this is made: what a time was taken beside."""

    def __init__(self) -> None:
        self._busy, self._own, self._began = _busy_seconds(), sum(os.times()[:4]), time.perf_counter()

    def cores(self) -> float:
        """Cores that they used since then; NaN where the system does not say. Children count once they have ended."""
        busy, own = _busy_seconds() - self._busy, sum(os.times()[:4]) - self._own
        return (busy - own) / (time.perf_counter() - self._began)


def _busy_seconds() -> float:
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return float("nan")
    user, nice, system, _, _, irq, softirq = map(int, first[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
