"""What commands that train or cut data share: their options, and how these and a configuration file become tables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_ext.algorithms import METHODS
from pfl_ext.configuration import Configuration
from pfl_ext.data import PARTITIONERS
from pfl_ext.named import networks_of
from pfl_ext.nn import NETWORKS
from pfl_ext.options import Option, OptionError, nearest, title
from pfl_ext.reports import COLUMNS, LOGGERS, METRIC, STATISTIC, Look
from pfl_ext.running import Output
from pfl_ext.sections import (
    DATA_OPTIONS,
    NETWORK_OPTIONS,
    PARTITION_OPTIONS,
    TASK_OPTIONS,
    method_options,
    network_options,
    partition_options,
    settings_options,
    task_options,
)
from pfl_ext.tasks import TASKS

from .flags import add_option, refuse_unknown, spoken
from .parser import Parser, UsageError
from .trust import add_trust, load_code, load_named

__all__ = [
    "Basis",
    "Words",
    "add_data",
    "add_method",
    "add_output",
    "add_settings",
    "explained",
    "hide_rare",
    "listed",
    "look_of",
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
        for option in ("partition", *_CODE):
            first.add_argument(f"--{option}")
        add_trust(first)
        known, _ = first.parse_known_args(arguments)
        try:
            configuration = Configuration() if known.config is None else Configuration.read(known.config)
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from None
        for section in _CODE:
            if (named := getattr(known, section)) is not None:
                for one in networks_of(named) if section == "network" else [named]:
                    load_code(section, one, trusted=True)
        load_named(_without(configuration.sections, known), trusted=known.trust_code)
        name = known.partition or configuration.sections.get("partition", {}).get("name")
        name = name or PARTITION_OPTIONS["name"].default
        if name not in PARTITIONERS:
            close = nearest(name, PARTITIONERS)
            raise UsageError(f"unknown partition {name!r}{close}; known are {', '.join(PARTITIONERS)}")
        return Basis(configuration, name, known.trust_code)


_CODE = ("data", "task", "network", "optimizer")


def _without(sections: Mapping[str, Mapping[str, Any]], known: Any) -> dict[str, dict[str, Any]]:
    """The tables of a file without the names that the command line names too."""
    return {
        section: {key: value for key, value in table.items() if key != "name" or getattr(known, section, None) is None}
        for section, table in sections.items()
        if section in (*_CODE, "method")
    }


def listed() -> str:
    """All methods of the package with what they are, for the help of a command."""
    wide = max(map(len, METHODS)) + 2  # two spaces at least, by which help knows a list's columns
    return "methods:\n" + "\n".join(f"  {name:{wide}}{title(method)}" for name, method in METHODS.items())


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
    group = parser.add_argument_group("task", "Options of the task; each names the tasks that have it, if not all do.")
    _add_own(group, "task", TASKS, task_options)
    group = parser.add_argument_group(
        "network", "Options of the network; each names the networks that have it, if not all do."
    )
    _add_own(group, "network", NETWORKS, network_options)


def _add_own(group: Any, section: str, names: Iterable[str], options_of: Callable[[str], Mapping[str, Option]]) -> None:
    """Add the options of all networks or tasks, and say which have each: one that a file names may have any of them."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for name in (every := list(names)):
        for key, option in options_of(name).items():
            first, own = found.setdefault(key, (option, []))
            own.append(name)
            if first.default != option.default:
                found[key] = (dataclasses.replace(first, default=None), own)
    for key, (option, own) in found.items():
        of = "" if len(own) == len(every) else f"; {', '.join(own)}"
        add_option(group, dataclasses.replace(option, help=option.help + of), section, key)


def add_settings(parser: Parser, engine: bool = True) -> None:
    """Add the options of the federation, a group for each group of settings, those that are asked for most first.

    Args:
        parser: takes them.
        engine: whether it is the user's to say where clients train.
    """
    *titles, of_engine = dict.fromkeys(option.group for option in settings_options().values())
    groups = {
        title: parser.add_argument_group(title) for title in (*reversed(titles), *([of_engine] if engine else []))
    }
    for option in settings_options().values():
        if option.group in groups:
            add_option(groups[option.group], option, "federation")


