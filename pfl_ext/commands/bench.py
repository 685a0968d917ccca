"""``pfl-ext bench FAMILY``: race an op family against its opponents, on a command line that the benchmarks have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Request", "execute", "parse"]


@dataclass(frozen=True)
class Request:
    """The command line of the benchmarks."""

    arguments: tuple[str, ...]


def parse(arguments: Sequence[str]) -> Request:
    """Pass all arguments on: the benchmarks read them."""
    return Request(tuple(arguments))


def execute(request: Request) -> int:
    """Run the benchmarks with these arguments, where they are installed."""
    try:
        from pfl_ext.benchmarks import harness
    except ImportError as error:
        raise ImportError(f"the benchmarks are not part of this installation ({error})") from error
    status: int = harness.main(list(request.arguments))
    return status
