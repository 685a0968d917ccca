"""Where clients' turns run: in this process, side by side in worker processes, or on the ranks of torchrun."""

from pfl_ext.federation import InProcess

from .choice import EngineOptions, make_engine
from .ranks import LostRank, restarted
from .torchrun import Torchrun, lead
from .workers import Workers, leave_if_imported_by_a_worker

__all__ = [
    "EngineOptions",
    "InProcess",
    "LostRank",
    "Torchrun",
    "Workers",
    "lead",
    "leave_if_imported_by_a_worker",
    "make_engine",
    "restarted",
]
