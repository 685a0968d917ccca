"""Comparisons as data: methods and variants of them on the same clients, at one point or at many of a sweep.

A configuration file of a comparison has, beside the tables of an experiment::

    methods = ["fedavg", "PerAda w/o KD", "perada"]   # names of methods, or of variants
    seeds = [0, 1, 2]
    metric = "accuracy"         # of tables and pictures, else the task's; with statistic, mean or weighted_mean
    columns = ["method", "personal: local test"]      # of the table, else all

    [method]                    # options of all
    lr = 0.01
    [method."PerAda w/o KD"]    # a variant: the method it is, and its options
    name = "perada"
    kd_steps = 0
    [network.perada]            # network and federation may have options of one method or variant too
    adapters = true

    [sweep]                     # every combination of these is a comparison
    "partition.alpha" = [1.0, 0.1]
    "method.rho" = [0.05, 0.1]  # for each method that has the option; "method.plgu-lf.rho" is for one
    "federation.dp_noise, federation.dp_clip" = [[0.0, 0.0], [0.8, 1.0]]  # options that change together
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .algorithms import METHODS
from .experiment import Experiment
from .nn import NETWORKS
from .options import Option, nearest
from .reports import Look, folder_name
from .sections import NETWORK_OPTIONS, method_options, network_options, refuse_unknown, settings_options

__all__ = ["Comparison", "Point", "check_common", "check_own_tables", "method_of", "points", "variant"]

Sections = Mapping[str, Mapping[str, Any]]
_OWN = ("method", "network", "federation")  # data and partition are the same for all: else nothing is compared


def method_of(label: str, sections: Sections) -> str:
    """The method that a name of a comparison stands for: itself, or that of the variant."""
    own = sections.get("method", {}).get(label)
    return str(own.get("name", label)) if isinstance(own, Mapping) else label


def variant(sections: Sections, label: str) -> dict[str, dict[str, Any]]:
    """The tables of one method or variant: what is common, overridden by the sub-tables of its name."""
    found: dict[str, dict[str, Any]] = {}
    for section, table in sections.items():
        common = {name: value for name, value in table.items() if section not in _OWN or not isinstance(value, Mapping)}
        own = table.get(label, {}) if section in _OWN else {}
        found[section] = common | (dict(own) if isinstance(own, Mapping) else {})
    found.setdefault("method", {})["name"] = method_of(label, sections)
    return found


def check_own_tables(sections: Sections, labels: Sequence[str]) -> None:
    """Refuse tables of one method or variant, such as ``[network.perada]``, with an unknown name or unknown options.

    Tables of what does not run are checked too: a misspelt option would be found out only when it does.

    Args:
        sections: all tables.
        labels: names that are known beside those of the methods and of the variants in the tables.

    Raises:
        ValueError: the message names the table.
    """
    known = {*METHODS, *labels, *_variants(sections)}
    for section in _OWN:
        for name, own in sections.get(section, {}).items():
            if not isinstance(own, Mapping):
                continue
            if name not in known:
                if name in _options_of_any(section):
                    raise ValueError(f"{name} in [{section}] is a table; accepted is a value")
                close = nearest(name, [*labels, *METHODS])
                raise ValueError(f"[{section}.{name}] is for no method or variant of this name{close}")
            method = method_of(name, sections)
            if section != "method":
                refuse_unknown(section, "", own, _options_of_any(section))
            elif method in METHODS:  # that of a file is known only where it runs
                given = {option: value for option, value in own.items() if option != "name"}
                refuse_unknown("method", method, given, method_options(method))


def check_common(sections: Sections, labels: Sequence[str]) -> None:
    """Refuse options of ``[method]`` that no method has; for commands that run none.

    Args:
        sections: all tables.
        labels: the methods and variants that the tables are for.

    Raises:
        ValueError: the message suggests the nearest names.
    """
    common = {name: value for name, value in sections.get("method", {}).items() if not isinstance(value, Mapping)}
    named = [*labels, str(common.pop("name", "fedavg"))]
    if all(method_of(label, sections) in METHODS for label in named):  # that of a file may have any
        refuse_unknown("method", "", common, _options_of_any("method"))


def _options_of_any(section: str) -> dict[str, Option]:
    """The options of all methods or all networks, or those of the federation."""
    if section == "federation":
        return settings_options()
    names, options_of = (METHODS, method_options) if section == "method" else (NETWORKS, network_options)
    found = dict(NETWORK_OPTIONS) if section == "network" else {}
    for name in names:
        found |= options_of(name)
    return found


def _variants(sections: Sections) -> list[str]:
    own = sections.get("method", {})
    return [name for name, table in own.items() if isinstance(table, Mapping) and "name" in table]


@dataclass(frozen=True)
class Comparison:
    """What runs on the same data, for each seed."""

    sections: Sections
    labels: tuple[str, ...]
    seeds: tuple[int, ...] | None
    """None: the one of the tables."""

    def __post_init__(self) -> None:
        """Refuse names that stand for nothing, before anything runs."""
        for label in self.labels:
            name = method_of(label, self.sections)
            if name not in METHODS:
                known = [*METHODS, *_variants(self.sections)]
                raise ValueError(f"unknown method {name!r}{nearest(name, known)}; known are {', '.join(known)}")
        for what, given in (("method", self.labels), ("seed", self.seeds or ())):
            for one in given:
                if given.count(one) > 1:
                    raise ValueError(f"the {what} {one} is named more than once")
        folders: dict[str, str] = {}
        for label in self.labels:
            other = folders.setdefault(folder_name(label), label)
            if other != label:
                raise ValueError(f"{label!r} and {other!r} would have the same folder: name one of them differently")
        check_own_tables(self.sections, self.labels)

    def experiments(self) -> list[tuple[str, Experiment]]:
        """Every run by its label, all of one seed before those of the next."""
        found = []
        for seed in (None,) if self.seeds is None else self.seeds:
            for label in self.labels:
                sections = variant(self.sections, label)
                if seed is not None:
                    sections.setdefault("federation", {})["seed"] = seed
                found.append((label, Experiment.from_sections(sections)))
        return found

    def config(self, look: Look, sweep: Mapping[str, Sequence[Any]] | None = None) -> dict[str, Any]:
        """What makes the same comparison again, as the content of a configuration file."""
        shown = {"metric": look.metric, "statistic": look.statistic, "columns": look.columns}
        more = {"sweep": {name: list(values) for name, values in sweep.items()}} if sweep else {}
        return {"methods": list(self.labels), "seeds": self.seeds, **shown, **self.sections, **more}

    def identity(self, label: str) -> str:
        """What decides the runs of a label, as text."""
        return json.dumps(variant(self.sections, label), sort_keys=True, default=str)


@dataclass(frozen=True)
class Point:
    """One combination of a sweep."""

    values: Mapping[str, Any]
    """The swept options and their values here."""
    comparison: Comparison
    applies: Mapping[str, frozenset[str]]
    """For each label the swept options that it has."""

    @property
    def folder(self) -> str:
        """The name of the combination's folder."""
        return "_".join(folder_name(f"{name.rpartition('.')[2]}={value}") for name, value in self.values.items())


