"""Fused C++/CUDA ops for personalised federated learning, and the algorithms built on them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _native, ops

if TYPE_CHECKING:
    from . import algorithms, data, engines, federation, metrics, nn, optim, reports, tasks
    from .interface import compare, run
    from .reports import load_results

__all__ = [
    "__version__",
    "algorithms",
    "compare",
    "data",
    "engines",
    "federation",
    "load_results",
    "metrics",
    "nn",
    "ops",
    "optim",
    "reports",
    "run",
    "tasks",
]
__version__ = "0.2.0"

_native.load()


def __getattr__(name: str) -> Any:
    """Import a part when it is first asked for: who calls an op should not wait for the methods."""
    home = {"compare": "interface", "run": "interface", "load_results": "reports"}.get(name)
    if home is not None:
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
