"""Which engine a run has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from pfl_ext.federation import Engine, InProcess
from pfl_ext.options import Options, option

from .ranks import under_torchrun
from .streams import Streams
from .torchrun import Reduction, Torchrun
from .workers import Workers

__all__ = ["EngineOptions", "make_engine"]


@dataclass(frozen=True)
class EngineOptions(Options):
    """Where clients train; only reduction=fast changes results."""

    engine: str = option(
        "auto",
        "where clients train: in this process, in worker processes, or on the ranks of torchrun; auto: on ranks where "
        "torchrun started the process, else as workers says",
        choices=("auto", "process", "workers", "torchrun"),
        identity=False,
    )
    workers: int = option(
        1, "processes that train clients side by side; the results are the same to the bit", identity=False
    )
    streams: int = option(
        1, "on a GPU: clients that train side by side, each on a stream of its own; the same results", identity=False
    )
    reduction: str = option(
        "exact",
        "how ranks average; fast: by an all-reduce, whose last bits depend on the number of ranks",
        choices=("exact", "fast"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("workers", 1 <= self.workers <= 1024, "from 1 to 1024")
        self.check("streams", 1 <= self.streams <= 64, "from 1 to 64")
        self.check(
            "streams",
            self.streams == 1 or (self.engine in ("auto", "process") and self.workers == 1),
            f"of 1 with engine={self.engine} and workers={self.workers}",
        )
        self.check(
            "workers", self.workers == 1 or self.engine in ("auto", "workers"), f"of 1 with engine={self.engine}"
        )


def make_engine(options: EngineOptions) -> Engine:
    """Make the engine that these options name."""
    chosen = options.engine
    if chosen == "auto":
        chosen = "torchrun" if under_torchrun() else "workers" if options.workers > 1 else "process"
    if chosen == "torchrun":
        if options.streams > 1:
            raise ValueError(f"streams is {options.streams} under torchrun, whose ranks train clients; accepted is 1")
        if options.workers > 1:
            raise ValueError(f"workers is {options.workers} under torchrun, whose ranks train clients; accepted is 1")
        return Torchrun(cast("Reduction", options.reduction))
    if options.streams > 1:
        return Streams(options.streams)
    return Workers(options.workers) if chosen == "workers" else InProcess()
