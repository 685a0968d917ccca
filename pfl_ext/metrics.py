"""Accuracy, loss and AUC of one model on one set of samples, and the distribution of such results over clients.

What tables and plots must know of a metric is here too: whether it is shown in per cent, and whether low is good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax

__all__ = [
    "LOWER_IS_BETTER",
    "METRICS",
    "SHARES",
    "classification_metrics",
    "digits_of",
    "mean_metrics",
    "prediction_distance",
    "scale_of",
    "sign_of",
    "summarize",
    "word_of",
]

SHARES = {"accuracy", "auc", "balanced_accuracy", "iou", "macro_f1", "top5"}
"""Metrics between 0 and 1 that are shown in per cent. A task of your own may add its metrics."""

LOWER_IS_BETTER = {"brier", "ece", "loss", "mae", "rmse", "perplexity"}
"""Metrics of which the lowest is the best; of all others it is the highest. A task of your own may add its metrics."""

_QUANTILES = {"min": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "max": 1.0}


def scale_of(metric: str) -> float:
    """What a metric is multiplied by to be shown: shares are shown in per cent."""
    return 100.0 if metric in SHARES else 1.0


def sign_of(metric: str) -> float:
    """What a metric is multiplied by so that higher is better: 1, or -1 where low is good."""
    return -1.0 if metric in LOWER_IS_BETTER else 1.0


def digits_of(metric: str) -> int:
    """Decimals that a metric is shown with: hundredths of a per cent, as fine for any other."""
    return 2 if metric in SHARES else 4


def word_of(metric: str) -> str:
    """What a metric is called in a sentence."""
    return {"auc": "AUC", "mae": "MAE", "rmse": "RMSE", "iou": "IoU", "r2": "R²"}.get(metric, metric)


def prediction_distance(personal: Tensor, other: Tensor) -> float:
    r"""How far two models' predictions are apart: the term of PerAda's Theorem 2,

    .. math:: \frac1n \sum_i \min\{1, \|p(x_i) - g(x_i)\|_1\}

    with probabilities p and g, one row per sample (:meth:`pfl_ext.tasks.Task.probabilities`).
    """
    return float((personal - other).abs().sum(-1).clamp(max=1).mean())


def classification_metrics(logits: Tensor, targets: Tensor) -> dict[str, float]:
    r"""Accuracy, mean loss and macro AUC of a model's outputs.

    With one class per sample (``targets`` of shape [n]):

    - accuracy: the share of samples whose largest logit is the target's;
    - loss: mean cross-entropy, :math:`-\frac1n \sum_i \log p_{i,y_i}` with :math:`p = \mathrm{softmax}(z)`;
    - auc: one-vs-rest over the probabilities, averaged over the classes.

    With several labels a sample (``targets`` of shape [n, labels], zeros and ones): sigmoids instead of the softmax,
    the mean binary cross-entropy, the share of right decisions at probability 0.5, and the mean of the labels' AUC.

    The AUC of a class is the probability that a random positive sample scores above a random negative one, a tie
    counting half. With :math:`r_i` the rank of sample i (ties share the mean of theirs), P positives and N negatives,

    .. math:: \mathrm{AUC} = \frac{\sum_{i \in P} r_i - P (P + 1) / 2}{P N}.

    A class without positives or without negatives has no AUC and is left out of the mean, so clients that hold few
    classes are judged on those.

    Args:
        logits: [n, classes], floating point, on any device. Everything is computed in float64.
        targets: [n] class numbers, or [n, labels] of zeros and ones, of any dtype.

    Returns:
        ``{"accuracy", "loss", "auc"}``; all NaN without samples. The AUC is NaN where no class has one, and where a
        logit is not finite; the loss then is what the formula gives, and a sample with a NaN logit counts as wrong.

    Raises:
        ValueError: shapes that do not fit, a class number out of range, a label that is neither 0 nor 1.
    """
    several = targets.dim() == 2
    expected = logits.shape if several else logits.shape[:1]
    if logits.dim() != 2 or not logits.is_floating_point() or targets.shape != expected:
        raise ValueError(
            "classification_metrics takes floating-point logits [n, classes] with targets [n], or [n, labels] like the "
            f"logits; got logits {logits.dtype} {list(logits.shape)} and targets {targets.dtype} {list(targets.shape)}"
        )
    if len(logits) == 0:
        return {"accuracy": float("nan"), "loss": float("nan"), "auc": float("nan")}

    # In float32 the probabilities of confident samples round to equal ones, which the AUC would take for ties.
    scores = logits.detach().double()
    targets = targets.detach().to(scores.device)
    if not several and len(scores) <= _FEW and scores.device.type == "cpu":
        return _metrics_of_few(scores, targets.long().numpy())
    broken = scores.isnan()
    if several:
        positives = targets == 1
        if not (positives | (targets == 0)).all():
            raise ValueError("the labels of [n, labels] targets must be 0 or 1; leave out samples with unknown labels")
        loss = binary_cross_entropy_with_logits(scores, positives.double())
        right = ((scores > 0) == positives) & ~broken
    else:
        targets = targets.long()
        _check_classes(int(targets.min()), int(targets.max()), logits.shape[1])
        right = (scores.argmax(1) == targets) & ~broken.any(1)
        scores = log_softmax(scores, 1)
        loss = -scores.gather(1, targets[:, None]).mean()
        positives = targets[:, None] == torch.arange(logits.shape[1], device=scores.device)

    auc = float("nan")
    if logits.isfinite().all():
        auc = _macro_auc(scores.T.cpu().numpy(), positives.T.cpu().numpy())
    accuracy, loss_value = torch.stack([right.double().mean(), loss]).tolist()
    return {"accuracy": accuracy, "loss": loss_value, "auc": auc}


def _check_classes(lowest: int, highest: int, classes: int) -> None:
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"targets must be class numbers from 0 to {classes - 1}, as many as the logits have columns; "
            f"got {lowest} to {highest}"
        )


_FEW = 64
"""Up to this number of samples, comparing all with all takes less time than sorting them class by class."""


def _metrics_of_few(logits: Tensor, targets: np.ndarray) -> dict[str, float]:
    """The same for few samples with one class each, in few calls: most of a small client's evaluation is overhead."""
    scores, raw, samples = log_softmax(logits, 1).numpy(), logits.numpy(), np.arange(len(targets))
    _check_classes(int(targets.min()), int(targets.max()), raw.shape[1])
    own = scores[samples, targets]
    right = (raw.argmax(1) == targets) & ~np.isnan(raw).any(1)
    auc = _macro_auc_of_few(scores, own, targets) if np.isfinite(raw).all() else float("nan")
    return {"accuracy": float(right.mean()), "loss": float(-own.mean()), "auc": auc}


