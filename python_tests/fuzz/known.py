"""Faults that are known and being mended: cases of these classes are left out. The list should be empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from call import NATIVE

__all__ = ["KNOWN", "KNOWN_FILES", "Known", "known"]


@dataclass(frozen=True)
class Known:
    """A class of cases that fails today: by the case, before it is run, or by what it was found to do.

    ``fits`` is asked twice, with an empty finding before the run.
    """

    name: str
    fits: Callable[[dict[str, Any], str], bool]


def _all_smoothed(case: dict[str, Any], found: str) -> bool:
    """The kernels multiply the target's infinite loss by 1 - smoothing, which is 0."""
    if not NATIVE or case["family"] != "distillation" or "nan instead of inf" not in found:
        return False
    return case["case"]["smoothing"] == 1 and not case["case"]["multilabel"]


KNOWN: list[Known] = [Known("label smoothing of 1 and a masked target: NaN for infinity", _all_smoothed)]
KNOWN_FILES: list[Known] = []


def known(case: dict[str, Any], finding: str, faults: list[Known]) -> str | None:
    """The known fault that a case would meet, or that a finding is of."""
    return next((fault.name for fault in faults if fault.fits(case, finding)), None)
