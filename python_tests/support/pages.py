"""The code of Markdown pages, and pages run as a reader would run them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pfl_ext import named
from pfl_ext.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
_FILE = re.compile(r"Write this into `([\w.]+)`:\Z")


class Block(NamedTuple):
    """A piece of code, and the file that the words before or after it say it is in."""

    kind: str
    code: str
    file: str | None


def blocks(page: Path) -> Iterator[Block]:
    """All of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n\n")[2]
        file = _FILE.search(before)
        saved = re.match(r"\n+Saved as `([\w.]+)`", text[match.end() :])
        yield Block(match[1], match[2], (file or saved or [None, None])[1])


def follow(page: Path) -> dict[str, Any]:
    """Do in this folder what a page says, and return the names that its Python leaves.

    Python is executed, in one namespace. Code that has a file is written into it. A line of ``sh`` is a command of
    ours, which must succeed; ``text`` is for reading.
    """
    names: dict[str, Any] = {"__name__": "tutorial"}
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).write_text(block.code, encoding="utf-8")
        if block.kind == "python":
            exec(compile(block.code, str(page), "exec", dont_inherit=True), names)
        elif block.kind == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                command, *arguments = shlex.split(line, comments=True)
                assert command == "pfl-ext", line
                assert main(arguments) == 0, line
    return names


class Kept:
    """What a page makes known to the program, and puts in its way, is gone after it."""

    def __enter__(self) -> None:
        self.tables = {section: dict(table) for section, table in named.TABLES.items()}
        self.path, self.modules = [*sys.path], set(sys.modules)
        sys.path.insert(0, str(Path.cwd()))

    def __exit__(self, *_: object) -> None:
        for section, table in self.tables.items():
            named.TABLES[section].clear()
            named.TABLES[section].update(table)
        sys.path[:] = self.path
        for name in set(sys.modules) - self.modules:
            if getattr(sys.modules[name], "__file__", None) and "pfl_ext" not in name:
                file = Path(str(sys.modules[name].__file__))
                if file.is_relative_to(Path.cwd()):
                    del sys.modules[name]
