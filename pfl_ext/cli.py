"""The command line, also as ``python -m pfl_ext``: ``run``, ``compare``, ``sweep`` and all others of :func:`main`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from . import __version__

__all__ = ["main"]


def _info(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pfl-ext info",
        description="Print versions, compilers, build flags, the instruction set in use, and for each op which "
        "kernel serves it on CPU and CUDA, with the reason where that is not a native one.",
        allow_abbrev=False,
    )
    parser.parse_args(arguments)
    from ._info import report

    print(report())
    return 0


def _bench(arguments: Sequence[str]) -> int:
    try:
        from .benchmarks import harness
    except ImportError as error:
        print(f"pfl-ext bench: the benchmarks are not part of this installation ({error})", file=sys.stderr)
        return 1
    return harness.main(list(arguments))


def _run(arguments: Sequence[str]) -> int:
    from .commands import run

    return run(arguments)


def _compare(arguments: Sequence[str]) -> int:
    from .commands import compare

    return compare(arguments)


def _sweep(arguments: Sequence[str]) -> int:
    from .commands import sweep

    return sweep(arguments)


def _data(arguments: Sequence[str]) -> int:
    from .commands import data

    return data(arguments)


def _landscape(arguments: Sequence[str]) -> int:
    from .commands import landscape

    return landscape(arguments)


def _virtual_time(arguments: Sequence[str]) -> int:
    from .virtual_time import main as virtual_time

    return virtual_time(arguments)


# Each has a parser of its own and imports what it needs when it is called.
_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "run": (_run, "run a method on clients' data"),
    "compare": (_compare, "run several methods on identical partitions and streams; one table, one picture"),
    "sweep": (_sweep, "a comparison for each combination of some options' values; one table"),
    "virtual-time": (_virtual_time, "virtual time of finished runs to a target accuracy, under each protocol"),
    "data": (_data, "cut a data set into clients: table, picture, file"),
    "landscape": (_landscape, "draw the loss around the models of finished runs"),
    "bench": (_bench, "race an op family against its opponents"),
    "info": (_info, "versions, build, and which kernel serves each op on CPU and CUDA (the default)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["info"]
    if arguments[0] in _COMMANDS:
        return _COMMANDS[arguments[0]][0](arguments[1:])
    parser = argparse.ArgumentParser(
        prog="pfl-ext", description="Personalised federated learning: methods and fused ops.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"pfl_ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    parser.parse_args(arguments)
    return 0