def _macro_auc_of_few(scores: np.ndarray, own: np.ndarray, targets: np.ndarray) -> float:
    """As :func:`_macro_auc`, to the bit, by comparing each sample's score of its own class with that of all others."""
    others = scores[:, targets].T  # [i, j]: sample j's score of the class of sample i
    apart = targets[:, None] != targets
    # Twice the pairs that are in the right order, a tie counting half: integers.
    won = ((own[:, None] > others).astype(np.int64) * 2 + (own[:, None] == others)) * apart
    count = np.bincount(targets, minlength=scores.shape[1])
    found = np.bincount(targets, won.sum(1), scores.shape[1])
    pairs = (count * (len(targets) - count)).tolist()
    areas = [twice / (2 * n) for twice, n in zip(found.tolist(), pairs, strict=True) if n]
    return sum(areas) / len(areas) if areas else float("nan")


def mean_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the parts of a test set, such as the corruptions of CIFAR-10-C; nothing without any."""
    if len(parts) == 1:  # to the bit: a sum has no negative zero, a loss may
        return dict(parts[0])
    return {name: sum(part[name] for part in parts) / len(parts) for name in (parts[0] if parts else ())}


def _macro_auc(scores: np.ndarray, positives: np.ndarray) -> float:
    """The mean AUC over the rows of ``scores`` [classes, n] that have positives and negatives; NaN if none has."""
    # NumPy, because it sorts without the indices that torch's sort always makes: an eighth of the time for [10, 5000].
    areas = []
    for score, positive in zip(scores, positives, strict=True):
        p = int(positive.sum())
        pairs = p * (len(score) - p)
        if pairs:
            ordered, found = np.sort(score), np.sort(score[positive])
            # Of equal scores the ranks are below + 1 .. up_to: twice their mean is an integer, so the sum is exact.
            below, up_to = (np.searchsorted(ordered, found, side).sum() for side in ("left", "right"))
            areas.append((int(below + up_to) + p - p * (p + 1)) / (2 * pairs))
    return sum(areas) / len(areas) if areas else float("nan")


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
            **dict(zip(_QUANTILES, _quantiles(ordered, np.array([*_QUANTILES.values()])).tolist(), strict=True)),
            "lowest5": float(ordered[:tail].mean()),
            "top5": float(ordered[-tail:].mean()),
            "count": len(x),
            "missing": missing,
        }


def _quantiles(ordered: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """``np.quantile`` of values in order, to the bit; its first call imports numpy.ma, for 10 ms of a first round."""
    place = shares * (len(ordered) - 1)
    below = place.astype(np.int64)
    t = place - below
    a, b = ordered[below], ordered[np.minimum(below + 1, len(ordered) - 1)]
    return np.where(t < 0.5, a + (b - a) * t, b - (b - a) * (1 - t))


def _vector(name: str, values: Tensor | Sequence[float]) -> np.ndarray:
    array = np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, one a client; got shape {list(array.shape)}")
    return array


# ---- more, for those who ask for them --------------------------------------------------------------------------------


def balanced_accuracy(logits: Tensor, targets: Tensor) -> float:
    """The mean over the classes that occur of the share of their samples that is right."""
    right = (logits.argmax(1) == targets).double()
    return float(torch.stack([right[targets == c].mean() for c in targets.unique()]).mean())


def macro_f1(logits: Tensor, targets: Tensor) -> float:
    r"""The mean over the classes that occur or are predicted of :math:`2 TP / (2 TP + FP + FN)`."""
    said = logits.argmax(1)
    scores = []
    for c in torch.cat([said, targets]).unique():
        both = ((said == c) & (targets == c)).sum().double()
        scores.append(2 * both / ((said == c).sum() + (targets == c).sum()))
    return float(torch.stack(scores).mean())


def top5(logits: Tensor, targets: Tensor) -> float:
    """The share of samples whose class is among the five largest logits."""
    return float((logits.topk(min(5, logits.shape[1]), 1).indices == targets[:, None]).any(1).double().mean())


def brier(logits: Tensor, targets: Tensor) -> float:
    """The mean squared distance of the probabilities from the class that is right."""
    apart = logits.double().softmax(1)
    apart[torch.arange(len(targets), device=targets.device), targets] -= 1
    return float(apart.square().sum(1).mean())


def ece(logits: Tensor, targets: Tensor) -> float:
    """The expected calibration error in 15 equal bins: how far confidence and accuracy are apart in the mean."""
    confidence, said = logits.double().softmax(1).max(1)
    place = (confidence * 15).ceil().long().clamp(1, 15) - 1
    apart = torch.zeros(15, dtype=torch.float64, device=logits.device)
    apart.index_add_(0, place, confidence - (said == targets).double())
    return float(apart.abs().sum() / len(targets))


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    metric.__name__: metric for metric in (balanced_accuracy, macro_f1, top5, brier, ece)
}
"""Of logits [n, classes] and class numbers [n], by name: what ``extra_metrics`` of a task adds."""
