"""Local steps: what moves a client's model, and the loop over batches that most methods share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl_ext.nn import Row
from pfl_ext.ops import loss_and_gradients, lwsam_perturb_, restore_, train_steps_
from pfl_ext.ops.training import is_native
from pfl_ext.optim.proximal import momentum_step_
from pfl_ext.tasks import Classification

from .client import Batch, Client
from .distillation import Distillation
from .graphs import RecordedSteps
from .method import Method
from .optimizers import made_optimizer, scheduled
from .privacy import PRIVATE_STEPS, epsilon, private_gradients, sampling

__all__ = ["Loss", "Perturb", "Steps", "fine_tune", "local_length", "mean_loss", "sam"]

Loss: TypeAlias = Callable[[Tensor, Batch], Tensor]
"""What is trained, as a function of the network's outputs and the batch."""

Perturb: TypeAlias = Callable[[list[Tensor], list[Tensor], Tensor | None], Tensor]
"""Moves parameters by their gradients; takes the backup of an earlier step, if any, and returns this step's."""

_MOST_ROWS = 64
"""Torch's products of matrices are made for larger batches: a step of the CNN on 64 samples takes as long with both."""


class Length(TypedDict, total=False):
    """How long a client trains, as ``client.batches`` takes it."""

    epochs: int
    steps: int


def local_length(method: Method) -> Length:
    """How long a client trains in a round of this method."""
    return {"steps": method.local_steps} if method.local_steps else {"epochs": method.local_epochs}


def sam(rho: float) -> Perturb | None:
    r"""Sharpness-aware steps: to :math:`v + \rho\, g / \|g\|_2` for the gradient; None for a radius of 0."""
    if rho == 0:
        return None
    return lambda params, gradients, backup: lwsam_perturb_(params, gradients, rho=rho, backup=backup)


