"""A race of whole rounds: everyone in turns, all begin with the same weights and must end with the same model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from torch import Tensor

from . import machine, report
from .case import WrongResult
from .opponents.federation import Reported

__all__ = ["Outcome", "Racer", "Result", "compare", "cores_text", "peers_table", "row", "rows"]

_CALM = 0.05


@dataclass(frozen=True)
class Outcome:
    """What one run of a contestant gave."""

    seconds: float
    """Seconds that a round took."""
    model: Tensor | None = None
    """What it ended with where all contestants have seen the same batches; it may be less than what ours has."""
    reported: Reported | None = None
    evaluated: float = float("nan")
    """Seconds of a round with its share of an evaluation that not every round has."""
    accuracy: float = float("nan")
    """After the last round, in per cent; whoever draws batches of its own has another one."""


@dataclass(frozen=True)
class Racer:
    """One way to run the round on that many cores."""

    name: str
    kind: str
    cores: int
    run: Callable[[], Outcome]


@dataclass(frozen=True)
class Result:
    """A contestant, and what each of its runs gave."""

    racer: Racer
    outcomes: Sequence[Outcome]

    @property
    def seconds(self) -> list[float]:
        """Seconds that a round took, for each run."""
        return [outcome.seconds for outcome in self.outcomes]

    @property
    def evaluated(self) -> list[float]:
        """The same with a round's share of an evaluation."""
        return [outcome.evaluated for outcome in self.outcomes]


def compare(begin: Tensor, racers: Sequence[Racer], repeats: int, patience: float = 0.0) -> list[Result]:
    """Run everyone in turns, check that all end with one model, and give their times.

    Args:
        begin: what all begin with, in the form of an outcome's model.
        racers: who races, ours first.
        repeats: how often each runs.
        patience: with a number of minutes, runs beside which other programs used more than a twentieth of a core are
            repeated, whatever they took, for that long.

    Raises:
        WrongResult: a contestant's model is not that of ours.
        TimeoutError: the machine was never calm for the length of a run.
    """
    deadline = time.monotonic() + 60 * patience
    found: dict[Racer, list[Outcome]] = {racer: [] for racer in racers}
    ours: Tensor | None = None
    for turn in range(repeats):
        for racer in racers:
            outcome = _calm(racer, deadline) if patience else racer.run()
            if turn == 0 and outcome.model is not None:
                ours = outcome.model if ours is None else ours
                check(racer, outcome.model, ours, begin)
            found[racer].append(outcome)
            print(f"{racer.name}, {cores_text(racer.cores)}: {outcome.seconds:.3f} s", file=sys.stderr, flush=True)
    return [Result(racer, outcomes) for racer, outcomes in found.items()]


def _calm(racer: Racer, deadline: float) -> Outcome:
    while True:
        others = machine.OtherPrograms()
        time.sleep(1)
        if not others.cores() > _CALM:  # NaN, where it is not known, is no reason to wait
            others = machine.OtherPrograms()
            outcome = racer.run()
            used = others.cores()
            if not used > _CALM:
                return outcome
            print(f"{racer.name}: other programs used {used:.2f} cores; again", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            raise TimeoutError(f"other programs use more than {_CALM} cores; measure when they have ended")


def check(racer: Racer, model: Tensor, ours: Tensor, begin: Tensor) -> None:
    """Raise unless the model is ours: to the bit if it is of ours, else but for rounding, which training amplifies.

    It is far below a hundredth of the way from the initial weights; another batch order or weighting is not.
    """
    size = len(model)
    apart, way = float((model - ours[:size]).norm()), float((ours[:size] - begin[:size]).norm())
    if not (apart == 0 if racer.kind == "ours" else apart <= 0.01 * way):
        raise WrongResult(
            f"{racer.name}, {cores_text(racer.cores)}: its model is {apart:.3g} from ours, which moved {way:.3g}"
        )


def cores_text(count: int) -> str:
    """The number of cores in words."""
    return f"{count} core{'' if count == 1 else 's'}"


# ---- what is written -----------------------------------------------------------------------------------------------


def row(
    op: str,
    shapes: str,
    clients: int,
    threads: int,
    contestant: str,
    kind: str,
    times: Sequence[float],
    *,
    ratio: float = float("nan"),
    ratio_of_medians: float = float("nan"),
    limit: float = float("nan"),
    share: float = float("nan"),
) -> report.Row:
    """A line of the CSV file of whole rounds, whose times are given in seconds."""
    q25, middle, q75 = quantiles(times, n=4, method="inclusive") if len(times) > 1 else [*times] * 3
    return report.Row(
        family="federation",
        op=op,
        shapes=shapes,
        clients=clients,
        dtype="float32",
        threads=threads,
        contestant=contestant,
        kind=kind,
        median_ms=middle * 1e3,
        q25_ms=q25 * 1e3,
        q75_ms=q75 * 1e3,
        min_ms=min(times) * 1e3,
        rounds=len(times),
        ratio_to_ours=ratio,
        ratio_of_medians=ratio_of_medians,
        limit_ms=limit * 1e3,
        share_of_bandwidth=share,
        read_bandwidth_gb_s=float("nan"),
        peak_extra_mib=None,
        **machine.describe(),
    )


def rows(
    op: str,
    shapes: str,
    clients: int,
    results: Sequence[Result],
    times_of: Callable[[Result], list[float]] = lambda result: result.seconds,
) -> list[report.Row]:
    """The lines of a race: each contestant beside ours on as many cores, and beside the limit where there is one."""
    limits = [median(times_of(result)) for result in results if result.racer.kind == "limit"]
    ours = {result.racer.cores: times_of(result) for result in results if result.racer.name == "pfl_ext"}
    made = []
    for result in results:
        racer, times = result.racer, times_of(result)
        own = ours.get(racer.cores, times)
        limit = limits[0] / racer.cores if limits else float("nan")
        made.append(
            row(
                op,
                shapes,
                clients,
                racer.cores,
                racer.name,
                racer.kind,
                times,
                ratio=median(theirs / mine for theirs, mine in zip(times, own, strict=True)),
                ratio_of_medians=median(times) / median(own),
                limit=limit,
                share=limit / median(times),
            )
        )
    return made


def peers_table(lines: Sequence[report.Row], evaluated: Sequence[report.Row] = ()) -> str:
    """A table of contestants: time of a round and how often that is ours; the same with its share of an evaluation."""
    header = ["", "cores", "ms a round", "pfl_ext is faster by"]
    header += ["with its share of an evaluation", "pfl_ext is faster by"] if evaluated else []
    table = [header, ["---", *["--:"] * (len(header) - 1)]]
    with_evaluation = {(line.contestant, line.threads): line for line in evaluated}
    for line in lines:
        cells = [line.contestant, str(line.threads)]
        for one in (line, with_evaluation.get((line.contestant, line.threads))):
            if one is not None:
                cells += [
                    report.ms_text(one.median_ms),
                    "-" if one.kind == "ours" else report.ratio_text(one.ratio_to_ours),
                ]
        table.append([*cells, *["-"] * (len(header) - len(cells))])
    return "\n".join("| " + " | ".join(line) + " |" for line in table)
