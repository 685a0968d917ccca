"""One HTML page about runs: text and tables of ours, charts by uPlot, everything in one file."""

from .document import write_page
from .found import Found, Reader
from .live import serve

__all__ = ["Found", "Reader", "serve", "write_page"]
