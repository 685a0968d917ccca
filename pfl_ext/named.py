"""What a name stands for: methods, networks, tasks, data, optimisers; of the package, of libraries, of a user's file.

``path/to/file.py:Name`` names something in a Python file. Importing a file runs it, so this is done for those names
alone that :func:`make_known` is called with: by ``pfl_ext.run`` and ``compare`` for what they are given, by the command
line as :mod:`pfl_ext.commands.trust` says.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from .algorithms import METHODS
from .data import Dataset
from .federation import Method
from .federation.optimizers import OPTIMIZERS
from .nn import NETWORKS, library_network
from .options import nearest
from .tasks import TASKS, Task

__all__ = [
    "OWN_DATA",
    "PYTHON",
    "TABLES",
    "as_dataset",
    "code_in",
    "from_file",
    "in_file",
    "known",
    "make_known",
    "networks_of",
    "register",
]

OWN_DATA: dict[str, Callable[[Path | None], Dataset]] = {}
"""Functions of users' files that make a data set, of the folder with the data's files."""

TABLES: dict[str, dict[str, Any]] = {
    "data": OWN_DATA,
    "task": TASKS,
    "network": NETWORKS,
    "method": METHODS,
    "optimizer": OPTIMIZERS,
}
"""Everything that is chosen by its name and may be a user's own; of the data only these."""

PYTHON = "python:"
"""How the name of an object begins that a Python program gave, and that no name can bring back."""

_ACCEPTED = {
    "data": "a function that returns a Dataset, tensors or torch datasets",
    "task": "a class derived from pfl_ext.tasks.Task",
    "network": "a class or function that makes a torch.nn.Module",
    "method": "a class derived from pfl_ext.federation.Method",
    "optimizer": "a class or function of (params, lr=..., weight_decay=...) that makes a torch optimiser",
}


def networks_of(name: str) -> list[str]:
    """The networks of a run by their names: between several stand commas."""
    return [part.strip() for part in name.split(",")]


def in_file(name: str) -> bool:
    """Whether a name is one of something in a file, ``path/to/file.py:Name``."""
    return re.fullmatch(r".+\.py:\w+", name) is not None


def known(section: str, name: str) -> Any:
    """What a name stands for.

    Raises:
        ValueError: nothing; the message suggests the nearest names.
    """
    table = TABLES[section]
    if name in table:
        return table[name]
    if section == "network" and (build := library_network(name)) is not None:
        return build
    if name.startswith(PYTHON):
        raise ValueError(
            f"the {section} {name} is an object of the Python program that made the run: go on with it there"
        )
    if in_file(name):
        raise ValueError(f"the {section} {name} is code that was not loaded: pfl_ext.named.make_known loads it")
    raise ValueError(f"unknown {section} {name!r}{nearest(name, table)}; known are {', '.join(sorted(table))}")


def make_known(section: str, name: str) -> None:
    """Load what ``path/to/file.py:Name`` names, which runs the file. Any other name is left as it is.

    Raises:
        ValueError: there is no such file, or nothing in it that the table takes.
    """
    if in_file(name) and name not in TABLES[section]:
        register(section, name, from_file(section, name))


def register(section: str, name: str, found: Any) -> None:
    """Let a name stand for a class or function of a user.

    Raises:
        ValueError: it is not what the table takes.
    """
    base = {"task": Task, "method": Method}.get(section)
    fits = callable(found) if base is None else isinstance(found, type) and issubclass(found, base)
    if not fits:
        raise ValueError(f"the {section} {name} is {_kind(found)}; accepted is {_ACCEPTED[section]}")
    made = {"network": _network, "data": _source}.get(section)
    TABLES[section][name] = found if made is None else made(name, found)


def from_file(section: str, name: str) -> Any:
    """Import the file of ``path/to/file.py:Name``, and give what has that name in it."""
    path, _, attribute = name.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{path} of the {section} {name} is not a file; path/to/file.py:Name is accepted")
    module = _module(file)
    if not hasattr(module, attribute):
        close = nearest(attribute, [other for other in vars(module) if not other.startswith("_")])
        raise ValueError(f"{path} has no {section} {attribute}{close}; accepted is {_ACCEPTED[section]}")
    return getattr(module, attribute)


