"""``pfl-ext resume FOLDER``: go on with a run, a comparison or a sweep, from what its folder says of itself."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_ext.reports import CONFIG, read_config

from .flags import known_flags
from .parser import Parser, UsageError

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """The request of the command that the folder is of."""

    command: str
    inner: Any


def parse(arguments: Sequence[str]) -> Request:
    """The folder, and options that are handed on: those that may change, such as --rounds, --workers and --quiet."""
    parser = Parser(
        "resume",
        " FOLDER",
        description="Go on with a run, a comparison or a sweep from its last good checkpoints. The folder says what it "
        "is.\nOptions of pfl-ext run, compare or sweep that do not change results may follow: --rounds (for more\n"
        "rounds), --workers, --quiet. If the run uses code of Python files, add --trust-code.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that the command wrote")
    if not arguments or arguments[0].startswith("-"):
        parser.parse_args(list(arguments))
    folder, more = Path(arguments[0]), list(arguments[1:])
    try:
        content = read_config(folder)
    except FileNotFoundError:
        reason = "it has no config.toml" if folder.exists() else "there is no such folder"
        raise UsageError(f"{folder} is not the folder of a run: {reason}") from None
    command = "sweep" if "sweep" in content else "compare" if "methods" in content else "run"
    module = importlib.import_module(f".{command}", __package__)
    own = ["--config", str(folder / CONFIG), "--output", str(folder), "--resume"]
    return Request(command, module.parse([*own, *more]))


def execute(request: Request) -> int:
    """Go on with the run, comparison or sweep of the folder."""
    module = importlib.import_module(f".{request.command}", __package__)
    status: int = module.execute(request.inner)
    return status