class Steps:
    r"""Takes steps of a client's working model v, and counts what it trains:

    .. math:: v \leftarrow v - \eta\, (\nabla L(v) + a + \lambda (v - w))

    :meth:`train` is the loop over batches. A method with a loop of its own calls :meth:`gradients` and :meth:`step`.

    Args:
        client: whose working model is trained, from where it is.
        method: gives step size, momentum, weight decay, batch size and how long.
        params: the parameters to train in place of all; needs no anchor.
        lr, weight_decay: in place of the method's.
        anchor: w, a state of the whole model or a tensor for each parameter.
        lam: :math:`\lambda`.
        perturb: moves v before a second gradient of the same batch, which the step then takes; see :func:`sam`.
        add: a, a tensor for each parameter, such as a control variate; None: nothing. It is added after clipping and
            after the noise of differential privacy.
        expected: how many steps a turn has, for a step size that changes over them; by default a step for each of the
            batches of the method's turn.

    The optimiser is the method's. Of Adam and others the gradient has the proximal term in it, and their state lives
    for the turn, as momentum does. Gradients of L are shortened to the method's ``clip``, whoever takes the step.

    Attributes:
        params: what is trained.
        taken: how many steps were taken.
    """

    def __init__(
        self,
        client: Client,
        method: Method,
        *,
        params: Sequence[Tensor] | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        anchor: Tensor | Sequence[Tensor] | None = None,
        lam: float = 0.0,
        perturb: Perturb | None = None,
        add: Sequence[Tensor] | None = None,
        expected: int | None = None,
    ) -> None:
        self.client, self.method = client, method
        self.params: list[Tensor] = list(client.model.trained if params is None else params)
        self._add = None if add is None else list(add)
        if self._add is not None and [x.shape for x in self._add] != [p.shape for p in self.params]:
            given, accepted = ([list(x.shape) for x in some] for some in (self._add, self.params))
            raise ValueError(f"add has the shapes {given}; the parameters have {accepted}")
        if anchor is None or lam == 0:
            anchor, lam = [], 0.0
        self._anchors = client.model.tensors(anchor) if isinstance(anchor, Tensor) else anchor
        self._momentum: list[Tensor | None] = [None] * len(self.params)
        self._options = {
            "lr": method.lr if lr is None else lr,
            "weight_decay": method.weight_decay if weight_decay is None else weight_decay,
            "lam": lam,
        }
        self._optimizer = made_optimizer(
            method.optimizer, self.params, self._options["lr"], self._options["weight_decay"]
        )
        self._perturb, self._expected = perturb, expected
        self._row = self._native_row()
        self._whole = self._row if self._is_plain_sgd() else None
        self._backup: Tensor | None = None
        self._scheduled = method.lr_steps != "constant" or method.lr_warmup_steps > 0
        self._of_round = self._round_factor()
        self.taken, self._factors = 0, list[float]()

    def _round_factor(self) -> float:
        """What the step size is multiplied with in this round; a turn after the last round is in none."""
        client, m = self.client, self.method
        if client.stage == "finish":
            return 1.0
        return scheduled(m.lr_rounds, client.round - 1, client.rounds, m.lr_warmup_rounds, m.lr_drop_every, m.lr_drop)

    def _factor(self) -> float:
        """What the step size of the next step is multiplied with."""
        if not self._scheduled:
            return self._of_round
        m = self.method
        if self._expected is None:
            self._expected = self.client.steps_of(m.batch_size, **local_length(m))
        return self._of_round * scheduled(
            m.lr_steps, self.taken, self._expected, m.lr_warmup_steps, m.lr_drop_every, m.lr_drop
        )

    def gradients(self, batch: Batch, loss: Loss | None = None) -> tuple[Tensor, list[Tensor]]:
        """The loss of a batch, without a graph, and its gradients in the parameters."""
        if self._row is not None and loss is None:
            x = self._inputs_of(batch, self._row)
            if x is not None and len(x) <= _MOST_ROWS:
                return loss_and_gradients(self.params, x, batch.targets, self._row.layers)
        outputs = self.client.model(batch.inputs)
        objective = self.client.task.loss(outputs, batch.targets) if loss is None else loss(outputs, batch)
        return objective.detach(), list(torch.autograd.grad(objective, self.params, materialize_grads=True))

    def step(self, gradients: list[Tensor]) -> None:
        """A step along these gradients of L."""
        if self.taken == 0:
            self.client.trains(self.params)
        if self.method.clip != 0:
            norm = torch.nn.utils.get_total_norm(gradients)
            # As torch's clip_grad_norm_, but not in place: autograd may have given one tensor to two parameters.
            gradients = list(torch._foreach_mul(gradients, (self.method.clip / (norm + 1e-6)).clamp(max=1.0)))
        if self._add is not None:
            # Not in place: two parameters that are added up may have one gradient between them.
            gradients = list(torch._foreach_add(gradients, self._add))
        factor, momentum = self._factor(), self.method.momentum
        if self._optimizer is None:
            options = self._options if factor == 1 else {**self._options, "lr": factor * self._options["lr"]}
            momentum_step_(self.params, gradients, self._anchors, self._momentum, momentum=momentum, **options)
        else:
            self._step_of(self._optimizer, gradients, factor)
        self._count(factor)

    def _count(self, factor: float) -> None:
        """Note that a step was taken, with the factor of its step size."""
        self.taken += 1
        if self._scheduled:
            self._factors.append(factor)

    @property
    def accumulated(self) -> float:
        r""":math:`\|a\|_1`: how often all gradients together are in what the steps of SGD changed.

        In units of the step size: with momentum :math:`\rho` and the step sizes :math:`\eta f_s` the s-th of
        :math:`\tau` gradients is in it :math:`a_s = \sum_{r \ge s} f_r \rho^{r - s}` times. Without either it is
        :attr:`taken`.
        """
        rho, taken = self.method.momentum, self.taken
        if self._scheduled:
            return sum(f * (1 - rho ** (s + 1)) / (1 - rho) for s, f in enumerate(self._factors))
        return self._of_round * (taken - rho * (1 - rho**taken) / (1 - rho)) / (1 - rho)

    @torch.no_grad()
    def _step_of(self, optimizer: Optimizer, gradients: list[Tensor], factor: float) -> None:
        """A step of torch's or of the user's."""
        if self._anchors:
            apart = torch._foreach_sub(self.params, list(self._anchors))
            gradients = list(torch._foreach_add(gradients, apart, alpha=self._options["lam"]))
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        for p, g in zip(self.params, gradients, strict=True):
            p.grad = g
        optimizer.step()
        for p in self.params:
            p.grad = None

    def _native_row(self) -> Row | None:
        """The network, if the gradients of the cross-entropy in it are those of one native call."""
        client, row = self.client, self.client.model.row
        if row is None or not client.fused_steps or type(client.task) is not Classification:
            return None
        every = [p is q for p, q in zip(self.params, client.model.trained, strict=False)]
        whole = all(every) and len(every) == len(self.params) == 2 * len(row.layers)
        smooth = client.task.label_smoothing != 0
        return row if whole and not smooth and row.is_plain() and is_native(client.model.dtype) else None

    def _is_plain_sgd(self) -> bool:
        """Whether a step needs no more than the gradient and what SGD has."""
        return self._optimizer is None and self.method.clip == 0 and self._add is None and self._perturb is None

    @property
    def native(self) -> bool:
        """Whether steps on the task's loss, and on a :class:`Distillation`, are native calls."""
        return self._whole is not None and self.method.batch_size <= _MOST_ROWS

    def _inputs_of(self, several: Batch, row: Row) -> Tensor | None:
        """The samples as the native calls take them; None where they do not."""
        x = several.inputs
        if not isinstance(x, Tensor) or not len(x) or x.dtype != self.client.model.dtype:
            return None
        if row.layers[0] == "conv_pool_relu" or x.dim() == 2:
            return x
        return x.flatten(1) if row.flattens else None

    def _distilled(self, loss: Distillation, rows: Tensor) -> dict[str, Any] | None:
        """A loss as the native call takes it; None if it does not."""
        if loss.task != self.client.task or loss.teacher.dim() != 2 or loss.teacher.dtype != self.client.model.dtype:
            return None
        return {
            "teacher": loss.teacher[rows],
            "temperature": loss.temperature,
            "soft_scale": loss.soft * loss.temperature**2,
            "hard_scale": loss.hard,
            "soft": loss.divergence,
        }

    def _taken_in_one_call(self, several: Batch, batch_size: int, row: Row, loss: Distillation | None) -> Tensor | None:
        """Whole steps without autograd; None, and nothing done, where the batches are not for it.

        Args:
            several: batches in a row.
            batch_size: how many samples each has, but the last.
            row: the network.
            loss: in place of the task's.

        Returns:
            The loss where each step began.
        """
        x = self._inputs_of(several, row)
        objective = {} if loss is None else self._distilled(loss, several.rows)
        if x is None or objective is None or min(len(x), batch_size) > _MOST_ROWS:
            return None
        if self.taken == 0:
            self.client.trains(self.params)
        factor, momentum, first = self._factor(), self.method.momentum, self._momentum[0] is None
        if momentum != 0 and first:
            self._momentum = [torch.empty_like(p) for p in self.params]
        losses = train_steps_(
            self.params,
            x,
            several.targets,
            row.layers,
            factor * self._options["lr"],
            batch_size=batch_size,
            anchors=list(self._anchors),
            lam=self._options["lam"],
            momentum=momentum,
            weight_decay=self._options["weight_decay"],
            momentum_buffers=[m for m in self._momentum if m is not None],
            first=first,
            **objective,
        )
        for _ in range(len(losses)):
            self._count(factor)
        return losses

    def _taken_in_a_row(self, row: Row, length: Length, batches: str, loss: Distillation | None) -> Iterator[Tensor]:
        """The steps of a turn, several in one call; gives the loss where each began."""
        size = self.method.batch_size
        for several in self.client.batches_in_a_row(size, name=batches, **length):
            losses = self._taken_in_one_call(several, size, row, loss)
            if losses is None:
                yield from (self.take(batch, loss) for batch in several.cut(size))
            else:
                yield from losses.unbind()

    def take(self, batch: Batch, loss: Loss | None = None) -> Tensor:
        """A whole step on a batch; returns the loss where it began."""
        if self._whole is not None and (loss is None or isinstance(loss, Distillation)):
            losses = self._taken_in_one_call(batch, len(batch.rows), self._whole, loss)
            if losses is not None:
                return losses[0]
        objective, gradients = self.gradients(batch, loss)
        if self._perturb is not None:
            self._backup = self._perturb(self.params, gradients, self._backup)
            _, gradients = self.gradients(batch, loss)
            restore_(self.params, self._backup)
        self.step(gradients)
        return objective

    def train(
        self, loss: Loss | None = None, *, epochs: int | None = None, steps: int = 0, batches: str = "batches"
    ) -> float:
        r"""Steps on L for a turn's length.

        Where the run is differentially private the gradients are those of :func:`~.privacy.private_gradients`; the
        proximal term, momentum, weight decay and the optimiser see nothing of the data but them.

        Args:
            loss: L; by default that of the task.
            epochs, steps: passes over the data, or the number of steps, in place of the method's ``local_epochs`` or
                ``local_steps``.
            batches: the stream that orders the batches.

        Returns:
            The mean of L(v) over the steps, NaN without any.
        """
        client, method = self.client, self.method
        length: Length = local_length(method) if epochs is None else {"epochs": epochs}
        if steps:
            length = {"steps": steps}
        if self._expected is None and self._scheduled:
            self._expected = client.steps_of(method.batch_size, **length)
        client.model.module.train()  # all of it: what a turn before has set for a part must not last
        if client.privacy is not None:
            return mean_loss(self._train_privately(loss, length, batches))
        if self._whole is not None and not self._scheduled and (loss is None or isinstance(loss, Distillation)):
            return mean_loss(self._taken_in_a_row(self._whole, length, batches, loss))
        recorded = RecordedSteps(self) if client.graphs and loss is None and self._is_the_same_every_time() else None
        given = client.batches(method.batch_size, name=batches, **length)
        return mean_loss(self.take(batch, loss) if recorded is None else recorded(batch) for batch in given)

    def _is_the_same_every_time(self) -> bool:
        """Whether a recorded step is the next one too: Python decides on other step sizes, optimisers and losses."""
        return self._optimizer is None and not self._scheduled and self.client.inputs_are_one_tensor

    def _train_privately(self, loss: Loss | None, length: Length, batches: str) -> list[Tensor]:
        """The same by DP-SGD; returns the losses."""
        client, method, privacy = self.client, self.method, self.client.privacy
        assert privacy is not None
        if loss is not None or self._perturb is not None:
            raise ValueError(
                "differential privacy is for steps on the loss of the task: this training has another loss, or takes a "
                "gradient elsewhere"
            )
        rate, _ = sampling(client.samples, method.batch_size)
        noise, losses = client.stream(f"{batches}/noise"), []
        for batch in client.poisson_batches(method.batch_size, name=batches, **length):
            objective, gradients = private_gradients(
                client.model, self.params, batch.inputs, batch.targets, client.task.loss, privacy,
                client.samples * rate, noise,
            )  # fmt: skip
            self.step(gradients)
            losses.append(objective)
        # One sum of all steps, whatever they trained; and one of those before the upload.
        taken = torch.tensor([len(losses), len(losses) * (client.stage == "train")])
        client[PRIVATE_STEPS] = client[PRIVATE_STEPS] + taken
        for name, steps in zip(("epsilon", "epsilon_sent"), client[PRIVATE_STEPS].tolist(), strict=True):
            client.report[name] = epsilon(rate, privacy.dp_noise, int(steps), privacy.dp_delta)
        return losses


def mean_loss(losses: Iterable[Tensor]) -> float:
    """The mean of the losses of a turn's steps, NaN without any. Read once, at the end: a step waits for nothing."""
    total, steps = torch.zeros(()), 0
    for loss in losses:
        total = torch.zeros((), device=loss.device) if steps == 0 else total
        total += loss
        steps += 1
    return float(total) / steps if steps else math.nan


def fine_tune(client: Client, method: Method, state: Tensor, epochs: int) -> None:
    """Make ``client["personal"]`` from a received model: that many passes of SGD on the client's own data."""
    client.model.load(state)
    client.report["fine_tune_loss"] = Steps(client, method).train(epochs=epochs, batches="fine-tune")
    client["personal"] = client.model.state()
