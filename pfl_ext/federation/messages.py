"""What passes between the loop and the clients, wherever these are: a request goes out, a reply comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from .mapped import MappedTensor, RemoteTensor

__all__ = ["Diverged", "Protocol", "Reply", "Request", "SharedTest", "Stage", "Vector", "Work"]

Protocol: TypeAlias = Literal["compute-and-wait", "wait-free", "until-arrival"]
"""When a client trains its personal model (:mod:`.clock`)."""

Stage: TypeAlias = Literal["train", "personal", "rest", "finish", "keep", "evaluate", "test"]
"""What a request asks for.

========  ==============================================================================================================
train     a selected client's turn: ``Method.train``, and ``Method.personalize`` where that runs beside the upload
personal  ``Method.personalize`` alone, for as long as the upload takes by the clock (``until-arrival``)
rest      ``Method.personalize`` of a client that was not selected
finish    ``Method.personalize`` after the last round
keep      keep what an asynchronous turn has trained
evaluate  metrics of the client's models, and of the global one on its data
test      outputs of the global model on a part of a test set that belongs to no client
========  ==============================================================================================================
"""

Vector: TypeAlias = Tensor | MappedTensor | RemoteTensor
"""A vector of a client, or where it is. ``Engine.fetch`` gives the vector itself."""


class SharedTest(NamedTuple):
    """Part of a test set that belongs to no client."""

    test: str
    """``"global_test"``, or the name of an extra test set."""
    part: int
    """Which part of that set; the global one has one."""
    begin: int
    end: int
    network: int = 0
    """Which global model: that of which network."""


class Work(NamedTuple):
    """What a client did in a turn, in quantities that no clock is needed for."""

    client: int
    trained: int
    """Samples trained on before the upload: a sample counts as often as it was taken."""
    personal: int
    """Samples that its personal model was trained on, beside or after the upload."""
    up: int
    """Bytes sent; 0: the server does not wait for this client."""
    down: int
    """Bytes received from the server for the turn."""
    begin: float = 0.0
    """When the server sent, in an asynchronous run; elsewhere it follows from the rounds before."""


class Diverged(RuntimeError):
    """A client's training, or the server's, gave infinity or NaN."""

    def __init__(self, client: int | None, round: int, what: str) -> None:
        """``what`` is not finite after this client's turn in this round; of the server, where ``client`` is None."""
        super().__init__(client, round, what)
        self.client, self.round, self.what = client, round, what

    def __str__(self) -> str:
        """Who, when, what, and what to do."""
        who = "the server" if self.client is None else f"client {self.client}"
        drop = "" if self.client is None else ", or run with diverged=drop to leave such clients out of the round"
        return f"{who} diverged in round {self.round}: its {self.what} is not finite. Lower the step size{drop}"


_NO_WORK = Work(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """One thing that is asked of one client."""

    client: int
    """Its number; of no meaning where the stage is ``test``."""
    round: int
    """The round, from 1; in an asynchronous run which of the client's turns it is."""
    stage: Stage
    received: Mapping[str, Vector] | None = None
    """What the server sends; None: what the method sends of the vectors that the engine has published."""
    sent: Mapping[str, Vector] = field(default_factory=dict)
    """For ``personal`` what the client has sent, for ``keep`` what it is to keep."""
    budget: int | None = None
    """For ``personal``: how many samples it may train on."""
    rows: SharedTest | None = None
    """For ``test``: on which samples."""


@dataclass(slots=True)
class Reply:
    """What a client's turn or evaluation gave back."""

    client: int
    sent: Mapping[str, Vector] = field(default_factory=dict)
    """What the client sends to the server."""
    kept: Mapping[str, Vector] = field(default_factory=dict)
    """What it is to keep later, in an asynchronous run: a request ``keep`` brings it back."""
    report: dict[str, float] = field(default_factory=dict)
    """Numbers that the method reports of the turn."""
    metrics: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """Of an evaluation: the metrics of each model on each split."""
    work: Work = _NO_WORK
    received: dict[str, int] = field(default_factory=dict)
    """How many numbers the client received, by the names of the vectors."""
    trained_parameters: int = 0
    """How many parameters it has trained: those of two models where it trained two."""
    outputs: tuple[Vector, Vector] | None = None
    """Outputs and targets of ``test``, as the task reduces them for its metrics."""
    error: Diverged | None = None
    """The client's training gave infinity or NaN: there is nothing else but what was received."""
