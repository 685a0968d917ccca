"""An experiment as data: what a configuration file or a command line says, checked, and the federation it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Generator, Tensor
from torch.nn import Module

from . import nn
from .algorithms import METHODS
from .data import PARTITIONERS, Dataset, Partition, load, load_test
from .engines import EngineOptions, make_engine
from .federation import Federation, Method, Settings, stream
from .named import OWN_DATA, PYTHON, in_file, known, networks_of
from .options import REQUIRED, Option, OptionError, checked, made, of_dataclass
from .reports import CONFIG, read_config
from .sections import (
    DATA_OPTIONS,
    NETWORK_OPTIONS,
    PARTITION_OPTIONS,
    SECTIONS,
    TASK_OPTIONS,
    check_tables,
    chosen,
    default_clients,
    network_options,
    partition_options,
    refuse_unknown,
    settings_options,
    task_options,
)
from .tasks import Task, task_of

__all__ = ["Experiment", "of_folder", "restored", "saved_weights"]


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run. Options that are not named have their defaults.

    ``module`` and ``dataset`` are objects that a Python program gives in place of what the names stand for.
    """

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
    network_clients: tuple[int, ...] = ()
    network_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    engine: EngineOptions = field(default_factory=EngineOptions)
    module: Module | None = field(default=None, compare=False, repr=False)
    dataset: Dataset | None = field(default=None, compare=False, repr=False)

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
        name, own = chosen("method", method)
        cut, cut_options = chosen("partition", partition)
        learned, task_own = chosen("task", task)
        net, net_options = chosen("network", network)
        refuse_unknown("data", "", data, DATA_OPTIONS)
        refuse_unknown("federation", "", federation, settings_options())
        source = checked("data", data, DATA_OPTIONS)
        if cut["clients"] is not None and cut["clients"] < 1:
            raise OptionError(
                "partition", "clients", partition["clients"], f"is {cut['clients']}; accepted is 1 or more"
            )
        _check_method(name["name"], method, own)
        if learned["name"] != "auto":
            made("task", known("task", learned["name"]), task, task_own)
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
            network_clients=net["clients"],
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
                    "clients": list(self.network_clients) or None,
                    **_values(network_options(self.network), self.network_options),
                },
                "federation": dataclasses.asdict(self.settings) | dataclasses.asdict(self.engine),
                "method": {"name": self.method, **self._method_values()},
            }
        )

    def make_method(self) -> Method:
        """The method with its options."""
        options = dict(self.method_options)
        if in_file(str(options.get("optimizer"))) or str(options.get("optimizer")).startswith(PYTHON):
            options["optimizer"] = known("optimizer", options["optimizer"])  # itself: workers know no other names
        method = known("method", self.method)(**options)
        assert isinstance(method, Method)
        return method

    def _method_values(self) -> dict[str, Any]:
        """The method's options, given or default; what a name stands for by its name."""
        values = {f.name: getattr(self.make_method(), f.name) for f in dataclasses.fields(self.make_method())}
        return values | {name: value for name, value in self.method_options.items() if callable(values[name])}

    def _load(self, name: str) -> Dataset:
        """The data set of a name, of the package or of a user's file."""
        root = self.data_options.get("root")
        if name in OWN_DATA:
            return OWN_DATA[name](root)
        if name.startswith(PYTHON):
            known("data", name)  # tells what that is
        return load(name, root, self.data_options.get("download", False))

    @property
    def data_seed(self) -> int:
        """What decides which samples there are and who has them."""
        return self.settings.seed if self.partition_seed is None else self.partition_seed

    def make_data(self) -> tuple[Dataset, Partition]:
        """The data set and its partition: that of the file, or drawn from the seed."""
        some, seed = self.data_options, self.data_seed
        dataset = self._load(self.data) if self.dataset is None else self.dataset
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
            found = self._load(some["auxiliary"])
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
        return task_of(dataset) if self.task == "auto" else known("task", self.task)(**self.task_options)

    def make_network(self, dataset: Dataset) -> Module:
        """The network with the initial weights of the seed, or that of the Python program; or several."""
        if self.module is not None:
            return self.module
        names, generator = self._networks(dataset), stream(self.settings.seed, "network")
        if self.network_clients and len(names) == 1:
            raise ValueError(f"network_clients says who has which of several networks; the run has {names[0]} alone")
        made = [self._make_network(name, dataset, generator) for name in names]
        return made[0] if len(made) == 1 else nn.Networks(made, self.network_clients)

    def _make_network(self, name: str, dataset: Dataset, generator: Generator) -> Module:
        known("network", name)  # refuses what an object of another program is called
        options = {key: value for key, value in self.network_options.items() if key in network_options(name)}
        if _is_run(options.get("pretrained")):
            options["weights"] = saved_weights(Path(options["pretrained"]))
        return nn.build(name, dataset.input_shape, _outputs(dataset), generator, **options)

    def _networks(self, dataset: Dataset) -> list[str]:
        """The names of the networks, with ``auto`` replaced by the network for this dataset."""
        return [self._network(name, dataset) for name in networks_of(self.network)]

    def _network(self, name: str, dataset: Dataset) -> str:
        """A network's name; ``auto`` is lenet for colour images, char-transformer for tokens, else mlp."""
        if name != "auto":
            return name
        if isinstance(dataset.inputs, tuple | Mapping):
            raise ValueError(f"network is 'auto', and a sample of {dataset.name!r} is several tensors; name a network")
        shape, kind = tuple(dataset.input_shape), dataset.inputs.dtype
        if not kind.is_floating_point and kind.itemsize > 1 and len(shape) == 1:  # tokens; bytes are quantities
            return "char-transformer"
        return "lenet" if len(shape) == 3 and shape[0] == 3 and min(shape[1:]) >= 16 else "mlp"

    def resolved(self, dataset: Dataset) -> Experiment:
        """The same experiment with what ``auto`` stands for."""
        task = self.make_task(dataset).name if self.task == "auto" else self.task
        cut = {name: option.default for name, option in partition_options(self.partition).items() if name == "test"}
        cut |= self.partition_options
        if cut.get("test") == "auto":
            cut["test"] = "proportional" if bool(dataset.is_test.any()) else "split"
        return dataclasses.replace(self, task=task, network=",".join(self._networks(dataset)), partition_options=cut)

    def make(self, dataset: Dataset, partition: Partition, **more: Any) -> Federation:
        """The federation, ready to run."""
        more.setdefault("auxiliary", self.make_auxiliary(dataset, partition))
        more.setdefault("extra_tests", self.make_extra_tests(dataset))
        more.setdefault("task", self.make_task(dataset))
        more.setdefault("engine", make_engine(self.engine))
        return Federation(self.make_method(), self.make_network(dataset), dataset, partition, self.settings, **more)


