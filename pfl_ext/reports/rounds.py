"""What many rounds come to: the last one, the best ones, how soon a target is reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["best_rounds", "rounds_to_converge", "time_to_target"]


def best_rounds(
    history: Sequence[Mapping[str, Any]], metric: str = "accuracy", statistic: str = "mean"
) -> dict[str, dict[str, dict[str, Any] | None]]:
    """The last round, the best one by validation and the best one on test, of each model.

    Only the first two are results. The best on test chose itself by what it reports, so it is an upper bound that shows
    how much the choice by validation lost, and it is kept apart.

    Args:
        history: Round records in order; those without ``models`` were not evaluated and are passed over.
        metric: What decides: the highest, or for ``loss`` the lowest. Between equal rounds the earliest is the best.
        statistic: Of that metric over the clients, a key of `summarize`.

    Returns:
        For each model ``{"last", "best_by_validation", "best_on_test"}``, each ``{"round": r, "test": ...,
        "validation": ..., "global_test": ...}`` as recorded in that round, or None where there is nothing to decide by.
    """
    rounds: dict[str, list[dict[str, Any]]] = {}
    for record in history:
        for model, results in record.get("models", {}).items():
            rounds.setdefault(model, []).append({"round": record["round"], **results})
    sign = -1.0 if metric == "loss" else 1.0

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


def rounds_to_converge(history: Sequence[Mapping[str, Any]], model: str, share: float = 0.99) -> int | None:
    """The first evaluated round whose mean accuracy is at least ``share`` of the highest of all; None without any.

    Judged on validation data, else on test data. PersFL's Table 7 counts rounds without saying by which rule.
    """
    for split in ("validation", "test"):
        judged = [
            (record["round"], value)
            for record in history
            if not np.isnan(
                value := record.get("models", {}).get(model, {}).get(split, {}).get("accuracy", {}).get("mean", np.nan)
            )
        ]
        if judged:
            highest = max(value for _, value in judged)
            return next(int(round) for round, value in judged if value >= share * highest)
    return None


def time_to_target(
    history: Sequence[Mapping[str, Any]], times: Sequence[float], target: float, model: str = "personal"
) -> float | None:
    """The time of the first evaluated round whose accuracy is at least ``target``; None if there is none.

    Args:
        history: Round records in order.
        times: When each of them was over.
        target: Between 0 and 1.
        model: ``"global"`` is judged on the global test set where there is one, any other by the mean over the clients'
            test sets, weighted by their sizes.
    """
    for record, time in zip(history, times, strict=True):
        splits = record.get("models", {}).get(model, {})
        if model == "global" and "global_test" in splits:
            accuracy = splits["global_test"].get("accuracy", np.nan)
        else:
            accuracy = splits.get("test", {}).get("accuracy", {}).get("weighted_mean", np.nan)
        if accuracy >= target:
            return time
    return None