def points(comparison: Comparison, sweep: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every combination of the swept options' values, the last one changing fastest.

    Raises:
        ValueError: an option that is not ``section.option`` or ``section.NAME.option``, or that no method has, or
            options that are named together without a value for each.
    """
    for name, given in sweep.items():
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise ValueError(f"sweep over {name} is {given!r}; a list of values is accepted")
    found = []
    for combination in itertools.product(*sweep.values()):
        values = _apart(dict(zip(sweep, combination, strict=True)))
        sections = {
            section: {name: dict(own) if isinstance(own, Mapping) else own for name, own in table.items()}
            for section, table in comparison.sections.items()
        }
        applies: dict[str, set[str]] = {label: set() for label in comparison.labels}
        for name, value in values.items():
            for label in _set(sections, comparison.labels, name, value):
                applies[label].add(name)
        at = Comparison(sections, comparison.labels, comparison.seeds)
        found.append(Point(values, at, {label: frozenset(names) for label, names in applies.items()}))
    return found


def _apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are named together, with commas between, each with its own value."""
    found: dict[str, Any] = {}
    for names, value in values.items():
        each = [name.strip() for name in names.split(",")]
        given = [value] if len(each) == 1 else value
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(each):
            raise ValueError(
                f"sweep over {names!r} has {value!r}; a list of {len(each)} values is accepted, one for each"
            )
        found |= dict(zip(each, given, strict=True))
    return found


def _set(sections: dict[str, dict[str, Any]], labels: Sequence[str], name: str, value: Any) -> list[str]:
    """Set one swept option in the tables; returns the labels that it concerns."""
    section, dot, option = name.partition(".")
    label, inner, option = option.rpartition(".")
    if not dot or not option:
        raise ValueError(f"sweep over {name!r}; section.option is accepted, such as partition.alpha or method.lr")
    if inner:
        if label not in labels or section not in _OWN:
            raise ValueError(f"sweep over {name!r}: {label!r} is not compared{nearest(label, labels)}")
        concerned = [label]
    elif section == "method":
        concerned = [label for label in labels if option in method_options(method_of(label, sections))]
        if not concerned:
            raise ValueError(f"sweep over {name!r}: none of {', '.join(labels)} has the option {option}")
    else:
        sections.setdefault(section, {})[option] = value
        return list(labels)
    for label in concerned:
        table = sections.setdefault(section, {}).setdefault(label, {})
        table[option] = value
    return concerned
