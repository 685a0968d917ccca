"""What becomes of a run: its results folder, tables, plots, loss landscapes, the progress display."""

from .beside import beside
from .landscape import Surface, draw_landscapes, filter_direction, loss_surface
from .loading import load_results
from .loggers import LOGGERS, Logger, LoggerFactory, check_loggers, loggers_of, scalars
from .look import COLUMNS, METRIC, STATISTIC, Look
from .panels import lines, scatter
from .plots import accuracy_curves, client_density, client_distribution, option_curves, timeline
from .progress import Progress, shown_values, value_words
from .recorded import recorded
from .results import CONFIG, LOCK, ResultsError, ResultsFolder, Runs, folder_name, lock, read_config, tidy, versions
from .rounds import best_rounds, rounds_to_converge, time_to_target
from .tables import Spread, best_cells, comparison, main_columns, on_terminal, per_user, table, tails, transpose
from .users import partitions, users

__all__ = [
    "COLUMNS",
    "CONFIG",
    "LOCK",
    "LOGGERS",
    "METRIC",
    "STATISTIC",
    "Logger",
    "LoggerFactory",
    "Look",
    "Progress",
    "ResultsError",
    "ResultsFolder",
    "Runs",
    "Spread",
    "Surface",
    "accuracy_curves",
    "beside",
    "best_cells",
    "best_rounds",
    "check_loggers",
    "client_density",
    "client_distribution",
    "comparison",
    "draw_landscapes",
    "filter_direction",
    "folder_name",
    "lines",
    "load_results",
    "lock",
    "loggers_of",
    "loss_surface",
    "main_columns",
    "on_terminal",
    "option_curves",
    "partitions",
    "per_user",
    "read_config",
    "recorded",
    "rounds_to_converge",
    "scalars",
    "scatter",
    "shown_values",
    "table",
    "tails",
    "tidy",
    "time_to_target",
    "timeline",
    "transpose",
    "users",
    "value_words",
    "versions",
]
