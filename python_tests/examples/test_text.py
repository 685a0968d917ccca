from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "text.py"


def test_four_methods_are_compared_on_text() -> None:
    found = runpy.run_path(str(EXAMPLE))["main"](rounds=1, public_rounds=2, length=48, width=16)
    assert list(found) == ["fedavg", "ditto", "scd", "perada"]
    for results in found.values():
        # By letter frequencies alone 17 % are right: a space is the commonest character.
        assert results["accuracy"] > 0.1 and 1 < results["perplexity"] < 60
    assert found["perada"]["sent"] < 0.5 * found["fedavg"]["sent"]
