"""Where clients' turns run: in this process, or side by side in worker processes."""

from pfl_ext.federation import InProcess

from .choice import EngineOptions, make_engine
from .workers import Workers, leave_if_imported_by_a_worker

__all__ = ["EngineOptions", "InProcess", "Workers", "leave_if_imported_by_a_worker", "make_engine"]
