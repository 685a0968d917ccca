"""A dataset as tensors on one device: indexed in batches, never reloaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cache import cached
from .description import describe
from .nests import Inputs, filled, joined, leaves, mapped, named, shapes
from .placement import placed
from .stacking import as_inputs, pair, scaled, stacked
from .statistics import Statistics, as_statistics, by_name, statistics_of
from .stored import StoredTensor
from .targets import IGNORED, as_targets, class_names

__all__ = ["Dataset"]


def _digest(digest: Any, label: str, tensor: Tensor | StoredTensor | None) -> None:
    """Feed a tensor's dtype, shape and bytes to a hash."""
    if tensor is None:
        digest.update(f"{label}:none;".encode())
        return
    digest.update(f"{label}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
    for part in tensor.parts() if isinstance(tensor, StoredTensor) else (tensor,):
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples, targets, and what is known about each sample.

    Training and test samples share one index space, so that an index names a sample whatever part it came from.

    Args:
        name: for people; files give theirs, without the folder.
        inputs: ``[n, ...]``, uint8 (images: channels, height, width) or floating, or integers (tokens), which stay what
            they are; or a tuple or a dictionary of such, which may hold others: the arguments of the network.
        targets: ``[n]`` int64 class numbers, ``[n, ...]`` int64 for a class of each pixel or token (:data:`IGNORED` for
            none), ``[n, labels]`` uint8 or floating of zeros and ones for multi-label data, ``[n]`` or ``[n, numbers]``
            floating for regression.
        classes: a name for each class or label; none for regression.
        is_test: ``[n]`` bool, the official test part; all False where there is none.
        domain: ``[n]`` int64, where a sample comes from, for feature shift.
        domains: a name for each domain.
        mean, std: a number for each channel ``inputs[:, c]``, in units of ``inputs``; :meth:`batch` applies
            ``(x - mean) / std``. To choose others: ``dataclasses.replace(dataset, mean=..., std=...)``. Of a nest a
            dictionary, of those tensors in it that are to be normalised: ``{"image": tensor}``.
        dtype: of the inputs (and of targets that are no class numbers) that :meth:`batch` returns.
    """

    name: str
    inputs: Any  # Inputs; what most have is a tensor, and need not say so
    targets: Tensor
    classes: tuple[str, ...]
    is_test: Tensor
    domain: Tensor | None = None
    domains: tuple[str, ...] = ()
    mean: Statistics | None = None
    std: Statistics | None = None
    dtype: torch.dtype = torch.float32
    _affine: dict[str, tuple[Tensor, Tensor]] = field(init=False, repr=False)
    """Scale and shift of the tensors that are normalised."""

    def __post_init__(self) -> None:
        """Refuse what does not fit together, before anything is trained on it."""
        n = self._check_inputs()
        _check_finite(self.name, "targets", self.targets)
        for label, tensor in (("targets", self.targets), ("is_test", self.is_test), ("domain", self.domain)):
            if tensor is not None and len(tensor) != n:
                raise ValueError(f"{label} has {len(tensor)} entries for {n} samples")
            if tensor is not None and tensor.device != self.device:
                raise ValueError(f"{label} is on {tensor.device}, the inputs on {self.device}; use to()")
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
        object.__setattr__(self, "_affine", self._normalisation())

    def _check_inputs(self) -> int:
        """Refuse inputs that no batch can be made of; returns how many samples there are."""
        every = list(named(self.inputs))
        if not every:
            raise ValueError("inputs hold no tensor")
        nested = not isinstance(self.inputs, Tensor) and every[0][0] != ""
        for name, leaf in every:
            label = f"inputs {name}".strip()
            if leaf.ndim < 2 - nested or leaf.dtype.is_complex:
                raise ValueError(
                    f"{label} are {leaf.dtype} {tuple(leaf.shape)}; uint8, floating or integer tensors of two or more "
                    "dimensions, [samples, ...], are accepted, in a tuple or a dictionary also [samples]"
                )
            if len(leaf) != len(every[0][1]) or leaf.device != every[0][1].device:
                raise ValueError(
                    f"{label} have {len(leaf)} entries on {leaf.device}, inputs {every[0][0]} {len(every[0][1])} on "
                    f"{every[0][1].device}; all have one for each sample, on one device"
                )
            if isinstance(leaf, Tensor):  # what is in a cache was checked when that was made
                _check_finite(self.name, label, leaf)
        return len(every[0][1])

    def _normalisation(self) -> dict[str, tuple[Tensor, Tensor]]:
        every = dict(named(self.inputs))
        mean, std = (by_name(given) for given in (self.mean, self.std))
        if mean.keys() != std.keys() or not mean.keys() <= every.keys():
            given = [", ".join(map(repr, some)) or "nothing" for some in (mean, std, every)]
            raise ValueError(
                f"mean is of {given[0]}, std of {given[1]}; both of the same of the inputs {given[2]} are accepted"
            )
        return {name: self._scale_and_shift(every[name], mean[name], std[name]) for name in mean}

    def _scale_and_shift(self, leaf: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        if not (leaf.dtype == torch.uint8 or leaf.is_floating_point()) or leaf.ndim < 2:
            raise ValueError(f"{leaf.dtype} {tuple(leaf.shape)} are not normalised: leave mean and std out")
        channels = leaf.shape[1]
        usable = bool(mean.isfinite().all() and std.isfinite().all() and (std > 0).all())
        if mean.shape != (channels,) or std.shape != (channels,) or not usable:
            raise ValueError(
                f"mean {tuple(mean.shape)} and std {tuple(std.shape)}: "
                f"[{channels}] each, finite, and a positive std, are accepted"
            )
        shape = (channels, *[1] * (leaf.ndim - 2))
        precision = torch.float64 if self.dtype == torch.float64 else torch.float32
        inverse = 1 / std.double()
        scale, shift = inverse.reshape(shape), (-mean.double() * inverse).reshape(shape)
        return scale.to(leaf.device, precision), shift.to(leaf.device, precision)

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

    def batch(self, indices: Tensor | Sequence[int]) -> tuple[Any, Tensor]:
        """Normalised inputs and targets of these samples, in this order, on the dataset's device.

        uint8 and floating inputs come in :attr:`dtype`, booleans as they are, other integers as int64.
        """
        if not isinstance(indices, Tensor):
            indices = torch.as_tensor(indices, dtype=torch.int64)
        inputs, targets = self.inputs, self.targets
        if indices.device != targets.device:
            indices = placed(indices, targets.device)
        y = targets.index_select(0, indices)
        if y.dtype is not torch.int64:
            y = y.to(self.dtype)
        if isinstance(inputs, Tensor):
            return self._taken(inputs, indices, self._affine.get("")), y
        every = [self._taken(leaf, indices, self._affine.get(name)) for name, leaf in named(inputs)]
        return filled(inputs, every), y

    def _taken(self, leaf: Tensor, indices: Tensor, affine: tuple[Tensor, Tensor] | None) -> Tensor:
        """These samples of one tensor."""
        x, dtype = leaf.index_select(0, indices), self.dtype
        # A batch of ten is a matter of microseconds: float() costs less than to(), an attribute less than a call.
        kind = x.dtype
        if kind is not torch.uint8 and not kind.is_floating_point:  # what is no quantity: tokens, masks
            return x if kind is torch.bool else x.long()
        x = x.double() if dtype is torch.float64 else x.float()
        if affine is not None:
            x.mul_(affine[0]).add_(affine[1])  # in place, in the copy that indexing made
        return x if x.dtype is dtype else x.to(dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Dataset:
        """The same dataset on another device, with batches of another dtype."""

        def move(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.to(device)

        moved = replace(
            self,
            inputs=mapped(move, self.inputs),
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
            inputs=mapped(lambda leaf: leaf[rows], self.inputs),
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
        if isinstance(self.inputs, (tuple, Mapping)):
            names = ", ".join(name for name, _ in named(self.inputs))
            raise ValueError(f"{self.name!r} has several inputs ({names}): dataclasses.replace says which to normalise")
        return replace(self, mean=torch.tensor(mean, dtype=torch.float32), std=torch.tensor(std, dtype=torch.float32))

    def in_shape_of(self, like: Dataset) -> Dataset:
        """These samples in the shape of another dataset's, normalised as those, on its device.

        Images are scaled to that height and width; grey ones get as many equal channels, colour ones become grey.
        """
        inputs, shape = self.inputs, like.input_shape
        images = isinstance(inputs, Tensor) and self.images and like.images
        if self.input_shape != shape and not images:
            given, wanted = (str(list(x) if isinstance(x, tuple) else x) for x in (self.input_shape, shape))
            raise ValueError(f"samples of the shape {given} cannot be made images {wanted}: only images are scaled")
        kinds = [[leaf.dtype for leaf in leaves(dataset.inputs)] for dataset in (self, like)]
        if kinds[0] != kinds[1]:
            given, accepted = (", ".join(map(str, some)) for some in kinds)
            raise ValueError(f"samples of {self.name!r} are {given}, those of {like.name!r} {accepted}")
        if isinstance(inputs, Tensor) and inputs.shape[1:] != shape:
            inputs = scaled(inputs, shape)
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
        return describe(self)

    def __repr__(self) -> str:
        """One line, without the numbers in it."""
        kinds = [f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape[1:])}" for leaf in leaves(self.inputs)]
        return f"<Dataset {self.name!r}: {len(self)} samples {', '.join(kinds)}, {len(self.classes)} classes>"

    def __len__(self) -> int:
        """The number of samples, test samples included."""
        return len(self.targets)

    @property
    def input_shape(self) -> Any:
        """The shape of one sample, a tuple of numbers; of a nest the same nest of shapes."""
        return shapes(self.inputs)

    @property
    def nbytes(self) -> int:
        """What inputs and targets take in memory: nothing of inputs that are in files."""
        return int(self.targets.nbytes + sum(leaf.nbytes for leaf in leaves(self.inputs) if isinstance(leaf, Tensor)))

    @property
    def images(self) -> bool:
        """Whether a sample is one image: channels, height, width."""
        return not isinstance(self.inputs, (tuple, Mapping)) and self.inputs.ndim == 4

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
        """The device that holds the samples."""
        return self.targets.device

    @property
    def fingerprint(self) -> str:
        """SHA-256 of samples, targets, test part, domains and class names; neither of the name nor of mean and std."""
        if "_fingerprint" not in self.__dict__:
            digest = hashlib.sha256()
            for name, leaf in named(self.inputs):
                _digest(digest, f"inputs/{name}" if name else "inputs", leaf)
            for label in ("targets", "is_test", "domain"):
                _digest(digest, label, getattr(self, label))
            digest.update(repr((self.classes, self.domains)).encode())
            object.__setattr__(self, "_fingerprint", digest.hexdigest())
        return str(self.__dict__["_fingerprint"])

    @staticmethod
    def from_tensors(
        train_x: Any,
        train_y: Any,
        test_x: Any = None,
        test_y: Any = None,
        *,
        name: str = "tensors",
        classes: Sequence[str] | None = None,
        domain: Any = None,
        domains: Sequence[str] = (),
        mean: Any = None,
        std: Any = None,
    ) -> Dataset:
        """A dataset of the user's tensors; a training and, if there is one, a test part.

        Inputs are a tensor or an array, or a tuple or a dictionary of such. Without ``mean`` and ``std``, uint8 inputs
        are normalised by the statistics of the training part and floating ones are left as they are. ``domain`` numbers
        the samples of both parts, training samples first. Without ``classes`` the classes are called "0", "1", ... up
        to the largest target. Floating targets that are not all 0 or 1 are numbers to predict, and have none; of
        targets ``[n, 1]`` that are, say which: ``classes=("label",)`` or ``classes=()``.
        """
        if (test_x is None) != (test_y is None):
            raise ValueError("test_x and test_y come together: one of them is None")
        x, y = as_inputs(train_x), torch.as_tensor(train_y)
        is_test = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        if len(y) == 0:
            raise ValueError("there is no training sample")
        if mean is None and std is None:
            mean, std = statistics_of(x)
        if test_x is not None and test_y is not None:
            other_x, other_y = as_inputs(test_x), torch.as_tensor(test_y)
            kinds = [[(name, leaf.dtype, tuple(leaf.shape[1:])) for name, leaf in named(part)] for part in (x, other_x)]
            if kinds[0] != kinds[1] or other_y.shape[1:] != y.shape[1:]:
                said = ["; ".join(f"{name} {kind} {shape}".strip() for name, kind, shape in some) for some in kinds]
                raise ValueError(
                    f"training samples are {said[0]} with targets {tuple(y.shape[1:])}, test samples {said[1]} with "
                    f"{tuple(other_y.shape[1:])}"
                )
            is_test = torch.cat([is_test, is_test.new_ones(len(other_y))])
            x, y = joined(torch.cat, [x, other_x]), torch.cat([y, other_y])
        y = as_targets(y)
        return Dataset(
            name=name,
            inputs=x,
            targets=y,
            classes=tuple(class_names(y) if classes is None else classes),
            is_test=is_test,
            domain=None if domain is None else torch.as_tensor(domain).to(y.device, torch.int64),
            domains=tuple(domains),
            mean=as_statistics(mean),
            std=as_statistics(std),
        )

    @staticmethod
    def from_torch(
        train: Any,
        test: Any = None,
        *,
        name: str | None = None,
        cache: Path | str | None = None,
        threads: int | None = None,
        **options: Any,
    ) -> Dataset:
        """A dataset of ``torch.utils.data.Dataset``s (anything with ``len`` and items ``(sample, target)``).

        Every item is read once, here; a random transform is therefore applied once, and does not belong there: see
        :mod:`pfl_ext.data.augmentation`. Samples may be tensors, arrays, numbers or PIL images, or tuples and
        dictionaries of them, all of one form.

        Args:
            train, test: the two parts.
            name: by default the class of ``train``.
            cache: a folder for the samples, which then stay in files and are read as they are needed: for data larger
                than memory. They are decoded once; a dataset of the same name, length and first items finds them there
                again. Where anything else changes, name another folder.
            threads: that read items for the cache, as many as there are processors by default.
            options: as in :meth:`from_tensors`; ``classes`` by default those that ``train`` names.
        """
        name = name or type(train).__name__
        if "classes" not in options and isinstance(getattr(train, "classes", None), (list, tuple)):
            options["classes"] = [str(label) for label in train.classes]
        if cache is not None:
            return _from_cache(train, test, name, Path(cache), threads, options)
        train_x, train_y = stacked(train)
        test_x, test_y = (None, None) if test is None else stacked(test)
        return Dataset.from_tensors(train_x, train_y, test_x, test_y, name=name, **options)


def _from_cache(
    train: Any, test: Any, name: str, folder: Path, threads: int | None, options: dict[str, Any]
) -> Dataset:
    """As :meth:`Dataset.from_torch`, the samples of both parts in one cache, training samples first."""
    if not len(train):
        raise ValueError("the torch dataset is empty")
    count = len(train) + (0 if test is None else len(test))

    def read(i: int) -> tuple[Inputs, Tensor]:
        return pair(train[i], i) if i < len(train) else pair(test[i - len(train)], i)

    digest = hashlib.sha256()
    for i in {0, len(train) // 2, len(train) - 1, count - 1}:
        for leaf in leaves(read(i)[0]):
            _digest(digest, str(i), leaf)
    key = [name, type(train).__qualname__, len(train), count, digest.hexdigest()]
    inputs, targets = cached(folder, key, count, read, name=name, threads=threads)
    assert targets is not None
    is_test = torch.arange(count) >= len(train)
    if options.get("mean") is None and options.get("std") is None:
        options["mean"], options["std"] = statistics_of(mapped(lambda leaf: leaf[~is_test], inputs))
    y = as_targets(targets)
    return Dataset(
        name=name,
        inputs=inputs,
        targets=y,
        classes=tuple(class_names(y) if options.get("classes") is None else options["classes"]),
        is_test=is_test,
        domain=None if options.get("domain") is None else torch.as_tensor(options["domain"]).to(torch.int64),
        domains=tuple(options.get("domains", ())),
        mean=as_statistics(options["mean"]),
        std=as_statistics(options["std"]),
    )


def _check_finite(name: str, label: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity: losses and predictions of such samples mean nothing, and nobody would be told."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if bool(torch.stack(torch.aminmax(tensor)).isfinite().all()):  # one pass without a copy; NaN goes through
        return
    bad = (
        torch.cat([(~part.reshape(len(part), -1).isfinite()).any(1) for part in tensor.split(4096)]).nonzero().flatten()
    )
    raise ValueError(
        f"{name!r} has NaN or infinity in the {label} of {len(bad)} of {len(tensor)} samples, the first is sample "
        f"{int(bad[0])}; leave these samples out or give them numbers"
    )


def _check_numbers(label: str, numbers: Tensor, count: int, what: str) -> None:
    if numbers.dtype != torch.int64 or numbers.ndim != 1:
        raise ValueError(f"{label} is {numbers.dtype} {tuple(numbers.shape)}; int64 [samples] is accepted")
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(f"{label} ranges from {int(numbers.min())} to {int(numbers.max())} for {count} {what}")
