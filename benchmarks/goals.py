"""What the races were to show, and what they showed: goals beside the measured numbers, missed ones among them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pfl_ext.commands.parser import HelpFormatter

from . import report
from .report import Row

__all__ = ["BANDWIDTH", "GOALS", "NAME", "SUMMARY", "Goal", "found", "main", "markdown"]

NAME = "goals"
SUMMARY = "what the races were to show, beside what they showed; measures nothing"
BANDWIDTH = "read bandwidth"
"""The opponent of a goal that is a share of what the memory can give."""


@dataclass(frozen=True)
class Goal:
    """A case of a race with the opponent that it was to beat, and by how much."""

    what: str
    family: str
    op: str
    shapes: str
    opponent: str
    least: float
    """How many times the opponent's time of ours; for ``BANDWIDTH`` a share, 1 being all of it."""
    clients: int = 1
    reason: str = ""
    """Why it is missed, where it is and where that is known."""
    first: bool = False
    """Whether it is one of those that a short table shows."""
    ours: str = "pfl_ext"
    """Which of ours: a list that a loop hands over again and again is a prepared one."""
    threads: int = 0
    """On how many; 0 is the most there are."""

    def rows(self, measured: Mapping[str, Sequence[Row]]) -> tuple[Row, Row]:
        """Our row of the case, in float32, and the opponent's.

        Raises:
            ValueError: it was not measured.
        """
        case = [
            row
            for row in measured.get(self.family, ())
            if (row.op, row.clients, row.dtype) == (self.op, self.clients, "float32") and row.shapes == self.shapes
        ]
        threads = self.threads or max((row.threads for row in case), default=0)
        by_name = {row.contestant: row for row in case if row.threads == threads}
        ours = by_name.get(self.ours)
        other = ours if self.opponent == BANDWIDTH else by_name.get(self.opponent)
        if ours is None or other is None:
            raise ValueError(f"{self.family}.csv has no {self.opponent} for the goal {self.what!r}; measure anew")
        return ours, other


_ROUND = "52\u202f410 training samples of mnist"
_SMALL_CLIENTS = "60 samples of fashion-mnist a client, 50 a round"
_SMALL_ROUND = "a round of FedAvg, 50 of 1,000 small clients"
_DITTO = "480 samples of cifar10 a client, 10 a round"
_AVERAGE = "average 20 ResNet-18"
_ADAPTERS = "average 20 sets of 84 adapters"
_CACHED = "its sums stay in the cache, so both read the clients once; at the full read bandwidth ours would reach"
_FULL = "ours is at the read bandwidth"
_DIVERGENCE = "spectral divergence and gradient"
_PERTURB = "SAM's perturbation and back"
_SCORES = "PLGU's layer scores"
_ENSEMBLE = "distil from 8 teachers"
_STEP = "proximal step, ResNet-18"
_DISPATCH = "12 of its 26 us (one thread, nothing beside it) are two calls and handing over, 14 the kernels"

_PREPARED = "pfl_ext (prepared)"
_FIXED = "handing over 30 tensors and checking them is half of its time (7 of 14 us); prepare() saves that"
_SUMS = "a call of either takes 4 us, a LeNet's kernel as long: what is left to gain is the beginning"

# Small tensors: ahead, whatever the number of threads.
_SMALL = tuple(
    Goal(f"{what}, {'1 thread' if threads else 'all threads'}", family, op, shapes, opponent, 1, clients, reason,
         ours=ours, threads=threads)
    for what, family, op, shapes, opponent, clients, reason, ours in (
        ("SGD step without anchor, LeNet", "proximal", "sgd", "lenet", "_foreach_add_", 1, "", _PREPARED),
        ("SGD step without anchor, adapters", "proximal", "sgd", "adapters", "_foreach_add_", 1, "", _PREPARED),
        ("proximal step, LeNet", "proximal", "step", "lenet", "_foreach_lerp_", 1, "", _PREPARED),
        ("proximal step, LeNet, not prepared", "proximal", "step", "lenet", "_foreach_lerp_", 1, _FIXED, "pfl_ext"),
        ("StreamingAverage, 20 LeNets", "averaging", "streaming", "lenet", "_foreach_add_", 20, _SUMS, "pfl_ext"),
        ("StreamingAverage, 20 sets of adapters", "averaging", "streaming", "adapters", "_foreach_add_", 20, "",
         "pfl_ext"),
        ("average 20 LeNets", "averaging", "average", "lenet", "_foreach_add_", 20, "", "pfl_ext"),
        (_ADAPTERS, "averaging", "average", "adapters", "_foreach_add_", 20, "", "pfl_ext"),
        ("SAM's perturbation and back, LeNet", "sharpness", "sam", "lenet", "_foreach", 1, "", "pfl_ext"),
        ("SAM's perturbation and back, adapters", "sharpness", "sam", "adapters", "_foreach", 1, "", "pfl_ext"),
        (f"{_ENSEMBLE}, 2048 x 10", "distillation", "ensemble", "2048x10", "loop over teachers", 8, "", "pfl_ext"),
    )
    for threads in (1, 0)
)  # fmt: skip

