"""What many rounds come to: the last one, the best ones, how soon a target is reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pfl_ext.metrics import sign_of

__all__ = ["best_rounds", "rounds_to_converge", "time_to_target"]


def best_rounds(
    history: Sequence[Mapping[str, Any]], metric: str = "accuracy", statistic: str = "mean"
) -> dict[str, dict[str, dict[str, Any] | None]]:
    """The last round, the best one by validation and the best one on test, of each model.

    Only the first two are results. The best on test chose itself by what it reports, so it is an upper bound that shows
    how much the choice by validation lost, and it is kept apart.

    Args:
        history: Round records in order; those without ``models`` were not evaluated and are passed over.
        metric: What decides: the highest, or the lowest (:func:`pfl_ext.metrics.sign_of`); of equal ones the earliest.
        statistic: Of that metric over the clients, a key of `summarize`.

    Returns:
        For each model ``{"last", "best_by_validation", "best_on_test"}``, each ``{"round": r, "test": ...,
        "validation": ..., "global_test": ...}`` as recorded in that round, or None where there is nothing to decide by.
    """
    rounds: dict[str, list[dict[str, Any]]] = {}
    for record in history:
        for model, results in record.get("models", {}).items():
            rounds.setdefault(model, []).append({"round": record["round"], **results})
    sign = sign_of(metric)

    def best(candidates: list[dict[str, Any]], split: str) -> dict[str, Any] | None:
        judged = [
            (sign * value, entry)
            for entry in candidates
            if not np.isnan(value := entry.get(split, {}).get(metric, {}).get(statistic, np.nan))
        ]
        return max(judged, key=lambda pair: pair[0])[1] if judged else None  # max takes the first of equals

    return {
        model: {
            "last": entries[-1],
            "best_by_validation": best(entries, "validation"),
            "best_on_test": best(entries, "test"),
        }
        for model, entries in rounds.items()
    }


def rounds_to_converge(
    history: Sequence[Mapping[str, Any]], model: str, share: float = 0.99, metric: str = "accuracy"
) -> int | None:
    """The first evaluated round whose mean is within 1 - ``share`` of the best of all; None without any.

    Of the accuracy that is ``share`` of the highest. Judged on validation data, else on test data. PersFL's Table 7
    counts rounds without saying by which rule.
    """
    sign = sign_of(metric)
    for split in ("validation", "test"):
        found = [(record["round"], _mean_of(record, model, split, metric, "mean")) for record in history]
        judged = [(round, sign * value) for round, value in found if not np.isnan(value)]
        if judged:
            best = max(value for _, value in judged)
            return next(int(round) for round, value in judged if value >= best - (1 - share) * abs(best))
    return None


def _mean_of(record: Mapping[str, Any], model: str, split: str, metric: str, statistic: str) -> float:
    """A statistic over the clients, NaN where the round was not evaluated."""
    splits = record.get("models", {}).get(model, {})
    return float(splits.get(split, {}).get(metric, {}).get(statistic, np.nan))


def time_to_target(
    history: Sequence[Mapping[str, Any]],
    times: Sequence[float],
    target: float,
    model: str = "personal",
    metric: str = "accuracy",
) -> float | None:
    """The time of the first evaluated round whose metric is at least as good as ``target``; None if there is none.

    Args:
        history: Round records in order.
        times: When each of them was over.
        target: As the metric is recorded: an accuracy between 0 and 1.
        model: ``"global"`` is judged on the global test set where there is one, any other by the mean over the clients'
            test sets, weighted by their sizes.
        metric: By which; of a loss "as good" is as low.
    """
    sign = sign_of(metric)
    for record, time in zip(history, times, strict=True):
        splits = record.get("models", {}).get(model, {})
        if model == "global" and "global_test" in splits:
            value = splits["global_test"].get(metric, np.nan)
        else:
            value = _mean_of(record, model, "test", metric, "weighted_mean")
        if sign * value >= sign * target:
            return time
    return None
