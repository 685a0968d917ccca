"""Options: each is written once, with default and help, for code, command line, files, tables and identity."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "REQUIRED",
    "Option",
    "OptionError",
    "Options",
    "checked",
    "made",
    "nearest",
    "of_dataclass",
    "of_signature",
    "option",
    "plain_value",
    "title",
]

REQUIRED = object()
"""The default of an option that has none."""

# What other libraries and papers call an option.
_SYNONYMS = {
    "lr": ("learning_rate", "local_learning_rate", "local_lr", "step_size", "eta"),
    "weight_decay": ("wd", "l2"),
    "batch_size": ("batch", "local_batch_size", "minibatch"),
    "local_epochs": ("epochs", "local_epoch", "num_epochs"),
    "rounds": ("global_rounds", "communication_rounds", "num_rounds", "iterations"),
    "participation": ("join_ratio", "client_fraction", "fraction", "frac", "sample_rate", "fraction_fit"),
    "clients": ("num_clients", "users", "num_users", "devices"),
    "data": ("dataset",),
    "network": ("model", "arch", "architecture", "net"),
    "partition": ("partitioner", "split"),
    "seed": ("random_seed", "random_state"),
    "device": ("gpu", "cuda"),
    "workers": ("num_workers", "jobs", "processes", "parallel"),
    "evaluate_every": ("eval_gap", "eval_every", "test_every"),
    "lam": ("lambda", "lamda", "regularization"),
    "dp_noise": ("noise_multiplier", "sigma"),
    "dp_clip": ("max_grad_norm", "clip"),
    "output": ("out", "output_dir", "save_dir", "folder"),
    "overwrite": ("force",),
    "resume": ("continue", "restart"),
}

_Made = TypeVar("_Made")


# ---- declaring them --------------------------------------------------------------------------------------------------


def option(
    default: Any, help: str, *, choices: tuple[Any, ...] | None = None, identity: bool = True, kw_only: bool = False
) -> Any:
    """A field of :class:`Options`.

    Args:
        default: its value where nobody names it.
        help: what it is, for the command line and the tables.
        choices: all values that are accepted; None: any of its type.
        identity: whether it has an influence on what models become. A run goes on only where a run of the same
            identity stopped; what has no influence may change between the two.
        kw_only: it is named where an object is made, and takes no place before the options of derived classes.
    """
    metadata = {"help": help, "choices": choices, "identity": identity}
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


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
            field.name: plain_value(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.metadata["identity"]
        }


def plain_value(value: Any) -> Any:
    """A value as records and identities have it: itself, or the name of a function or a class of the user's."""
    if isinstance(value, functools.partial):
        given = [*map(repr, value.args), *(f"{name}={one!r}" for name, one in value.keywords.items())]
        return f"{plain_value(value.func)}({', '.join(given)})"
    return (
        f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}" if callable(value) else value
    )


# ---- reading and checking them ---------------------------------------------------------------------------------------


class OptionError(ValueError):
    """An option is unknown or has a value that is not accepted.

    Attributes:
        section, name, value: the table it is in, its name there, and what it was set to.
        problem: what is wrong, to be read after the option's name.
    """

    def __init__(self, section: str, name: str, value: Any, problem: str, message: str = "") -> None:
        """``message`` is the whole of it, where that is not name and problem."""
        super().__init__(message or f"{name} {problem}")
        self.section, self.name, self.value, self.problem = section, name, value, problem


@dataclass(frozen=True)
class Option:
    """One thing that can be set: its name, type, default, explanation, and the group it belongs to."""

    name: str
    type: Any
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None
    group: str = ""

    def parse(self, value: Any) -> Any:
        """``value``, from a command line (text) or from TOML, as this option's type.

        Raises:
            OptionError: it cannot be; the message says what is accepted.
        """
        try:
            parsed = _convert(value, self.type)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            problem = f"is {value!r}; accepted is {_describe(self.type)}"
            raise OptionError("", self.name, value, problem) from None
        if self.choices and parsed not in self.choices:
            close = nearest(str(parsed), map(str, self.choices))
            problem = f"is {parsed!r}{close}; accepted is {', '.join(map(str, self.choices))}"
            raise OptionError("", self.name, value, problem)
        return parsed