GOALS = (
    Goal(_AVERAGE, "averaging", "average", "resnet18", "Flower (running sum)", 3, 20, first=True),
    Goal(_AVERAGE, "averaging", "average", "resnet18", "PFLlib", 8, 20,
         f"{_CACHED} 5.5x", first=True),
    Goal(_AVERAGE, "averaging", "average", "resnet18", "_foreach_add_", 1.5, 20, f"{_CACHED} 1.6x"),
    Goal(_AVERAGE, "averaging", "average", "resnet18", "add_ per tensor", 1.5, 20, f"{_CACHED} 1.6x"),
    Goal(_AVERAGE, "averaging", "average", "resnet18", "w @ M (flat input)", 1.5, 20,
         "it is given one matrix, not lists"),
    Goal(_ADAPTERS, "averaging", "average", "adapters", "_foreach_add_", 3, 20,
         f"{_CACHED} 1.9x", first=True),
    Goal(f"{_DIVERGENCE}, ResNet-18", "spectral", "divergence", "resnet18", "fft + autograd", 2, first=True),
    Goal(f"{_DIVERGENCE}, ResNet-18", "spectral", "divergence", "resnet18", "rfft + autograd", 1.8),
    Goal(f"{_DIVERGENCE}, a smooth length", "spectral", "divergence", "smooth", "fft + autograd", 2),
    Goal(f"{_DIVERGENCE}, a smooth length", "spectral", "divergence", "smooth", "rfft + autograd", 1.5),
    Goal(f"{_DIVERGENCE}, LeNet", "spectral", "divergence", "lenet", "fft + autograd", 3),
    Goal("spectral divergence alone, LeNet", "spectral", "value", "lenet", "NumPy and lists", 10),
    Goal(f"{_PERTURB}, ResNet-18", "sharpness", "sam", "resnet18", "_foreach", 1.3, first=True),
    Goal(f"{_PERTURB}, ResNet-18", "sharpness", "sam", "resnet18", BANDWIDTH, 0.85),
    Goal(f"{_PERTURB}, LeNet", "sharpness", "sam", "lenet", "_foreach", 4, reason=_DISPATCH),
    Goal(f"{_PERTURB}, LeNet", "sharpness", "sam", "lenet", "davda54 (per tensor)", 4, reason=_DISPATCH),
    Goal(f"{_SCORES}, LeNet", "sharpness", "scores", "lenet", "loop over layers", 3),
    Goal(f"{_SCORES}, adapters", "sharpness", "scores", "adapters", "loop over layers", 3),
    Goal(f"{_SCORES}, ResNet-18", "sharpness", "scores", "resnet18", "loop over layers", 3, reason=_FULL),
    Goal(f"{_ENSEMBLE}, 2048 x 10", "distillation", "ensemble", "2048x10", "loop over teachers", 4, 8,
         "autograd's own work is nearly half of the time", first=True),
    Goal(f"{_ENSEMBLE}, 2048 x 10", "distillation", "ensemble", "2048x10", "torch.compile", 1.5, 8),
    Goal(f"{_ENSEMBLE}, 2048 x 100", "distillation", "ensemble", "2048x100", "loop over teachers", 3, 8),
    Goal(f"{_ENSEMBLE}, 2048 x 100", "distillation", "ensemble", "2048x100", "torch.compile", 1.5, 8),
    Goal("distil from 20 teachers, 2048 x 1000", "distillation", "ensemble", "2048x1000", BANDWIDTH, 0.85, 20,
         "half of its time is arithmetic, beside which memory rests: 1.9 ms to read, 1.8 to compute, 3.6 in all"),
    Goal(_STEP, "proximal", "step", "resnet18", "autograd, then SGD", 5),
    Goal(_STEP, "proximal", "step", "resnet18", "_foreach_lerp_", 1.5,
         reason="it moves six model sizes, ours four: 1.5x is the most there can be", first=True),
    Goal("a round of FedAvg, 20 clients, MNIST", "federation", "round", _ROUND, "PFLlib", 3, 20, first=True),
    Goal("a round of FedAvg, 20 clients, MNIST", "federation", "round", _ROUND, "fluke", 4, 20),
    Goal(f"{_SMALL_ROUND}, 1 core", "federation", "small clients", _SMALL_CLIENTS, "pfl", 2, 1000, threads=1),
    Goal(f"{_SMALL_ROUND}, 2 cores", "federation", "small clients", _SMALL_CLIENTS, "pfl", 2, 1000),
    Goal("a round of Ditto, 10 of 100 clients, CIFAR-10", "federation", "ditto", _DITTO, "fluke", 4, 100),
    *_SMALL,
)  # fmt: skip
"""All goals that were set, in the order of the families."""


