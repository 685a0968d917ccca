"""How options are spelled on the command line: flags made of them, and messages that speak of these flags."""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pfl_ext.algorithms import METHODS
from pfl_ext.data import PARTITIONERS
from pfl_ext.options import Option, OptionError, nearest
from pfl_ext.sections import (
    DATA_OPTIONS,
    PARTITION_OPTIONS,
    SECTIONS,
    method_options,
    owners,
    partition_options,
    settings_options,
    spelled,
)

from .parser import UsageError

__all__ = ["add_option", "flag", "known_flags", "refuse_unknown", "spoken", "with_flags"]

_OUTPUT = ("resume", "overwrite", "output", "quiet", "log", "metric", "statistic", "columns")


def flag(section: str, key: str) -> str:
    """What an option of a table is called on the command line."""
    return "--" + spelled(section, key).replace("_", "-")


def add_option(group: Any, option: Option, section: str, key: str | None = None) -> None:
    """Add the flag of an option, ``key`` of its table.

    Defaults stay out of the parsed result, so that a configuration file can set them.
    """
    key = key or option.name
    default = option.default
    if isinstance(default, tuple):
        default = "none" if not default else ",".join(f"{x:g}" if isinstance(x, float) else str(x) for x in default)
    text = option.help.replace("%", "%%")
    if isinstance(default, (str, int, float)) and "(default: " not in text:
        text += f" (default: {_shown(default)})"
    common: dict[str, Any] = {"dest": f"{section}.{key}", "default": argparse.SUPPRESS, "help": text}
    name = flag(section, key)
    if option.type is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, **common)
    else:
        metavar = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else _stands_for(option.type)
        group.add_argument(name, metavar=metavar, **common)


def _shown(default: str | int | float) -> str:
    """A default as help shows it."""
    if default == "":
        return "empty"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _stands_for(kind: Any) -> str:
    """What stands for a value in help."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if isinstance(kind, types.UnionType):
        return _stands_for(parts[0])
    if typing.get_origin(kind) is tuple:
        return f"{_stands_for(parts[0])},..."
    return {int: "N", float: "X", str: "NAME", Path: "PATH"}.get(kind, "VALUE")


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str], chosen: Mapping[str, str]) -> None:
    """Refuse what a parser has left over.

    Args:
        parser: it.
        unknown: what it has left over.
        chosen: the partition and the method of the run, by "partition" and "method"; neither where it has none.
    """
    options = [word for word in unknown if word.startswith("-")]
    if options:
        name = options[0].partition("=")[0]
        key = name.lstrip("-").replace("-", "_")
        for section, own in chosen.items():
            others = owners(section, key)
            if others:
                raise UsageError(f"{name} is an option of the {section} {', '.join(others)}; this run has {own}")
        flags = [flag for action in parser._actions for flag in action.option_strings]
        if "--set" in flags and (others := owners("method", key)):
            raise UsageError(f"{name} is an option of the method {', '.join(others)}: --set METHOD.{key}=VALUE sets it")
        raise UsageError(f"unknown option {name}{nearest(name, flags)}; see {parser.prog} --help")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; see {parser.prog} --help")


def spoken(error: OptionError, given: Mapping[str, Mapping[str, Any]]) -> str:
    """The message of an error: about the flag, where the command line gave the value, else about the table's option."""
    if error.name in given.get(error.section, {}) and given[error.section][error.name] == error.value:
        return f"{flag(error.section, error.name)} {error.problem}"
    return f"{error.section}.{error}" if error.section and str(error).startswith(f"{error.name} ") else str(error)


def known_flags() -> dict[str, str]:
    """The flags of all options of all partitions and methods by their names in Python."""
    found: dict[str, str] = {}
    for method in METHODS:
        found |= {key: flag("method", key) for key in method_options(method)}
    for partition in PARTITIONERS:
        found |= {key: flag("partition", key) for key in partition_options(partition)}
    found |= {key: flag("federation", key) for key in settings_options()}
    for section, options in (("data", DATA_OPTIONS), ("partition", PARTITION_OPTIONS)):
        found |= {key: flag(section, key) for key in options if key != "name"}
    return found | {name: f"--{name}" for name in _OUTPUT}


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """A message of the library in the words of the command line.

    In Python options are keyword arguments: ``download=True`` is ``--download`` here, ``server=0.1`` is
    ``--server 0.1``, and what begins with "device is" speaks of ``--device``. A line that lists an option of a table,
    ``  method.lr: ...``, lists its flag.
    """
    if not flags:
        return message

    def of_keyword(match: re.Match[str]) -> str:
        name, value = match.groups()
        return flags[name] if value == "True" else f"{flags[name]} {value}"

    names = _any(flags)
    message = re.sub(rf"(?<![\w/.=-])({names})=(\w+(?:\.\w+)*)(?![\w/=])", of_keyword, message)
    message = re.sub(rf"^  ({'|'.join(SECTIONS)})\.(\w+)(?=: )", lambda m: f"  {flag(m[1], m[2])}", message, flags=re.M)
    return re.sub(rf"^({names})(?= (?:is|has) )", lambda match: flags[match[1]], message)


def _any(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
