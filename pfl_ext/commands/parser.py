"""The parser of every command. It imports nothing, so that ``pfl-ext info`` works where other things do not."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

__all__ = ["HelpFormatter", "Parser", "UsageError", "help_width"]


class UsageError(Exception):
    """The command line is wrong; the message says how, in one line."""


_WIDTH = 100  # columns that help takes at most


def help_width() -> int:
    """How many letters a line of help has at most: as many as the terminal, up to a width that is read with ease."""
    return min(_WIDTH, shutil.get_terminal_size().columns) - 2


class _Everything(argparse.Action):
    """Print all options, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the help with all options and exit; argparse calls it for ``--help-all``."""
        assert isinstance(parser, Parser)
        print(parser.format_help(everything=True), end="")
        parser.exit()


class HelpFormatter(argparse.HelpFormatter):
    """Help as wide as the terminal, up to a width that is read with ease.

    Lines of a description that begin with a space stay lines, such as those of a list; what is longer goes on below the
    last of its columns. All others are filled.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for listed, paragraph in _pieces(text):
            column = re.match(r" *(?:\S+ {2,})?", paragraph) if listed else None
            hanging = " " * (column.end() if column else 0)
            filled += textwrap.wrap(
                paragraph, width, initial_indent=indent, subsequent_indent=indent + hanging, break_on_hyphens=False
            ) or [""]
        return "\n".join(filled)


def _pieces(text: str) -> list[tuple[bool, str]]:
    """The lines of a text that begin with a space, and the paragraphs between them, each with whether it is a line."""
    found: list[tuple[bool, str]] = []
    for line in text.splitlines():
        if line.startswith(" ") or not line or not found or found[-1][0] or not found[-1][1]:
            found.append((line.startswith(" "), line))
        else:
            found[-1] = (False, f"{found[-1][1]} {line}")
    return found


class Parser(argparse.ArgumentParser):
    """A parser of a command whose errors are one line.

    Where some of its options are rare (`rare`), ``--help`` leaves them out, and ``--help-all`` shows all.
    """

    def __init__(self, command: str, operands: str = "", **more: Any) -> None:
        super().__init__(
            **{
                "prog": f"pfl-ext {command}",
                "usage": f"pfl-ext {command}{operands} [options]",
                "allow_abbrev": False,
                "formatter_class": HelpFormatter,
                **more,
            }
        )
        self._rare: set[str] = set()

    def rare(self, destinations: Iterable[str]) -> None:
        """Show these options with ``--help-all`` alone."""
        if not self._rare:
            text = "show all options, in groups"
            self.add_argument("--help-all", action=_Everything, nargs=0, default=argparse.SUPPRESS, help=text)
        self._rare |= set(destinations)

    def format_help(self, everything: bool = False) -> str:
        """The help; without rare options and without groups that have no others, unless ``everything``."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        hidden = 0
        for group in self._action_groups:
            shown = [action for action in group._group_actions if everything or action.dest not in self._rare]
            hidden += len(group._group_actions) - len(shown)
            if shown:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(shown)
                formatter.end_section()
        if hidden:
            formatter.add_text(f"--help-all shows {hidden} more options.")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """In place of the usage and the end of the process."""
        raise UsageError(f"{message}; see {self.prog} --help")
