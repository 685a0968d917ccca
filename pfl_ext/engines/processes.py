"""Worker processes, which runs one after the other may share: starting them takes seconds, mostly for importing torch.

>>> with kept_processes():                                                                      # doctest: +SKIP
...     for run in several:
...         run.run()
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import resource_tracker, util
from multiprocessing.synchronize import Barrier, SemLock
from typing import Any

__all__ = ["Processes", "kept_processes", "leave_if_imported_by_a_worker"]

_UNGUARDED = 78  # the exit status of a worker that would run the script which starts it
_PATIENCE = 60  # seconds that one process waits for the others


def leave_if_imported_by_a_worker() -> None:
    """End this process if it is a worker that imports the script which starts it, and so would do all of it again."""
    # What the standard library itself asks before it starts a process (multiprocessing.spawn).
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(_UNGUARDED)


# ---- in a worker -----------------------------------------------------------------------------------------------------

_all_there: Barrier


def _start(all_there: Barrier) -> None:
    """The first thing a worker process does."""
    global _all_there
    # A signal to the whole group (Ctrl-C, systemd, Slurm) is the parent's to answer: it ends the run after the round.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _all_there = all_there


def _end_with_parent() -> None:
    """Whoever kills the parent leaves no worker behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _once(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call the function, then wait for all others, so that each of them calls it once."""
    try:
        return function(*arguments)
    finally:
        _all_there.wait(_PATIENCE)


def _identity() -> int:
    return os.getpid()


# ---- in the parent ---------------------------------------------------------------------------------------------------


class Processes:
    """Processes that carry out calls: the standard library's pool.

    They are spawned: a script that makes them must guard its entry point by ``__name__ == "__main__"``.

    Attributes:
        ids: of the processes.
        seconds: how long it took until all were there.

    Raises:
        RuntimeError: the script has no such guard.
        BrokenProcessPool: one of them ended.
    """

    def __init__(self, count: int) -> None:
        """Start them, and wait until all are there."""
        begin = time.perf_counter()
        # Python's tracker of semaphores ignores Ctrl-C and SIGTERM, and keeps what is blocked when it begins: so it
        # outlives a hangup of the whole group too.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            resource_tracker.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        context = multiprocessing.get_context("spawn")
        self.count, self.ids = count, list[int]()
        registry: dict[Any, Any] = util._finalizer_registry  # type: ignore[attr-defined]
        earlier = set(registry)
        self._pool = ProcessPoolExecutor(count, context, initializer=_start, initargs=(context.Barrier(count),))
        finalizers = [last for key, last in list(registry.items()) if key not in earlier]
        self._last = deque[Future[Any]]()
        others = set(multiprocessing.active_children())
        answers = [self._pool.submit(_once, _identity, ()) for _ in range(count)]
        started = [process for process in multiprocessing.active_children() if process not in others]
        try:
            # Waited for here, so that it is not counted as part of the first round.
            self.ids = [answer.result() for answer in answers]
        except BrokenProcessPool:
            for process in started:
                process.join(1)
            self.end()
            if any(process.exitcode == _UNGUARDED for process in started):
                raise RuntimeError(
                    f"workers is {count}, and each of them begins with an import of the script: put what the script "
                    "does below `if __name__ == '__main__':`, or use workers=1"
                ) from None
            raise
        for last in finalizers:
            # All have opened their semaphores: without names these end with the processes. By its name one would stay
            # in /dev/shm for good where the whole group is killed, Python's tracker of semaphores with it.
            if last._callback is SemLock._cleanup:  # type: ignore[attr-defined]
                last()
        self.seconds = time.perf_counter() - begin

    @staticmethod
    def take(count: int) -> Processes:
        """Those that an earlier run has left, or new ones."""
        while _kept is not None and _kept.idle.get(count):
            processes = _kept.idle[count].pop()
            try:  # one may have been killed meanwhile
                processes.everywhere(_identity)
            except BrokenProcessPool:
                processes.end()
            else:
                return processes
        processes = Processes(count)
        if _kept is not None:
            _kept.started_in += processes.seconds
        return processes

    def leave(self, forget: Callable[[], None], saved: float = 0.0) -> None:
        """They are not needed any more: the next run may have them, where some are kept; else they end.

        Args:
            forget: what each calls first, to free what it has of the run.
            saved: seconds that they have saved the run.
        """
        if _kept is not None:
            _kept.saved += saved
            if all(future.done() for future in self._last):
                self._last.clear()
                with contextlib.suppress(BrokenProcessPool):
                    self.everywhere(forget)
                    _kept.idle.setdefault(self.count, []).append(self)
                    return
        self.end()

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each process gives for this call."""
        return [future.result() for future in [self.submit(_once, function, arguments) for _ in range(self.count)]]

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let one of them carry out a call."""
        future = self._pool.submit(function, *arguments)
        while self._last and self._last[0].done():
            self._last.popleft()
        self._last.append(future)
        return future

    def end(self) -> None:
        """End them now, whatever they do."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process.pid in self.ids:
                process.kill()  # it has nothing to lose; torch takes a second to end by itself
                process.join()


@dataclass
class _Kept:
    """What the runs in a block share."""

    idle: dict[int, list[Processes]] = field(default_factory=dict)
    """Processes that no run uses now, by their number."""
    started_in: float = 0.0
    """Seconds that it took to start all of them."""
    saved: float = 0.0
    """Seconds that they have saved."""

    def note(self) -> str | None:
        """What to say where they have cost more than they saved."""
        if self.saved >= self.started_in:
            return None
        return (
            f"starting worker processes took {self.started_in:.1f} s, and they saved {max(self.saved, 0.0):.1f} s: "
            "what is so short takes less time with workers=1"
        )


_kept: _Kept | None = None
"""None outside of :func:`kept_processes`."""


@contextlib.contextmanager
def kept_processes(tell: Callable[[str], None] = lambda note: None) -> Iterator[None]:
    """Runs in this block leave their worker processes to the next one; those that are left end with it.

    Args:
        tell: called at the end of a block that ends well if starting them took longer than they have saved.
    """
    global _kept
    if _kept is not None:  # in another such block, which keeps them longer
        yield
        return
    kept = _kept = _Kept()
    try:
        yield
    finally:
        _kept = None
        for processes in itertools.chain(*kept.idle.values()):
            processes.end()
    note = kept.note()
    if note is not None:
        tell(note)
