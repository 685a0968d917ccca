"""What a run must have, checked before anything is done."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pfl_ext.data import Dataset, Inputs, Partition
from pfl_ext.data.nests import named
from pfl_ext.nn import Networks
from pfl_ext.tasks import Task

from .evaluation import SPLITS
from .method import Method
from .model import WorkingModel
from .privacy import refuse_batch_norm
from .server import Server
from .settings import Compute, Settings

__all__ = ["check_augmentation", "check_batch", "check_buffers", "check_run", "usable_device"]

_COLUMNS = ("local test", "std", "global test", "new clients")  # of a model in the tables of comparisons


def usable_device(compute: Compute) -> torch.device:
    """The device of the settings.

    Raises:
        ValueError: it cannot be used here; the message says why.
    """
    try:
        device = torch.device(compute.device)
        torch.zeros(1, device=device).item()  # meta has tensors without numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {compute.device!r}, which cannot be used here: {reason}") from None
    return device


def check_run(
    method: Method,
    task: Task,
    module: nn.Module,
    dataset: Dataset,
    partition: Partition,
    settings: Settings,
    extra_tests: Mapping[str, Sequence[Dataset]],
) -> None:
    """Raise a ValueError if these do not fit together."""
    if settings.new_clients >= partition.clients:
        raise ValueError(f"{settings.new_clients} of {partition.clients} clients are to join late")
    partition.check(dataset)
    _check_networks(method, module, partition, settings)
    without = [k for k, part in enumerate(partition.validation) if len(part) == 0]
    if method.needs_validation and without:
        raise ValueError(
            f"{type(method).__name__} chooses models on validation data, and {len(without)} of {partition.clients} "
            f"clients have none (client {without[0]}, say): partition with validation=0.2, or more samples a client"
        )
    _check_outputs(method, task, settings)
    if settings.augmentation != "none":
        check_augmentation(f"augmentation is {settings.augmentation!r}", dataset)
    for name, parts in extra_tests.items():
        _check_extra_test(name, parts, dataset)
    if settings.privacy is not None:
        refuse_batch_norm(module)
        if not method.private:
            private = "those whose clients train by plain SGD on the labels, such as fedavg, ditto and perada"
            raise ValueError(f"{method.name} has no differentially private form; {private} have one")


def _check_networks(method: Method, module: nn.Module, partition: Partition, settings: Settings) -> None:
    """Refuse networks of different shapes where vectors of one would meet those of another."""
    networks = Networks.of(module)
    networks.check(partition.clients)
    if len(networks.each) == 1:
        return
    if not method.several_networks:
        raise ValueError(
            f"{method.name} brings clients' models together number by number, so that all need one network; the run "
            f"has {len(networks.each)}. For several there are those whose clients share something else, such as "
            "feddf, fedmd and fedproto"
        )
    if settings.local_buffers or settings.server_buffers:
        raise ValueError("local_buffers and server_buffers are of one network; the run has several: leave them out")


def check_augmentation(given: str, dataset: Dataset) -> None:
    """Refuse to augment what is no image, or what has targets that would have to move with it."""
    if not dataset.images:
        raise ValueError(f"{given}, which is for images; the samples of {dataset.name!r} are none: use none")
    if dataset.targets.ndim > 2:
        raise ValueError(
            f"{given}, which moves the pixels of images; those of {dataset.name!r} have targets, which would have to "
            "move too: use none"
        )


def _check_outputs(method: Method, task: Task, settings: Settings) -> None:
    """Refuse a task whose outputs are not what the method works with."""
    if (method.needs == "logits" and not task.has_logits) or (method.needs == "classes" and not task.one_class):
        needed = {"logits": "logits of classes", "classes": "one class for each sample"}[method.needs]
        raise ValueError(f"{method.name} needs {needed}, and the task {task.name} has none: use another method")
    if settings.prediction_distance and not task.has_logits:
        raise ValueError(
            f"prediction_distance compares probabilities, and the task {task.name} has none; leave the setting out"
        )


@torch.no_grad()
def check_batch(task: Task, model: WorkingModel, dataset: Dataset, partition: Partition) -> None:
    """Raise a ValueError if the network cannot take the samples, or if its outputs do not fit the task's targets."""
    rows = torch.cat([*partition.train])[:2]
    inputs, targets = dataset.batch(rows)
    training = model.module.training
    model.module.eval()
    try:
        outputs = model(inputs)
    except Exception as error:
        what = f"a batch of {dataset.name!r}, {_shown(inputs)}"
        raise ValueError(f"the network does not take {what}: {type(error).__name__}: {error}") from error
    finally:
        model.module.train(training)
    task.check_batch(dataset, outputs, targets)
    for metric in task.extra_metrics:
        if not callable(metric) and not task.one_class:
            raise ValueError(f"extra_metrics has {metric}, which is of samples with one class; {task.name} has none")
    loss = task.loss(outputs, targets)
    if loss.dim() or not loss.is_floating_point():
        given = f"{loss.dtype} {list(loss.shape)}"
        raise ValueError(f"the loss of the task {task.name} is {given}; accepted is one floating number, a mean")


def _shown(inputs: Inputs) -> str:
    kinds = ((name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in named(inputs))
    return ", ".join(f"{name} {dtype} {shape}".strip() for name, dtype, shape in kinds)


def check_buffers(method: Method, server: Server) -> None:
    """Refuse buffers that are to stay somewhere, where the method sends parts of a model: it says nothing of them."""
    whole = [vector for vector in server.values() if vector.shape[-1] == server.model.size]  # or a row for each client
    if server and not whole and bool(server.model.stays.any()):
        raise ValueError(
            f"{method.name} does not send whole models, so that local_buffers and server_buffers do not hold for it; "
            "leave them out, or use a method that does, such as fedavg or ditto"
        )


def _check_extra_test(name: str, parts: Sequence[Dataset], ours: Dataset) -> None:
    taken = (*SPLITS, "global_test", *_COLUMNS)
    if not re.fullmatch(r"[\w.+-]+( [\w.+-]+)*", name) or name in taken:
        raise ValueError(
            f"an extra test set is called {name!r}; letters, digits, spaces and any of . + - _ are accepted, and "
            f"none of {', '.join(taken)}"
        )
    if not sum(map(len, parts)):
        raise ValueError(f"the extra test set {name} is empty")
    for part in parts:
        if len(part.classes) != len(ours.classes) or part.multilabel != ours.multilabel:
            kinds = [f"{len(d.classes)} {'labels' if d.multilabel else 'classes'}" for d in (part, ours)]
            raise ValueError(
                f"the extra test set {name} ({part.name}) has {kinds[0]}, {ours.name!r} has {kinds[1]}; the "
                "same are accepted (an archive can name them in its classes)"
            )
        named = [not all(label.isdigit() for label in d.classes) for d in (part, ours)]
        if all(named) and part.classes != ours.classes:
            first = next((a, b) for a, b in zip(part.classes, ours.classes, strict=True) if a != b)
            raise ValueError(
                f"the extra test set {name} ({part.name}) has a class {first[0]!r} where {ours.name!r} has "
                f"{first[1]!r}; the same classes in the same order are accepted"
            )
        if part.input_shape != ours.input_shape:
            raise ValueError(
                f"samples of the extra test set {name} ({part.name}) are {_listed(part.input_shape)}, those of "
                f"{ours.name!r} {_listed(ours.input_shape)}; Dataset.in_shape_of makes them alike"
            )


def _listed(shape: Any) -> str:
    return str(list(shape) if isinstance(shape, tuple) else shape)
