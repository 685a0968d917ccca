"""What the clients keep between rounds: named vectors, one row per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .mapped import MappedTensor

__all__ = ["ClientStore", "label_of", "merged"]


def label_of(name: str, network: int) -> str:
    """What the vectors of a name are called that clients with this network keep."""
    return name if network == 0 else f"{name}@{network}"


def _network_of(label: str) -> int:
    """The network that a label of :func:`label_of` is for."""
    number = label.rpartition("@")[2]
    return int(number) if "@" in label and number.isdecimal() else 0


class ClientStore:
    """Named vectors for each client. A row that was never written reads as the common initial vector.

    A row costs no memory until it is written. Clients with different networks keep vectors of different lengths: each
    network has rows of its own.

    Args:
        clients: how many; or the number of each one's network by its own number.
        initial: for each name the vector all clients begin with; where there are several networks, for each label.
        folder: keep the rows in files there (made anew), so that more clients fit than memory holds and worker
            processes that are given the store see the same rows. None keeps them on the vectors' device.
    """

    def __init__(
        self, clients: int | Mapping[int, int], initial: Mapping[str, Tensor], folder: Path | None = None
    ) -> None:
        for name, vector in initial.items():
            if vector.dim() != 1:
                raise ValueError(f"{name} has the shape {list(vector.shape)}; what a client keeps is made of vectors")
            if folder is not None and vector.device.type != "cpu":
                raise ValueError(f"a memory-mapped store holds CPU tensors; {name} is on {vector.device}")
        self._networks = dict(clients) if isinstance(clients, Mapping) else dict.fromkeys(range(clients), 0)
        self.clients = len(self._networks)
        self.initial = {name: vector.detach().clone() for name, vector in initial.items()}
        members: dict[int, list[int]] = {}
        for k, network in sorted(self._networks.items()):
            members.setdefault(network, []).append(k)
        self._members = {label: members.get(_network_of(label), []) for label in initial}
        self._row = {k: row for own in members.values() for row, k in enumerate(own)}
        self._files: dict[str, tuple[MappedTensor, MappedTensor]] = {}
        self._rows: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}
        for name, vector in self.initial.items():
            count = len(self._members[name])
            shape = (count, vector.numel())
            if folder is None:
                self._rows[name] = torch.empty(shape, dtype=vector.dtype, device=vector.device)
                self._written[name] = torch.zeros(count, dtype=torch.bool)
            else:
                self._files[name] = (
                    MappedTensor.create(folder / f"{name}.rows", shape, vector.dtype),
                    MappedTensor.copy(torch.zeros(count, dtype=torch.bool), folder / f"{name}.written"),
                )
        self._open()

    def _open(self) -> None:
        for name, (_, written) in self._files.items():
            self._written[name] = written.open()

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to see the same rows."""
        if self.initial and not self._files:
            raise TypeError("only a store with a folder can be given to another process")
        return {name: value for name, value in vars(self).items() if name not in ("_rows", "_written")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the files of the folder again, in this process."""
        self.__dict__.update(state, _rows={}, _written={})
        self._open()

    @property
    def labels(self) -> list[str]:
        """The names of the vectors, those of each network."""
        return list(self.initial)

    def label(self, client: int, name: str) -> str:
        """What a vector of this client is called among those of all networks."""
        return label_of(name, self._networks[client])

    def read(self, client: int, name: str) -> Tensor:
        """A copy of the client's vector."""
        label, row = self.label(client, name), self._row[client]
        initial = self.initial[label]
        if not self._written[label][row]:
            return initial.clone()
        if label in self._files:
            return self._files[label][0].read(row * initial.numel(), initial.numel())
        return self._rows[label][row].clone()

    def write(self, client: int, name: str, vector: Tensor) -> None:
        """Keep ``vector`` for the client."""
        self._write(client, self.label(client, name), vector)

    def _write(self, client: int, label: str, vector: Tensor) -> None:
        row, initial = self._row[client], self.initial[label]
        if vector.shape != initial.shape:
            raise ValueError(f"{label} of client {client} is {list(vector.shape)}; {list(initial.shape)} is kept")
        if label in self._files:
            self._files[label][0].write(row * vector.numel(), vector.to(initial.dtype))
        else:
            self._rows[label][row].copy_(vector)
        self._written[label][row] = True

    def written(self, client: int, name: str) -> bool:
        """Whether the client has a vector of its own."""
        return bool(self._written[self.label(client, name)][self._row[client]])

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save: for each label the written rows and their clients."""
        found = {}
        for name in self.initial:
            rows = self._files[name][0].open() if name in self._files else self._rows[name]
            which = self._written[name].nonzero().flatten()
            found[f"{name}/clients"] = torch.tensor(self._members[name], dtype=torch.int64)[which]
            # Without a copy where all rows are there: a mapped store may be larger than memory.
            found[f"{name}/rows"] = rows if len(which) == len(rows) else rows[which]
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the rows to what :meth:`tensors` gave."""
        for name, vector in self.initial.items():
            which, saved = tensors[f"{name}/clients"], tensors[f"{name}/rows"]
            members = self._members[name]
            if saved.shape[1:] != vector.shape or not set(which.tolist()) <= set(members):
                raise ValueError(
                    f"saved rows of {name} are {list(saved.shape)}, the store has {[len(members), *vector.shape]}"
                )
        for name in self.initial:
            self._written[name].zero_()
            for client, row in zip(tensors[f"{name}/clients"].tolist(), tensors[f"{name}/rows"], strict=True):
                self._write(client, name, row)


def merged(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What the stores of several places hold, each of other clients, as one store of all clients has it."""
    found: dict[str, Tensor] = {}
    for label in parts[0]:
        name = label.rpartition("/")[0]
        clients = torch.cat([part[f"{name}/clients"] for part in parts])
        every = torch.cat([part[label] for part in parts])
        found[label] = every[clients.argsort().to(every.device)]
    return found
