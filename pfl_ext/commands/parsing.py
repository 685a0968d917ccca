"""What commands that train or cut data share: their options, and how these and a configuration file become tables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_ext.configuration import Configuration
from pfl_ext.data import PARTITIONERS
from pfl_ext.engines import restarted
from pfl_ext.experiment import (
    DATA_OPTIONS,
    NETWORK_OPTIONS,
    PARTITION_OPTIONS,
    TASK_OPTIONS,
    Experiment,
    network_options,
    partition_options,
    settings_options,
    task_options,
)
from pfl_ext.nn import NETWORKS
from pfl_ext.options import Option, OptionError, nearest, title
from pfl_ext.runs import has_results
from pfl_ext.tasks import TASKS

from .flags import add_option, refuse_unknown, spoken
from .methods import add_trust
from .parser import Parser, UsageError

__all__ = [
    "Basis",
    "Output",
    "Words",
    "add_data",
    "add_output",
    "add_settings",
    "data_name",
    "explained",
    "output_of",
    "words_of",
]


@dataclass(frozen=True)
class Basis:
    """What is looked for in a command line before its parser is made, as it decides what options there are."""

    configuration: Configuration
    partition: str
    trust_code: bool

    @staticmethod
    def of(command: str, arguments: Sequence[str]) -> Basis:
        """The basis of a command line."""
        first = Parser(command, add_help=False)
        first.add_argument("--config", type=Path)
        first.add_argument("--partition")
        add_trust(first)
        known, _ = first.parse_known_args(arguments)
        try:
            configuration = Configuration() if known.config is None else Configuration.read(known.config)
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from None
        name = known.partition or configuration.sections.get("partition", {}).get("name")
        name = name or PARTITION_OPTIONS["name"].default
        if name not in PARTITIONERS:
            close = nearest(name, PARTITIONERS)
            raise UsageError(f"unknown partition {name!r}{close}; known are {', '.join(PARTITIONERS)}")
        return Basis(configuration, name, known.trust_code)


@dataclass(frozen=True)
class Words:
    """A parsed command line: options of tables, and what is not of a table."""

    tables: Mapping[str, Mapping[str, Any]]
    rest: Mapping[str, Any]

    def over(self, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The tables of a configuration file, overridden by what the command line names."""
        merged = {name: dict(table) for name, table in sections.items()}
        for section, table in self.tables.items():
            merged.setdefault(section, {}).update(table)
        return merged


def words_of(parser: Parser, arguments: Sequence[str], chosen: Mapping[str, str], own: Parser | None = None) -> Words:
    """Parse a command line.

    Args:
        parser: of the command.
        arguments: the command line.
        chosen: as of :func:`~pfl_ext.commands.flags.refuse_unknown`.
        own: the parser below it that has the options, where that is not itself.
    """
    parsed, unknown = parser.parse_known_args(list(arguments))
    refuse_unknown(own or parser, unknown, chosen)
    tables: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for destination, value in vars(parsed).items():
        section, dot, key = destination.partition(".")
        if dot:
            tables.setdefault(section, {})[key] = value
        else:
            rest[destination] = value
    return Words(tables, rest)


@contextlib.contextmanager
def explained(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Let errors of options speak of flags where the command line gave the value."""
    try:
        yield
    except OptionError as error:
        raise ValueError(spoken(error, tables)) from None


# ---- groups of options -----------------------------------------------------------------------------------------------


def add_data(parser: Parser, partition: str) -> None:
    """Add the options of data, partition, task and network."""
    group = parser.add_argument_group("data, task and network")
    tables = (DATA_OPTIONS, PARTITION_OPTIONS, TASK_OPTIONS, NETWORK_OPTIONS)
    for section, options in zip(("data", "partition", "task", "network"), tables, strict=True):
        for key, option in options.items():
            add_option(group, option, section, key)
    group = parser.add_argument_group(f"partition {partition}", title(PARTITIONERS[partition]))
    for option in partition_options(partition).values():
        add_option(group, option, "partition")
    group = parser.add_argument_group("task", "The options of tasks that have any.")
    for task in TASKS:
        for option in task_options(task).values():
            add_option(group, dataclasses.replace(option, help=f"{option.help}; {task}"), "task")
    group = parser.add_argument_group("network", "The options of every network; stem and the like where it has them.")
    for key, (option, networks) in _network_options().items():
        of = "" if len(networks) == len(NETWORKS) else f"; {', '.join(networks)}"
        add_option(group, dataclasses.replace(option, help=option.help + of), "network", key)


def _network_options() -> dict[str, tuple[Option, list[str]]]:
    """The options of all networks, and which have each. A network named later in a file may have any of them."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for network in NETWORKS:
        for key, option in network_options(network).items():
            first, networks = found.setdefault(key, (option, []))
            networks.append(network)
            if first.default != option.default:
                found[key] = (dataclasses.replace(first, default=None), networks)
    return found


def add_settings(parser: Parser) -> None:
    """Add the options of the federation, a group for each group of settings."""
    groups: dict[str, Any] = {}
    for option in settings_options().values():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        add_option(groups[option.group], option, "federation")


# ---- where results go ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """Where the results of a command go, and what is made of them."""

    folder: Path
    resume: bool
    overwrite: bool
    quiet: bool
    tensorboard: bool
    plots: bool

    def check(self, runs: Sequence[Path]) -> None:
        """Refuse folders that a command cannot write its runs to, before the first of them begins.

        Args:
            runs: the folders of all runs.
        """
        if self.resume and not self.folder.exists():
            raise ValueError(
                f"--resume: there is no folder {self.folder}, so there is nothing to go on with; leave out --resume to "
                "begin, or name the run's folder by --output"
            )
        if self.resume or self.overwrite:
            return
        for folder in runs:
            if has_results(folder):
                raise ValueError(
                    f"{folder} holds the results of an earlier run: --resume goes on with it, --overwrite removes its "
                    "results, --output names another folder"
                )


def add_output(parser: Parser, default: str) -> None:
    """Add the options of the configuration file and of the results."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--config", type=Path, help="a TOML file with the tables data, partition, task, network, federation, method"
    )
    add_trust(group)
    group.add_argument("--output", type=Path, help=f"folder for results and checkpoints (default: {default})")
    group.add_argument("--resume", action="store_true", help="go on from the folder's last good checkpoint")
    group.add_argument(
        "--overwrite", action="store_true", help="remove the results of an earlier run in the folder, and begin anew"
    )
    group.add_argument("--quiet", action="store_true", help="no progress display")
    group.add_argument("--tensorboard", action="store_true", help="write TensorBoard files into the folder too")
    group.add_argument("--no-plots", action="store_true", help="draw nothing")


def output_of(words: Words, default: str) -> Output:
    """Where the results go, by default into this folder of ``results``."""
    rest = words.rest
    if rest["resume"] and rest["overwrite"]:
        raise UsageError("--resume goes on with a run and --overwrite removes it: give one of them")
    folder = rest["output"] or Path("results") / default
    again = restarted() and folder.exists()  # torchrun has: what was begun goes on, also what overwrote another run
    return Output(
        folder=folder,
        resume=rest["resume"] or again,
        overwrite=rest["overwrite"] and not again,
        quiet=rest["quiet"],
        tensorboard=rest["tensorboard"],
        plots=not rest["no_plots"],
    )


def data_name(experiment: Experiment) -> str:
    """The data and partition of an experiment as part of a folder's name."""
    return f"{experiment.data.replace(':', '-').replace('/', '-')}-{experiment.partition}"
