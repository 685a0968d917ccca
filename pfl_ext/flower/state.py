"""What a client keeps between rounds: vectors in Flower's ``context.state``, which never leaves the node."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pfl_ext.federation import ClientStore

from .arrays import copied, record_of, records_in

__all__ = ["ContextStore", "NodeFiles", "load_kept", "save_kept"]


def save_kept(context: Context, tensors: Mapping[str, Tensor], name: str = "kept") -> None:
    """Keep tensors, such as the state dict of a personal model, until the next message to this client.

    Flower makes a client anew for every message; what is to last belongs into ``context.state``.
    """
    context.state[name] = record_of(tensors)


def load_kept(context: Context, name: str = "kept") -> dict[str, Tensor] | None:
    """What :func:`save_kept` kept; None before the first time."""
    kept = records_in(context.state, ArrayRecord).get(name)
    return None if kept is None else copied(kept)


class ContextStore(ClientStore):
    """The vectors that one client keeps, in its context.

    Args:
        context: the client's.
        run: which run they are of: a node's context may have those of another.
        initial: for each label the vector that all clients begin with.
        networks: the number of the client's network by its own number.
    """

    def __init__(self, context: Context, run: str, initial: Mapping[str, Tensor], networks: Mapping[int, int]) -> None:
        super().__init__(networks, initial)
        self._context, self._key = context, f"pfl_ext/{run}"
        self._kept = load_kept(context, self._key) or {}

    def read(self, client: int, name: str) -> Tensor:
        """A copy of the vector that the client keeps."""
        label = self.label(client, name)
        return self._kept.get(label, self.initial[label]).clone()

    def write(self, client: int, name: str, vector: Tensor) -> None:
        """Keep ``vector`` in the node's state under the client's name for it."""
        label = self.label(client, name)
        initial = self.initial[label]
        if vector.shape != initial.shape:
            raise ValueError(f"{label} of client {client} is {list(vector.shape)}; {list(initial.shape)} is kept")
        self._kept[label] = vector.detach().to(initial.dtype, copy=True)
        save_kept(self._context, self._kept, self._key)

    def written(self, client: int, name: str) -> bool:
        """Whether there is a vector of the client's own."""
        return self.label(client, name) in self._kept

    def content(self) -> dict[str, Tensor]:
        """All vectors that the node keeps, by label."""
        return dict(self._kept)

    def replace(self, kept: Mapping[str, Tensor]) -> None:
        """Let the node keep these vectors and no others, once their shapes were checked."""
        for name, vector in kept.items():
            if name not in self.initial or vector.shape != self.initial[name].shape:
                raise ValueError(f"{name} {list(vector.shape)} is not what a client of this run keeps")
        self._kept = {name: vector.clone() for name, vector in kept.items()}
        self._context.state[self._key] = record_of(self._kept) if self._kept else ArrayRecord()


class NodeFiles:
    """Copies of what a client keeps in a folder of its node, a file for each of the server's checkpoints.

    Flower forgets ``context.state`` with the run; a run that goes on where another stopped finds it here.
    """

    def __init__(self, folder: Path, run: str, client: int) -> None:
        self._folder, self._name = folder, f"client-{client}-{run}"
        self._about = {"run": run, "client": str(client)}

    def save(self, moment: int, kept: Mapping[str, Tensor]) -> None:
        """Write the copy of a checkpoint; of the older ones the newest two stay."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(moment)
        new = path.with_suffix(".new")
        save_file(dict(kept), new, metadata={**self._about, "moment": json.dumps(moment)})
        new.replace(path)
        for old in sorted(self.moments())[:-3]:
            self._path(old).unlink(missing_ok=True)

    def load(self, moment: int) -> dict[str, Tensor]:
        """The copy of a checkpoint.

        Raises:
            ValueError: there is none that is good.
        """
        path = self._path(moment)
        try:
            with safe_open(path, framework="pt") as file:
                about: dict[str, Any] = file.metadata() or {}
                if any(about.get(name) != value for name, value in self._about.items()):
                    raise ValueError(f"{path} is of another run or client")
                return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            have = ", ".join(map(str, sorted(self.moments()))) or "none"
            raise ValueError(f"{path} cannot be read ({error}); there are copies of: {have}") from None

    def moments(self) -> list[int]:
        """The checkpoints that there are copies of."""
        found = [re.fullmatch(re.escape(self._name) + r"-(\d{8})\.safetensors", p.name) for p in self._folder.glob("*")]
        return [int(match[1]) for match in found if match]

    def _path(self, moment: int) -> Path:
        return self._folder / f"{self._name}-{moment:08d}.safetensors"
