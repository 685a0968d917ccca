"""Metrics, their distribution over clients and rounds, results folders, tables, plots and the progress display."""

from .events import TensorBoard, tensorboard
from .landscape import Surface, draw_landscapes, filter_direction, loss_surface
from .metrics import classification_metrics, mean_metrics, prediction_distance
from .plots import accuracy_curves, client_density, client_distribution, option_curves, timeline
from .progress import Progress
from .results import ResultsError, ResultsFolder, Runs, versions
from .summary import best_rounds, rounds_to_converge, summarize, time_to_target
from .tables import Spread, comparison, per_user, table, tails, transpose

__all__ = [
    "Progress",
    "ResultsError",
    "ResultsFolder",
    "Runs",
    "Spread",
    "Surface",
    "TensorBoard",
    "accuracy_curves",
    "best_rounds",
    "classification_metrics",
    "client_density",
    "client_distribution",
    "comparison",
    "draw_landscapes",
    "filter_direction",
    "loss_surface",
    "mean_metrics",
    "option_curves",
    "per_user",
    "prediction_distance",
    "rounds_to_converge",
    "summarize",
    "table",
    "tails",
    "tensorboard",
    "time_to_target",
    "timeline",
    "transpose",
    "versions",
]
