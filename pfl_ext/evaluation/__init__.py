"""Metrics, their distribution over clients and rounds, results folders, tables, plots and the progress display."""

from .metrics import classification_metrics
from .results import ResultsError, ResultsFolder, Runs, versions
from .summary import best_rounds, summarize

__all__ = [
    "ResultsError",
    "ResultsFolder",
    "Runs",
    "best_rounds",
    "classification_metrics",
    "summarize",
    "versions",
]
