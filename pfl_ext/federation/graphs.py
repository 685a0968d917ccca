"""A client's local step as a CUDA graph: recorded once in a turn and replayed for every further batch of its shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .client import Batch

__all__ = ["RecordedSteps", "record"]


class Taking(Protocol):
    """Takes steps: the part of :class:`~.steps.Steps` that is needed here."""

    taken: int

    def take(self, batch: Batch) -> Tensor:
        """A step on a batch; returns the loss."""


def record(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What does again on that GPU what ``function`` launches there. Nothing is computed yet.

    Raises:
        ValueError: it does something that a graph cannot hold, such as waiting for the GPU.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # A stream of torch's own choice is one of the first GPU that was recorded on, and has nothing of another.
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=_stream(device)):
            function()
    except RuntimeError as error:
        raise ValueError(
            f"graphs is true, and a step of this method cannot be recorded as a CUDA graph: use false. {error}"
        ) from error
    return graph.replay


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep memory for each stream."""
    return torch.cuda.Stream(device)


class RecordedSteps:
    """Steps on batches, of which those that have the shape of the first are replayed from the second on.

    The first is taken as it is: momentum begins with it, and libraries are loaded. The same kernels run on the same
    numbers in the same order either way.

    Args:
        steps: takes them. What a step reads and writes beside the batch stays where it is in memory (parameters,
            buffers, anchors, momentum), and nothing in it is Python's to decide.
    """

    def __init__(self, steps: Taking) -> None:
        self._steps = steps
        self._first: Batch | None = None
        self._given: list[Tensor] = []
        self._loss: Tensor | None = None
        self._replay: Callable[[], None] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """A step; the loss is good until the next one."""
        if self._first is None:
            self._first = batch
            return self._steps.take(batch)
        if not _alike(batch, self._first):
            return self._steps.take(batch)
        taken = self._steps.taken
        if self._replay is None:
            self._given = [torch.empty_like(part) for part in _tensors(batch)]
            self._replay = record(self._step, self._given[0].device)
        for place, part in zip(self._given, _tensors(batch), strict=True):
            place.copy_(part)
        self._replay()
        self._steps.taken = taken + 1  # Python sees the recording, and not the replays
        assert self._loss is not None
        return self._loss

    def _step(self) -> None:
        self._loss = self._steps.take(Batch(*self._given))


def _tensors(batch: Batch) -> list[Tensor]:
    return [part for part in batch if isinstance(part, Tensor)]


def _alike(a: Batch, b: Batch) -> bool:
    """Whether both are tensors of the same shapes: a dictionary of inputs is not recorded."""
    return all(
        isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype
        for x, y in zip(a, b, strict=True)
    )
