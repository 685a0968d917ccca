"""What a method sees of a client during its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pfl_ext.data import AUGMENTATIONS, Dataset, Inputs
from pfl_ext.data.nests import split
from pfl_ext.data.placement import placed
from pfl_ext.tasks import Task

from .features import Features
from .messages import Stage
from .model import WorkingModel
from .privacy import sampling, secure_uniform
from .settings import Privacy, Settings
from .store import ClientStore
from .streams import stream

__all__ = ["Batch", "Client", "Rows", "current_outputs"]

_EVALUATION_BATCH = 128  # samples a forward pass takes when nothing is trained; fixed, as the last bits depend on it
_FETCHED_AHEAD = 256  # samples that are fetched together: one by one, batches of ten take longer to fetch than to copy


def _split(rows: Any, size: int, count: int) -> Sequence[Any]:
    """Cut ``count`` rows into parts of ``size``. A split into one part, which small clients ask for, takes 5 us."""
    if count <= size:
        return (rows,)
    return rows.split(size) if isinstance(rows, Tensor) else split(rows, size)


class Batch(NamedTuple):
    """A mini-batch of a client's training data."""

    inputs: Inputs
    targets: Tensor
    rows: Tensor
    """Where the samples stand in ``client.train``, for what is kept for each of them (a teacher's logits)."""

    def cut(self, size: int) -> Iterable[Batch]:
        """Batches of so many of its samples; of the last one what is left."""
        count = len(self.rows)
        return map(Batch, *(_split(part, size, count) for part in self))


class Rows(NamedTuple):
    """Indices of a client's samples."""

    train: Tensor
    validation: Tensor
    test: Tensor


Reduce: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What is kept of a batch's outputs and targets: :meth:`~pfl_ext.tasks.Task.reduce`."""


