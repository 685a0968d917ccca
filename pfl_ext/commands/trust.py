"""Whose code a command may run: that of files which the command line names itself, or all with ``--trust-code``.

One rule for methods, networks, tasks, data and optimisers, ``path/to/file.py:Name`` each: importing a file runs it, so
that a configuration file, or the folder of a run, may name one only where the user says that it may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pfl_ext.named import code_in, in_file, make_known

from .parser import UsageError

__all__ = ["add_trust", "load_code", "load_named"]


def add_trust(parser: Any) -> None:
    """Add the flag that lets a file name code."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the Python files (path/to/file.py:Name) that a configuration file or a run's folder names; only for "
        "files you trust",
    )


def load_code(section: str, name: str, *, trusted: bool) -> None:
    """Make what ``path/to/file.py:Name`` names known; any other name is left as it is.

    Args:
        section: the table that names it.
        name: it.
        trusted: whether the user named it, or said that files may.
    """
    if not in_file(name):
        return
    if not trusted:
        raise UsageError(
            f"{name} is Python code that a configuration file or a run's folder names, and would be run: name it on "
            "the command line yourself, or give --trust-code if you trust both"
        )
    try:
        make_known(section, name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def load_named(sections: Mapping[str, Mapping[str, Any]], *, trusted: bool) -> None:
    """The same for everything that the tables of a file name, but for methods: not all of these run."""
    for section, name in code_in(sections):
        load_code(section, name, trusted=trusted)
