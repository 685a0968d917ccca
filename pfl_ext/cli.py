"""The command line: ``pfl-ext info`` and ``pfl-ext bench``; also as ``python -m pfl_ext``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__

__all__ = ["main"]


def _bench(arguments: Sequence[str]) -> int:
    try:
        from .benchmarks import harness
    except ImportError as error:
        print(f"pfl-ext bench: the benchmarks are not part of this installation ({error})", file=sys.stderr)
        return 1
    return harness.main(list(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pfl-ext", description="Fused ops for personalised federated learning.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"pfl_ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser(
        "info",
        help="versions, build, and which kernel serves each op on CPU and CUDA (the default)",
        description="Print versions, compilers, build flags, the instruction set in use, and for each op which "
        "kernel serves it on CPU and CUDA, with the reason where that is not a native one.",
    )
    commands.add_parser("bench", help="race an op family against its opponents", add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "bench":  # the harness has a parser of its own
        return _bench(arguments[1:])
    _parser().parse_args(arguments)
    from ._info import report

    print(report())
    return 0