def _convert(value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if value is None or value in ("", "none"):
            return None
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, Mapping):
            raise TypeError
        return tuple(_convert(part.strip() if isinstance(part, str) else part, inner) for part in parts)
    if typing.get_origin(kind) is dict:
        pairs = [part.partition("=")[::2] for part in value.split(",")] if isinstance(value, str) else value.items()
        made = {name.strip(): str(text).strip() for name, text in pairs if name.strip() and str(text).strip()}
        if len(made) < len(pairs):
            raise ValueError
        return made
    if typing.get_origin(kind) is typing.Literal:
        return str(value)
    if kind is bool:
        if isinstance(value, str):
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
        if not isinstance(value, bool):
            raise TypeError
        return value
    if kind is str and not isinstance(value, str):
        raise TypeError
    if kind is int and (isinstance(value, bool) or (isinstance(value, float) and value != int(value))):
        raise TypeError
    if kind in (int, float) and isinstance(value, bool):
        raise TypeError
    return kind(value)


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _describe(next(part for part in typing.get_args(kind) if part is not type(None)))
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        if inner is str:
            return "a list of names"
        return f"a list of {_describe(inner).removeprefix('a ').removeprefix('an ')}s, such as 1,5,9"
    if typing.get_origin(kind) is dict:
        return "NAME=SOURCE,NAME=SOURCE, or a table in a file, each name once"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return names.get(kind, str(kind))


def nearest(name: str, known: Iterable[str]) -> str:
    """The names that a wrong one may stand for, by meaning, else by spelling, as " (did you mean ...?)", or nothing."""
    spelled: dict[str, str] = {}
    for other in known:
        spelled.setdefault(_plain(other), other)
    meant = [plain for plain, others in _SYNONYMS.items() if _plain(name) in others and plain in spelled]
    close = meant or difflib.get_close_matches(_plain(name), list(spelled), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(spelled[plain] for plain in close)}?)" if close else ""


def _plain(name: str) -> str:
    """A name as a flag and as a key of a file: ``--batch-size`` and ``batch_size`` are the same."""
    return name.lstrip("-").replace("-", "_").lower()


def title(thing: Any) -> str:
    """The first line of what a class or function says of itself, as plain text."""
    return (inspect.getdoc(thing) or thing.__name__).splitlines()[0].rstrip(".").replace("``", "")


def of_dataclass(cls: type) -> dict[str, Option]:
    """The options that are the fields of a dataclass, made by :func:`option`.

    The group of each is the class that declares it, by its title; groups come in the order of the bases.
    """
    kinds = typing.get_type_hints(cls)
    classes = cls.__mro__
    declared = {
        f.name: max(n for n, base in enumerate(classes) if f.name in inspect.get_annotations(base))
        for f in dataclasses.fields(cls)
    }
    return {
        f.name: Option(
            f.name,
            kinds[f.name],
            f.default,
            f.metadata["help"],
            f.metadata["choices"],
            title(classes[declared[f.name]]),
        )
        for f in sorted(dataclasses.fields(cls), key=lambda f: declared[f.name])
    }


def of_signature(function: Callable[..., Any]) -> dict[str, Option]:
    """An option for each keyword-only parameter, explained by its ``typing.Annotated``."""
    hints = typing.get_type_hints(function, include_extras=True)
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.name == "generator":
            continue
        hint, text = hints[parameter.name], ""
        if typing.get_origin(hint) is typing.Annotated:
            hint, text = typing.get_args(hint)[0], str(typing.get_args(hint)[1])
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        found[parameter.name] = Option(parameter.name, hint, default, text, choices, title(function))
    return found


def checked(section: str, given: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    """The values of a table's options as their types; all of them must be known.

    Raises:
        OptionError: one has a value that is not accepted.
    """
    found = {}
    for name, value in given.items():
        try:
            found[name] = known[name].parse(value)
        except OptionError as error:
            raise OptionError(section, name, value, error.problem) from None
    return found


def made(section: str, cls: Callable[..., _Made], given: Mapping[str, Any], values: Mapping[str, Any]) -> _Made:
    """``cls`` of these values; what it refuses as "NAME is ..." is an error of the option of that name.

    Args:
        section: the table.
        cls: a dataclass of options.
        given: the values as they stand in the table.
        values: the same as :func:`checked` returns them.
    """
    try:
        return cls(**values)
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        if name in given and problem.startswith("is "):
            raise OptionError(section, name, given[name], problem) from None
        raise