def _check_method(name: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse options of a method that are out of range."""
    optimizer = own.get("optimizer", "sgd")
    if in_file(optimizer) or optimizer.startswith(PYTHON):
        known("optimizer", optimizer)
    made("method", known("method", name), given, own)


def _outputs(dataset: Dataset) -> int:
    """How many outputs a network has: one for each class, or for each number to predict."""
    numbers = dataset.targets.shape[1] if dataset.targets.dim() > 1 else 1
    return len(dataset.classes) or numbers


# ---- a run that is in a folder ---------------------------------------------------------------------------------------


def of_folder(folder: Path) -> Experiment:
    """The experiment of a run's ``config.toml``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not that of a run, or names what is not known.
    """
    content = read_config(folder)
    if not all(isinstance(content.get(section), dict) for section in SECTIONS):
        raise ValueError(f"{folder / CONFIG} is not that of a run: it does not have the tables {', '.join(SECTIONS)}")
    return Experiment.from_sections({section: content[section] for section in SECTIONS})


def restored(
    folder: Path, experiment: Experiment, checkpoint: Path | None = None, device: str | None = None
) -> Federation:
    """A run's federation in this process, as its newest checkpoint has it, or that one, on a device of its own
    or the run's. The folder stays as it is.

    Raises:
        FileNotFoundError: it has no checkpoint.
    """
    here = dataclasses.replace(
        experiment,
        settings=dataclasses.replace(experiment.settings, store="memory", device=device or experiment.settings.device),
        engine=EngineOptions(engine="process"),
        partition_file=folder / "partition.safetensors",
    )
    federation = here.make(*here.make_data(), extra_tests={})  # none of them is needed
    federation.read(folder, checkpoint)
    return federation


def _is_run(source: str | None) -> bool:
    """Whether weights are those of a run: its folder, or one of its checkpoints."""
    return source is not None and (Path(source).is_dir() or Path(source).parent.name == "checkpoints")


def saved_weights(place: Path) -> dict[str, Tensor]:
    """The tensors of the global model that a run has saved, by the network's own names.

    Args:
        place: the run's folder, or one of its checkpoints.
    """
    folder, checkpoint = (place, None) if place.is_dir() else (place.parent.parent, place)
    return dict(restored(folder, of_folder(folder), checkpoint).global_model().state_dict())


# ---- values ----------------------------------------------------------------------------------------------------------


def _values(known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value, given or default, as JSON and TOML have it."""
    values = {name: given.get(name, option.default) for name, option in known.items() if name != "name"}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _without_none(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """TOML has no null: what is None is left out."""
    return {name: {k: v for k, v in table.items() if v is not None} for name, table in sections.items()}
