"""The command line of the benchmarks: ``pfl-ext bench``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pfl_ext.commands.parser import HelpFormatter

from . import (
    averaging,
    distillation,
    federation,
    flower,
    goals,
    gpu_model,
    gpu_race,
    machine,
    proximal,
    report,
    sharpness,
    spectral,
)
from .case import Family, Grid, Skipped, WrongResult
from .measure import MIN_ROUNDS, ReadBandwidth, Result, race

__all__ = ["FAMILIES", "main"]

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (averaging, spectral, sharpness, distillation, proximal, flower)
}

_ROUNDS, _QUICK_ROUNDS = 30, 10
_SECONDS, _QUICK_SECONDS = 8.0, 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``pfl-ext bench`` with these arguments.

    Returns:
        0, or 1 if there was nothing to report on, a file could not be used, or a contestant was wrong. Arguments that
        are not accepted end the program with code 2, as in argparse.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == [federation.NAME]:  # a round takes seconds and has no grid: it has options of its own
        return federation.main(argv[1:])
    if argv[:1] == [goals.NAME]:
        return goals.main(argv[1:])
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.list:
        for family in FAMILIES.values():
            print(f"{family.name}: {family.summary}")
        print(f"{federation.NAME}: {federation.SUMMARY}")
        print(f"{goals.NAME}: {goals.SUMMARY}")
        return 0
    if arguments.gpu_model or arguments.device == "cuda":
        return _on_gpu(parser, arguments)
    names = ", ".join((*FAMILIES, federation.NAME, goals.NAME))
    if arguments.family is None:
        parser.error(f"name a family: {names}")
    if arguments.family not in FAMILIES:
        parser.error(f"unknown family {arguments.family!r}; accepted: {names}")
    family = FAMILIES[arguments.family]

    path = report.results_folder(arguments.output) / f"{family.name}{'.quick' if arguments.quick else ''}.csv"
    try:
        if arguments.table or arguments.plot or arguments.readme:
            _report(family, path, arguments.table, arguments.plot, arguments.readme)
        else:
            grid = _grid(parser, family, arguments)
            rounds = arguments.repeats or (_QUICK_ROUNDS if arguments.quick else _ROUNDS)
            seconds = arguments.seconds or (_QUICK_SECONDS if arguments.quick else _SECONDS)
            _measure(family, grid, rounds, seconds, path)
            print(report.markdown(family, report.read_csv(path)), end="")
    except (OSError, ValueError, ImportError, WrongResult) as error:
        print(f"pfl-ext bench: error: {error}", file=sys.stderr)
        return 1
    return 0


def _on_gpu(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """All ops on a GPU, simulated or real."""
    if arguments.family is not None:
        parser.error("--gpu-model and --device cuda take all ops at once; leave the family out")
    try:
        if arguments.gpu_model:
            table = gpu_model.markdown(gpu_model.counted_cases(), arguments.bandwidth * 1e12, arguments.launch * 1e-6)
            print(table, end="")
            if arguments.readme is not None:
                report.put_into(arguments.readme, gpu_model.NAME, table)
        else:
            gpu_race.main(
                arguments.shapes or "resnet18", arguments.repeats or _ROUNDS, arguments.output, arguments.readme
            )
    except (OSError, ValueError, ImportError) as error:
        print(f"pfl-ext bench: error: {error}", file=sys.stderr)
        return 1
    return 0


# ---- arguments -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pfl-ext bench",
        formatter_class=HelpFormatter,
        description="Race the fused ops against what people write instead, on this machine: contestants are checked, "
        "then timed in turns in one process. Writes a CSV file and prints the table made from it.",
        epilog="A run replaces the CSV file of its family as a whole; use --output to keep a partial run apart.",
    )
    parser.add_argument(
        "family",
        nargs="?",
        help=f"what to race: {', '.join(FAMILIES)}; or {federation.NAME} or {goals.NAME}, which have "
        f"options of their own (`pfl-ext bench {federation.NAME} --help`)",
    )
    parser.add_argument("--list", action="store_true", help="list the families and stop")

    run = parser.add_argument_group("what to run", "Lists are separated by commas; by default the family's own grid.")
    run.add_argument(
        "--quick", action="store_true", help="a small grid in about 20 seconds, written to FAMILY.quick.csv"
    )
    run.add_argument("--shapes", metavar="LIST", help="sets of tensors: " + ", ".join(averaging.FAMILY.shapes))
    run.add_argument("--clients", metavar="LIST", help="numbers of clients, such as 8,20,100")
    run.add_argument("--dtypes", metavar="LIST", help="types: " + ", ".join(averaging.FAMILY.dtypes))
    run.add_argument("--threads", metavar="LIST", help="numbers of threads; 'all' is what torch uses by default")
    run.add_argument("--repeats", metavar="N", type=_positive(int), help=f"rounds per case (default: {_ROUNDS})")
    run.add_argument(
        "--seconds",
        metavar="S",
        type=_positive(float),
        help="time a case, in equal shares for its contestants; one that has used its share, and had "
        f"{MIN_ROUNDS} rounds, sits out the rest (default: {_SECONDS:g})",
    )
    run.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="folder of the CSV file (default: benchmarks/results if there is such a folder, else pfl_ext_benchmarks)",
    )

    gpu = parser.add_argument_group("on a GPU", "All ops at once, without a family (docs/gpu.md).")
    gpu.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: race on this GPU; writes gpu.csv, and tables into a checkout's pages (default: cpu)",
    )
    gpu.add_argument(
        "--gpu-model", action="store_true", help="count bytes, launches and waits on a simulated GPU: an estimate"
    )
    gpu.add_argument(
        "--bandwidth", metavar="TB/S", type=_positive(float), default=gpu_model.BANDWIDTH / 1e12,
        help="memory bandwidth of the estimate (default: %(default)g)",
    )  # fmt: skip
    gpu.add_argument(
        "--launch", metavar="US", type=_positive(float), default=gpu_model.LAUNCH * 1e6,
        help="microseconds of a launch in the estimate (default: %(default)g)",
    )  # fmt: skip

    made = parser.add_argument_group("from an existing CSV file", "Nothing is measured; may be combined.")
    made.add_argument("--table", action="store_true", help="print the Markdown table")
    made.add_argument("--plot", metavar="FILE", type=Path, help="draw the times into FILE, a .png or .svg")
    made.add_argument(
        "--readme",
        metavar="FILE",
        type=Path,
        help="put the table into a Markdown file, between <!-- benchmark:FAMILY:begin --> and the same with end",
    )
    return parser


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not accepted; a positive number is")
        return value

    return parse


def _grid(parser: argparse.ArgumentParser, family: Family, arguments: argparse.Namespace) -> Grid:
    cores = torch.get_num_threads()

    def split(option: str, accepted: Sequence[str] = ()) -> tuple[str, ...] | None:
        text: str | None = getattr(arguments, option)
        if text is None:
            return None
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if accepted and name not in accepted:
                parser.error(f"--{option}: unknown {name!r}; accepted: {', '.join(accepted)}")
        return names

    def numbers(option: str, names: tuple[str, ...] | None, most: int | None = None) -> tuple[int, ...] | None:
        if names is None:
            return None
        for name in names:
            if not name.isdecimal() or int(name) < 1 or (most is not None and int(name) > most):
                span = "positive whole numbers" if most is None else f"whole numbers from 1 to {most}, and all"
                parser.error(f"--{option}: {name!r} is not accepted; accepted: {span}")
        return tuple(dict.fromkeys(int(name) for name in names))

    threads = split("threads")
    if threads is not None:
        threads = tuple(str(cores) if name == "all" else name for name in threads)
    return Grid(
        shapes=split("shapes", family.shapes),
        clients=numbers("clients", split("clients")),
        dtypes=split("dtypes", family.dtypes),
        threads=numbers("threads", threads, most=cores),
        all_threads=cores,
        quick=arguments.quick,
    )


# ---- what it does --------------------------------------------------------------------------------------------------


def _measure(family: Family, grid: Grid, rounds: int, seconds: float, path: Path) -> None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5:
        # A thread that is not scheduled holds up all others of its op for milliseconds.
        print(f"warning: other programs run (load {load:.1f}); times with several threads will be off", file=sys.stderr)
    plan = family.plan(grid)
    about = machine.describe()
    bandwidth = ReadBandwidth()
    rows: list[report.Row] = []
    finished = 0
    for case in family.cases(plan):
        if isinstance(case, Skipped):
            finished += case.contestant is None
            what = f"{case.spec}" if case.contestant is None else f"{case.spec}: {case.contestant}"
            print(f"skipped {what}: {case.reason}", file=sys.stderr)
            continue
        results = race(case, rounds, seconds, bandwidth)
        rows += report.rows_of(family.name, case, results, about)
        finished += 1
        print(f"[{finished}/{len(plan)}] {case.spec}: {_in_short(results)}", file=sys.stderr, flush=True)
        del case, results  # or two cases would be in memory while the next one is built
    if not rows:
        raise ValueError("every case was skipped; nothing was measured")
    # Ops one after the other, for readers; the plan goes by data.
    ops = list(family.ops)
    rows.sort(key=lambda row: ops.index(row.op))
    report.write_csv(path, rows)
    print(f"wrote {path}", file=sys.stderr)


def _in_short(results: Sequence[Result]) -> str:
    ours = results[0]
    best = min((r for r in results if r.contestant.kind != "ours"), key=lambda r: r.ratio_to_ours)
    closest = f"{best.contestant.name} {best.ratio_to_ours:.2f}x"
    return f"{ours.quartiles[1]:.3g} ms; closest: {closest} ({len(ours.times)} rounds)"


def _report(family: Family, path: Path, table: bool, plot: Path | None, readme: Path | None) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; `pfl-ext bench {family.name}` writes it")
    rows = report.read_csv(path)
    if not rows:
        raise ValueError(f"{path} holds no results; measure anew")
    text = report.markdown(family, rows)
    if table:
        print(text, end="")
    if plot is not None:
        from .plot import draw  # matplotlib is optional

        draw(rows, plot, family.counted)
    if readme is not None:
        report.put_into(readme, family.name, text)
