"""Where clients' turns run: in this process, side by side in worker processes, on streams of a GPU, or on ranks."""

from pfl_ext.federation import InProcess

from .choice import EngineOptions, make_engine
from .processes import kept_processes, leave_if_imported_by_a_worker
from .ranks import LostRank
from .streams import Streams
from .torchrun import Torchrun, begun_before_restart, lead, note_begun, restarted
from .workers import Workers

__all__ = [
    "EngineOptions",
    "InProcess",
    "LostRank",
    "Streams",
    "Torchrun",
    "Workers",
    "begun_before_restart",
    "kept_processes",
    "lead",
    "leave_if_imported_by_a_worker",
    "make_engine",
    "note_begun",
    "restarted",
]
