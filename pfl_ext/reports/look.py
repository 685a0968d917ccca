"""What tables and pictures show: which metric, which mean over the clients, which columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pfl_ext.metrics import digits_of
from pfl_ext.options import Option, OptionError, nearest

from .tables import Style

__all__ = ["COLUMNS", "METRIC", "STATISTIC", "Look"]

METRIC = Option(
    "metric", str | None, None, "the metric that tables and pictures show, such as auc or loss (default: the task's)"
)
STATISTIC = Option(
    "statistic",
    str,
    "mean",
    "how the table averages the clients' results: all alike, or weighted by the sizes of their test sets",
    ("mean", "weighted_mean"),
)
COLUMNS = Option(
    "columns",
    tuple[str, ...] | None,
    None,
    "columns of the printed table, such as 'method,personal: local test' (default: the most important; files have all)",
)
# Every other column is of a model, as in "personal: local test".
_COLUMNS = (
    "method",
    "seeds",
    "rounds",
    "model",
    "clients",
    "variance",
    "lowest 5 %",
    "top 5 %",
    "best by validation",
    "best on test",
    "rounds to 99 %",
    "communicated MB",
    "trained parameters",
    "epsilon",
    "seconds a round",
)


@dataclass(frozen=True)
class Look:
    """How the tables of a run or a comparison look."""

    metric: str | None = None
    """The metric of tables and pictures; None: that of the task."""
    statistic: str = STATISTIC.default
    columns: tuple[str, ...] | None = None
    """None: those that answer which method is best, in the files all."""
    style: Style = "markdown"
    """The style of the printed table."""

    def __post_init__(self) -> None:
        """Refuse columns that no table has, before anything runs."""
        for name in self.columns or ():
            if name not in _COLUMNS and ": " not in name:
                close = nearest(name, (*_COLUMNS, "personal: local test", "global: local test"))
                problem = f"has {name!r}{close}; accepted are {', '.join(_COLUMNS)}, MODEL: local test, ..."
                raise OptionError("", "columns", self.columns, problem)

    @property
    def digits(self) -> int:
        """How many decimals of the metric are shown."""
        return digits_of(self.metric or "accuracy")

    def of(self, metric: str) -> Look:
        """The same with this metric, where none is named."""
        return self if self.metric is not None else replace(self, metric=metric)
