"""Signals: the first one asks a run to stop after its round, the second one does what it did before.

Under torchrun, Ctrl-C comes twice: from the terminal, and from torchrun, which passes it on. These two are one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["Interrupted", "interruptible"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TOGETHER = 2.0  # seconds in which signals under torchrun are one


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal after a round, and saved if it has a folder."""


@contextlib.contextmanager
def interruptible(heard: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C, SIGTERM or SIGHUP sets; in other threads than the main one nothing does.

    Args:
        heard: called at once by the first signal, wherever the program is at that moment.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    together = _TOGETHER if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
    first = -1.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not asked.is_set():
            first = now
            asked.set()
            heard()
        elif now - first > together:
            for other in _SIGNALS:
                signal.signal(other, before[other])
            signal.raise_signal(number)

    for number in _SIGNALS:
        if before[number] != signal.SIG_IGN or number != signal.SIGHUP:  # nohup: it is to go on
            signal.signal(number, stop)
    try:
        yield asked
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])
