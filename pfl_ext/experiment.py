"""An experiment as data: what a configuration file or a command line says, checked, and the federation it makes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import nn
from .algorithms import METHODS
from .data import PARTITIONERS, SOURCES, Dataset, Partition, load, load_test
from .engines import EngineOptions, make_engine
from .federation import Federation, Method, Settings, stream
from .options import REQUIRED, Option, OptionError, checked, made, nearest, of_dataclass, of_signature
from .tasks import TASKS, Task, task_of

__all__ = [
    "DATA_OPTIONS",
    "NETWORK_OPTIONS",
    "PARTITION_OPTIONS",
    "SECTIONS",
    "TASK_OPTIONS",
    "Experiment",
    "check_tables",
    "default_clients",
    "method_options",
    "network_options",
    "owners",
    "partition_options",
    "refuse_unknown",
    "settings_options",
    "task_options",
]

SECTIONS = ("data", "partition", "task", "network", "federation", "method")
"""The tables of a configuration file that decide a run."""


def method_options(name: str) -> dict[str, Option]:
    """The options of a method."""
    return of_dataclass(_known("method", name, METHODS))


def settings_options() -> dict[str, Option]:
    """The options every federation has and those of its engine, each with the group it belongs to."""
    return of_dataclass(Settings) | of_dataclass(EngineOptions)


def partition_options(name: str) -> dict[str, Option]:
    """The options of a partitioner, read off its signature."""
    return of_signature(_known("partition", name, PARTITIONERS))


def default_clients(partition: str) -> int | None:
    """How many clients there are unless a number is given: 10, or None where the data say it."""
    clients = inspect.signature(_known("partition", partition, PARTITIONERS)).parameters["clients"]
    return 10 if clients.default is clients.empty else None


def task_options(name: str) -> dict[str, Option]:
    """The options of a task; ``auto`` has none."""
    return {} if name == "auto" else of_dataclass(_known("task", name, TASKS))


def network_options(name: str) -> dict[str, Option]:
    """The options of a network: its own, and those that all have; ``auto`` has the latter alone."""
    own = {} if name == "auto" else of_signature(_known("network", name, nn.NETWORKS))
    return own | of_signature(nn.build)


_CHOSEN: dict[str, tuple[Mapping[str, Any], Callable[[str], dict[str, Option]]]] = {
    "method": (METHODS, method_options),
    "partition": (PARTITIONERS, partition_options),
    "task": (TASKS, task_options),
    "network": (nn.NETWORKS, network_options),
}


def owners(section: str, option: str) -> list[str]:
    """The methods, partitions or networks, as the table is, that have an option."""
    if section not in _CHOSEN:
        return []
    names, options_of = _CHOSEN[section]
    return [name for name in names if option in options_of(name)]


def _known(what: str, name: str, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}{nearest(name, table)}; known are {', '.join(sorted(table))}")
    return table[name]


def refuse_unknown(section: str, chosen: str, given: Mapping[str, Any], known: Mapping[str, Option]) -> None:
    """Refuse options that a table, for the method, partition or network ``chosen`` there, does not have.

    Raises:
        OptionError: the message says who has the option, or suggests the nearest names.
    """
    for name, value in given.items():
        if name in known:
            continue
        of = f"the {section} {chosen}" if chosen else section
        others = owners(section, name)
        if others:
            problem = f"is an option of the {section} {', '.join(others)}; this run has {chosen}"
            message = f"unknown option {name!r} of {of}: it {problem}"
        else:
            problem = f"is no option of {of}{nearest(name, known)}"
            message = f"unknown option {name!r} of {of}{nearest(name, known)}; it has {', '.join(known)}"
        raise OptionError(section, name, value, problem, message)


def check_tables(sections: Mapping[str, Any]) -> None:
    """Refuse tables that an experiment does not have, and what is no table.

    Raises:
        ValueError: the message names it.
    """
    for name, table in sections.items():
        if name not in SECTIONS:
            raise ValueError(f"unknown table [{name}]{nearest(name, SECTIONS)}; known are {', '.join(SECTIONS)}")
        if not isinstance(table, Mapping):
            raise ValueError(f"{name} is {table!r}; accepted is a table, [{name}]")


DATA_OPTIONS = {
    "name": Option("data", str, "digits", ", ".join(SOURCES)),
    "root": Option(
        "data_root", Path | None, None, "the folder with the files; relative PATHs are looked for there too"
    ),
    "download": Option("download", bool, False, "let torchvision download what is not there"),
    "train_samples": Option("train_samples", int, 0, "use so many training samples, drawn from the seed; 0: all"),
    "test_samples": Option("test_samples", int, 0, "use so many of the official test samples; 0: all"),
    "mean": Option("data_mean", tuple[float, ...] | None, None, "mean of each channel in place of the data's own"),
    "std": Option("data_std", tuple[float, ...] | None, None, "standard deviation of each channel likewise"),
    "auxiliary": Option(
        "auxiliary", str | None, None, "unlabelled data of the server: a name as for data, or server: its held-out part"
    ),
    "auxiliary_samples": Option("auxiliary_samples", int, 0, "use so many of them, drawn from the seed; 0: all"),
    "extra_tests": Option(
        "extra_tests",
        dict[str, str] | None,
        None,
        "NAME=SOURCE,...: test sets beside the global one, for the models of the last round: cifar10.1, cifar10-c "
        "(@5: of severity 5), or the test part of a name as for data",
    ),
    "extra_test_samples": Option(
        "extra_test_samples", int, 0, "use so many of each (of each corruption), drawn from the seed; 0: all"
    ),
}
"""The options of the table ``data``, each with its name on the command line."""

PARTITION_OPTIONS = {
    "name": Option("partition", str, "ds1", f"how clients get their data: {', '.join(PARTITIONERS)}"),
    "clients": Option("clients", int | None, None, "number of clients (default: 10; by_domain: one for each)"),
    "seed": Option(
        "partition_seed",
        int | None,
        None,
        "a seed of its own for who has which samples: a client is then the same for every seed (default: the seed)",
    ),
    "file": Option("partition_file", Path | None, None, "a saved partition in place of a drawn one"),
}
"""The options of the table ``partition`` beside those of the partitioner."""

TASK_OPTIONS = {"name": Option("task", str, "auto", f"what is learned: auto (by the targets), {', '.join(TASKS)}")}
"""The same of the table ``task``."""

NETWORK_OPTIONS = {"name": Option("network", str, "auto", f"auto, {', '.join(nn.NETWORKS)}")}
"""The same of the table ``network``."""

_METHOD = {"name": Option("method", str, REQUIRED, "")}


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run. Options that are not named have their defaults."""

    method: str
    method_options: Mapping[str, Any] = field(default_factory=dict)
    data: str = DATA_OPTIONS["name"].default
    data_options: Mapping[str, Any] = field(default_factory=dict)
    partition: str = PARTITION_OPTIONS["name"].default
    clients: int | None = None
    partition_options: Mapping[str, Any] = field(default_factory=dict)
    partition_seed: int | None = None
    partition_file: Path | None = None
    task: str = TASK_OPTIONS["name"].default
    task_options: Mapping[str, Any] = field(default_factory=dict)
    network: str = NETWORK_OPTIONS["name"].default
    network_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        """Set the number of clients where none is given."""
        if self.clients is None:
            object.__setattr__(self, "clients", default_clients(self.partition))

    @staticmethod
    def from_sections(sections: Mapping[str, Mapping[str, Any]]) -> Experiment:
        """The experiment of a file with the tables ``data``, ``partition``, ``task``, ``network``, ``federation`` and
        ``method``.

        Raises:
            ValueError: an unknown table, name or option (the nearest names are suggested), or a value out of range.
        """
        check_tables(sections)
        data, partition, task, network, federation, method = (dict(sections.get(name, {})) for name in SECTIONS)
        if "name" not in method:
            raise ValueError(f"no method is named; known are {', '.join(METHODS)}")
        name, own = _chosen("method", method, _METHOD)
        cut, cut_options = _chosen("partition", partition, PARTITION_OPTIONS)
        learned, task_own = _chosen("task", task, TASK_OPTIONS)
        net, net_options = _chosen("network", network, NETWORK_OPTIONS)
        refuse_unknown("data", "", data, DATA_OPTIONS)
        refuse_unknown("federation", "", federation, settings_options())
        source = checked("data", data, DATA_OPTIONS)
        if cut["clients"] is not None and cut["clients"] < 1:
            raise OptionError(
                "partition", "clients", partition["clients"], f"is {cut['clients']}; accepted is 1 or more"
            )
        made("method", METHODS[name["name"]], method, own)  # refuses what is out of range
        if learned["name"] != "auto":
            made("task", TASKS[learned["name"]], task, task_own)
        run, of_engine = checked("federation", federation, settings_options()), of_dataclass(EngineOptions)
        engine = {key: run.pop(key) for key in of_engine if key in run}
        return Experiment(
            method=name["name"],
            method_options=own,
            data=source.pop("name", DATA_OPTIONS["name"].default),
            data_options=source,
            partition=cut["name"],
            clients=cut["clients"],
            partition_options=cut_options,
            partition_seed=cut["seed"],
            partition_file=cut["file"],
            task=learned["name"],
            task_options=task_own,
            network=net["name"],
            network_options=net_options,
            settings=made("federation", Settings, federation, run),
            engine=made("federation", EngineOptions, federation, engine),
        )

    def sections(self) -> dict[str, dict[str, Any]]:
        """All options with their values, defaults included, in the form :meth:`from_sections` takes."""
        cut: dict[str, Any] = {"clients": self.clients}
        for option in partition_options(self.partition).values():
            value = self.partition_options.get(option.name, option.default)
            if value is not REQUIRED:
                cut[option.name] = value
        cut["seed"] = self.partition_seed
        if self.partition_file is not None:
            cut["file"] = str(self.partition_file)
        return _without_none(
            {
                "data": {"name": self.data, **_values(DATA_OPTIONS, self.data_options)},
                "partition": {"name": self.partition, **cut},
                "task": {"name": self.task, **_values(task_options(self.task), self.task_options)},
                "network": {
                    "name": self.network,
                    **_values(network_options(self.network), self.network_options),
                },
                "federation": dataclasses.asdict(self.settings) | dataclasses.asdict(self.engine),
                "method": {"name": self.method, **dataclasses.asdict(self.make_method())},
            }
        )

    def make_method(self) -> Method:
        """The method with its options."""
        method = METHODS[self.method](**self.method_options)
        assert isinstance(method, Method)
        return method

    @property
    def data_seed(self) -> int:
        """What decides which samples there are and who has them."""
        return self.settings.seed if self.partition_seed is None else self.partition_seed

    def make_data(self) -> tuple[Dataset, Partition]:
        """The data set and its partition: that of the file, or drawn from the seed."""
        some, seed = self.data_options, self.data_seed
        dataset = load(self.data, some.get("root"), some.get("download", False))
        for part, test in (("train_samples", False), ("test_samples", True)):
            if some.get(part, 0):
                dataset = dataset.sample(some[part], test=test, generator=stream(seed, f"data/{part}"))
        dataset = dataset.normalised(some.get("mean"), some.get("std"))
        if self.partition_file is not None:
            return dataset, Partition.load(self.partition_file)
        generator = stream(seed, "partition")
        partition = PARTITIONERS[self.partition](dataset, self.clients, generator=generator, **self.partition_options)
        return dataset, partition

    def make_auxiliary(self, dataset: Dataset, partition: Partition) -> Dataset | None:
        """The unlabelled data of the server, as images of the data set's shape, normalised as these; None for none."""
        some = self.data_options
        if some.get("auxiliary") is None:
            return None
        if some["auxiliary"] == "server":
            if not len(partition.server):
                raise ValueError(
                    "auxiliary is server, and the partition leaves it none: use a partition with server=0.1, say"
                )
            found = dataset.subset(partition.server)
        else:
            found = load(some["auxiliary"], some.get("root"), some.get("download", False))
            found = found.subset((~found.is_test).nonzero().flatten())
        if some.get("auxiliary_samples", 0):
            generator = stream(self.settings.seed, "data/auxiliary_samples")
            found = found.sample(some["auxiliary_samples"], generator=generator)
        return found.unlabelled(like=dataset)

    def make_extra_tests(self, dataset: Dataset) -> dict[str, tuple[Dataset, ...]]:
        """The extra test sets by their names, in parts, as images of the data set's shape, normalised as these."""
        some, found = self.data_options, dict[str, tuple[Dataset, ...]]()
        for name, source in (some.get("extra_tests") or {}).items():
            parts = load_test(source, some.get("root"), some.get("download", False))
            if some.get("extra_test_samples", 0):
                # The stream begins anew for each part: of every corruption the same images.
                seed, count = self.settings.seed, some["extra_test_samples"]
                parts = tuple(
                    part.sample(count, test=True, generator=stream(seed, "data/extra_test_samples")) for part in parts
                )
            found[name] = tuple(part.in_shape_of(dataset) for part in parts)
        return found

    def make_task(self, dataset: Dataset) -> Task:
        """The task; ``auto`` is what the targets are for."""
        return task_of(dataset) if self.task == "auto" else TASKS[self.task](**self.task_options)

    def make_network(self, dataset: Dataset) -> Any:
        """The network with the initial weights of the seed; ``auto`` is lenet for colour images, else mlp."""
        shape = tuple(dataset.input_shape)
        name = self.network
        if name == "auto":
            name = "lenet" if len(shape) == 3 and shape[0] == 3 and min(shape[1:]) >= 16 else "mlp"
        generator = stream(self.settings.seed, "network")
        return nn.build(name, shape, len(dataset.classes), generator, **self.network_options)

    def make(self, dataset: Dataset, partition: Partition, **more: Any) -> Federation:
        """The federation, ready to run."""
        more.setdefault("auxiliary", self.make_auxiliary(dataset, partition))
        more.setdefault("extra_tests", self.make_extra_tests(dataset))
        more.setdefault("task", self.make_task(dataset))
        more.setdefault("engine", make_engine(self.engine))
        return Federation(self.make_method(), self.make_network(dataset), dataset, partition, self.settings, **more)


def _chosen(
    section: str, table: Mapping[str, Any], common: Mapping[str, Option]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a table that chooses something by its ``name``: of ``common``, defaults included; of its own."""
    defaults = {name: option.default for name, option in common.items()}
    found = defaults | checked(section, {name: table[name] for name in table if name in common}, common)
    own = {name: value for name, value in table.items() if name not in common}
    known = _CHOSEN[section][1](found["name"])
    refuse_unknown(section, found["name"], own, known | dict(common))
    return found, checked(section, own, known)


def _values(known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value, given or default, as JSON and TOML have it."""
    values = {name: given.get(name, option.default) for name, option in known.items() if name != "name"}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _without_none(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """TOML has no null: what is None is left out."""
    return {name: {k: v for k, v in table.items() if v is not None} for name, table in sections.items()}