def add_method(parser: Parser, method: str, title_: str) -> None:
    """Add the options of a method: those that it has itself, and those of the local training that all share."""
    shared = method_options("fedavg").keys()
    own = parser.add_argument_group(title_, title(METHODS[method]))
    local = parser.add_argument_group("local training", "Options that all methods share.")
    for option in method_options(method).values():
        add_option(local if option.name in shared else own, option, "method")


_COMMON = {
    "data": ("name", "root", "download"),
    "partition": ("name", "clients"),
    "task": ("name",),
    "network": ("name",),
    "federation": ("rounds", "participation", "seed", "evaluate_every", "device", "workers"),
    "method": ("lr", "momentum", "weight_decay", "batch_size", "local_epochs"),
}


def hide_rare(parser: Parser, basis: Basis, method: str | None = None) -> None:
    """Let ``--help`` show the options that are asked for most, and those of the method and the partition."""
    own: dict[str, set[str]] = {section: set(names) for section, names in _COMMON.items()}
    own["partition"] |= partition_options(basis.partition).keys()
    if method is not None:
        own["method"] |= method_options(method).keys() - method_options("fedavg").keys()
    found = [action.dest.partition(".") for action in parser._actions]
    rare = [f"{section}.{key}" for section, dot, key in found if dot and key not in own[section]]
    parser.rare([*rare, "trust_code", "log", "statistic"])


# ---- where results go ------------------------------------------------------------------------------------------------


_LOG = Option(
    "log",
    tuple[str, ...],
    (),
    f"also send every record to {', '.join(LOGGERS)}, each an extra of the package; W&B and MLflow read their own "
    "variables, such as WANDB_MODE=offline and MLFLOW_TRACKING_URI",
)


def add_output(parser: Parser, default: str) -> None:
    """Add the options of the configuration file and of the results."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a TOML file with the tables data, partition, task, network, federation, method; flags override it",
    )
    add_trust(group)
    group.add_argument(
        "--output", type=Path, metavar="FOLDER", help=f"folder for results and checkpoints (default: {default})"
    )
    group.add_argument("--resume", action="store_true", help="go on from the folder's last good checkpoint")
    group.add_argument(
        "--overwrite", action="store_true", help="remove the results of an earlier run in the folder, and begin anew"
    )
    group.add_argument("--quiet", action="store_true", help="no progress display")
    group.add_argument("--log", metavar="NAME,...", default=(), help=_LOG.help)
    group.add_argument("--no-plots", action="store_true", help="draw no pictures")
    for option in (METRIC, STATISTIC, COLUMNS):  # the file may set them: no default here
        text = option.help if option.default is None else f"{option.help} (default: {option.default})"
        metavar = None if option.choices else "A,B,..." if option is COLUMNS else "NAME"
        group.add_argument(f"--{option.name}", choices=option.choices, metavar=metavar, help=text.replace("%", "%%"))


def output_of(words: Words, default: str) -> Output:
    """Where the results go, by default into this folder of ``results``."""
    rest = words.rest
    if rest["resume"] and rest["overwrite"]:
        raise UsageError("--resume goes on with a run and --overwrite removes it: give one of them")
    return Output(
        folder=rest["output"] or Path("results") / default,
        resume=rest["resume"],
        overwrite=rest["overwrite"],
        quiet=rest["quiet"],
        log=_LOG.parse(rest["log"]),
        plots=not rest["no_plots"],
    )


def look_of(words: Words, configuration: Configuration) -> Look:
    """What tables and pictures show: as the command line says, else the file."""
    rest = {"style": "markdown", **words.rest}
    with explained({}):
        columns = configuration.columns if rest["columns"] is None else COLUMNS.parse(rest["columns"])
        return Look(
            rest["metric"] or configuration.metric, rest["statistic"] or configuration.statistic, columns, rest["style"]
        )
