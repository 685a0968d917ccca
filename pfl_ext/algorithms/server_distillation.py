"""Ensemble distillation at the server, on unlabelled data: the part that PerAda and FedDF share."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.data import AUGMENTATIONS, Inputs
from pfl_ext.data.placement import placed
from pfl_ext.federation import Method, Server, Uploads, WorkingModel, label_of, option, outputs_of
from pfl_ext.federation.requirements import check_augmentation
from pfl_ext.ops import ensemble_distillation_loss, ensemble_logits
from pfl_ext.tasks import Task

__all__ = ["DistillingMethod", "distil"]


@dataclass(frozen=True)
class DistillingMethod(Method):
    """The options of a method whose server distils what the clients sent into the average of it."""

    kd_steps: int = option(100, "R, steps of distillation at the server in a round; 0: none")
    kd_lr: float = option(1e-3, "step size of the server's Adam, which begins anew in each round")
    kd_batch_size: int = option(128, "unlabelled samples a step of distillation takes")
    kd_temperature: float = option(1.0, "temperature of the distillation")
    kd_schedule: str = option(
        "constant", "step size over the R steps (PerAda's official code: cosine)", choices=("constant", "cosine")
    )
    kd_rounds: int = option(0, "distil in the first rounds only (PerAda's official code: 30); 0: in all")
    kd_teachers: str = option(
        "eval", "mode of the teachers' layers; train: as PerAda's official code leaves them", choices=("eval", "train")
    )
    kd_student: str = option(
        "train", "mode of the student's layers; eval: with the averaged statistics", choices=("train", "eval")
    )
    kd_augmentation: str = option("none", "augmentation of the unlabelled data", choices=tuple(AUGMENTATIONS))
    kd_cache: bool = option(True, "teachers see each sample once in a round, as it is; false: every batch as augmented")
    kd_keep_best: int = option(
        0, "steps after which the student is tried on the server's held-out samples, the best one kept; 0: the last one"
    )
    kd_sigmoid: bool = option(False, "distil each label by itself (multi-label data) in place of a softmax over all")
    kd_distance: bool = option(False, "report the ensemble distillation distance before and after the distillation")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kd_steps", "kd_rounds", "kd_keep_best"):
            self.check(name, getattr(self, name) >= 0, "not negative")
        self.check("kd_lr", self.kd_lr > 0, "above 0")
        self.check("kd_temperature", self.kd_temperature > 0, "above 0")
        self.check("kd_batch_size", self.kd_batch_size >= 1, "at least 1")

    def set_up(self, server: Server) -> None:
        """The model; refuses a run without the data that the server needs."""
        if (self.kd_steps or self.kd_distance) and server.auxiliary is None:
            raise ValueError(
                f"{self.name} distils at the server, which has no unlabelled data: name some (auxiliary, such as "
                "cifar100), or use kd_steps=0"
            )
        if self.kd_keep_best and server.held_out is None:
            raise ValueError("kd_keep_best needs labelled samples of the server: partition with server=0.1, say")
        if self.kd_temperature != 1 and not server.task.has_logits:
            raise ValueError(
                f"kd_temperature is {self.kd_temperature}; the task {server.task.name} has no logits that it could "
                "soften: leave it at 1"
            )
        if self.kd_augmentation != "none" and server.auxiliary is not None:
            check_augmentation(f"kd_augmentation is {self.kd_augmentation!r}", server.auxiliary)
        super().set_up(server)


def distil(
    server: Server, method: DistillingMethod, starts: Sequence[Tensor], groups: Sequence[Uploads]
) -> list[Tensor]:
    r"""R steps of Adam on the divergence of the student g from the mean logits of M teachers, on unlabelled samples.

    .. math:: \mathrm{KL}\Big(\sigma\big(\tfrac1T \tfrac1M \sum_m h_m(x)\big) \,\Big\|\, \sigma(\tfrac1T g(x))\Big)

    Its mean is over everything that has a class: samples, pixels, tokens. Of a task without logits it is the mean of
    :math:`(\tfrac1M \sum_m h_m(x) - g(x))^2`: twice the divergence of normal distributions of variance 1 around both.

    The teachers are the models that clients have sent. They do not change in a round: their mean logits are computed
    once for each sample that the R batches hold, where the clients are, and kept. Where they see other images every
    time (``kd_augmentation`` with ``kd_cache=False``) or depend on the whole batch (``kd_teachers="train"``) they are
    computed with every batch, at the server.

    With ``kd_distance`` it reports, over all unlabelled samples and with probabilities g and :math:`h_m`,

    .. math:: \Phi = \tfrac1n \sum_j \big\|g(x_j) - \tfrac1M \sum_m h_m(x_j)\big\|_1

    as ``distillation_distance``, and of the student that it begins with as ``distillation_distance_before``.

    Where there are several networks there is a student of each, all distilled from all teachers, on the same batches.

    Args:
        server: its working models and unlabelled data are used.
        method: gives the options.
        starts: for each network the student's state to begin with.
        groups: for each network the teachers' states, by the name ``"model"``.

    Returns:
        The students' states. Parameters that are not trained are as in ``starts``.
    """
    steps = method.kd_steps if not method.kd_rounds or server.round <= method.kd_rounds else 0
    data = server.auxiliary
    if data is None or not (steps or method.kd_distance):
        return list(starts)
    batches = _batches(len(data), method.kd_batch_size, steps, server.stream("distillation"))
    each_batch = method.kd_teachers == "train" or (method.kd_augmentation != "none" and not method.kd_cache)
    rows = torch.arange(len(data))
    mean, probabilities = torch.empty(0), torch.empty(0)
    if method.kd_distance or (steps and not each_batch):
        if not method.kd_distance:
            rows = torch.cat(batches).unique()
        pairs = list(zip(groups, server.models, strict=True))
        every = torch.stack([one for group, m in pairs for one in group.outputs("model", m, data, rows)])
        mean = _mean(every)
        probabilities = torch.stack([_probabilities(server.task, method, outputs) for outputs in every]).mean(0)
    place = torch.full((len(data),), -1)
    place[rows] = torch.arange(len(rows))

    def tell_distance(name: str, model: WorkingModel, state: Tensor) -> None:
        if method.kd_distance:
            own = _probabilities(server.task, method, outputs_of(model, state, data, rows))
            server.report[label_of(name, model.network)] = float((own - probabilities).abs().sum(-1).mean())

    teachers = None
    if each_batch and steps:
        copies = [WorkingModel(copy.deepcopy(model.module)) for model in server.models]
        teachers = [(model, group.each("model")) for model, group in zip(copies, groups, strict=True)]
    found = []
    for model, start in zip(server.models, starts, strict=True):
        tell_distance("distillation_distance_before", model, start)
        if steps:
            start = _train(server, method, model, start, batches, mean if teachers is None else teachers, place)
        tell_distance("distillation_distance", model, start)
        found.append(start)
    return found


Teachers: TypeAlias = list[tuple[WorkingModel, list[Tensor]]]
"""For each network a working model, and the states of those that have it."""


def _train(
    server: Server,
    method: DistillingMethod,
    model: WorkingModel,
    start: Tensor,
    batches: list[Tensor],
    teachers: Tensor | Teachers,
    place: Tensor,
) -> Tensor:
    """The student after all steps.

    Of ``teachers`` either the mean logits, those of sample j in row ``place[j]``, or they themselves.
    """
    data = server.auxiliary
    assert data is not None
    augment, random = AUGMENTATIONS[method.kd_augmentation], server.stream("distillation/augmentation")
    model.load(start)
    model.module.train(method.kd_student == "train")
    optimizer = torch.optim.Adam(model.trained, lr=method.kd_lr)
    best, best_metric = start, _held_out(server, model, start) if method.kd_keep_best else math.nan
    total = torch.zeros((), device=model.device)
    for step, rows in enumerate(batches):
        inputs = augment(data.batch(rows)[0], random)
        if isinstance(teachers, Tensor):
            target = teachers.index_select(0, placed(place[rows], teachers.device))
        else:
            target = _mean_of_batch(method, teachers, inputs)
        if method.kd_schedule == "cosine":
            for group in optimizer.param_groups:
                group["lr"] = method.kd_lr * 0.5 * (1 + math.cos(math.pi * step / len(batches)))
        loss = _divergence(server.task, method, model(inputs), target)
        for parameter, gradient in zip(model.trained, torch.autograd.grad(loss, model.trained), strict=True):
            parameter.grad = gradient
        optimizer.step()
        total += loss.detach()
        if method.kd_keep_best and ((step + 1) % method.kd_keep_best == 0 or step + 1 == len(batches)):
            now = model.state()
            metric = _held_out(server, model, now)
            if server.task.is_better(metric, best_metric):
                best, best_metric = now, metric
            model.module.train(method.kd_student == "train")
    server.report[label_of("kd_loss", model.network)] = float(total) / len(batches)
    for parameter in model.trained:
        parameter.grad = None
    if not method.kd_keep_best:
        return model.state()
    server.report[label_of(f"held_out_{server.task.metric}", model.network)] = best_metric
    return best


def _batches(samples: int, size: int, steps: int, order: torch.Generator) -> list[Tensor]:
    """Shuffled batches of ``size`` numbers below ``samples``, pass after pass, without a smaller last one of a pass."""
    found: list[Tensor] = []
    while len(found) < steps:
        found += [
            rows for rows in torch.randperm(samples, generator=order).split(size) if len(rows) == min(size, samples)
        ]
    return found[:steps]


@torch.no_grad()
def _mean_of_batch(method: DistillingMethod, teachers: Teachers, inputs: Inputs) -> Tensor:
    """The teachers' mean logits of one batch."""
    every = []
    for model, states in teachers:
        for state in states:
            model.load(state)
            model.module.train(method.kd_teachers == "train")
            every.append(model(inputs))
    return _mean(torch.stack(every))


