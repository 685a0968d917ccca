"""What a method is: one file that says what a client trains and sends, what the server does, what is evaluated."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pfl_ext.data import Partition

from .client import Client
from .mapped import MappedTensor, opened
from .model import WorkingModel
from .server import Server

__all__ = ["Method", "Options", "Uploads", "option"]

_PIECES = 1 << 28  # bytes of all clients' pieces together, where uploads are in files


def option(default: Any, help: str, *, choices: tuple[Any, ...] | None = None) -> Any:
    """A method's hyper-parameter: its default and what it is, once, for the code, the command line and the tables."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


class Uploads:
    """What the server received in a round, in the order of the clients' numbers.

    ``uploads["model"]`` is the list of the clients' vectors of that name.

    Attributes:
        clients: their numbers.
        samples: n_k of each.
        staleness: how often the server has changed its vectors since it sent them to the client: 0 but in asynchronous
            rounds.
    """

    def __init__(
        self,
        clients: list[int],
        samples: list[int],
        vectors: Sequence[Mapping[str, Tensor | MappedTensor]],
        staleness: list[int] | None = None,
    ) -> None:
        """Made by the round."""
        self.clients, self.samples, self._vectors = clients, samples, vectors
        self.staleness = [0] * len(clients) if staleness is None else staleness

    def __getitem__(self, name: str) -> list[Tensor]:
        """The vectors of that name, one a client."""
        return [opened(vectors[name]) for vectors in self._vectors]

    def pieces(self, name: str) -> Iterator[list[Tensor]]:
        """The same, cut alike into pieces that follow each other: a single one where they are in memory.

        For what the server computes number by number, such as an average, on more clients than memory holds.
        """
        every = [vectors[name] for vectors in self._vectors]
        files = [vector for vector in every if isinstance(vector, MappedTensor)]
        if len(files) < len(every):
            yield self[name]
            return
        size = files[0].numel()
        step = max(1, _PIECES // (len(files) * files[0].dtype.itemsize))
        for begin in range(0, size, step):
            yield [file.read(begin, min(step, size - begin)) for file in files]

    def discard(self) -> None:
        """Remove the files of those that are in files (the round does this when the server is done)."""
        for vectors in self._vectors:
            for vector in vectors.values():
                if isinstance(vector, MappedTensor):
                    vector.path.unlink(missing_ok=True)

    def __len__(self) -> int:
        """How many clients sent something."""
        return len(self.clients)

    def parameters(self) -> int:
        """How many numbers were sent."""
        return sum(vector.numel() for vectors in self._vectors for vector in vectors.values())

    def bytes(self) -> int:
        """How many bytes were sent."""
        return sum(vector.nbytes for vectors in self._vectors for vector in vectors.values())


@dataclass(frozen=True)
class Options:
    """Options that are made by :func:`option`, checked when they are set."""

    def __post_init__(self) -> None:
        """Refuse what is not among an option's choices."""
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            if choices:
                chosen = getattr(self, field.name) in choices
                self.check(field.name, chosen, f"one of {', '.join(map(str, choices))}")

    def check(self, name: str, holds: bool, accepted: str) -> None:
        """Raise a ValueError that says what was given and what is accepted, unless the condition holds."""
        value = getattr(self, name)
        if not holds or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name} is {value!r}; accepted is a value {accepted}")


