"""A command in a process of its own, importable from there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pfl_ext.cli import main


def run(arguments: Sequence[str]) -> None:
    """End the process with the status of the command, as a shell sees it."""
    os._exit(main(arguments))
