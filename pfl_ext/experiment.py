"""An experiment as data: what a configuration file or a command line says, checked, and the federation it makes."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import nn
from .algorithms import METHODS
from .data import PARTITIONERS, Dataset, Partition, load
from .federation import Federation, Method, Settings, stream

__all__ = ["Experiment", "Option", "method_options", "nearest", "partition_options", "settings_options"]

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
        except (TypeError, ValueError, KeyError):
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
    if typing.get_origin(kind) is tuple:
        return f"a list of {_describe(typing.get_args(kind)[0])}s, such as 1,5,9"
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
    function = _known("partition", name, PARTITIONERS)
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


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run. Options that are not named have their defaults."""

    method: str
    method_options: Mapping[str, Any] = field(default_factory=dict)
    data: str = "digits"
    data_root: Path | None = None
    download: bool = False
    partition: str = "ds1"
    clients: int = 10
    partition_options: Mapping[str, Any] = field(default_factory=dict)
    partition_file: Path | None = None
    network: str = "auto"
    settings: Settings = field(default_factory=Settings)

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
        clients = Option("clients", int, default.clients, "").parse(partition.pop("clients", default.clients))
        file = partition.pop("file", None)
        about_data = {
            option.name: option
            for option in (
                Option("name", str, default.data, ""),
                Option("root", Path | None, None, ""),
                Option("download", bool, False, ""),
            )
        }
        source = _checked("data", data, about_data)
        net = _checked("network", network, {"name": Option("name", str, default.network, "")})
        if net.get("name", "auto") != "auto":
            _known("network", net["name"], nn.NETWORKS)
        experiment = Experiment(
            name,
            _checked(f"the method {name}", method, method_options(name)),
            source.get("name", default.data),
            source.get("root"),
            source.get("download", False),
            cut,
            clients,
            _checked(f"the partition {cut}", partition, partition_options(cut)),
            None if file is None else Path(file),
            net.get("name", default.network),
            Settings(**_checked("federation", federation, settings_options())),
        )
        if experiment.clients < 1:
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
                "data": {
                    "name": self.data,
                    "root": None if self.data_root is None else str(self.data_root),
                    "download": self.download,
                },
                "partition": {"name": self.partition, **made},
                "network": {"name": self.network},
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
        dataset = load(self.data, self.data_root, self.download)
        if self.partition_file is not None:
            return dataset, Partition.load(self.partition_file)
        generator = stream(self.settings.seed, "partition")
        partition = PARTITIONERS[self.partition](dataset, self.clients, generator=generator, **self.partition_options)
        return dataset, partition

    def make_network(self, dataset: Dataset) -> Any:
        """The network with the initial weights of the seed; ``auto`` is lenet for colour images, else mlp."""
        shape = tuple(dataset.input_shape)
        name = self.network
        if name == "auto":
            name = "lenet" if len(shape) == 3 and shape[0] == 3 and min(shape[1:]) >= 16 else "mlp"
        return nn.build(name, shape, len(dataset.classes), stream(self.settings.seed, "network"))

    def make(self, dataset: Dataset, partition: Partition, **more: Any) -> Federation:
        """The federation, ready to run."""
        return Federation(self.make_method(), self.make_network(dataset), dataset, partition, self.settings, **more)


def _without_none(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """TOML has no null: what is None is left out."""
    return {name: {k: v for k, v in table.items() if v is not None} for name, table in sections.items()}
