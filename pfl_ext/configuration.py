"""A configuration file: the tables of an experiment, and what a comparison or a sweep has beside them.

It is data and runs no code. :mod:`pfl_ext.comparison` shows a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .options import Option, nearest
from .reports import COLUMNS, METRIC, STATISTIC
from .sections import DATA_OPTIONS, PARTITION_OPTIONS, SECTIONS, check_tables, owners, settings_options
from .toml import read_toml

__all__ = ["Configuration"]

_METHODS = Option("methods", tuple[str, ...], (), "")
_SEEDS = Option("seeds", tuple[int, ...], (), "")
_BESIDE = ("methods", "seeds", "metric", "statistic", "columns", "sweep")


@dataclass(frozen=True)
class Configuration:
    """What a file says. Its structure is right; options are checked where they are used."""

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    metric: str | None = METRIC.default
    statistic: str = STATISTIC.default
    columns: tuple[str, ...] | None = COLUMNS.default
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Configuration:
        """The configuration of a TOML file.

        Raises:
            ValueError: it is not TOML, has a key that is not known, or something of the wrong type.
            OSError: it cannot be read.
        """
        content = read_toml(path)
        try:
            return Configuration.of(content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @staticmethod
    def of(content: Mapping[str, Any]) -> Configuration:
        """The configuration of a file's content.

        Raises:
            ValueError: a key that is not known (the nearest names are suggested), or something of the wrong type.
        """
        for key, value in content.items():
            if key not in (*SECTIONS, *_BESIDE):
                raise ValueError(_unknown(key, value))
        sections = {name: content[name] for name in content if name in SECTIONS}
        check_tables(sections)
        for section, table in sections.items():
            _check_names(section, table)
        sweep = content.get("sweep", {})
        if not isinstance(sweep, Mapping):
            raise ValueError(f"sweep is {sweep!r}; accepted is a table, [sweep]")
        return Configuration(
            sections={name: dict(table) for name, table in sections.items()},
            methods=_list(_METHODS, content) or (),
            seeds=_list(_SEEDS, content),
            metric=METRIC.parse(content.get("metric", METRIC.default)),
            statistic=STATISTIC.parse(content.get("statistic", STATISTIC.default)),
            columns=_list(COLUMNS, content),
            sweep=dict(sweep),
        )


def _check_names(section: str, table: Mapping[str, Any]) -> None:
    """What a table and the tables in it choose by ``name`` is text."""
    inner = {f"{section}.{key}": own for key, own in table.items() if isinstance(own, Mapping)}
    for where, own in {section: table, **inner}.items():
        if where != "data.extra_tests" and not isinstance(own.get("name", ""), str):
            raise ValueError(f"name in [{where}] is {own['name']!r}; accepted is text")


def _list(option: Option, content: Mapping[str, Any]) -> tuple[Any, ...] | None:
    given = content.get(option.name)
    if given is None:
        return None
    if not isinstance(given, list) or not given:
        raise ValueError(f"{option.name} is {given!r}; accepted is a list, such as {option.name} = [...]")
    found: tuple[Any, ...] = option.parse(given)
    return found


def _unknown(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"unknown table [{key}]{nearest(key, (*SECTIONS, 'sweep'))}; known are {', '.join((*SECTIONS, 'sweep'))}"
    known = {"federation": settings_options(), "data": DATA_OPTIONS, "partition": PARTITION_OPTIONS}
    tables = [section for section, options in known.items() if key in options and key != "name"]
    tables += [section for section in ("partition", "method") if section not in tables and owners(section, key)]
    if tables:
        return f"{key} is an option of a table; it stands below [{tables[0]}]"
    close = nearest(key, (*SECTIONS, *_BESIDE))
    return f"unknown key {key!r}{close}; known are {', '.join(_BESIDE)} and the tables {', '.join(SECTIONS)}"