class Client:
    """One client's data, the vectors it keeps, its random streams, and the working model.

    ``client["personal"]`` is a vector the client keeps between rounds, as it was when the turn began or as the method
    has set it since. What a method sets is kept when its turn ends without an error, and not before.

    Attributes:
        index: the client's number.
        round: the round, from 1.
        stage: what the turn is for, the stage of its request; ``"personal"`` also beside the upload of ``"train"``.
        task: what is learned: ``client.task.loss(outputs, targets)``.
        model: the working model, of this client's network. It holds whatever the last client left: load a state first.
        train, validation, test: indices of the client's samples.
        report: numbers that the method reports of this turn, for the tables of the run (such as ``"loss"``).
        privacy: the options of differential privacy, None without.
        fused_steps: whether whole steps, and gradients, may be native calls.
        graphs: whether local steps are recorded as CUDA graphs.
        trained: how many samples :meth:`batches` has given for what is sent, and for the client's own model.
        trained_parameters: how many parameters were trained, each as often as there are models of it.
    """

    def __init__(
        self,
        index: int,
        round: int,
        stage: Stage,
        task: Task,
        model: WorkingModel,
        dataset: Dataset,
        rows: Rows,
        store: ClientStore,
        settings: Settings,
        public: Dataset | None = None,
    ) -> None:
        """Not called by users: the runtime makes a client for each turn."""
        self.index, self.round, self.stage, self.task, self.model = index, round, stage, task, model
        self.train, self.validation, self.test = rows
        self.privacy: Privacy | None = settings.privacy
        self.fused_steps: bool = settings.fused_steps
        self.graphs: bool = settings.graphs
        self.report: dict[str, float] = {}
        self.trained, self.trained_personally, self.trained_parameters = 0, 0, 0
        self._dataset, self._store, self._settings, self._public = dataset, store, settings, public
        self._most_steps: int | None = None
        self._most_samples: int | None = None
        self._set: dict[str, Tensor] = {}

    @property
    def inputs_are_one_tensor(self) -> bool:
        """Whether a batch's inputs are a tensor, not a nest of them."""
        return not isinstance(self._dataset.inputs, tuple | Mapping)

    @property
    def rounds(self) -> int:
        """How many rounds the run has."""
        return self._settings.rounds

    def steps_of(self, batch_size: int, *, epochs: int = 1, steps: int | None = None) -> int:
        """How many batches :meth:`batches` gives, but for what it leaves out."""
        return epochs * -(-self.samples // batch_size) if steps is None else steps

    @property
    def samples(self) -> int:
        """n_k, how many training samples the client has."""
        return len(self.train)

    def __getitem__(self, name: str) -> Tensor:
        """A vector that the client keeps: not to be changed in place."""
        return self._set[name] if name in self._set else self._store.read(self.index, name)

    def __setitem__(self, name: str, vector: Tensor) -> None:
        """Keep ``vector`` under a name that the method's ``keeps`` has."""
        if name not in self._store.initial:
            raise KeyError(f"{name} is not in what the method keeps: {', '.join(self._store.labels) or 'nothing'}")
        self._set[name] = vector

    def __contains__(self, name: object) -> bool:
        """Whether the client has set that vector in this turn or before, rather than having the common initial one."""
        known = isinstance(name, str) and name in self._store.initial
        return name in self._set or (known and self._store.written(self.index, str(name)))

    @property
    def changes(self) -> dict[str, Tensor]:
        """The vectors that were set in this turn, by name."""
        return self._set

    @property
    def public(self) -> Dataset:
        """The unlabelled data that all clients and the server see, where the method is ``public``."""
        if self._public is None:
            raise ValueError("there are no public data, or the method does not say that its clients see them")
        return self._public

    def label_counts(self) -> Tensor:
        """How many training samples the client has of each class."""
        if not self._dataset.one_class:
            raise ValueError(f"the samples of {self._dataset.name} have not one class each, which is needed here")
        return torch.bincount(self._dataset.targets[self.train], minlength=len(self._dataset.classes))

    def stream(self, name: str) -> torch.Generator:
        """A random stream of this client in this round, at its beginning."""
        return stream(self._settings.seed, name, self.round, self.index)

    def begin_personal(self, most_samples: int | None = None) -> None:
        """From now on what is trained is the client's own (the runtime says so).

        Args:
            most_samples: as many as are trained on until the new model arrives, in place of the epochs or steps asked
                for.
        """
        if self.stage == "train":
            self.stage = "personal"
        self._most_steps, self._most_samples = self._settings.personal_cap or None, most_samples

    def trains(self, params: Sequence[Tensor]) -> None:
        """Count these parameters as trained in this turn (:class:`~.steps.Steps` does)."""
        self.trained_parameters += sum(p.numel() for p in params)

    def _goes_on(self, samples: int) -> bool:
        """Whether a batch of this many samples fits into the turn, and count it if it does."""
        if self.stage == "train":
            self.trained += samples
            return True
        if self._most_samples is not None and self.trained_personally + samples > self._most_samples:
            return False
        if self._most_steps is not None:
            if self._most_steps == 0:
                return False
            self._most_steps -= 1
        self.trained_personally += samples
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
        augmented = self._augmentation(name)
        for several in self._fetched(batch_size, epochs, steps, name):
            for batch in several.cut(batch_size):
                if not self._goes_on(len(batch.rows)):
                    return
                yield batch if augmented is None else Batch(augmented(batch.inputs), batch.targets, batch.rows)

    def batches_in_a_row(
        self, batch_size: int, *, epochs: int = 1, steps: int | None = None, name: str = "batches"
    ) -> Iterator[Batch]:
        """The same mini-batches, several one after the other as one, which its ``cut(batch_size)`` parts again.

        For training that takes several steps in one call. Inputs that are augmented are tensors.
        """
        augmented = self._augmentation(name)
        for several in self._fetched(batch_size, epochs, steps, name):
            taken, count = 0, len(several.rows)
            while taken < count and self._goes_on(min(batch_size, count - taken)):
                taken += min(batch_size, count - taken)
            if taken == 0:
                return
            if taken < count:
                several = next(iter(several.cut(taken)))
            if augmented is not None:
                parts = [augmented(batch.inputs) for batch in several.cut(batch_size)]
                several = Batch(torch.cat(parts), several.targets, several.rows)
            yield several
            if taken < count:
                return

    def _fetched(self, batch_size: int, epochs: int, steps: int | None, name: str) -> Iterator[Batch]:
        """What :meth:`batches` gives, several of them as one."""
        if self.privacy is not None:
            raise ValueError(
                "a method that takes batches of its own has no differentially private form: Steps.train has"
            )
        order = self.stream(name)
        skip_single = self.model.has_batch_norm and self.samples > 1 and batch_size > 1
        left_over = self.samples % batch_size
        dropped = left_over if self._settings.drop_last and left_over < self.samples else 0
        dropped = 1 if skip_single and left_over == 1 else dropped
        taken, passes = 0, 0
        until_arrival = self._most_samples is not None
        while until_arrival or (passes < epochs if steps is None else taken < steps):
            passes += 1
            # Drawn on the host, so that batches are the same on every device, and brought there once a pass.
            shuffled = placed(torch.randperm(self.samples, generator=order), self.train.device)
            if dropped:
                shuffled = shuffled[: self.samples - dropped]
            if steps is not None and not until_arrival:
                shuffled = shuffled[: (steps - taken) * batch_size]
            for rows in _split(shuffled, max(1, _FETCHED_AHEAD // batch_size) * batch_size, len(shuffled)):
                yield Batch(*self._dataset.batch(self.train[rows]), rows)
                taken += max(1, -(-len(rows) // batch_size))

    def poisson_batches(
        self, batch_size: int, *, epochs: int = 1, steps: int | None = None, name: str = "batches"
    ) -> Iterator[Batch]:
        """Batches that hold each training sample with the probability of :func:`~.privacy.sampling`, each by itself.

        As many as :meth:`batches` would give. One may be empty: that many samples are what privacy must not tell.
        """
        order, augmented = self.stream(name), self._augmentation(name)
        rate, batches = sampling(self.samples, batch_size)
        for _ in range(epochs * batches if steps is None else steps):
            secure = self.privacy is not None and self.privacy.dp_secure
            drawn = 1 - secure_uniform(self.samples) if secure else torch.rand(self.samples, generator=order)
            rows = placed((drawn < rate).nonzero().flatten(), self.train.device)
            if not self._goes_on(len(rows)):
                return
            inputs, targets = self._dataset.batch(self.train[rows])
            yield Batch(inputs if augmented is None else augmented(inputs), targets, rows)

    def _augmentation(self, name: str) -> Callable[[Any], Any] | None:
        """What becomes of a batch's inputs, by a stream of its own, if anything."""
        if self._settings.augmentation == "none":
            return None
        augment, random = AUGMENTATIONS[self._settings.augmentation], self.stream(f"{name}/augmentation")
        return lambda inputs: augment(inputs, random)

    def public_batches(self, rows: Tensor, batch_size: int, *, epochs: int, name: str) -> Iterator[Batch]:
        """Shuffled mini-batches of some of the public samples: of each its inputs and which of the ``rows`` it is.

        There are no targets: ``batch.targets`` are those places again, for what the server has said of the samples.
        """
        order, skip_single = self.stream(name), self.model.has_batch_norm and len(rows) > 1
        for _ in range(epochs):
            for places in torch.randperm(len(rows), generator=order).split(batch_size):
                if skip_single and len(places) == 1 and batch_size > 1:
                    continue
                if not self._goes_on(len(places)):
                    return
                places = placed(places, rows.device)
                yield Batch(self.public.batch(rows[places])[0], places, places)

    def outputs(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (logits, say) and targets of these samples by the working model as it is, in evaluation mode."""
        return current_outputs(self.model, self._dataset, indices)

    def features(self, indices: Tensor, head: str = "") -> tuple[Tensor, Tensor]:
        """What enters the head of the working model as it is, in evaluation mode, for these samples; and targets."""
        with Features(self.model, head) as features:
            return current_outputs(self.model, self._dataset, indices, predict=features)

    def metrics(self, indices: Tensor) -> dict[str, float]:
        """The task's metrics of the working model on these samples."""
        return self.task.measured(*current_outputs(self.model, self._dataset, indices, self.task.reduce))

    def loss(self, indices: Tensor) -> float:
        """Mean loss of the working model on these samples, NaN for none."""
        if len(indices) == 0:
            return float("nan")
        return float(self.task.loss(*self.outputs(indices)))

    def gradient(self, indices: Tensor, batch_size: int) -> Tensor:
        """The gradient of the mean loss on these samples in the trained parameters, in a row, in evaluation mode.

        Args:
            indices: of the samples.
            batch_size: how many are computed at once.
        """
        if self.privacy is not None:
            raise ValueError("the gradient over all samples has no differentially private form: Steps.train has one")
        module, params = self.model.module, self.model.trained
        training = module.training
        module.eval()
        total = [torch.zeros_like(p) for p in params]
        for rows in indices.split(batch_size):
            inputs, targets = self._dataset.batch(rows)
            loss = self.task.loss(self.model(inputs), targets) * (len(rows) / len(indices))
            torch._foreach_add_(total, torch.autograd.grad(loss, params, materialize_grads=True))
        module.train(training)
        return torch.cat([g.reshape(-1) for g in total])


@torch.no_grad()
def current_outputs(
    model: WorkingModel,
    dataset: Dataset,
    indices: Tensor,
    reduce: Reduce = lambda *both: both,
    predict: Callable[[Inputs], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and targets of samples by a model as it is, in evaluation mode, or what ``reduce`` makes of them.

    ``predict`` makes the outputs in place of the model.
    """
    predict = model if predict is None else predict
    training = model.module.training
    if training:
        model.module.eval()
    parts, targets = [], []
    for part in indices.split(_EVALUATION_BATCH):
        x, y = dataset.batch(part)
        found, y = reduce(predict(x), y)
        parts.append(found)
        targets.append(y)
    if training:
        model.module.train()
    return torch.cat(parts), torch.cat(targets)
