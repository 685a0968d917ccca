"""Flower: methods on clients that really are elsewhere, and parts for apps that have Flower already.

:func:`server_app` and :func:`client_app` run every method of this package on Flower. The strategies and the steps are
for apps of your own. ``docs/flower.md`` shows both.
"""

import importlib.util

if importlib.util.find_spec("flwr") is None:
    raise ImportError("pfl_ext.flower needs Flower, on Python 3.11 or later: pip install 'pfl_ext[flower]'")

from .client import client_app
from .engine import GridEngine, Lost
from .server import server_app
from .state import load_kept, save_kept
from .strategy import FusedFedAvg, read_arrays, write_arrays
from .training import codistill, distill, lwsam_steps, proximal_steps

__all__ = [
    "FusedFedAvg",
    "GridEngine",
    "Lost",
    "client_app",
    "codistill",
    "distill",
    "load_kept",
    "lwsam_steps",
    "proximal_steps",
    "read_arrays",
    "save_kept",
    "server_app",
    "write_arrays",
]
