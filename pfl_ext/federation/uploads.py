"""What the server received in a round."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pfl_ext.data import Dataset
from pfl_ext.ops import weighted_average

from .mapped import MappedTensor, opened
from .messages import Vector
from .model import WorkingModel
from .turns import Turns

__all__ = ["Here", "Uploads", "VectorAccess", "outputs_of"]

_FORWARD_BATCH = 256  # samples a forward pass of an uploaded model takes; fixed, as the last bits depend on it
_PIECES = 1 << 28  # bytes of all clients' pieces together, where uploads are in files


class VectorAccess(Protocol):
    """How to come by clients' vectors, wherever they are: the part of an engine that the server needs."""

    def average(self, vectors: Sequence[Vector], weights: Sequence[float], normalize: bool = True) -> Tensor:
        """The weighted sum of vectors, the weights divided by their sum first if ``normalize``.

        The same bits wherever the vectors are: those of :func:`pfl_ext.ops.weighted_average` in their order.
        """

    def fetch(self, vector: Vector, hold: bool = True) -> Tensor:
        """A vector itself; with ``hold`` it stays here until it is released, where it had to be brought."""

    def outputs(self, vectors: Sequence[Vector], model: WorkingModel, data: Dataset, rows: Tensor) -> list[Tensor]:
        """What a model makes of samples with each of these vectors as its state: those of :func:`outputs_of`."""

    def release(self, vector: Vector) -> None:
        """That vector is not needed any more."""


def _average(vectors: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    found: list[Tensor] = weighted_average([[vector] for vector in vectors], weights, normalize=normalize)
    return found[0]


@torch.no_grad()
def outputs_of(model: WorkingModel, state: Tensor, data: Dataset, rows: Tensor) -> Tensor:
    """What a model of that state, in evaluation mode, makes of samples of a dataset."""
    model.load(state)
    model.module.eval()
    return torch.cat([model(data.batch(part)[0]) for part in rows.split(_FORWARD_BATCH)])


class Here:
    """Vectors in this process's memory, or in files that it sees."""

    @cached_property
    def turns(self) -> Turns:
        """How far it is with clients' turns: for an engine to count, and a display to show."""
        return Turns()

    def identity(self) -> dict[str, Any]:
        """Nothing: the same bits wherever clients train."""
        return {}

    def average(self, vectors: Sequence[Vector], weights: Sequence[float], normalize: bool = True) -> Tensor:
        """As :class:`VectorAccess` says; of files in pieces, as they may be more than memory holds."""
        files = [vector for vector in vectors if isinstance(vector, MappedTensor)]
        if len(files) < len(vectors):
            return _average([self.fetch(vector) for vector in vectors], weights, normalize)
        size = files[0].numel()
        step = max(1, _PIECES // (len(files) * files[0].dtype.itemsize))
        pieces = [
            _average([file.read(begin, min(step, size - begin)) for file in files], weights, normalize)
            for begin in range(0, size, step)
        ]
        return torch.cat(pieces).view(files[0].shape) if pieces else self.fetch(files[0])

    def fetch(self, vector: Vector, hold: bool = True) -> Tensor:
        """The vector, mapped where it is in a file."""
        return opened(vector)

    def outputs(self, vectors: Sequence[Vector], model: WorkingModel, data: Dataset, rows: Tensor) -> list[Tensor]:
        """By the model that is given, one vector after the other."""
        return [outputs_of(model, self.fetch(vector), data, rows) for vector in vectors]

    def release(self, vector: Vector) -> None:
        """Remove its file, where it has one."""
        if isinstance(vector, MappedTensor):
            vector.path.unlink(missing_ok=True)

    def save(self, stem: Path) -> list[Path]:
        """No files of its own: what clients keep is in the engine's ``state()``."""
        return []


class Uploads:
    """What the server received in a round, in the order of the clients' numbers.

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
        vectors: Sequence[Mapping[str, Vector]],
        staleness: list[int] | None = None,
        access: VectorAccess | None = None,
        weighting: str = "paper",
    ) -> None:
        """Not called by users: a round makes the uploads that it aggregates."""
        self._weighting = weighting
        self.clients, self.samples, self._vectors = clients, samples, vectors
        self.staleness = [0] * len(clients) if staleness is None else staleness
        self._access: VectorAccess = Here() if access is None else access

    def average(self, name: str = "model", *, equally: bool = False) -> Tensor:
        r""":math:`\sum_k \frac{n_k}{n} w_k` over the clients that sent something, or their mean (:meth:`weights`)."""
        return self._access.average([vectors[name] for vectors in self._vectors], self.weights(equally=equally))

    def of(self, clients: Collection[int]) -> Uploads:
        """What those of these clients sent that sent something: of the clients with one network, say."""
        some = [i for i, k in enumerate(self.clients) if k in clients]
        return Uploads(
            [self.clients[i] for i in some],
            [self.samples[i] for i in some],
            [self._vectors[i] for i in some],
            [self.staleness[i] for i in some],
            self._access,
            self._weighting,
        )

    def weights(self, *, equally: bool = False) -> list[int]:
        """n_k of each client, or 1: as the method's paper has it, unless its option ``weighting`` says otherwise."""
        alike = equally if self._weighting == "paper" else self._weighting == "equal"
        return [1] * len(self) if alike else self.samples

    def sum(self, name: str, weights: Sequence[float]) -> Tensor:
        r""":math:`\sum_k a_k w_k` with weights of the method's own."""
        return self._access.average([vectors[name] for vectors in self._vectors], weights, normalize=False)

    def each(self, name: str) -> list[Tensor]:
        """The vectors themselves, one a client. An average asks for less: the clients' vectors may be elsewhere."""
        return [self._access.fetch(vectors[name]) for vectors in self._vectors]

    def outputs(self, name: str, model: WorkingModel, data: Dataset, rows: Tensor) -> list[Tensor]:
        """What the clients' models, whose states were sent, make of samples: each computed where the client is.

        Args:
            name: of the states.
            model: of the server, of these clients' network; it may be used, and holds any state afterwards.
            data: of the server.
            rows: indices of its samples.
        """
        return self._access.outputs([vectors[name] for vectors in self._vectors], model, data, rows)

    def one_by_one(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Each client and its vector, which is fetched when its turn comes: never are all in memory for this."""
        for client, vectors in zip(self.clients, self._vectors, strict=True):
            yield client, self._access.fetch(vectors[name], hold=False)

    def __len__(self) -> int:
        """How many clients sent something."""
        return len(self.clients)

    def parameters(self) -> int:
        """How many numbers were sent."""
        return sum(vector.numel() for vectors in self._vectors for vector in vectors.values())

    def bytes(self) -> int:
        """How many bytes were sent."""
        return sum(vector.nbytes for vectors in self._vectors for vector in vectors.values())

    def release(self) -> None:
        """Nobody needs them any more (the round says so when the server is done)."""
        for vectors in self._vectors:
            for vector in vectors.values():
                self._access.release(vector)
