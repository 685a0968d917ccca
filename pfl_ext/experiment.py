"""An experiment as data: what a configuration file or a command line says, checked, and the federation it makes."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import nn
from .algorithms import METHODS
from .data import PARTITIONERS, SOURCES, Dataset, Partition, load, load_test
from .federation import Federation, Method, Settings, stream

__all__ = [
    "DATA_OPTIONS",
    "Experiment",
    "Option",
    "default_clients",
    "method_options",
    "nearest",
    "network_options",
    "partition_options",
    "settings_options",
]

_SECTIONS = ("data", "partition", "network", "federation", "method")
_REQUIRED = object()


@dataclass(frozen=True)
class Option:
    """One thing that can be set: its name, type, default, explanation."""

    name: str
    type: Any
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None

    def parse(self, value: Any) -> Any:
        """``value``, from a command line (text) or from TOML, as this option's type.

        Raises:
            ValueError: it cannot be; the message says what is accepted.
        """
        try:
            parsed = _convert(value, self.type)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise ValueError(f"{self.name} is {value!r}; accepted is {_describe(self.type)}") from None
        if self.choices and parsed not in self.choices:
            close = nearest(str(parsed), map(str, self.choices))
            raise ValueError(f"{self.name} is {parsed!r}{close}; accepted is {', '.join(map(str, self.choices))}")
        return parsed


def _convert(value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if value is None or value in ("", "none"):
            return None
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(_convert(part.strip() if isinstance(part, str) else part, inner) for part in parts)
    if typing.get_origin(kind) is dict:
        pairs = [part.partition("=")[::2] for part in value.split(",")] if isinstance(value, str) else value.items()
        made = {name.strip(): str(text).strip() for name, text in pairs if name.strip() and str(text).strip()}
        if len(made) < len(pairs):
            raise ValueError
        return made
    if typing.get_origin(kind) is typing.Literal:
        return str(value)
    if kind is bool:
        if isinstance(value, str):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
        if not isinstance(value, bool):
            raise TypeError
        return value
    if kind is int and (isinstance(value, bool) or (isinstance(value, float) and value != int(value))):
        raise TypeError
    if kind in (int, float) and isinstance(value, bool):
        raise TypeError
    return kind(value)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _describe(next(part for part in typing.get_args(kind) if part is not type(None)))
    if typing.get_origin(kind) is tuple:
        inner = _describe(typing.get_args(kind)[0]).removeprefix("a ").removeprefix("an ")
        return f"a list of {inner}s, such as 1,5,9"
    if typing.get_origin(kind) is dict:
        return "NAME=SOURCE,NAME=SOURCE, in a file a table, each name once"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return names.get(kind, str(kind))


def nearest(name: str, known: Iterable[str]) -> str:
    """The names closest to a wrong one, as " (did you mean ...?)", or nothing."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _of_dataclass(cls: type) -> dict[str, Option]:
    kinds = typing.get_type_hints(cls)
    return {
        f.name: Option(f.name, kinds[f.name], f.default, f.metadata["help"], f.metadata["choices"])
        for f in dataclasses.fields(cls)
    }


def method_options(name: str) -> dict[str, Option]:
    """The options of a method."""
    return _of_dataclass(_known("method", name, METHODS))


def settings_options() -> dict[str, Option]:
    """The options every federation has."""
    return _of_dataclass(Settings)


def partition_options(name: str) -> dict[str, Option]:
    """The options of a partitioner, read off its signature."""
    return _of_signature(_known("partition", name, PARTITIONERS))


def default_clients(partition: str) -> int | None:
    """How many clients there are unless a number is given: 10, or None where the data say it."""
    clients = inspect.signature(_known("partition", partition, PARTITIONERS)).parameters["clients"]
    return 10 if clients.default is clients.empty else None


def network_options(name: str) -> dict[str, Option]:
    """The options of a network: its own, and those that all have; ``auto`` has the latter alone."""
    own = {} if name == "auto" else _of_signature(_known("network", name, nn.NETWORKS))
    return own | _of_signature(nn.build)


def _of_signature(function: Callable[..., Any]) -> dict[str, Option]:
    """An option for each keyword-only parameter, explained by its ``typing.Annotated``."""
    hints = typing.get_type_hints(function, include_extras=True)
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.name == "generator":
            continue
        hint, text = hints[parameter.name], ""
        if typing.get_origin(hint) is typing.Annotated:
            hint, text = typing.get_args(hint)[0], str(typing.get_args(hint)[1])
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
        default = _REQUIRED if parameter.default is parameter.empty else parameter.default
        found[parameter.name] = Option(parameter.name, hint, default, text, choices)
    return found


