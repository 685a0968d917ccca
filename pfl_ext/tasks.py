"""Tasks: what is learned. A task says which loss is trained, which metrics are reported and what a prediction is.

=====================  ===============================  ==============================  ================================
task                   outputs of the network           targets                         metrics
=====================  ===============================  ==============================  ================================
`classification`       [n, classes]                     int64 [n]                       accuracy, loss, auc
`multi-label`          [n, labels]                      0 or 1, [n, labels]             accuracy, loss, auc
`regression`           as the targets                   floating [n] or [n, numbers]    loss, mae, rmse, r2
`pixels`               [n, classes, height, width]      int64 [n, height, width]        accuracy, iou, loss
`next-token`           [n, length, vocabulary]          int64 [n, length]               accuracy, perplexity, loss
=====================  ===============================  ==============================  ================================

A target of -100 in ``pixels`` and ``next-token`` counts nowhere: a border, a padding. A network may return its outputs
as a tensor, as the first of a tuple, or as ``"logits"`` of a dictionary.

A task of your own is a subclass of :class:`Task` with a ``loss``::

    @dataclass(frozen=True)
    class Quantile(Task):
        name = "quantile"

        q: float = option(0.9, "which quantile")

        def loss(self, outputs, targets):
            apart = targets - outputs
            return torch.maximum(self.q * apart, (self.q - 1) * apart).mean()
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.data import IGNORED, Dataset
from pfl_ext.metrics import METRICS, classification_metrics, sign_of
from pfl_ext.options import Options, option

__all__ = ["TASKS", "Classification", "MultiLabel", "NextToken", "Pixels", "Regression", "Task", "outputs", "task_of"]


def outputs(returned: Any) -> Tensor:
    """The outputs in what a network returned: a tensor, the first of a tuple, ``"logits"`` of a dictionary.

    Raises:
        TypeError: it returned something else.
    """
    if isinstance(returned, Tensor):
        return returned
    found = returned.get("logits") if isinstance(returned, Mapping) else None
    if isinstance(returned, tuple) and returned:
        found = returned[0]
    if not isinstance(found, Tensor):
        kind = f"a {type(returned).__name__}"
        if isinstance(returned, Mapping):
            kind = f"a dictionary of {', '.join(map(str, returned)) or 'nothing'}"
        raise TypeError(
            f"the network returned {kind}; accepted is a tensor, a tuple that begins with one, or a dictionary with "
            "one under 'logits'"
        )
    return found


@dataclass(frozen=True)
class Task(Options, abc.ABC):
    """What is learned. Only :meth:`loss` must be written; its mean is the metric of a task that names no others."""

    name: ClassVar[str]
    """What the task is called on the command line."""

    metric: ClassVar[str] = "loss"
    """The metric that tables show unless they are asked for another."""

    has_logits: ClassVar[bool] = False
    """Whether outputs are logits of classes, which can be distilled (see :meth:`rows`)."""

    one_class: ClassVar[bool] = False
    """Whether each sample has one class, as methods need that count samples by class."""

    extra_metrics: tuple[str, ...] = option(
        (),
        f"more metrics of samples with classes: {', '.join(METRICS)}; in Python also functions",
        identity=False,
        kw_only=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [metric for metric in self.extra_metrics if not callable(metric)]
        self.check("extra_metrics", set(names) <= METRICS.keys(), f"of {', '.join(METRICS)}")
        whole = type(self).reduce is Task.reduce
        self.check("extra_metrics", whole or not self.extra_metrics, f"of () for {self.name}, which keeps no outputs")

    def measured(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """:meth:`metrics` and the extra ones, NaN where there is no sample."""
        found = self.metrics(outputs, targets)
        for metric in self.extra_metrics:
            compute = metric if callable(metric) else METRICS[metric]
            found[getattr(compute, "__name__", str(metric))] = (
                float(compute(outputs, targets)) if len(targets) else math.nan
            )
        return found

    @abc.abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, which is trained."""

    def reduce(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`metrics` needs of a batch, a row for each sample: outputs and targets, unless these are large."""
        return outputs, targets

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The metrics of a set of samples, of what :meth:`reduce` gave for its batches, one below the other."""
        return {"loss": float(self.loss(outputs, targets)) if len(outputs) else math.nan}

    def is_better(self, one: float, other: float) -> bool:
        """Whether one value of :attr:`metric` is better than another; NaN is worse than any."""
        if math.isnan(other):
            return not math.isnan(one)
        return sign_of(self.metric) * one > sign_of(self.metric) * other

    def rows(self, outputs: Tensor) -> Tensor:
        """Logits as a matrix with a row for everything that has a class: a sample, a pixel, a token."""
        return outputs

    def probabilities(self, outputs: Tensor) -> Tensor:
        """What the outputs mean; for tasks without logits the outputs themselves."""
        return outputs

    def predictions(self, outputs: Tensor) -> Tensor:
        """What the network says of each sample, in the form of the targets."""
        return outputs

    def check_batch(self, dataset: Dataset, outputs: Tensor, targets: Tensor) -> None:
        """Refuse a network or targets that do not fit, before anything is trained.

        Args:
            dataset: all samples.
            outputs, targets: of a few of them, by the network as it is.

        Raises:
            ValueError: the message says what the task takes.
        """

    def _check_shapes(self, outputs: Tensor, targets: Tensor, fits: bool, accepted: str) -> None:
        if not fits:
            raise ValueError(
                f"the task {self.name} takes {accepted}; the network gives {_kind(outputs)} for targets "
                f"{_kind(targets)}"
            )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@dataclass(frozen=True)
class Classification(Task):
    """One class a sample, by the cross-entropy of a softmax."""

    name = "classification"
    metric = "accuracy"
    has_logits = one_class = True

    label_smoothing: float = option(0.0, "weight of the uniform distribution in the targets that are trained")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("label_smoothing", 0 <= self.label_smoothing < 1, "from 0 to below 1")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the samples."""
        return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Accuracy, cross-entropy without smoothing, macro AUC."""
        return classification_metrics(outputs, targets)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The softmax of the outputs."""
        return F.softmax(outputs, -1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The class of the largest logit."""
        return outputs.argmax(-1)

    def check_batch(self, dataset: Dataset, outputs: Tensor, targets: Tensor) -> None:
        """Logits [n, classes] for class numbers [n]."""
        whole = targets.dtype == torch.int64 and targets.dim() == 1
        fits = whole and outputs.dim() == 2 and outputs.is_floating_point() and len(outputs) == len(targets)
        self._check_shapes(outputs, targets, fits, "floating logits [n, classes] for targets int64 [n]")
        _check_classes(dataset, outputs.shape[1])


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any number of labels a sample, by the mean binary cross-entropy of sigmoids."""

    name = "multi-label"
    metric = "accuracy"
    has_logits = True

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean binary cross-entropy over samples and labels."""
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Share of right decisions, binary cross-entropy, mean AUC of the labels."""
        return classification_metrics(outputs, targets)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The sigmoid of each label."""
        return outputs.sigmoid()

    def predictions(self, outputs: Tensor) -> Tensor:
        """Which labels are more likely than not."""
        return (outputs > 0).to(torch.uint8)

    def check_batch(self, dataset: Dataset, outputs: Tensor, targets: Tensor) -> None:
        """Logits and labels of one shape."""
        fits = targets.dim() == 2 and outputs.shape == targets.shape and outputs.is_floating_point()
        self._check_shapes(outputs, targets, fits, "floating logits [n, labels] for targets of the same shape")


@dataclass(frozen=True)
class Regression(Task):
    r"""Numbers, by the mean squared error or another distance.

    The metrics: the trained ``loss``, the mean absolute error ``mae``, the root of the mean squared error ``rmse``, and
    ``r2`` :math:`= 1 - \sum (y - \hat y)^2 / \sum (y - \bar y)^2` (of several numbers a sample the mean over them).
    """

    name = "regression"

    distance: str = option(
        "squared",
        "what is trained; huber is squared within 1, then linear",
        choices=("squared", "absolute", "huber"),
    )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean distance from the targets, as the option ``distance`` has it."""
        found, y = outputs.view(targets.shape), targets.to(outputs.dtype)
        if self.distance == "squared":
            return F.mse_loss(found, y)
        return F.l1_loss(found, y) if self.distance == "absolute" else F.huber_loss(found, y)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Loss, mae, rmse and r2, in float64."""
        if not len(targets):
            return dict.fromkeys(("loss", "mae", "rmse", "r2"), math.nan)
        found, y = outputs.double().view(targets.shape), targets.double()
        apart, around = ((y - x).square() for x in (found, y.mean(0, keepdim=True)))
        spread = around.sum(0)
        r2 = torch.where(spread > 0, 1 - apart.sum(0) / spread, math.nan)
        values = torch.stack([self.loss(found, y), (y - found).abs().mean(), apart.mean().sqrt(), r2.mean()])
        return dict(zip(("loss", "mae", "rmse", "r2"), values.tolist(), strict=True))

    def check_batch(self, dataset: Dataset, outputs: Tensor, targets: Tensor) -> None:
        """A number for each number."""
        fits = outputs.is_floating_point() and targets.is_floating_point()
        fits = fits and (outputs.shape == targets.shape or outputs.shape == (*targets.shape, 1))
        self._check_shapes(outputs, targets, fits, "floating outputs of the shape of floating targets")


@dataclass(frozen=True)
class Pixels(Task):
    """A class for each pixel, by the mean cross-entropy over all pixels that have one."""

    name = "pixels"
    metric = "iou"
    has_logits = True

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the pixels that count."""
        return F.cross_entropy(outputs, targets, ignore_index=IGNORED)

    def reduce(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """For each sample which class was taken for which, [n, classes * classes], and the sum of its losses."""
        classes, n = outputs.shape[1], len(outputs)
        counts = targets != IGNORED
        sample = torch.arange(n, device=targets.device).view(-1, 1, 1).expand_as(targets)
        cell = (sample * classes + targets.clamp(min=0)) * classes + outputs.argmax(1)
        confusion = torch.bincount(cell[counts], minlength=n * classes * classes).view(n, -1)
        losses = F.cross_entropy(outputs.double(), targets, ignore_index=IGNORED, reduction="none")
        return confusion, losses.flatten(1).sum(1)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Share of right pixels, mean intersection over union of the classes that occur, cross-entropy."""
        table = outputs.sum(0).double()
        table = table.view(math.isqrt(len(table)), -1)
        both, either = table.diagonal(), table.sum(0) + table.sum(1) - table.diagonal()
        iou, pixels = (both / either)[either > 0].mean(), table.sum()
        values = torch.stack([both.sum() / pixels, iou, targets.sum() / pixels])
        return dict(zip(("accuracy", "iou", "loss"), values.tolist(), strict=True))

    def rows(self, outputs: Tensor) -> Tensor:
        """A row for each pixel."""
        return outputs.movedim(1, -1).reshape(-1, outputs.shape[1])

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The softmax over the classes."""
        return F.softmax(outputs, 1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The class of each pixel's largest logit."""
        return outputs.argmax(1)

    def check_batch(self, dataset: Dataset, outputs: Tensor, targets: Tensor) -> None:
        """Logits [n, classes, height, width] for class numbers [n, height, width]."""
        fits = (
            targets.dtype == torch.int64 and targets.dim() == 3 and outputs.is_floating_point() and outputs.dim() == 4
        )
        fits = fits and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)
        accepted = "floating logits [n, classes, height, width] for targets int64 [n, height, width]"
        self._check_shapes(outputs, targets, fits, accepted)
        _check_classes(dataset, outputs.shape[1])


