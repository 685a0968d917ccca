"""What many clients' results and many rounds come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["best_rounds", "rounds_to_converge", "summarize", "time_to_target"]

_QUANTILES = {"min": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "max": 1.0}


def summarize(
    values: Tensor | Sequence[float], weights: Tensor | Sequence[float] | None = None
) -> dict[str, float | int]:
    r"""The distribution of one result over the clients.

    - ``mean``, and ``weighted_mean`` :math:`\sum_k w_k x_k / \sum_k w_k` (without weights the same);
    - ``variance`` and ``std`` of the population: the clients are all there are, so the divisor is their number;
    - ``min``, ``q05``, ``q25``, ``median``, ``q75``, ``q95``, ``max``: quantiles, linear between two clients;
    - ``lowest5`` and ``top5``: the mean over the lowest and the highest 5 % of the clients, rounded up to whole ones;
    - ``count`` clients that have a value, and ``missing``: the NaN ones (no test data), which are left out of the rest.

    Args:
        values: One a client.
        weights: One a client, not negative, such as the number of test samples.

    Returns:
        A dictionary of floats, NaN where there is no client with a value; ``count`` and ``missing`` are integers.

    Raises:
        ValueError: not one-dimensional, as many weights as values, or a weight below zero.
    """
    x = _vector("values", values)
    w = np.ones_like(x) if weights is None else _vector("weights", weights)
    if w.shape != x.shape:
        raise ValueError(f"summarize needs a weight for each of the {len(x)} values, got {len(w)}")
    if not (w >= 0).all():
        raise ValueError(f"weights must be 0 or more, got {w[~(w >= 0)][0]}")
    present = ~np.isnan(x)
    missing = int(len(x) - present.sum())
    x, w = x[present], w[present]
    if len(x) == 0:
        names = ("mean", "weighted_mean", "std", "variance", *_QUANTILES, "lowest5", "top5")
        return {**dict.fromkeys(names, float("nan")), "count": 0, "missing": missing}

    ordered = np.sort(x)
    tail = -(-len(x) // 20)  # 5 %, rounded up without the rounding of 0.05 * n
    with np.errstate(invalid="ignore", divide="ignore"):  # infinite losses and weights of zero give inf or NaN
        variance = float(x.var())
        return {
            "mean": float(x.mean()),
            "weighted_mean": float((w * x).sum() / w.sum()),
            "std": variance**0.5,
            "variance": variance,
            **dict(zip(_QUANTILES, np.quantile(ordered, list(_QUANTILES.values())).tolist(), strict=True)),
            "lowest5": float(ordered[:tail].mean()),
            "top5": float(ordered[-tail:].mean()),
            "count": len(x),
            "missing": missing,
        }


def _vector(name: str, values: Tensor | Sequence[float]) -> np.ndarray:
    array = np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, one a client; got shape {list(array.shape)}")
    return array


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
