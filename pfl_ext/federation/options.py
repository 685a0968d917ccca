"""Options: each is written once, with default and help, for code, command line, files, tables and identity."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

__all__ = ["Options", "option"]


def option(default: Any, help: str, *, choices: tuple[Any, ...] | None = None, identity: bool = True) -> Any:
    """A field of :class:`Options`.

    Args:
        default: its value where nobody names it.
        help: what it is, for the command line and the tables.
        choices: all values that are accepted; None: any of its type.
        identity: whether it has an influence on what models become. A run goes on only where a run of the same
            identity stopped; what has no influence may change between the two.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "identity": identity})


@dataclass(frozen=True)
class Options:
    """Options that are made by :func:`option`, checked when they are set."""

    def __post_init__(self) -> None:
        """Refuse what is not among an option's choices."""
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            if choices:
                chosen = getattr(self, field.name) in choices
                self.check(field.name, chosen, f"one of {', '.join(map(str, choices))}")

    def check(self, name: str, holds: bool, accepted: str) -> None:
        """Raise a ValueError that says what was given and what is accepted, unless the condition holds."""
        value = getattr(self, name)
        if not holds or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name} is {value!r}; accepted is a value {accepted}")

    def identity(self) -> dict[str, Any]:
        """The options that have an influence on what models become."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.metadata["identity"]
        }
