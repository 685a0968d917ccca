"""The parser of every command. It imports nothing, so that ``pfl-ext info`` works where other things do not."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

__all__ = ["Parser", "UsageError"]


class UsageError(Exception):
    """The command line is wrong; the message says how, in one line."""


class Parser(argparse.ArgumentParser):
    """A parser of a command whose errors are one line."""

    def __init__(self, command: str, operands: str = "", **more: Any) -> None:
        """Of ``pfl-ext COMMAND OPERANDS [options]``."""
        super().__init__(
            **{
                "prog": f"pfl-ext {command}",
                "usage": f"pfl-ext {command}{operands} [options]",
                "allow_abbrev": False,
                "formatter_class": argparse.RawDescriptionHelpFormatter,
                **more,
            }
        )

    def error(self, message: str) -> NoReturn:
        """In place of the usage and the end of the process."""
        raise UsageError(f"{message}; see {self.prog} --help")
