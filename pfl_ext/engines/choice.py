"""Which engine a run has."""

from __future__ import annotations

from dataclasses import dataclass

from pfl_ext.federation import Engine, InProcess
from pfl_ext.options import Options, option

from .workers import Workers

__all__ = ["EngineOptions", "make_engine"]


@dataclass(frozen=True)
class EngineOptions(Options):
    """Where clients' turns run; it has no influence on results."""

    workers: int = option(
        1, "processes that train clients side by side; the results are the same to the bit", identity=False
    )

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        super().__post_init__()
        self.check("workers", 1 <= self.workers <= 1024, "from 1 to 1024")


def make_engine(options: EngineOptions) -> Engine:
    """The engine that these options name."""
    return Workers(options.workers) if options.workers > 1 else InProcess()
