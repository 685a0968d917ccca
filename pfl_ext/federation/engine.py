"""Where clients' turns run: what an engine is, and the plainest one, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pfl_ext.data.placement import placed

from .mapped import LARGE, MappedTensor, scratch_folder
from .messages import Reply, Request, Vector
from .plan import Plan
from .runtime import ClientRuntime, threads
from .turns import Turns
from .uploads import Here, VectorAccess

__all__ = ["Engine", "InProcess"]


class Engine(VectorAccess, Protocol):
    """Runs clients' requests and owns what clients keep. ``docs/extending.md`` shows how to write one.

    What comes out of a run does not depend on the engine, to the bit.
    """

    @property
    def turns(self) -> Turns:
        """How far it is within a round, as far as it counts (`Turns.begin` and `Turns.end` in :meth:`run`)."""

    def identity(self) -> dict[str, Any]:
        """What of it has an influence on what models become, if anything has: a part of the run's identity."""

    def start(self, plan: Plan) -> None:
        """Make clients' runtimes, each client with its initial vectors. Called once, before all but ``identity``."""

    def publish(self, server: Mapping[str, Tensor]) -> None:
        """Make the server's vectors visible to the requests that follow."""

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        """The replies, in the order of the requests.

        ``costs`` says how long each takes, in any unit, so that none of the longest is left alone at the end.
        """

    def state(self) -> dict[str, Tensor]:
        """What clients keep, to save it: as :meth:`ClientStore.tensors` gives it."""

    def save(self, stem: Path) -> list[Path]:
        """Write what clients keep into files, each where clients are (:func:`.checkpoint.write_shard`); which they are.

        None, as of most engines: whoever saves asks :meth:`state`.
        """

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set it to what :meth:`state` gave, of this engine or of any other."""

    def close(self) -> None:
        """End whatever was started. It may be called twice, and before :meth:`start`."""


class InProcess(Here):
    """All requests in this process, one after the other."""

    def start(self, plan: Plan) -> None:
        """One runtime for all clients."""
        mapped = plan.settings.store == "mapped"
        self._threads = plan.settings.threads
        self._device = plan.dataset.device
        folder = store_folder(self, plan) if mapped else None
        self.store = plan.store(folder)
        # With all clients selected uploads are as large as what is kept: in files too.
        self._uploads: Path | None = scratch_folder(self, 1 << 62) if mapped else None
        self.runtime = ClientRuntime(plan, self.store, self._deliver)

    def _deliver(self, request: Request, kind: str, vectors: Mapping[str, Tensor]) -> Mapping[str, Vector]:
        return vectors if self._uploads is None else in_files(vectors, self._uploads, request, kind)

    def fetch(self, vector: Vector, hold: bool = True) -> Tensor:
        """The vector, on the run's device: uploads may wait in the host's memory."""
        return placed(super().fetch(vector), self._device)

    def publish(self, server: Mapping[str, Tensor]) -> None:
        """Let the runtime see them."""
        self.runtime.server = server

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        """The replies, one after the other."""
        random_state = torch.get_rng_state()
        self.turns.begin(requests)
        try:
            for request in requests:
                # Not across the yield: whoever takes the replies computes with all threads.
                with threads(self._threads):
                    reply = self.runtime(request)
                self.turns.end()
                yield reply
        finally:
            torch.set_rng_state(random_state)

    def state(self) -> dict[str, Tensor]:
        """All vectors that the clients keep, for a checkpoint."""
        return self.store.tensors()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the clients' vectors to those of a checkpoint."""
        self.store.restore(tensors)

    def close(self) -> None:
        """Do nothing: no process has to end."""


def store_folder(owner: object, plan: Plan) -> Path:
    """Where a mapped store has its files: the run's folder, or one that lives as long as the engine."""
    return scratch_folder(owner, 1 << 62) if plan.folder is None else plan.folder / "clients.store"


def in_files(
    vectors: Mapping[str, Tensor], folder: Path, request: Request, kind: str, large: int = LARGE
) -> Mapping[str, Vector]:
    """Vectors with those of at least ``large`` bytes in files of their own."""
    return {
        name: MappedTensor.copy(vector, folder / f"{kind}-{name.replace('/', '-')}-{request.client}-{request.round}")
        if vector.nbytes >= large
        else vector
        for name, vector in vectors.items()
    }
