"""What a dataset is, in five lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .nests import leaves, named

__all__ = ["describe"]


def describe(dataset: Any) -> str:
    """Samples, inputs, normalisation, targets and domains of a :class:`~.dataset.Dataset`: a line each."""
    test = int(dataset.is_test.sum())
    parts = f"{len(dataset) - test:,} for training and {test:,} for testing" if test else "no test part"
    inputs = [f"{name} {_kind(leaf)}".strip() for name, leaf in named(dataset.inputs)]
    lines = [
        f"{dataset.name}: {len(dataset):,} samples, {parts}",
        f"inputs: {_some(inputs, '; ')}, {_where(dataset)}",
        f"normalised: {_normalised(dataset)}",
        f"targets: {_targets(dataset)}",
        "domains: none",
    ]
    if dataset.domain is not None:
        counts = torch.bincount(dataset.domain, minlength=len(dataset.domains))
        lines[-1] = f"domains: {len(dataset.domains)}: {_listed(dataset.domains)}; {_range(counts)} samples of each"
    return "\n".join(lines)


def _where(dataset: Any) -> str:
    stored = [leaf for leaf in leaves(dataset.inputs) if not isinstance(leaf, Tensor)]
    if not stored:
        return f"{sum(leaf.nbytes for leaf in leaves(dataset.inputs)) / 1e6:,.1f} MB on {dataset.device}"
    return f"{sum(leaf.nbytes for leaf in stored) / 1e6:,.1f} MB in {stored[0].path.parent}"


def _kind(leaf: Any) -> str:
    kind = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape[1:])}"
    if isinstance(leaf, Tensor) and leaf.numel() and leaf.dtype != torch.bool:
        kind += " from {:g} to {:g}".format(*(float(bound) for bound in torch.aminmax(leaf)))
    return kind


def _normalised(dataset: Any) -> str:
    mean, std = dataset.mean, dataset.std
    if isinstance(mean, Mapping) and isinstance(std, Mapping):
        return f"{', '.join(mean)} by mean and standard deviation of each channel" if mean else "as they are"
    if not isinstance(mean, Tensor) or not isinstance(std, Tensor):
        return "as they are"
    channels = [f"({mean:.4g}, {std:.4g})" for mean, std in zip(mean.tolist(), std.tolist(), strict=True)]
    return f"by (mean, standard deviation) of each channel: {_listed(channels)}"


def _targets(dataset: Any) -> str:
    train, classes = dataset.targets[~dataset.is_test], len(dataset.classes)
    if dataset.multilabel:
        kind, counts = "labels, of which a sample may have several", (train > 0).sum(0)
    elif dataset.one_class:
        kind, counts = "classes", torch.bincount(train, minlength=classes)
    elif classes:
        counts = torch.bincount(train[train >= 0], minlength=classes)
        kind = f"{classes} classes for each of {list(train.shape[1:])}: {_listed(dataset.classes)}"
        return f"{kind}; {_range(counts)} of each in the training samples"
    else:
        each = f"{train.shape[1]} numbers" if train.ndim > 1 else "a number"
        bounds = " from {:g} to {:g}".format(*map(float, torch.aminmax(train))) if train.numel() else ""
        return f"{each} to predict,{bounds} in the training samples"
    return f"{classes} {kind}: {_listed(dataset.classes)}; {_range(counts)} training samples of each"


def _some(names: Sequence[str], between: str = ", ") -> str:
    """The first of them, and the last where some are left out."""
    return between.join(names if len(names) <= 6 else (*names[:4], "...", names[-1]))


def _listed(names: Sequence[str]) -> str:
    """The first names; line ends and the like are written out."""
    shown = names if len(names) <= 6 else (*names[:5], names[-1])
    shown = [repr(name)[1:-1] for name in shown]
    return ", ".join(shown if len(names) <= 6 else (*shown[:4], "...", shown[-1]))


def _range(counts: Tensor) -> str:
    least, most = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