@dataclass(frozen=True)
class _Line:
    goal: Goal
    ours: Row
    reached: float

    @property
    def missed(self) -> bool:
        return self.reached < self.goal.least


def found(measured: Mapping[str, Sequence[Row]]) -> list[_Line]:
    """Each goal with what was reached."""
    lines = []
    for goal in GOALS:
        ours, other = goal.rows(measured)
        reached = ours.share_of_bandwidth if goal.opponent == BANDWIDTH else other.ratio_to_ours / ours.ratio_to_ours
        lines.append(_Line(goal, ours, reached))
    return lines


def markdown(lines: Sequence[_Line], short: bool = False) -> str:
    """A table with a line for each goal, or for the eight that say most; which are missed, and why."""
    shown = [line for line in lines if line.goal.first] if short else lines
    header = ["what", "ours", "compared with", "goal", "reached", *([] if short else ["why it is missed"])]
    table = [header, ["---", "--:", "---", "--:", "--:", *([] if short else ["---"])]]
    for line in shown:
        goal = line.goal
        reached = f"**{_amount(goal, line.reached)}, missed**" if line.missed else _amount(goal, line.reached)
        cells = [
            goal.what,
            _time(line.ours.median_ms),
            report.in_markdown(goal.opponent),
            _amount(goal, goal.least, 1),
            reached,
        ]
        table.append(cells if short else [*cells, goal.reason if line.missed else ""])
    missed = sum(line.missed for line in lines)
    machines = dict.fromkeys((line.ours.machine, line.ours.torch) for line in lines)
    dates = sorted(line.ours.date for line in lines)
    text = (
        f"float32, {max(line.ours.threads for line in lines)} threads where not said otherwise. "
        "2.00x: the other took twice as long. "
        f"{len(lines)} goals were set, {missed} are missed. Measured from {dates[0]} to {dates[-1]}: "
        + "; ".join(f"{machine}, torch {torch}" for machine, torch in machines)
        + ".\n"
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in table) + "\n\n" + text


def _amount(goal: Goal, value: float, digits: int = 2) -> str:
    if goal.opponent == BANDWIDTH:
        return f"{value:.0%}"
    return f"{value:g}x" if digits == 1 else report.ratio_text(value)


def _time(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{report.ms_text(ms)} ms"


def main(argv: Sequence[str]) -> int:
    """Run ``pfl-ext bench goals`` with these arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"pfl-ext bench {NAME}", description=SUMMARY, formatter_class=HelpFormatter)
    parser.add_argument("--summary", action="store_true", help="the eight that say most, in place of all")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of the CSV files")
    parser.add_argument(
        "--readme",
        metavar="FILE",
        type=Path,
        help="put the table into a Markdown file, between <!-- benchmark:goals:begin --> and the same with end; "
        "with --summary: benchmark:summary",
    )
    arguments = parser.parse_args(argv)
    folder = report.results_folder(arguments.output)
    try:
        families = dict.fromkeys(goal.family for goal in GOALS)
        measured = {family: report.read_csv(folder / f"{family}.csv") for family in families}
        text = markdown(found(measured), arguments.summary)
        if arguments.readme is None:
            print(text, end="")
        else:
            report.put_into(arguments.readme, "summary" if arguments.summary else NAME, text)
    except (OSError, ValueError) as error:
        print(f"pfl-ext bench: error: {error}", file=sys.stderr)
        return 1
    return 0
