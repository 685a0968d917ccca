"""Where the time of a round goes: one process of one thread, with a clock around its parts.

The clock is the processor time of this process, so what runs beside it does not count. What a part calls is counted
once, in the part that called it. A clock takes less than a microsecond, a local step a few thousand.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from pfl_ext.data import Dataset
from pfl_ext.federation import Federation, Record, WorkingModel, steps
from pfl_ext.optim import proximal
from pfl_ext.tasks import Classification

__all__ = ["PARTS", "PASSES", "profile"]

PASSES = ("training, whole steps in one call", "training, forward", "training, backward", "evaluation, forward")
"""The parts that are forward and backward passes; whole steps have both, and the step of SGD in the second."""
_REST = "the rest"
PARTS = (*PASSES, "step of SGD", "fetching batches", "metrics", "model to and from a vector", "server", _REST)


def profile(run: Federation) -> dict[str, float]:
    """Run all rounds of a federation in this process; the seconds of each of :data:`PARTS`."""
    spent = dict.fromkeys(PARTS, 0.0)
    whole = 0.0
    round_of = run._one_round

    def timed() -> Record:
        nonlocal whole
        begin = time.process_time()
        record = round_of()
        whole += time.process_time() - begin
        return record

    with _clocks(run, spent), mock.patch.object(run, "_one_round", timed):
        run.run()
    spent[_REST] = whole - sum(spent.values())
    return spent


@contextlib.contextmanager
def _clocks(run: Federation, spent: dict[str, float]) -> Iterator[None]:
    inside = False

    def clock(owner: Any, name: str, part: Callable[[], str]) -> Any:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return inner(*args, **kwargs)
            inside, begin = True, time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[part()] += time.process_time() - begin
                inside = False

        return mock.patch.object(owner, name, timed)

    def forward() -> str:
        return PASSES[1] if torch.is_grad_enabled() else PASSES[3]

    with contextlib.ExitStack() as stack:
        for owner, name, part in (
            (WorkingModel, "__call__", forward),
            (Classification, "loss", forward),
            (steps, "train_steps_", lambda: PASSES[0]),
            (steps, "loss_and_gradients", lambda: PASSES[0]),
            (torch.autograd, "grad", lambda: PASSES[2]),
            (proximal, "proximal_sgd_step_", lambda: "step of SGD"),
            (Dataset, "batch", lambda: "fetching batches"),
            (Classification, "metrics", lambda: "metrics"),
            (WorkingModel, "load", lambda: "model to and from a vector"),
            (WorkingModel, "state", lambda: "model to and from a vector"),
            (type(run.method), "aggregate", lambda: "server"),
        ):
            stack.enter_context(clock(owner, name, part))
        yield
