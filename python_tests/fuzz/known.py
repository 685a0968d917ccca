"""Faults that are known and being mended: cases of these classes are left out. The lists should be empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["KNOWN", "KNOWN_FILES", "Known", "known"]


@dataclass(frozen=True)
class Known:
    """A class of cases that fails today: by the case, before it is run, or by what it was found to do.

    ``fits`` is asked twice, with an empty finding before the run.
    """

    name: str
    fits: Callable[[dict[str, Any], str], bool]


KNOWN: list[Known] = []
KNOWN_FILES: list[Known] = []


def known(case: dict[str, Any], finding: str, faults: list[Known]) -> str | None:
    """The known fault that a case would meet, or that a finding is of."""
    return next((fault.name for fault in faults if fault.fits(case, finding)), None)
