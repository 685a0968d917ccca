"""What a method sees of a client during its turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.data import AUGMENTATIONS, Dataset, Partition

from .model import WorkingModel
from .privacy import Privacy, sampling
from .store import ClientStore
from .streams import stream

__all__ = ["Batch", "Client", "classification_loss"]

_EVALUATION_BATCH = 128  # samples a forward pass takes when nothing is trained; fixed, as the last bits depend on it
_FETCHED_AHEAD = 256  # samples that are fetched together: one by one, batches of ten take longer to fetch than to copy


class Batch(NamedTuple):
    """A mini-batch of a client's training data."""

    inputs: Tensor
    targets: Tensor
    rows: Tensor
    """Where the samples stand in ``client.train``, for what is kept for each of them (a teacher's logits)."""


def classification_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy; for multi-label targets [n, labels] the mean binary one."""
    if targets.dim() == 2:
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))
    return F.cross_entropy(logits, targets)


class Client:
    """One client's data, its kept vectors, its random streams, and the working model.

    ``client["personal"]`` is a vector the client keeps between rounds, as it was when the turn began or as the method
    has set it since. What a method sets is kept when its turn ends without an error, and not before.

    Attributes:
        index: the client's number.
        round: the round, from 1.
        model: the working model. It holds whatever the last client left: load a state first.
        train, validation, test: indices of the client's samples.
        report: numbers that the method reports of this turn, for the tables of the run (such as ``"loss"``).
        part: ``"generic"`` up to the upload, ``"personal"`` beside it.
        trained: for each part how many samples :meth:`batches` has given, for the clock.
        privacy: the options of differential privacy, None without.
    """

    def __init__(
        self,
        index: int,
        round: int,
        model: WorkingModel,
        dataset: Dataset,
        partition: Partition,
        store: ClientStore,
        seed: int,
        augmentation: str = "none",
        privacy: Privacy | None = None,
        drop_last: bool = False,
    ) -> None:
        """Made by the engine."""
        self.privacy, self._drop_last = privacy, drop_last
        self.index, self.round, self.model = index, round, model
        self.train = partition.train[index]
        self.validation = partition.validation[index]
        self.test = partition.test[index]
        self.report: dict[str, float] = {}
        self.part = "generic"
        self.trained = {"generic": 0, "personal": 0}
        self._most_steps: int | None = None
        self._most_samples: int | None = None
        self._dataset, self._store, self._seed = dataset, store, seed
        self._augment = AUGMENTATIONS[augmentation] if augmentation != "none" else None
        self._set: dict[str, Tensor] = {}

    @property
    def samples(self) -> int:
        """n_k, how many training samples the client has."""
        return len(self.train)

    def __getitem__(self, name: str) -> Tensor:
        """A kept vector: not to be changed in place."""
        return self._set[name] if name in self._set else self._store.read(self.index, name)

    def __setitem__(self, name: str, vector: Tensor) -> None:
        """Keep ``vector`` under a name that the method's ``client_state`` has."""
        if name not in self._store.initial:
            raise KeyError(f"{name} is not in client_state, which has: {', '.join(self._store.names) or 'nothing'}")
        self._set[name] = vector

    def __contains__(self, name: object) -> bool:
        """Whether the client has set that vector in this turn or before, rather than having the common initial one."""
        known = isinstance(name, str) and name in self._store.initial
        return name in self._set or (known and self._store.written(self.index, str(name)))

    def commit(self) -> None:
        """Keep what was set (the engine does this at the end of a turn)."""
        for name, vector in self._set.items():
            self._store.write(self.index, name, vector)
        self._set.clear()

    def label_counts(self) -> Tensor:
        """How many training samples the client has of each class."""
        if self._dataset.multilabel:
            raise ValueError(f"{self._dataset.name} has several labels a sample; one class each is accepted here")
        return torch.bincount(self._dataset.targets[self.train], minlength=len(self._dataset.classes))

    def stream(self, name: str) -> torch.Generator:
        """A random stream of this client in this round, at its beginning."""
        return stream(self._seed, name, self.round, self.index)

    def begin_personal(self, most_steps: int | None = None, samples: int | None = None) -> None:
        """The upload is on its way (the engine says so); from now on what is trained is the client's own.

        Args:
            most_steps: an end to the personal steps of this turn.
            samples: as many as are trained on until the new model arrives, in place of the epochs or steps asked for.
        """
        self.part = "personal"
        self._most_steps, self._most_samples = most_steps, samples

    def _goes_on(self, samples: int) -> bool:
        """Whether a batch of so many samples fits into the turn, and count it if it does."""
        if self._most_samples is not None and self.trained["personal"] + samples > self._most_samples:
            return False
        if self._most_steps is not None:
            if self._most_steps == 0:
                return False
            self._most_steps -= 1
        self.trained[self.part] += samples
        return True

    def batches(
        self, batch_size: int, *, epochs: int = 1, steps: int | None = None, name: str = "batches"
    ) -> Iterator[Batch]:
        """Shuffled mini-batches of the training data: ``epochs`` passes over it, or ``steps`` batches.

        The stream ``name`` decides the order, so two models that are to see different batches ask for different
        streams, and two methods that ask for the same one see the same batches. The last batch of a pass may be
        smaller; if it is a single sample, which batch normalisation cannot take, it is left out for a network that
        has such layers (unless it is the whole pass). With the setting ``drop_last`` every smaller one is left out.
        """
        order, augmentation = self.stream(name), self.stream(f"{name}/augmentation")
        skip_single = self.model.has_batch_norm and self.samples > 1
        taken, passes = 0, 0
        until_arrival = self._most_samples is not None
        while until_arrival or (passes < epochs if steps is None else taken < steps):
            passes += 1
            ahead = max(1, _FETCHED_AHEAD // batch_size)
            if steps is not None and not until_arrival:
                ahead = min(ahead, steps - taken)
            for fetched in torch.randperm(self.samples, generator=order).split(ahead * batch_size):
                several = (fetched, *self._dataset.batch(self.train[fetched]))
                for rows, inputs, targets in zip(*(part.split(batch_size) for part in several), strict=True):
                    if skip_single and len(rows) == 1 and batch_size > 1:
                        continue
                    if self._drop_last and len(rows) < min(batch_size, self.samples):
                        continue
                    if not self._goes_on(len(rows)):
                        return
                    if self._augment is not None:
                        inputs = self._augment(inputs, augmentation)
                    taken += 1
                    yield Batch(inputs, targets, rows)
                    if taken == steps and not until_arrival:
                        return

    def poisson_batches(
        self, batch_size: int, *, epochs: int = 1, steps: int | None = None, name: str = "batches"
    ) -> Iterator[Batch]:
        """Batches that hold each training sample with the probability of :func:`~.privacy.sampling`, each by itself.

        As many as :meth:`batches` would give. One may be empty: that many samples are what privacy must not tell.
        """
        order, augmentation = self.stream(name), self.stream(f"{name}/augmentation")
        rate, batches = sampling(self.samples, batch_size)
        for _ in range(epochs * batches if steps is None else steps):
            rows = (torch.rand(self.samples, generator=order) < rate).nonzero().flatten()
            if not self._goes_on(len(rows)):
                return
            inputs, targets = self._dataset.batch(self.train[rows])
            if self._augment is not None:
                inputs = self._augment(inputs, augmentation)
            yield Batch(inputs, targets, rows)

    @torch.no_grad()
    def logits(self, indices: Tensor, dataset: Dataset | None = None) -> tuple[Tensor, Tensor]:
        """Logits and targets of these samples by the working model as it is, in evaluation mode.

        The samples are the run's, or those of another dataset.
        """
        dataset = self._dataset if dataset is None else dataset
        training = self.model.module.training
        self.model.module.eval()
        parts, targets = [], []
        for part in indices.split(_EVALUATION_BATCH):
            x, y = dataset.batch(part)
            parts.append(self.model(x))
            targets.append(y)
        self.model.module.train(training)
        return torch.cat(parts), torch.cat(targets)

    def loss(self, indices: Tensor) -> float:
        """Mean loss of the working model on these samples, NaN for none."""
        if len(indices) == 0:
            return float("nan")
        return float(classification_loss(*self.logits(indices)))
