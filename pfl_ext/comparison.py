"""Comparisons as data: methods and variants of them on the same clients, at one point or at many of a sweep.

A configuration file of a comparison has, beside the tables of an experiment::

    methods = ["fedavg", "PerAda w/o KD", "perada"]   # names of methods, or of variants
    seeds = [0, 1, 2]

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
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .algorithms import METHODS
from .experiment import Experiment, method_options, nearest

__all__ = ["Comparison", "Point", "folder_name", "method_of", "points", "variant"]

Sections = Mapping[str, Mapping[str, Any]]
_OWN = ("method", "network", "federation")  # data and partition are the same for all: else nothing is compared


def folder_name(text: str) -> str:
    """The text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.=+]+", "-", text).strip("-").lower()


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
                known = [
                    *METHODS,
                    *(t for t, own in self.sections.get("method", {}).items() if isinstance(own, Mapping)),
                ]
                raise ValueError(f"unknown method {name!r}{nearest(name, known)}; known are {', '.join(known)}")
        folders: dict[str, str] = {}
        for label in self.labels:
            other = folders.setdefault(folder_name(label), label)
            if other is not label:
                raise ValueError(f"{label!r} and {other!r} would have the same folder: name one of them differently")
        variants = {
            t for t, own in self.sections.get("method", {}).items() if isinstance(own, Mapping) and "name" in own
        }
        for section in _OWN:
            for name, own in self.sections.get(section, {}).items():
                if isinstance(own, Mapping) and not (name in METHODS or name in self.labels or name in variants):
                    close = nearest(name, [*self.labels, *METHODS])
                    raise ValueError(f"[{section}.{name}] is for no method or variant of this name{close}")

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
        """The name of its folder."""
        return "_".join(folder_name(f"{name.rpartition('.')[2]}={value}") for name, value in self.values.items())


def points(comparison: Comparison, sweep: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every combination of the swept options' values, the last one changing fastest.

    Raises:
        ValueError: an option that is not ``section.option`` or ``section.NAME.option``, or that no method has.
    """
    for name, given in sweep.items():
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise ValueError(f"sweep over {name} is {given!r}; a list of values is accepted")
    found = []
    for combination in itertools.product(*sweep.values()):
        values = dict(zip(sweep, combination, strict=True))
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
