from __future__ import annotations

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_codistillation_learns(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["spectral_codistillation.py", "--rounds", "3", "--clients", "2"])
    example = runpy.run_path(str(EXAMPLES / "spectral_codistillation.py"))
    history = example["main"]()
    assert len(history) == 3
    assert history[-1] > 0.8
