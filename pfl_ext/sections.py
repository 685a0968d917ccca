"""The tables of a configuration file: which options each has, and what is said of one that it has not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import nn
from .algorithms import METHODS
from .data import PARTITIONERS, SOURCES
from .engines import EngineOptions
from .federation import Settings
from .named import PYTHON, known, networks_of
from .options import REQUIRED, Option, OptionError, checked, nearest, of_dataclass, of_signature
from .tasks import TASKS

__all__ = [
    "DATA_OPTIONS",
    "METHOD_OPTIONS",
    "NETWORK_OPTIONS",
    "PARTITION_OPTIONS",
    "SECTIONS",
    "TASK_OPTIONS",
    "check_tables",
    "chosen",
    "default_clients",
    "method_options",
    "network_options",
    "owners",
    "partition_options",
    "refuse_unknown",
    "settings_options",
    "spelled",
    "task_options",
]

SECTIONS = ("data", "partition", "task", "network", "federation", "method")
"""The tables of a configuration file that decide a run."""


def method_options(name: str) -> dict[str, Option]:
    """The options of a method."""
    return of_dataclass(known("method", name))


def settings_options() -> dict[str, Option]:
    """The options every federation has and those of its engine, each with the group it belongs to."""
    return of_dataclass(Settings) | of_dataclass(EngineOptions)


def partition_options(name: str) -> dict[str, Option]:
    """The options of a partitioner, read off its signature."""
    return of_signature(_partitioner(name))


def _partitioner(name: str) -> Callable[..., Any]:
    if name not in PARTITIONERS:
        raise ValueError(
            f"unknown partition {name!r}{nearest(name, PARTITIONERS)}; known are {', '.join(PARTITIONERS)}"
        )
    return PARTITIONERS[name]


def default_clients(partition: str) -> int | None:
    """How many clients there are unless a number is given: 10, or None where the data say it."""
    clients = inspect.signature(_partitioner(partition)).parameters["clients"]
    return 10 if clients.default is clients.empty else None


def task_options(name: str) -> dict[str, Option]:
    """The options of a task; ``auto`` has none."""
    return {} if name == "auto" else of_dataclass(known("task", name))


def network_options(name: str) -> dict[str, Option]:
    """The options of a network: its own, and those that all have; ``auto`` has the latter alone.

    Several, with commas between their names, have all of theirs: each takes those that it has. A module that a Python
    program gave is as it is, and has none.
    """
    if name.startswith(PYTHON):
        return {}
    own: dict[str, Option] = {}
    for one in networks_of(name):
        own |= {} if one == "auto" else of_signature(known("network", one))
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
    "name": Option("data", str, "digits", f"{', '.join(SOURCES)}, file.py:function"),
    "root": Option(
        "data_root", Path | None, None, "the folder with the files; relative PATHs are looked for there too"
    ),
    "download": Option("download", bool, False, "let torchvision download what is not there"),
    "train_samples": Option("train_samples", int, 0, "how many training samples to use, drawn from the seed; 0: all"),
    "test_samples": Option("test_samples", int, 0, "how many of the official test samples to use; 0: all"),
    "mean": Option("data_mean", tuple[float, ...] | None, None, "mean of each channel in place of the data's own"),
    "std": Option(
        "data_std", tuple[float, ...] | None, None, "standard deviation of each channel in place of the data's own"
    ),
    "auxiliary": Option(
        "auxiliary",
        str | None,
        None,
        "unlabelled data of the server: a name as for data, or 'server': a part of the data that is held out",
    ),
    "auxiliary_samples": Option(
        "auxiliary_samples", int, 0, "how many samples of the auxiliary data to use, drawn from the seed; 0: all"
    ),
    "extra_tests": Option(
        "extra_tests",
        dict[str, str] | None,
        None,
        "NAME=SOURCE,...: test sets beside the global one, for the models of the last round: cifar10.1, cifar10-c "
        "(@5: of severity 5), or the test part of a name as for data",
    ),
    "extra_test_samples": Option(
        "extra_test_samples",
        int,
        0,
        "how many samples of each extra test set (of each corruption) to use, drawn from the seed; 0: all",
    ),
}
"""The options of the table ``data``, each with its name on the command line."""

PARTITION_OPTIONS = {
    "name": Option("partition", str, "ds1", f"how clients get their data: {', '.join(PARTITIONERS)}"),
    "clients": Option("clients", int | None, None, "number of clients (default: 10; by_domain: one for each domain)"),
    "seed": Option(
        "partition_seed",
        int | None,
        None,
        "a separate seed for who has which samples: with it clients have the same data for every --seed (default: the "
        "seed)",
    ),
    "file": Option("partition_file", Path | None, None, "a saved partition in place of a drawn one"),
}
"""The options of the table ``partition`` beside those of the partitioner."""

TASK_OPTIONS = {
    "name": Option("task", str, "auto", f"what is learned: auto (by the targets), {', '.join(TASKS)}, file.py:Class")
}
"""The same of the table ``task``."""

NETWORK_OPTIONS = {
    "name": Option(
        "network",
        str,
        "auto",
        f"auto, {', '.join(nn.NETWORKS)}, torchvision:NAME, timm:NAME, file.py:Class; several, as lenet,mlp: clients "
        "take them in turn",
    ),
    "clients": Option(
        "network_clients",
        tuple[int, ...],
        (),
        "with several networks: which one each client has, counted from 0, as 0,1,1,0 (default: in turn)",
    ),
}
"""The same of the table ``network``."""

METHOD_OPTIONS = {"name": Option("method", str, REQUIRED, "")}
"""The same of the table ``method``."""

_TABLES = {"data": DATA_OPTIONS, "partition": PARTITION_OPTIONS, "task": TASK_OPTIONS, "network": NETWORK_OPTIONS}


def spelled(section: str, key: str) -> str:
    """What an option of a table is called where no table says whose it is: in Python, and after ``--``."""
    if key in _TABLES.get(section, {}):
        return _TABLES[section][key].name
    return f"{section}_{key}" if section in ("task", "network") else key


def chosen(section: str, table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a table that chooses something by its ``name``: those it always has, defaults included; its own.

    Raises:
        ValueError: an unknown name or option, or a value that is not accepted.
    """
    common = METHOD_OPTIONS if section == "method" else _TABLES[section]
    defaults = {name: option.default for name, option in common.items()}
    found = defaults | checked(section, {name: table[name] for name in table if name in common}, common)
    own = {name: value for name, value in table.items() if name not in common}
    options = _CHOSEN[section][1](found["name"])
    refuse_unknown(section, found["name"], own, options | dict(common))
    return found, checked(section, own, options)
