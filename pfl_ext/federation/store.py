"""What the clients keep between rounds: named vectors, a row a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .mapped import MappedTensor

__all__ = ["ClientStore", "merged"]


class ClientStore:
    """Named vectors for each client. A row that was never written reads as the common initial vector.

    A row costs no memory until it is written.

    Args:
        clients: how many rows.
        initial: for each name the vector all clients begin with.
        folder: keep the rows in files there (made anew), so that more clients fit than memory holds and worker
            processes that are given the store see the same rows. None keeps them on the vectors' device.
    """

    def __init__(self, clients: int, initial: Mapping[str, Tensor], folder: Path | None = None) -> None:
        """See the class."""
        for name, vector in initial.items():
            if vector.dim() != 1:
                raise ValueError(f"{name} has the shape {list(vector.shape)}; what a client keeps is made of vectors")
            if folder is not None and vector.device.type != "cpu":
                raise ValueError(f"a memory-mapped store holds CPU tensors; {name} is on {vector.device}")
        self.clients = clients
        self.initial = {name: vector.detach().clone() for name, vector in initial.items()}
        self._files: dict[str, tuple[MappedTensor, MappedTensor]] = {}
        self._rows: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}
        for name, vector in self.initial.items():
            shape = (clients, vector.numel())
            if folder is None:
                self._rows[name] = torch.empty(shape, dtype=vector.dtype, device=vector.device)
                self._written[name] = torch.zeros(clients, dtype=torch.bool)
            else:
                self._files[name] = (
                    MappedTensor.create(folder / f"{name}.rows", shape, vector.dtype),
                    MappedTensor.copy(torch.zeros(clients, dtype=torch.bool), folder / f"{name}.written"),
                )
        self._open()

    def _open(self) -> None:
        for name, (_, written) in self._files.items():
            self._written[name] = written.open()

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to see the same rows."""
        if self.initial and not self._files:
            raise TypeError("only a store with a folder can be given to another process")
        return {"clients": self.clients, "initial": self.initial, "_files": self._files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the files again."""
        self.__dict__.update(state, _rows={}, _written={})
        self._open()

    @property
    def names(self) -> list[str]:
        """The names of the vectors."""
        return list(self.initial)

    def read(self, client: int, name: str) -> Tensor:
        """A copy of the client's vector."""
        initial = self.initial[name]
        if not self._written[name][client]:
            return initial.clone()
        if name in self._files:
            return self._files[name][0].read(client * initial.numel(), initial.numel())
        return self._rows[name][client].clone()

    def write(self, client: int, name: str, vector: Tensor) -> None:
        """Keep ``vector`` for the client."""
        if vector.shape != self.initial[name].shape:
            raise ValueError(
                f"{name} of client {client} is {list(vector.shape)}; {list(self.initial[name].shape)} is kept"
            )
        if name in self._files:
            self._files[name][0].write(client * vector.numel(), vector.to(self.initial[name].dtype))
        else:
            self._rows[name][client].copy_(vector)
        self._written[name][client] = True

    def written(self, client: int, name: str) -> bool:
        """Whether the client has a vector of its own."""
        return bool(self._written[name][client])

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save: for each name the written rows and their clients."""
        found = {}
        for name in self.initial:
            rows = self._files[name][0].open() if name in self._files else self._rows[name]
            which = self._written[name].nonzero().flatten()
            found[f"{name}/clients"] = which
            # Without a copy where all rows are there: a mapped store may be larger than memory.
            found[f"{name}/rows"] = rows if len(which) == self.clients else rows[which]
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the rows to what :meth:`tensors` gave."""
        for name, vector in self.initial.items():
            which, saved = tensors[f"{name}/clients"], tensors[f"{name}/rows"]
            if saved.shape[1:] != vector.shape or len(which) > self.clients:
                raise ValueError(
                    f"saved rows of {name} are {list(saved.shape)}, the store has {[self.clients, *vector.shape]}"
                )
        for name in self.initial:
            self._written[name].zero_()
            for client, row in zip(tensors[f"{name}/clients"].tolist(), tensors[f"{name}/rows"], strict=True):
                self.write(client, name, row)


def merged(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What the stores of several places hold, each of other clients, as one store of all clients has it."""
    found: dict[str, Tensor] = {}
    for label in parts[0]:
        name = label.rpartition("/")[0]
        clients = torch.cat([part[f"{name}/clients"] for part in parts])
        every = torch.cat([part[label] for part in parts])
        found[label] = every[clients.argsort().to(every.device)]
    return found
