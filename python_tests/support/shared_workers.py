"""Worker processes that many runs share, one after the other: to start two takes seconds, a run of a test less."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from pfl_ext.engines import Workers, workers
from pfl_ext.federation.mapped import MappedTensor


def _meet(all_there: Barrier) -> None:
    workers._all_there = all_there


def _renew(arguments: tuple[Any, ...]) -> None:
    """What a worker does when it begins, for another plan."""
    plan, store, server, folder = arguments
    here = plan.open()
    torch.set_num_threads(here.settings.threads)
    workers._worker = workers._Worker(here, store, server, folder)
    workers._all_there.wait(60)


class Pool:
    """The processes."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.count = count
        self.executor = ProcessPoolExecutor(count, context, initializer=_meet, initargs=(context.Barrier(count),))

    def engine(self) -> SharedWorkers:
        """An engine of one run on them."""
        return SharedWorkers(self)

    def close(self) -> None:
        self.executor.shutdown()


class SharedWorkers(Workers):
    """Workers that were there before the run, and are after it."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.count)
        self._shared = pool

    def _start_processes(self, server: dict[str, MappedTensor]) -> None:
        portable = workers._PortablePlan.of(self._plan, self._folder)
        self._pool = self._shared.executor
        list(self._pool.map(_renew, [(portable, self.store, server, self._folder)] * self.workers))

    def close(self) -> None:
        self._pool = None
        super().close()
