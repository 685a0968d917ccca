"""``pfl-ext info``: versions, the build, and which kernel serves each op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pfl_ext._info import report

from .parser import Parser

__all__ = ["Request", "execute", "parse"]


@dataclass(frozen=True)
class Request:
    """What ``pfl-ext info`` was asked: it has no options."""


def parse(arguments: Sequence[str]) -> Request:
    """Refuse every argument but ``--help``."""
    parser = Parser(
        "info",
        description="Print versions, compilers, build flags, the instruction set in use, and for each op which\n"
        "kernel serves it on CPU and CUDA, with the reason where that is not a native one.",
    )
    parser.parse_args(arguments)
    return Request()


def execute(request: Request) -> int:
    """Print the report on this installation."""
    print(report())
    return 0
