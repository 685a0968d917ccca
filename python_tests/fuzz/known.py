"""Faults that are known and being mended: cases of these classes are left out. The list should be empty."""

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


def _infinite_labels(case: dict[str, Any]) -> bool:
    own = case["case"]
    if case["family"] != "distillation" or not own["multilabel"] or own["temperature"] == 1:
        return False
    return any(x["values"] in ("low", "inf", "mixed") for x in (own["student"], *own["teachers"]))


def _all_smoothed(case: dict[str, Any]) -> bool:
    return (
        case["family"] == "distillation"
        and case["case"]["smoothing"] == 1
        and case["case"]["student"]["values"] != "normal"
    )


def _extreme_weights(case: dict[str, Any]) -> bool:
    if case["family"] != "public_average":
        return False
    return max(case["case"]["weights"]) > 1e30 or 0 < max(case["case"]["weights"]) < 1e-30


def _wild_places(case: dict[str, Any]) -> bool:
    return case["family"] == "conv_pool_relu" and bool(case["case"]["which"]["range"][1] > 5)


def _plain_index(case: dict[str, Any], found: str) -> bool:
    return "IndexError" in found and case["family"] in ("conv_pool_relu", "transform")


KNOWN: list[Known] = [
    # Refused with the wrong words.
    # Wrong numbers.
    Known("remaining weights that cancel", lambda case, found: "weights that add up to 0 were not refused" in found),
    Known("label smoothing of 1 and a masked target: NaN for infinity", lambda case, found: _all_smoothed(case)),
    Known("multi-label logits of infinity, temperature not 1", lambda case, found: _infinite_labels(case)),
    Known(
        "an expanded out: refused when the others have been written",
        lambda case, found: (
            case.get("damage", {}).get("kind") == "expanded" and "what was refused, was changed" in found
        ),
    ),
    # Of the plain-torch definitions alone.
    Known("plain: IndexError of raw ops for tensors of other dimensions", _plain_index),
    Known(
        "plain: scores of layers without elements are NaN",
        lambda case, found: found.startswith("scores") and "nan instead of 0.0" in found,
    ),
    Known(
        "plain: lwsam_perturb_ of an empty strided tensor",
        lambda case, found: (
            case["family"] == "perturb"
            and ("self.stride(-1) must be 1" in found or "what was refused, was changed" in found)
        ),
    ),
]
KNOWN_FILES: list[Known] = []


def known(case: dict[str, Any], finding: str, faults: list[Known]) -> str | None:
    """The known fault that a case would meet, or that a finding is of."""
    return next((fault.name for fault in faults if fault.fits(case, finding)), None)