def _known(what: str, name: str, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}{nearest(name, table)}; known are {', '.join(sorted(table))}")
    return table[name]


def _checked(section: str, given: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"unknown option {name!r} of {section}{nearest(name, known)}; it has {', '.join(known)}")
        found[name] = known[name].parse(value)
    return found


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


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run. Options that are not named have their defaults."""

    method: str
    method_options: Mapping[str, Any] = field(default_factory=dict)
    data: str = "digits"
    data_options: Mapping[str, Any] = field(default_factory=dict)
    partition: str = "ds1"
    clients: int | None = None
    partition_options: Mapping[str, Any] = field(default_factory=dict)
    partition_file: Path | None = None
    network: str = "auto"
    network_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        """Set the number of clients where none is given."""
        if self.clients is None:
            object.__setattr__(self, "clients", default_clients(self.partition))

    @staticmethod
    def from_sections(sections: Mapping[str, Mapping[str, Any]]) -> Experiment:
        """The experiment of a file with the tables ``data``, ``partition``, ``network``, ``federation`` and ``method``.

        Raises:
            ValueError: an unknown table, name or option (the nearest names are suggested), or a value out of range.
        """
        for section in sections:
            if section not in _SECTIONS:
                raise ValueError(
                    f"unknown table [{section}]{nearest(section, _SECTIONS)}; known are {', '.join(_SECTIONS)}"
                )
        data, partition, network, federation, method = (dict(sections.get(name, {})) for name in _SECTIONS)
        if "name" not in method:
            raise ValueError(f"no method is named; known are {', '.join(METHODS)}")
        default = Experiment("fedavg")
        name = str(method.pop("name"))
        cut = str(partition.pop("name", default.partition))
        clients = Option("clients", int | None, None, "").parse(partition.pop("clients", None))
        file = partition.pop("file", None)
        source = _checked("data", data, DATA_OPTIONS)
        net = str(network.pop("name", default.network))
        experiment = Experiment(
            method=name,
            method_options=_checked(f"the method {name}", method, method_options(name)),
            data=source.pop("name", default.data),
            data_options=source,
            partition=cut,
            clients=clients,
            partition_options=_checked(f"the partition {cut}", partition, partition_options(cut)),
            partition_file=None if file is None else Path(file),
            network=net,
            network_options=_checked(f"the network {net}", network, network_options(net)),
            settings=Settings(**_checked("federation", federation, settings_options())),
        )
        if experiment.clients is not None and experiment.clients < 1:
            raise ValueError(f"clients is {experiment.clients}; accepted is 1 or more")
        experiment.make_method()
        return experiment

    def sections(self) -> dict[str, dict[str, Any]]:
        """All options with their values, defaults included, in the form :meth:`from_sections` takes."""
        made: dict[str, Any] = {"clients": self.clients}
        for option in partition_options(self.partition).values():
            value = self.partition_options.get(option.name, option.default)
            if value is not _REQUIRED:
                made[option.name] = value
        if self.partition_file is not None:
            made["file"] = str(self.partition_file)
        return _without_none(
            {
                "data": {"name": self.data, **_values(DATA_OPTIONS, self.data_options)},
                "partition": {"name": self.partition, **made},
                "network": {
                    "name": self.network,
                    **_values(network_options(self.network), self.network_options),
                },
                "federation": dataclasses.asdict(self.settings),
                "method": {"name": self.method, **dataclasses.asdict(self.make_method())},
            }
        )

    def make_method(self) -> Method:
        """The method with its options."""
        made = METHODS[self.method](**self.method_options)
        assert isinstance(made, Method)
        return made

    def make_data(self) -> tuple[Dataset, Partition]:
        """The data set and its partition: that of the file, or drawn from the seed."""
        some, seed = self.data_options, self.settings.seed
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
                    "auxiliary is server, and the partition leaves it none: partition with server=0.1, say"
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
        return Federation(self.make_method(), self.make_network(dataset), dataset, partition, self.settings, **more)


def _values(known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value, given or default, as JSON and TOML have it."""
    values = {name: given.get(name, option.default) for name, option in known.items() if name != "name"}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _without_none(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """TOML has no null: what is None is left out."""
    return {name: {k: v for k, v in table.items() if v is not None} for name, table in sections.items()}
