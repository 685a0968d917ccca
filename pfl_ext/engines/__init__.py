"""Where the clients' turns run: in this process, or side by side in worker processes."""

from .in_process import InProcess
from .workers import Workers

__all__ = ["InProcess", "Workers"]