def _module(file: Path) -> ModuleType:
    """The file as a module by its own name: worker processes import it the same way, as they have the same path."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(file.stem)
    origin = getattr(module, "__file__", None)
    if origin is None or Path(origin).resolve() != file.resolve():
        raise ValueError(f"{file} has the name of another module ({origin or 'built in'}): rename the file")
    return module


def code_in(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """What tables name of files, each with what it is, but for methods: those of a file do not all run."""
    network, data = sections.get("network", {}), sections.get("data", {})
    named = {
        "optimizer": _values("optimizer", _with_inner(sections.get("method", {}))),
        "network": [one for name in _values("name", _with_inner(network)) for one in networks_of(name)],
        "task": _values("name", [sections.get("task", {})]),
        "data": [*_values("name", [data]), *_values("auxiliary", [data])],
    }
    yield from ((section, name) for section, names in named.items() for name in names if in_file(name))


def _with_inner(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A table and the tables of single methods in it."""
    return [table, *(own for own in table.values() if isinstance(own, Mapping))]


def _values(key: str, tables: Sequence[Mapping[str, Any]]) -> list[str]:
    return [table[key] for table in tables if isinstance(table.get(key), str)]


def _kind(found: Any) -> str:
    name = getattr(found, "__name__", None)
    return f"the {type(found).__name__} {name}" if isinstance(name, str) else f"of the type {type(found).__name__}"


# ---- networks and data of a user -------------------------------------------------------------------------------------

_GIVEN = ("input_shape", "classes")


def _network(name: str, make: Callable[..., Any]) -> Callable[..., nn.Module]:
    """A user's class or function as a builder like those of the package.

    Parameters called ``input_shape`` and ``classes`` are given. All others are options, and need a default.
    """
    parameters = inspect.signature(make).parameters
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = [p for p in named if p.name not in _GIVEN]
    for parameter in own:
        if parameter.default is parameter.empty:
            raise ValueError(
                f"the parameter {parameter.name} of the network {name} has no default; input_shape and classes are "
                "given, all others are options, which have one"
            )

    def build(input_shape: Any, classes: int, **options: Any) -> nn.Module:
        given = {"input_shape": input_shape, "classes": classes}
        made = make(**{key: value for key, value in given.items() if key in parameters}, **options)
        if not isinstance(made, nn.Module):
            raise ValueError(f"what the network {name} makes is {_kind(made)}; accepted is a torch.nn.Module")
        return made

    build.__name__, build.__doc__ = name, inspect.getdoc(make)
    build.__annotations__ = _types(make, own)
    options = [p.replace(kind=p.KEYWORD_ONLY, annotation=p.empty) for p in own]
    build.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return build


def _types(make: Callable[..., Any], own: list[inspect.Parameter]) -> dict[str, Any]:
    """The types of a user's parameters: as annotated, else those of the defaults."""
    try:
        annotated: Any = make.__init__ if inspect.isclass(make) else make
        hints = typing.get_type_hints(annotated, include_extras=True)
    except Exception:  # an annotation may name what is imported for type checkers alone
        hints = {}
    return {p.name: hints.get(p.name, str if p.default is None else type(p.default)) for p in own}


def _source(name: str, make: Callable[..., Any]) -> Callable[[Path | None], Dataset]:
    """A user's function as a source of data; a parameter called ``root`` is given the folder with the files."""
    takes_root = "root" in inspect.signature(make).parameters

    def load(root: Path | None) -> Dataset:
        return as_dataset(make(root=root) if takes_root else make(), name)

    return load


def as_dataset(found: Any, name: str) -> Dataset:
    """A dataset of what a user gave: one, its tensors or arrays, or one or two torch datasets.

    Args:
        found: a Dataset, ``(train_x, train_y)``, ``(train_x, train_y, test_x, test_y)``, a torch dataset, or
            ``(train, test)`` of these.
        name: for messages, and for the dataset where it has none.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(found, Dataset):
        return found
    short = name.rpartition(":")[2]
    if isinstance(found, tuple | list) and len(found) in (2, 4) and isinstance(found[1], Tensor | np.ndarray):
        return Dataset.from_tensors(*found, name=short)
    parts = found if isinstance(found, tuple | list) else (found,)
    if len(parts) in (1, 2) and all(map(_like_a_torch_dataset, parts)):
        return Dataset.from_torch(*parts, name=short)
    raise ValueError(
        f"the data {name} are {_kind(found)}; accepted is a Dataset, tensors (train_x, train_y) or (train_x, train_y, "
        "test_x, test_y), a torch dataset, or two of these"
    )


def _like_a_torch_dataset(part: Any) -> bool:
    items = hasattr(part, "__getitem__") and hasattr(part, "__len__")
    return items and not isinstance(part, str | Mapping | Tensor | np.ndarray)
