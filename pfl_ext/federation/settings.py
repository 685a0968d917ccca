"""How a federation runs, whatever the method: its options, in groups.

A group is a class of its own, so that a function can ask for the one it needs; :class:`Settings` is all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from pfl_ext.data import AUGMENTATIONS
from pfl_ext.options import Options, option

from .messages import Protocol

__all__ = ["ClockOptions", "Compute", "Evaluation", "Privacy", "Schedule", "Settings", "Training"]


@dataclass(frozen=True)
class Schedule(Options):
    """Rounds, seed, and which clients take part in which round."""

    rounds: int = option(20, "communication rounds T", identity=False)
    participation: float = option(1.0, "fraction of the clients selected in a round")
    seed: int = option(0, "the one seed: partition, initial weights, client selection, batches")
    new_clients: int = option(0, "how many clients, the last ones, join late; they are reported apart")
    join_round: int = option(0, "the first round late clients take part in; 0: none, they only personalise at the end")
    diverged: str = option(
        "stop",
        "what to do when a client's training gives NaN: end the run, or leave the client out",
        choices=("stop", "drop"),
    )
    # The first two give the same models; the run adds the third to its identity (Federation.identity).
    protocol: str = option(
        "wait-free",
        "when a client trains its personal model. compute-and-wait: before its upload is sent; wait-free: while the "
        "upload is on the way; until-arrival: the same, for as long as the clock says that takes. The first two give "
        "the same models",
        choices=get_args(Protocol),
        identity=False,
    )
    personal_cap: int = option(0, "the most steps of personal training in a turn; 0: no limit")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("participation", 0 < self.participation <= 1, "above 0, up to 1")
        for name in ("rounds", "new_clients", "join_round", "personal_cap"):
            self.check(name, getattr(self, name) >= 0, "of 0 or more")


@dataclass(frozen=True)
class Training(Options):
    """What all local training has in common."""

    augmentation: str = option("none", "augmentation of training batches", choices=tuple(AUGMENTATIONS))
    drop_last: bool = option(
        False, "leave out the last batch of a pass where it is smaller: a few samples upset batch normalisation"
    )
    local_buffers: tuple[str, ...] = option(
        (), "types of modules whose buffers, such as running statistics, stay with each client: BatchNorm2d, ..."
    )
    server_buffers: tuple[str, ...] = option((), "types of modules whose buffers stay as the server has them")


@dataclass(frozen=True)
class Evaluation(Options):
    """Which models are evaluated, on what, and how often."""

    evaluate_every: int = option(1, "rounds between evaluations; the last round is always evaluated", identity=False)
    evaluate: str = option(
        "all",
        "what is evaluated: clients' models on their own data and the global model, or the global model on the global "
        "test set alone",
        choices=("all", "global"),
        identity=False,
    )
    evaluate_clients_every: int = option(
        1,
        "rounds between evaluations of the clients' models, which the last round always has; the other evaluations "
        "test the global model alone",
        identity=False,
    )
    evaluate_train: bool = option(False, "evaluate on the clients' training data too", identity=False)
    evaluate_local: bool = option(
        False, "evaluate selected clients before and after their local training", identity=False
    )
    personal_global_test: bool = option(
        False,
        "evaluate personal models on the global test set too (one pass over it for each client)",
        identity=False,
    )
    evaluate_participants: bool = option(
        False,
        "report the means over the clients that took part in the round too (PerAda's Figure 6)",
        identity=False,
    )
    prediction_distance: bool = option(
        False,
        "report how far personal models' predictions are from the global one's (PerAda's Theorem 2)",
        identity=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("evaluate_every", self.evaluate_every >= 1, "of 1 or more")
        self.check("evaluate_clients_every", self.evaluate_clients_every >= 1, "of 1 or more")


@dataclass(frozen=True)
class Compute(Options):
    """Device, threads and memory that a run computes with, and how often it is saved."""

    threads: int = option(1, "threads of each process; unlike workers this may change the last bits")
    fused_steps: bool = option(
        True,
        "take the steps of small networks, or their gradients, in one native call where it can be done: the same sums "
        "as autograd's, in another order",
    )
    device: str = option("cpu", "where data, models and clients' vectors are, such as cuda; workers need cpu")
    graphs: bool = option(
        False,
        "on a GPU: record a local step on the task's loss once a turn as a CUDA graph, and replay it for all further "
        "batches of that shape; the same numbers",
        identity=False,
    )
    uploads: str = option(
        "device",
        "on a GPU: where uploads wait for the server, there or in pinned memory of the host, to which they are copied "
        "while the client trains its own model; the same numbers",
        choices=("device", "host"),
        identity=False,
    )
    store: str = option(
        "memory",
        "where clients' vectors are kept: in memory, or in files that are mapped into it",
        choices=("memory", "mapped"),
        identity=False,
    )
    checkpoint_every: int = option(
        10, "rounds between checkpoints; one is also written when a minute has passed without one", identity=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # OpenMP ends the process where it cannot have the memory for so many.
        self.check("threads", 1 <= self.threads <= 1024, "from 1 to 1024")
        self.check("graphs", not self.graphs or self.device.startswith("cuda"), "of false where device is not cuda")
        host = self.uploads == "host" and not self.device.startswith("cuda")
        self.check("uploads", not host, "of device where device is not cuda")
        self.check("checkpoint_every", self.checkpoint_every >= 1, "of 1 or more")


@dataclass(frozen=True)
class ClockOptions(Options):
    """Virtual time: how fast clients' devices and links are.

    These are part of the run's identity only where they decide what models become.
    """

    clock: str = option(
        "none",
        "virtual times in the records: devices and links that are the same for all clients, log-normal over them, or "
        "those of a file",
        choices=("none", "constant", "log-normal", "trace"),
        identity=False,
    )
    clock_compute: float = option(
        0.001, "seconds a client trains on a sample (the median, where log-normal)", identity=False
    )
    clock_up: float = option(1.25e6, "bytes per second from a client to the server (the median)", identity=False)
    clock_down: float = option(6.25e6, "bytes per second from the server to a client (the median)", identity=False)
    clock_latency: float = option(
        0.05, "seconds before a message arrives, beside its bytes (the median)", identity=False
    )
    clock_spread: float = option(
        0.5, "standard deviation of the logarithms over the clients, where log-normal", identity=False
    )
    clock_aggregation: float = option(0.0, "seconds the server takes for a new model", identity=False)
    clock_trace: str = option(
        "", "CSV or JSON file with client, compute, up, down, latency of every client", identity=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clock_compute", "clock_up", "clock_down"):
            self.check(name, getattr(self, name) > 0, "above 0")
        for name in ("clock_latency", "clock_spread", "clock_aggregation"):
            self.check(name, getattr(self, name) >= 0, "of 0 or more")
        if (self.clock == "trace") != bool(self.clock_trace):
            raise ValueError(
                f"clock is {self.clock!r} and clock_trace {self.clock_trace!r}; clock=trace needs a file, and no other "
                "takes one"
            )


@dataclass(frozen=True)
class Privacy(Options):
    """Differential privacy of every client's samples."""

    dp_noise: float = option(0.0, "standard deviation of the noise in units of dp_clip; 0 with no dp_clip: none")
    dp_clip: float = option(0.0, "norm to which the gradient of a sample is clipped; 0: no differential privacy")
    dp_delta: float = option(1e-5, "delta of the guarantee: the probability with which it may fail")
    dp_secure: bool = option(
        False,
        "draw noise and batches from the operating system's secure generator, not from the seed: nobody can draw them "
        "again, so no run can be repeated, and a resumed run differs from one without a break",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("dp_noise", self.dp_noise >= 0, "of 0 or more")
        self.check("dp_clip", self.dp_clip > 0 or (self.dp_clip == 0 and self.dp_noise == 0), "above 0 with dp_noise")
        self.check("dp_delta", 0 < self.dp_delta < 1, "above 0 and below 1")
        self.check("dp_secure", not self.dp_secure or self.dp_clip > 0, "of false without dp_clip")


@dataclass(frozen=True)
class Settings(Privacy, ClockOptions, Compute, Evaluation, Training, Schedule):
    """How a federation runs, whatever the method."""

    @property
    def privacy(self) -> Privacy | None:
        """The options of differential privacy, None without."""
        return self if self.dp_clip else None
