"""``pfl-ext methods``; and which methods a command may run: the package's, and those of files that the user trusts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pfl_ext.algorithms import METHODS
from pfl_ext.federation import Method
from pfl_ext.options import nearest

from .parser import Parser, UsageError, help_width

__all__ = ["Request", "execute", "make_known", "parse"]


@dataclass(frozen=True)
class Request:
    """The methods to show; none named: all. With a page the tables are put into it."""

    names: tuple[str, ...]
    style: str
    page: Path | None = None


def parse(arguments: Sequence[str]) -> Request:
    """Read the names of methods from the command line; none: all."""
    parser = Parser(
        "methods",
        description="Print what methods are: paper; what a client keeps, is sent, sends and trains in a round, in\n"
        "multiples of the network's parameters; what is evaluated; options and their defaults. Measured\n"
        "in two rounds of LeNet with six clients, which takes seconds.",
    )
    parser.add_argument("names", nargs="*", metavar="METHOD", help="names of methods; default: all")
    parser.add_argument(
        "--style",
        choices=("text", "markdown"),
        default="text",
        help="text: a paragraph for each; markdown: two tables, as on the documentation's page (default: text)",
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="put the tables between two comments of this page, docs/methods.md",
    )
    words = parser.parse_args(arguments)
    for name in words.names:
        make_known(name, trusted=True)
    return Request(tuple(words.names), words.style, words.page)


def execute(request: Request) -> int:
    """Print what the methods are, and their options, or put the tables into a page."""
    from pfl_ext.catalogue import catalogue, described, put_into, told

    entries = catalogue(request.names)
    if request.page is not None:
        put_into(request.page, entries)
    elif request.style == "markdown":
        print(told(entries))
    else:
        print(described(entries, help_width()))
    return 0


def make_known(name: str, *, trusted: bool, others: Sequence[str] = ()) -> None:
    """Refuse an unknown method; make that of a file, ``path/to/file.py:Class``, known.

    Args:
        name: it.
        trusted: whether the user named it, or said that files may: importing a file runs it.
        others: names beside those of methods that could have been meant.
    """
    path, colon, cls = name.rpartition(":")
    if name in METHODS:
        return
    if not colon:
        known = [*METHODS, *others]
        raise UsageError(f"unknown method {name!r}{nearest(name, known)}; known are {', '.join(known)}")
    if not trusted:
        raise UsageError(
            f"{name} is Python code that a configuration file or a run's folder names, and would be run: name it on "
            "the command line yourself, or give --trust-code if you trust both"
        )
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{path} of the method {name} is not a file; path/to/file.py:Class is accepted")
    sys.path.insert(0, str(file.resolve().parent))  # by its name: worker processes import it the same way
    module = importlib.import_module(file.stem)
    origin = getattr(module, "__file__", None)
    if origin is None or Path(origin).resolve() != file.resolve():
        raise UsageError(f"{path} has the name of another module ({origin or 'built in'}): rename the file")
    found = getattr(module, cls, None)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UsageError(f"{path} has no method {cls}; a class derived from pfl_ext.federation.Method is accepted")
    METHODS[name] = found
