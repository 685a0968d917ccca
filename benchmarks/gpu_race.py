"""``pfl-ext bench --device cuda``: the ops against their opponents on a GPU, for its owner to run and send back.

Each call is timed by CUDA events around it, after the L2 cache was overwritten, contestants in turns. Clocks are
written down before and after: a GPU that was throttled between the two is no basis for a ratio.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from . import machine, report
from .gpu_cases import GpuCase, cases
from .gpu_model import simulated

__all__ = ["NAME", "GpuRow", "main", "markdown", "publish", "read_rows", "summary"]

NAME = "gpu"
PAGE = Path("docs/gpu.md")
"""Where a checkout has the table."""
README = Path("README.md")
"""Where a checkout has the summary, between the markers of this name."""
SUMMARY = "gpu-summary"
SIMULATED = " (SIMULATED: times mean nothing)"
_WARM = 3


@dataclass(frozen=True)
class GpuRow:
    """One contestant in one case, as in the CSV file. Times in microseconds."""

    op: str
    size: str
    dtype: str
    contestant: str
    low: float
    middle: float
    high: float
    rounds: int
    by_ours: float
    """Median over the rounds of its time by ours."""
    gigabytes_a_second: float
    """Bytes that ours must move by the time: of an opponent that moves more, less than it reached."""
    gpu: str
    clocks_before: str
    clocks_after: str
    torch: str
    commit: str


def _clocks() -> str:
    """Clocks, temperature and why they are limited, as the driver tells; "not told" where there is none."""
    query = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", str(torch.cuda.current_device())]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not told"


class _Flush:
    """Overwrites the L2 cache, so that no call finds its data there."""

    def __init__(self) -> None:
        size = torch.cuda.get_device_properties().L2_cache_size
        self._memory = torch.empty(max(4 * size, 1 << 20), dtype=torch.int8, device="cuda")

    def __call__(self) -> None:
        self._memory.zero_()


def _microseconds(run: Callable[[], Any], flush: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))


def _times(case: GpuCase, rounds: int, flush: Callable[[], None]) -> dict[str, list[float]]:
    """The times of each contestant that can run here, ours first, who begins moving on by one a round."""
    contestants: dict[str, Callable[[], Any]] = {}
    for name, run in {"pfl_ext": case.run, **case.opponents}.items():
        try:
            for _ in range(_WARM):
                run()
            torch.cuda.synchronize()
        except Exception as error:
            if name == "pfl_ext":
                raise
            print(
                f"skipped {case.op}, {case.size}, {case.dtype}: {name}: {str(error).splitlines()[0]}", file=sys.stderr
            )
        else:
            contestants[name] = run
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds):
        names = list(contestants)
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            times[name].append(_microseconds(contestants[name], flush))
    return times


def _rows(case: GpuCase, times: Mapping[str, Sequence[float]], about: Mapping[str, str]) -> list[GpuRow]:
    ours, rows = times["pfl_ext"], []
    for name, samples in times.items():
        low, middle, high = quantiles(samples, n=4, method="inclusive")
        ratio = median(theirs / own for theirs, own in zip(samples, ours, strict=True))
        moved = (case.reads + case.writes) / middle / 1e3
        rows.append(
            GpuRow(case.op, case.size, case.dtype, name, low, middle, high, len(samples), ratio, moved, **about)
        )
    return rows


def read_rows(path: Path) -> list[GpuRow]:
    """The rows of a CSV file."""
    kinds = {"low": float, "middle": float, "high": float, "rounds": int, "by_ours": float, "gigabytes_a_second": float}
    with path.open(newline="", encoding="utf-8") as file:
        return [GpuRow(**{k: kinds.get(k, str)(v) for k, v in row.items()}) for row in csv.DictReader(file)]


def _write_rows(path: Path, rows: Sequence[GpuRow]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(GpuRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def markdown(rows: Sequence[GpuRow]) -> str:
    """The table: ours, its bandwidth, and each opponent by ours."""
    first = rows[0]
    how = "A rehearsal, not a measurement, on" if _rehearsed(rows) else "Measured on"
    about = (
        f"{how} {first.gpu}, torch {first.torch}, commit {first.commit}; clocks before and after: "
        f"{first.clocks_before}; {first.clocks_after}. Medians of {first.rounds} calls by CUDA events, L2 overwritten "
        "before each."
    )
    return f"{about}\n\n{_table(_by_case(rows))}"


def summary(rows: Sequence[GpuRow]) -> str:
    """The table for a README: each op that has opponents once, in float32."""
    once: dict[str, list[GpuRow]] = {}
    for case in _by_case(rows):
        if len(case) > 1 and case[0].dtype == "float32":
            once.setdefault(case[0].op, case)
    return f"On {rows[0].gpu}; 2.00x: the other took twice as long. All of it: [docs/gpu.md]({PAGE}).\n\n" + _table(
        list(once.values())
    )


def _by_case(rows: Sequence[GpuRow]) -> list[list[GpuRow]]:
    """The rows of each case, ours first."""
    found: dict[tuple[str, str, str], list[GpuRow]] = {}
    for row in rows:
        found.setdefault((row.op, row.size, row.dtype), []).append(row)
    return list(found.values())


def _table(cases: Sequence[Sequence[GpuRow]]) -> str:
    lines = ["| op | size | type | pfl_ext us | GB/s | opponents, by ours |", "| --- | --- | --- | ---: | ---: | --- |"]
    for ours, *others in cases:
        against = ", ".join(f"{row.contestant} {row.by_ours:.2f}x" for row in others) or "-"
        about = f"{ours.op} | {ours.size} | {ours.dtype} | {ours.middle:.1f} | {ours.gigabytes_a_second:.0f}"
        lines.append(f"| {about} | {against} |")
    return "\n".join(lines) + "\n"


def _rehearsed(rows: Sequence[GpuRow]) -> bool:
    return any(row.gpu.endswith(SIMULATED) for row in rows)


def publish(rows: Sequence[GpuRow], page: Path, readme: Path | None = None) -> None:
    """Put the table into a Markdown file, and the summary into a README.

    Raises:
        ValueError: the times are those of a simulated GPU, or a file has no place for them. It is as it was.
    """
    if _rehearsed(rows):
        raise ValueError(f"this GPU is simulated: its times are those of an interpreter and do not go into {page}")
    report.put_into(page, NAME, markdown(rows))
    if readme is not None:
        report.put_into(readme, SUMMARY, summary(rows))


def main(shapes: str, rounds: int, output: Path | None, readme: Path | None) -> None:
    """Race everything, write gpu.csv, print the table and put it into a page.

    That is the named Markdown file; in a checkout :data:`PAGE`, and its summary goes into :data:`README`. On a
    simulated GPU it is a rehearsal: the file is gpu.rehearsal.csv, and no page is changed.

    Raises:
        ValueError: there is no GPU, or it is a simulated one and a page was to have its times.
    """
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU; --gpu-model estimates without one (docs/gpu.md)")
    if simulated() and readme is not None:  # before the race, not after it
        raise ValueError(f"this GPU is simulated: its times are those of an interpreter and do not go into {readme}")
    before, flush, found = _clocks(), _Flush(), []
    for case in cases("cuda", shapes, large=not simulated()):
        times = _times(case, rounds, flush)
        found.append((case, times))
        print(f"{case.op}, {case.size}, {case.dtype}: {median(times['pfl_ext']):.1f} us", file=sys.stderr, flush=True)
    about = {
        "gpu": torch.cuda.get_device_name() + (SIMULATED if simulated() else ""),
        "clocks_before": before,
        "clocks_after": _clocks(),
        "torch": torch.__version__,
        "commit": machine.commit() or "unknown",
    }
    rows = [row for case, times in found for row in _rows(case, times, about)]
    path = report.results_folder(output) / f"{NAME}{'.rehearsal' if simulated() else ''}.csv"
    _write_rows(path, rows)
    print(f"wrote {path}", file=sys.stderr)
    print(markdown(rows), end="")
    if readme is not None:
        publish(rows, readme)
    elif PAGE.exists() and not simulated():
        publish(rows, PAGE, README)
    else:
        return
    print(f"wrote the table into {readme or f'{PAGE} and {README}'}", file=sys.stderr)
