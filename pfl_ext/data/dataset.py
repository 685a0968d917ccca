"""A dataset as tensors on one device: indexed in batches, never reloaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["CLASSES", "IGNORED", "Dataset", "Inputs", "channel_statistics", "class_names"]

CLASSES = 100_000
"""How many classes there may be: a target beyond is no class number but something else, or damaged."""

IGNORED = -100
"""The target of a pixel or a token that counts nowhere; torch's losses have the same number."""

Inputs: TypeAlias = Tensor | tuple["Inputs", ...] | Mapping[str, "Inputs"]
"""What a network takes: a tensor, a tuple of its arguments, or a dictionary of them by their names."""


def channel_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, ``inputs[:, c]``, in units of ``inputs``.

    A constant channel has the standard deviation 1, so that dividing by it is harmless. For the training images of
    MNIST and CIFAR these are the constants in common use, times 255.
    """
    channels = inputs.transpose(0, 1).flatten(1)
    if inputs.dtype == torch.uint8:
        # Through a histogram: exact, and without a floating-point copy of all images.
        values = torch.arange(256, dtype=torch.float64)
        histogram = torch.stack([torch.bincount(channel, minlength=256) for channel in channels]).double().cpu()
        mean = histogram @ values / channels.shape[1]
        variance = (histogram * (values - mean[:, None]) ** 2).sum(1) / channels.shape[1]
    else:
        variance, mean = torch.var_mean(channels.double(), dim=1, correction=0)
    std = variance.sqrt()
    return mean.float(), torch.where(std > 0, std, 1.0).float()


def class_names(targets: Tensor) -> tuple[str, ...]:
    """ "0", "1", ... up to the largest class number, or one for each label of multi-label targets; none for numbers.

    Raises:
        ValueError: the targets may be either labels or numbers, or are no class numbers.
    """
    if targets.dtype == torch.int64:
        count = int(targets.max()) + 1
    else:
        labels = targets.ndim > 1 and bool(((targets == 0) | (targets == 1)).all())
        if labels and targets.shape[1] == 1:
            raise ValueError(
                f"targets are {targets.dtype} {tuple(targets.shape)}, all 0 or 1: a label or a number to predict? Say "
                "classes=('its name',) for a label, classes=() for a number"
            )
        count = targets.shape[1] if labels else 0
    if count > CLASSES:
        raise ValueError(f"the largest target is {count - 1}; class numbers below {CLASSES:,} are accepted")
    return tuple(map(str, range(count)))


def _digest(digest: Any, label: str, tensor: Tensor | None) -> None:
    """Feed a tensor's dtype, shape and bytes to a hash."""
    if tensor is None:
        digest.update(f"{label}:none;".encode())
        return
    digest.update(f"{label}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples, targets, and what is known about each sample.

    Training and test samples share one index space, so that an index names a sample whatever part it came from.

    Args:
        name: for people; files give theirs, without the folder.
        inputs: ``[n, ...]``, uint8 (images: channels, height, width) or floating.
        targets: ``[n]`` int64 class numbers, ``[n, ...]`` int64 for a class of each pixel or token (:data:`IGNORED` for
            none), ``[n, labels]`` uint8 or floating of zeros and ones for multi-label data, ``[n]`` or ``[n, numbers]``
            floating for regression.
        classes: a name for each class or label; none for regression.
        is_test: ``[n]`` bool, the official test part; all False where there is none.
        domain: ``[n]`` int64, where a sample comes from, for feature shift.
        domains: a name for each domain.
        mean, std: a number for each channel ``inputs[:, c]``, in units of ``inputs``; :meth:`batch` applies
            ``(x - mean) / std``. To choose others: ``dataclasses.replace(dataset, mean=..., std=...)``.
        dtype: of the inputs (and of targets that are no class numbers) that :meth:`batch` returns.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    classes: tuple[str, ...]
    is_test: Tensor
    domain: Tensor | None = None
    domains: tuple[str, ...] = ()
    mean: Tensor | None = None
    std: Tensor | None = None
    dtype: torch.dtype = torch.float32
    _scale: Tensor | None = field(init=False, repr=False)
    _shift: Tensor | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what does not fit together, before anything is trained on it."""
        n = len(self.inputs)
        if self.inputs.ndim < 2 or not (self.inputs.dtype == torch.uint8 or self.inputs.is_floating_point()):
            raise ValueError(
                f"inputs are {self.inputs.dtype} {tuple(self.inputs.shape)}; "
                "uint8 or floating tensors of two or more dimensions, [samples, ...], are accepted"
            )
        _check_finite(self.name, "inputs", self.inputs)
        _check_finite(self.name, "targets", self.targets)
        for label, tensor in (("targets", self.targets), ("is_test", self.is_test), ("domain", self.domain)):
            if tensor is not None and len(tensor) != n:
                raise ValueError(f"{label} has {len(tensor)} entries for {n} samples")
            if tensor is not None and tensor.device != self.inputs.device:
                raise ValueError(f"{label} is on {tensor.device}, the inputs on {self.inputs.device}; use to()")
        if self.is_test.dtype != torch.bool or self.is_test.ndim != 1:
            raise ValueError(f"is_test is {self.is_test.dtype} {tuple(self.is_test.shape)}; bool [{n}] is accepted")
        self._check_targets()
        if self.domain is not None:
            _check_numbers("domain", self.domain, len(self.domains), "domains")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std come together: one of them is None")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {self.dtype}; a floating one is accepted")
        # batch() is called once per training step: what does not depend on the indices is computed here.
        scale = shift = None
        if self.mean is not None and self.std is not None:
            channels = self.inputs.shape[1]
            usable = bool(self.mean.isfinite().all() and self.std.isfinite().all() and (self.std > 0).all())
            if self.mean.shape != (channels,) or self.std.shape != (channels,) or not usable:
                raise ValueError(
                    f"mean {tuple(self.mean.shape)} and std {tuple(self.std.shape)}: "
                    f"[{channels}] each, finite, and a positive std, are accepted"
                )
            shape = (channels, *[1] * (self.inputs.ndim - 2))
            precision = torch.float64 if self.dtype == torch.float64 else torch.float32
            inverse = 1 / self.std.double()
            scale = inverse.reshape(shape).to(self.inputs.device, precision)
            shift = (-self.mean.double() * inverse).reshape(shape).to(self.inputs.device, precision)
        object.__setattr__(self, "_scale", scale)
        object.__setattr__(self, "_shift", shift)

    def _check_targets(self) -> None:
        targets, classes = self.targets, len(self.classes)
        if targets.dtype == torch.int64 and targets.ndim == 1:
            _check_numbers("targets", targets, classes, "classes")
        elif targets.dtype == torch.int64:
            _check_numbers("targets", targets[targets != IGNORED], classes, "classes")
        elif self.multilabel:
            if targets.shape[1:] != (classes,):
                raise ValueError(
                    f"targets are {targets.dtype} {tuple(targets.shape)} for {classes} labels or classes; accepted is "
                    "[samples, labels] for labels, int64 for classes"
                )
        elif not targets.is_floating_point() or targets.ndim > 2:
            raise ValueError(
                f"targets are {targets.dtype} {tuple(targets.shape)} without classes; numbers to predict are floating, "
                "[samples] or [samples, numbers]"
            )

    def batch(self, indices: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        """Normalised inputs and targets of these samples, in this order, on the dataset's device."""
        if not isinstance(indices, Tensor):
            indices = torch.as_tensor(indices, dtype=torch.int64)
        inputs, targets, dtype = self.inputs, self.targets, self.dtype
        if indices.device != inputs.device:
            indices = indices.to(inputs.device)
        x = inputs.index_select(0, indices)
        y = targets.index_select(0, indices)
        # A batch of ten is a matter of microseconds: float() costs less than to(), an attribute less than a call.
        x = x.double() if dtype is torch.float64 else x.float()
        if self._scale is not None and self._shift is not None:
            x.mul_(self._scale).add_(self._shift)  # in place, in the copy that indexing made
        if x.dtype is not dtype:
            x = x.to(dtype)
        return x, y if y.dtype is torch.int64 else y.to(dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Dataset:
        """The same dataset on another device, with batches of another dtype."""

        def move(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.to(device)

        moved = replace(
            self,
            inputs=move(self.inputs),
            targets=move(self.targets),
            is_test=move(self.is_test),
            domain=move(self.domain),
            dtype=dtype or self.dtype,
        )
        if "_fingerprint" in self.__dict__:
            object.__setattr__(moved, "_fingerprint", self.fingerprint)
        return moved

    def subset(self, indices: Tensor) -> Dataset:
        """The same dataset with these samples alone, in this order; they are numbered anew."""
        rows = indices.to(self.device)
        return replace(
            self,
            inputs=self.inputs[rows],
            targets=self.targets[rows],
            is_test=self.is_test[rows],
            domain=None if self.domain is None else self.domain[rows],
        )

    def sample(self, count: int, *, generator: torch.Generator, test: bool = False) -> Dataset:
        """The same dataset with ``count`` of its training samples (or test samples) drawn at random, in their order."""
        part = (self.is_test == test).nonzero().flatten().cpu()
        if not 1 <= count <= len(part):
            raise ValueError(f"{count} of the {len(part)} {'test' if test else 'training'} samples of {self.name!r}")
        chosen = part[torch.randperm(len(part), generator=generator)[:count]]
        others = (self.is_test != test).nonzero().flatten().cpu()
        return self.subset(torch.cat([chosen, others]).sort().values)

    def normalised(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> Dataset:
        """The same dataset with another mean and standard deviation of the channels; itself where both are None."""
        if mean is None and std is None:
            return self
        if mean is None or std is None:
            raise ValueError("mean and std come together: one of them is None")
        return replace(self, mean=torch.tensor(mean, dtype=torch.float32), std=torch.tensor(std, dtype=torch.float32))

    def in_shape_of(self, like: Dataset) -> Dataset:
        """These samples in the shape of another dataset's, normalised as those, on its device.

        Images are scaled to that height and width; grey ones get as many equal channels, colour ones become grey.
        """
        inputs, shape = self.inputs, like.input_shape
        if self.input_shape != shape and (len(self.input_shape) != 3 or len(shape) != 3):
            raise ValueError(f"samples of the shape {list(self.input_shape)} cannot be made images {list(shape)}")
        if inputs.dtype != like.inputs.dtype:
            raise ValueError(f"samples of {self.name!r} are {inputs.dtype}, those of {like.name!r} {like.inputs.dtype}")
        if inputs.shape[1:] != shape:
            inputs = _images_of(inputs, shape)
        return replace(self, inputs=inputs, mean=like.mean, std=like.std).to(like.device, like.dtype)

    def unlabelled(self, like: Dataset) -> Dataset:
        """These samples without their labels, :meth:`in_shape_of` another dataset's."""
        shaped = self.in_shape_of(like)
        n = len(shaped)
        return Dataset(
            name=self.name,
            inputs=shaped.inputs,
            targets=torch.zeros(n, dtype=torch.int64, device=like.device),
            classes=("unlabelled",),
            is_test=torch.zeros(n, dtype=torch.bool, device=like.device),
            mean=like.mean,
            std=like.std,
            dtype=like.dtype,
        )

    def __str__(self) -> str:
        """What it is, in five lines: samples, inputs, normalisation, targets, domains."""
        test = int(self.is_test.sum())
        parts = f"{len(self) - test:,} for training and {test:,} for testing" if test else "no test part"
        inputs = f"{str(self.inputs.dtype).removeprefix('torch.')} {list(self.input_shape)}"
        if self.inputs.numel():
            inputs += " from {:g} to {:g}".format(*(float(bound) for bound in torch.aminmax(self.inputs)))
        normalised = "as they are"
        if self.mean is not None and self.std is not None:
            channels = [
                f"({mean:.4g}, {std:.4g})" for mean, std in zip(self.mean.tolist(), self.std.tolist(), strict=True)
            ]
            normalised = f"by (mean, standard deviation) of each channel: {_listed(channels)}"
        train = self.targets[~self.is_test]
        if self.multilabel:
            counts, kind = (train > 0).sum(0), "labels, of which a sample may have several"
        else:
            counts, kind = torch.bincount(train, minlength=len(self.classes)), "classes"
        lines = [
            f"{self.name}: {len(self):,} samples, {parts}",
            f"inputs: {inputs}, {self.inputs.nbytes / 1e6:,.1f} MB on {self.device}",
            f"normalised: {normalised}",
            f"targets: {len(self.classes)} {kind}: {_listed(self.classes)}; {_range(counts)} training samples of each",
            "domains: none",
        ]
        if self.domain is not None:
            counts = torch.bincount(self.domain, minlength=len(self.domains))
            lines[-1] = f"domains: {len(self.domains)}: {_listed(self.domains)}; {_range(counts)} samples of each"
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line, without the numbers in it."""
        shape = f"{str(self.inputs.dtype).removeprefix('torch.')} {list(self.input_shape)}"
        return f"<Dataset {self.name!r}: {len(self)} samples {shape}, {len(self.classes)} classes>"

    def __len__(self) -> int:
        """The number of samples, test samples included."""
        return len(self.inputs)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.inputs.shape[1:])

    @property
    def multilabel(self) -> bool:
        """Whether a sample may have several labels, or none."""
        return self.targets.dtype != torch.int64 and bool(self.classes)

    @property
    def one_class(self) -> bool:
        """Whether every sample has one class."""
        return self.targets.dtype == torch.int64 and self.targets.ndim == 1

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.inputs.device

    @property
    def fingerprint(self) -> str:
        """SHA-256 of samples, targets, test part, domains and class names; neither of the name nor of mean and std."""
        if "_fingerprint" not in self.__dict__:
            digest = hashlib.sha256()
            for label in ("inputs", "targets", "is_test", "domain"):
                _digest(digest, label, getattr(self, label))
            digest.update(repr((self.classes, self.domains)).encode())
            object.__setattr__(self, "_fingerprint", digest.hexdigest())
        return str(self.__dict__["_fingerprint"])

    @staticmethod
    def from_tensors(
        train_x: Tensor | np.ndarray,
        train_y: Tensor | np.ndarray,
        test_x: Tensor | np.ndarray | None = None,
        test_y: Tensor | np.ndarray | None = None,
        *,
        name: str = "tensors",
        classes: Sequence[str] | None = None,
        domain: Tensor | np.ndarray | None = None,
        domains: Sequence[str] = (),
        mean: Tensor | Sequence[float] | None = None,
        std: Tensor | Sequence[float] | None = None,
    ) -> Dataset:
        """A dataset of the user's tensors; a training and, if there is one, a test part.

        Without ``mean`` and ``std``, uint8 inputs are normalised by the statistics of the training part and floating
        ones are left as they are. ``domain`` numbers the samples of both parts, training samples first. Without
        ``classes`` the classes are called "0", "1", ... up to the largest target. Floating targets that are not all 0
        or 1 are numbers to predict, and have none; of targets ``[n, 1]`` that are, say which: ``classes=("label",)`` or
        ``classes=()``.
        """
        if (test_x is None) != (test_y is None):
            raise ValueError("test_x and test_y come together: one of them is None")
        x, y = torch.as_tensor(train_x), torch.as_tensor(train_y)
        is_test = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        if len(x) == 0:
            raise ValueError("there is no training sample")
        if mean is None and std is None and x.dtype == torch.uint8:
            mean, std = channel_statistics(x)
        if test_x is not None and test_y is not None:
            other_x, other_y = torch.as_tensor(test_x), torch.as_tensor(test_y)
            if other_x.dtype != x.dtype or other_x.shape[1:] != x.shape[1:] or other_y.shape[1:] != y.shape[1:]:
                raise ValueError(
                    f"training samples are {x.dtype} {tuple(x.shape[1:])} with targets {tuple(y.shape[1:])}, "
                    f"test samples {other_x.dtype} {tuple(other_x.shape[1:])} with {tuple(other_y.shape[1:])}"
                )
            is_test = torch.cat([is_test, is_test.new_ones(len(other_x))])
            x, y = torch.cat([x, other_x]), torch.cat([y, other_y])
        if not y.is_floating_point() and (y.ndim == 1 or y.dtype not in (torch.uint8, torch.bool)):
            y = y.to(torch.int64)
        if classes is None:
            classes = class_names(y)
        return Dataset(
            name=name,
            inputs=x,
            targets=y,
            classes=tuple(classes),
            is_test=is_test,
            domain=None if domain is None else torch.as_tensor(domain).to(x.device, torch.int64),
            domains=tuple(domains),
            mean=None if mean is None else torch.as_tensor(mean, dtype=torch.float32),
            std=None if std is None else torch.as_tensor(std, dtype=torch.float32),
        )

    @staticmethod
    def from_torch(train: Any, test: Any = None, *, name: str | None = None, **options: Any) -> Dataset:
        """A dataset of ``torch.utils.data.Dataset``s (anything with ``len`` and items ``(sample, target)``).

        Every item is read once, here; a random transform is therefore applied once, and does not belong there: see
        :mod:`pfl_ext.data.augmentation`. Samples may be tensors, arrays or PIL images, all of one shape.

        Args:
            train, test: the two parts.
            name: by default the class of ``train``.
            options: as in :meth:`from_tensors`; ``classes`` by default those that ``train`` names.
        """
        train_x, train_y = _stack(train)
        test_x, test_y = (None, None) if test is None else _stack(test)
        if "classes" not in options and isinstance(getattr(train, "classes", None), (list, tuple)):
            options["classes"] = [str(label) for label in train.classes]
        return Dataset.from_tensors(train_x, train_y, test_x, test_y, name=name or type(train).__name__, **options)


def _listed(names: Sequence[str]) -> str:
    """The first names, and the last where some are left out; line ends and the like are written out."""
    shown = [repr(name)[1:-1] for name in (names if len(names) <= 6 else (*names[:4], names[-1]))]
    return ", ".join(shown if len(names) <= 6 else (*shown[:4], "...", shown[4]))


def _range(counts: Tensor) -> str:
    least, most = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _check_finite(name: str, label: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity: losses and predictions of such samples mean nothing, and nobody would be told."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if bool(torch.stack(torch.aminmax(tensor)).isfinite().all()):  # one pass without a copy; NaN goes through
        return
    bad = torch.cat([(~part.flatten(1).isfinite()).any(1) for part in tensor.split(4096)]).nonzero().flatten()
    raise ValueError(
        f"{name!r} has NaN or infinity in the {label} of {len(bad)} of {len(tensor)} samples, the first is sample "
        f"{int(bad[0])}; leave these samples out or give them numbers"
    )


def _check_numbers(label: str, numbers: Tensor, count: int, what: str) -> None:
    if numbers.dtype != torch.int64 or numbers.ndim != 1:
        raise ValueError(f"{label} is {numbers.dtype} {tuple(numbers.shape)}; int64 [samples] is accepted")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(f"{label} ranges from {int(numbers.min())} to {int(numbers.max())} for {count} {what}")


def _images_of(inputs: Tensor, shape: Sequence[int]) -> Tensor:
    """Images [n, channels, height, width] of another shape, in their own type."""
    parts = []
    for part in inputs.split(4096):  # a floating-point copy of all images would be large
        x = part.float()
        if x.shape[1] != shape[0]:
            x = x.mean(1, keepdim=True).expand(-1, shape[0], -1, -1)
        if x.shape[2:] != tuple(shape[1:]):
            size = (shape[1], shape[2])
            x = torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
        parts.append(x.round().clamp(0, 255).to(torch.uint8) if inputs.dtype == torch.uint8 else x.to(inputs.dtype))
    return torch.cat(parts)


def _as_tensor(sample: Any) -> Tensor:
    if isinstance(sample, Tensor):
        return sample
    array = np.asarray(sample)
    if array.dtype == np.uint8 and array.ndim in (2, 3) and not isinstance(sample, np.ndarray):
        # A PIL image: height, width and, for colour, channels last.
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(np.array(array, order="C"))


def _stack(items: Iterable[Any] | Sized) -> tuple[Tensor, Tensor]:
    if not len(items):  # type: ignore[arg-type]
        raise ValueError("the torch dataset is empty")
    samples, targets = [], []
    for i in range(len(items)):  # type: ignore[arg-type]
        sample, target = items[i]  # type: ignore[index]
        samples.append(_as_tensor(sample))
        targets.append(torch.as_tensor(target))
        if samples[i].shape != samples[0].shape or samples[i].dtype != samples[0].dtype:
            raise ValueError(
                f"sample {i} is {samples[i].dtype} {tuple(samples[i].shape)}, sample 0 "
                f"{samples[0].dtype} {tuple(samples[0].shape)}; samples of one shape and dtype are accepted"
            )
    return torch.stack(samples), torch.stack(targets)
