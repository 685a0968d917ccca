"""What runs were configured with, and in which options they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .found import table_of

__all__ = ["differing", "flat"]


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run as ``section.option``, without the seed, which is no difference between methods."""
    found: dict[str, Any] = {}
    for section in config:
        table = table_of(config, section)
        entries = {f"{section}.{name}": value for name, value in table.items()} or {section: config[section]}
        found |= {name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()}
    found.pop("federation.seed", None)
    return {
        name: value if isinstance(value, int | float | str | tuple) else str(value) for name, value in found.items()
    }


def differing(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The options of which those that have them have several values."""
    names = dict.fromkeys(name for own in settings.values() for name in own)
    values = {name: [own[name] for own in settings.values() if name in own] for name in names}
    return [name for name, own in values.items() if any(value != own[0] for value in own)]