def _mean(every: Tensor) -> Tensor:
    """The mean outputs of teachers [M, n, ...]."""
    return ensemble_logits(every.flatten(2) if every.dim() > 2 else every[..., None]).view(every.shape[1:])


def _divergence(task: Task, method: DistillingMethod, outputs: Tensor, target: Tensor) -> Tensor:
    """How far the student's outputs are from the teachers' mean."""
    if not task.has_logits:
        return F.mse_loss(outputs, target)
    student, teachers = task.rows(outputs), task.rows(target)[None]
    loss: Tensor = ensemble_distillation_loss(
        student, teachers, temperature=method.kd_temperature, multilabel=method.kd_sigmoid
    )
    return loss


def _probabilities(task: Task, method: DistillingMethod, outputs: Tensor) -> Tensor:
    """A row of them for everything that has a class; without logits the outputs of each sample."""
    if not task.has_logits:
        return outputs.reshape(len(outputs), -1)
    logits = task.rows(outputs)
    return logits.sigmoid() if method.kd_sigmoid else F.softmax(logits, -1)


def _held_out(server: Server, model: WorkingModel, state: Tensor) -> float:
    """The task's metric of a model of that state on the server's held-out samples."""
    data, task = server.held_out, server.task
    assert data is not None
    outputs = outputs_of(model, state, data, torch.arange(len(data)))
    return task.metrics(*task.reduce(outputs, data.batch(torch.arange(len(data)))[1]))[task.metric]
