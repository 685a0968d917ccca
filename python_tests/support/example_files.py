"""The example files as modules, with Flower or, where it is not installed, with a stand-in for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import flower_stand_in

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """``examples/<name>.py``, executed anew."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # as for a script in that folder: examples import one another
    if name.endswith("_flower"):
        flower_stand_in.use_unless_installed()
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
