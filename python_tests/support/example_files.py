"""The example files as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_file(path: Path) -> ModuleType:
    """A Python file, executed anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_example(name: str) -> ModuleType:
    """``examples/<name>.py``, executed anew."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # as for a script in that folder: examples import one another
    return load_file(EXAMPLES / f"{name}.py")
