"""What a run is made of, at the server and at every node: given in code, or read from the app's configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from pfl_ext.data import Dataset, Partition
from pfl_ext.experiment import Experiment
from pfl_ext.federation import Method, Settings, WorkingModel
from pfl_ext.nn import Networks
from pfl_ext.sections import SECTIONS
from pfl_ext.tasks import Task, task_of

__all__ = ["Auxiliary", "Given", "Network", "Parts", "Whole", "network_digest"]

Network = Callable[[Dataset], nn.Module]
"""Makes the network with its initial weights for a dataset: the same ones wherever it is called."""
Auxiliary = Callable[[Dataset, Partition], Dataset | None]
"""Makes the unlabelled data of a run for its dataset; None: there are none."""
Whole = Callable[[], tuple[Dataset, Partition]]
"""Loads all clients' data, for a simulation."""


@dataclass(frozen=True)
class Parts:
    """Method, task, settings, network and data of a run."""

    method: Method
    task: Callable[[Dataset], Task]
    settings: Settings
    network: Network
    whole: Whole
    auxiliary: Auxiliary
    experiment: Experiment | None
    """None where all of it was given in code."""

    @property
    def run(self) -> str:
        """What tells runs apart whose models become others."""
        identity = [type(self.method).__name__, self.method.identity(), self.settings.identity()]
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Given:
    """What was given in code; the rest is the configuration's, ``[tool.flwr.app.config]`` in ``pyproject.toml``."""

    method: Method | None = None
    network: Network | None = None
    settings: Settings | None = None
    data: Whole | None = None
    task: Task | None = None
    """None: the one that the targets of the data are of."""
    auxiliary: Auxiliary | None = None

    def parts(self, config: Mapping[str, Any]) -> Parts:
        """The parts of a run with this configuration.

        Raises:
            ValueError: it is not one of a run.
        """
        if self.method and self.network and self.settings and self.data:
            auxiliary = self.auxiliary or (lambda dataset, partition: None)
            return Parts(self.method, self._task, self.settings, self.network, self.data, auxiliary, None)
        experiment = _experiment(config, named=self.method is None)
        return Parts(
            self.method or experiment.make_method(),
            experiment.make_task if self.task is None else self._task,
            self.settings or experiment.settings,
            self.network or experiment.make_network,
            self.data or experiment.make_data,
            self.auxiliary or experiment.make_auxiliary,
            experiment if self == Given() else None,
        )

    def _task(self, dataset: Dataset) -> Task:
        return self.task or task_of(dataset)


def _experiment(config: Mapping[str, Any], named: bool) -> Experiment:
    """The experiment of Flower's flat configuration: ``method.lr`` is ``lr`` of the table ``method``."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in config.items():
        section, _, option = key.partition(".")
        if section in SECTIONS and option:
            sections.setdefault(section, {})[option] = value
    if not named:
        sections["method"] = {"name": "fedavg"}
    return Experiment.from_sections(sections)


def network_digest(parts: Parts, dataset: Dataset) -> str:
    """What tells networks apart, their initial weights and what they are to learn included."""
    module, settings, task = parts.network(dataset), parts.settings, parts.task(dataset)
    networks = Networks.of(module)
    models = [WorkingModel(each, settings.local_buffers, settings.server_buffers) for each in networks.each]
    every = [[model.layout(), model.digest()] for model in models]
    content = json.dumps([every, networks.clients, type(task).__name__, task.identity()], default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
