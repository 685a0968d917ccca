"""Everything that clients' turns need, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from pfl_ext.data import Dataset, Partition
from pfl_ext.nn import Networks
from pfl_ext.tasks import Task

from .client import Rows
from .method import Method
from .model import WorkingModel
from .privacy import PRIVATE_STEPS
from .settings import Settings
from .store import ClientStore, label_of

__all__ = ["LOCAL_BUFFERS", "Plan"]

LOCAL_BUFFERS = "pfl_ext.local_buffers"
"""The name under which a client keeps the buffers that never leave it."""


@dataclass(frozen=True)
class Plan:
    """What an engine is given: plain data, from which it makes a :class:`~.runtime.ClientRuntime` where clients are."""

    method: Method
    task: Task
    module: nn.Module
    """The network with its initial weights, or all of them (:class:`~pfl_ext.nn.Networks`)."""
    dataset: Dataset
    rows: Mapping[int, Rows]
    """The samples of each client."""
    settings: Settings
    tests: Mapping[str, Sequence[tuple[Dataset, Tensor]]] = field(default_factory=dict)
    """Test sets that belong to no client, each in parts of samples of a dataset: ``"global_test"``, and extra ones."""
    folder: Path | None = None
    """Where clients' vectors are kept that are in files; None: where there is room."""
    public: Dataset | None = None
    """Unlabelled data that the clients of the method see too."""

    @classmethod
    def of(
        cls,
        method: Method,
        task: Task,
        module: nn.Module,
        dataset: Dataset,
        partition: Partition,
        settings: Settings,
        extra_tests: Mapping[str, Sequence[Dataset]],
        folder: Path | None,
        public: Dataset | None = None,
    ) -> Plan:
        """The plan of all clients of a partition."""
        cut = partition
        rows = {k: Rows(cut.train[k], cut.validation[k], cut.test[k]) for k in range(cut.clients)}
        tests = {"global_test": [(dataset, cut.global_test)]}
        for name, parts in extra_tests.items():
            tests[name] = [(part.to(dataset.device), torch.arange(len(part))) for part in parts]
        return cls(method, task, module, dataset, rows, settings, tests, folder, public if method.public else None)

    @property
    def networks(self) -> dict[int, int]:
        """The number of each client's network."""
        networks = Networks.of(self.module)
        return {k: networks.network(k) for k in self.rows}

    def working_models(self) -> list[WorkingModel]:
        """Each network as a working model; it is changed."""
        s, each = self.settings, Networks.of(self.module).each
        return [WorkingModel(module, s.local_buffers, s.server_buffers, n) for n, module in enumerate(each)]

    def kept(self) -> dict[str, Tensor]:
        """What is kept for each client: the method's vectors, and local buffers and private steps where there are.

        Of the second network and further ones by names of their own (:func:`.store.label_of`).
        """
        found: dict[str, Tensor] = {}
        for model in self.working_models():
            kept = self.method.keeps(model)
            if self.settings.privacy is not None:
                kept[PRIVATE_STEPS] = torch.zeros(2, dtype=torch.float64)
            if model.local.any():
                kept[LOCAL_BUFFERS] = model.state()[model.local]
            found |= {label_of(name, model.network): vector for name, vector in kept.items()}
        return found

    def store(self, folder: Path | None = None) -> ClientStore:
        """A store of these clients."""
        return ClientStore(self.networks, self.kept(), folder)