@dataclass(frozen=True)
class NextToken(Task):
    """The next token at each place of a text, by the mean cross-entropy over all places that count."""

    name = "next-token"
    metric = "accuracy"
    has_logits = True

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the tokens that count."""
        return F.cross_entropy(self.rows(outputs), targets.flatten(), ignore_index=IGNORED)

    def reduce(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """For each sample how many tokens are right and the sum of their losses; and how many count."""
        losses = F.cross_entropy(self.rows(outputs).double(), targets.flatten(), ignore_index=IGNORED, reduction="none")
        right = (outputs.argmax(-1) == targets).sum(1).double()
        return torch.stack([right, losses.view(targets.shape).sum(1)], 1), (targets != IGNORED).sum(1)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Share of right tokens, perplexity (the exponential of the loss), cross-entropy."""
        accuracy, loss = (outputs.sum(0) / targets.sum()).tolist()
        return {"accuracy": accuracy, "perplexity": math.exp(loss) if loss < 700 else math.inf, "loss": loss}

    def rows(self, outputs: Tensor) -> Tensor:
        """A row for each token."""
        return outputs.flatten(0, -2)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """The softmax over the vocabulary."""
        return F.softmax(outputs, -1)

    def predictions(self, outputs: Tensor) -> Tensor:
        """The most likely token at each place."""
        return outputs.argmax(-1)

    def check_batch(self, dataset: Dataset, outputs: Tensor, targets: Tensor) -> None:
        """Logits [n, length, vocabulary] for token numbers [n, length]."""
        fits = targets.dtype == torch.int64 and targets.dim() == 2 and outputs.is_floating_point()
        fits = fits and outputs.dim() == 3 and outputs.shape[:2] == targets.shape
        accepted = "floating logits [n, length, vocabulary] for targets int64 [n, length]"
        self._check_shapes(outputs, targets, fits, accepted)
        _check_classes(dataset, outputs.shape[2])


def _check_classes(dataset: Dataset, columns: int) -> None:
    if columns < len(dataset.classes):
        raise ValueError(
            f"the network has outputs for {columns} classes, and {dataset.name!r} has {len(dataset.classes)}; build it "
            f"with {len(dataset.classes)}"
        )


TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, MultiLabel, Regression, Pixels, NextToken)}
"""The tasks by their names."""


def task_of(dataset: Dataset) -> Task:
    """The task that a dataset's targets are for, where they leave no choice.

    Raises:
        ValueError: no task has such targets.
    """
    if dataset.targets.dtype != torch.int64:
        return MultiLabel() if dataset.classes else Regression()
    known = {1: Classification, 2: NextToken, 3: Pixels}
    if dataset.targets.dim() not in known:
        raise ValueError(
            f"the targets of {dataset.name!r} are {_kind(dataset.targets)}, for which there is no task here: give one "
            "of your own"
        )
    return known[dataset.targets.dim()]()