@dataclass(frozen=True)
class Method(Options, abc.ABC):
    """The base of every method: the options all share, and what a method may say about itself.

    A method has no state of its own: what the server keeps is in ``server``, what a client keeps in ``client``, so that
    a run can be saved at any round and clients can be trained in any process. ``docs/methods.md`` shows a whole one.
    """

    name: ClassVar[str]
    """What the method is called on the command line."""

    private: ClassVar[bool]
    """Set where clients touch their samples in :func:`local_sgd` alone, so that a run of it can be made differentially
    private. Each class says it for itself."""

    lr: float = option(0.01, "step size of the local SGD")
    momentum: float = option(0.0, "momentum of the local SGD; it starts anew in each round")
    weight_decay: float = option(0.0, "weight decay of the local SGD")
    batch_size: int = option(10, "samples a local step takes")
    local_epochs: int = option(1, "passes over a client's data in a round")
    local_steps: int = option(0, "steps in a round instead of passes; 0: passes")

    def __post_init__(self) -> None:
        """Refuse what cannot work before a run begins."""
        super().__post_init__()
        self.check("lr", self.lr > 0, "above 0")
        self.check("momentum", 0 <= self.momentum < 1, "from 0 to below 1")
        self.check("weight_decay", self.weight_decay >= 0, "not negative")
        self.check("batch_size", self.batch_size >= 1, "at least 1")
        self.check("local_epochs", self.local_epochs >= 0, "not negative")
        self.check("local_steps", self.local_steps >= 0, "not negative")

    # ---- what a method says of itself --------------------------------------------------------------------------------

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """The vectors the server keeps and sends, as they are before the first round."""
        return {"model": model.state()}

    def prepare_server(self, server: Server) -> None:
        """Add to the server's vectors what depends on the number of clients or on chance, once, before all rounds.

        ``server.clients`` is that number, and ``server.stream(name)`` a generator that depends on the run's seed.
        """

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """The vectors a client keeps, as they are before its first turn."""
        return {}

    def received(self) -> tuple[str, ...]:
        """Which of the server's vectors a client receives at the beginning of a turn."""
        return ("model",)

    def received_last(self) -> tuple[str, ...]:
        """Which of them it receives after the last round, for :meth:`personalize` and for its evaluation."""
        return self.received()

    def sends(self, server: Mapping[str, Tensor], client: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        """What the server sends to one client where ``names`` are asked for; its size is what is counted as sent.

        For methods whose server makes each client something of its own out of its vectors; as many numbers for every
        client. It runs where the client's turn does.
        """
        return {name: server[name] for name in names}

    def trained_parameters(self, model: WorkingModel) -> int:
        """How many parameters a client trains in a round: those of two models where it trains two."""
        return sum(p.numel() for p in model.trained)

    @abc.abstractmethod
    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A selected client's turn; returns what it sends."""

    def personal_round(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """What a client then does for its own model, while ``sent``, which is not to be changed, is on its way.

        A method that trains a generic and a personal model trains the second one here. That is all it takes for the
        wait-free protocol (:mod:`pfl_ext.federation.clock`).
        """

    def received_unselected(self) -> tuple[str, ...] | None:
        """What of the server's vectors clients that were not selected receive for :meth:`unselected_round`.

        None: they have no turn.
        """
        return None

    def unselected_round(self, client: Client, received: Mapping[str, Tensor]) -> None:
        """What a client that was not selected does for its own model."""

    def buffer_size(self) -> int | None:
        """How many uploads the server takes for an update of its vectors; None: those of all selected clients.

        With a number the run is asynchronous: clients begin and end their turns by the clock, each with the vectors
        that the server had when the turn began, and a round is one update.
        """
        return None

    @abc.abstractmethod
    def server_round(self, server: Server, uploads: Uploads) -> None:
        """Change the server's vectors by what the clients sent."""

    def check_data(self, partition: Partition) -> None:
        """Raise a ValueError if the method cannot work with this partition (no validation data, say)."""

    def personalize(self, client: Client, received: Mapping[str, Tensor]) -> None:
        """After the last round, once for every client, selected or not: what it does on its own."""

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The models to evaluate, by name: ``"global"`` is what the server has, ``"personal"`` the client's own."""
        return {"global": received["model"]}

    @property
    def has_personal_round(self) -> bool:
        """Whether :meth:`personal_round` does something."""
        return type(self).personal_round is not Method.personal_round

    @property
    def has_personal_stage(self) -> bool:
        """Whether :meth:`personalize` does something."""
        return type(self).personalize is not Method.personalize
