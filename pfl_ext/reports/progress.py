"""The live display of a run: round, accuracy, time a round, time left."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from pfl_ext.metrics import SHARES

__all__ = ["Progress"]

_MEDIAN_OF = 15  # rounds that the time left is judged by: few enough to follow a change, enough to pass over outliers
_BAR = 20  # characters; the line keeps its place on terminals that are wide enough
_LIVE_EVERY = 0.1  # seconds between two updates of the line on a terminal
_PLAIN_EVERY = 5.0  # seconds between two lines in a log


class Progress:
    """One line on stderr that a terminal updates in place; in a log, a line now and then.

    A display must never end a run: when the stream is closed or broken, it goes quiet::

        with Progress(rounds, title="PersFL") as progress:
            for r in range(1, rounds + 1):
                ...
                progress.update(r, accuracy=0.93, loss=0.21)
    """

    def __init__(
        self,
        rounds: int,
        title: str = "",
        *,
        start: int = 0,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to measure time.

        Args:
            rounds: The number of the last round.
            title: Stands before the round, such as the method's name.
            start: The number of the last round that is done already, in a run that resumes.
            quiet: Show nothing.
            stream: Default: stderr.
            clock: Seconds from any origin.
        """
        self._rounds, self._title, self._round = rounds, title, start
        self._stream = None if quiet else (stream if stream is not None else sys.stderr)
        self._clock = clock
        self._began = self._last = clock()
        self._durations: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._values: dict[str, float] = {}
        self._width = 0  # of the line on the terminal
        self._shown: tuple[int, float] | None = None  # the round of the last line, and when
        self._live = self._safely(lambda stream: stream.isatty()) is True and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> Progress:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the line."""
        self.close()

    def update(self, round: int, **values: float) -> None:
        """Show that ``round`` is done. Values such as ``accuracy=`` stay until they are given again.

        Names that end with a share, such as ``accuracy``, are shown in per cent. NaN is shown as such.
        """
        now = self._clock()
        done = max(1, round - self._round)
        self._durations.extend([(now - self._last) / done] * min(done, _MEDIAN_OF))
        self._last, self._round = now, round
        self._values.update(values)
        every = _LIVE_EVERY if self._live else _PLAIN_EVERY
        if self._shown is None or now - self._shown[1] >= every or round >= self._rounds:
            self._show()

    def message(self, text: str) -> None:
        """Print a line of its own above the display, such as a warning."""
        self._write("\r" + text.ljust(self._width) + "\n" if self._width else text + "\n")
        if self._width:
            self._width = 0
            self._show()

    def close(self) -> None:
        """Show the last round and leave the line where it is."""
        if self._shown is not None and self._shown[0] != self._round:
            self._show()
        if self._width:
            self._write("\n")
        self._width, self._stream = 0, None

    @property
    def seconds_left(self) -> float:
        """The rounds that are left times the median time of the last ones; NaN before the first."""
        if not self._durations:
            return math.nan
        return max(0, self._rounds - self._round) * statistics.median(self._durations)

    def _text(self) -> str:
        parts = [f"{self._title} round {self._round}/{self._rounds}".strip()]
        for name, value in self._values.items():
            words = name.replace("_", " ")
            share = words.rpartition(" ")[2] in SHARES
            parts.append(f"{words} {100 * value:.2f} %" if share else f"{words} {value:.4f}")
        if self._durations:
            parts.append(f"{_duration(statistics.median(self._durations))} a round")
            if self._round < self._rounds:
                parts.append(f"{_duration(self.seconds_left)} left")
            else:
                parts.append(f"{_duration(self._last - self._began)} in all")
        return " | ".join(parts)

    def _show(self) -> None:
        self._shown = self._round, self._last
        if not self._live:
            self._write(self._text() + "\n")
            return
        columns = shutil.get_terminal_size().columns - 1  # a full last column would wrap
        line = self._text()
        room = min(_BAR, columns - len(line) - 3)
        if room >= 5:
            full = round(room * min(1.0, self._round / self._rounds)) if self._rounds else room
            line = f"[{'#' * full}{'.' * (room - full)}] {line}"
        line = line[:columns]
        self._write("\r" + line.ljust(min(self._width, columns)))
        self._width = len(line)

    def _write(self, text: str) -> None:
        def write(stream: TextIO) -> None:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()

        self._safely(write)

    def _safely(self, action: Callable[[TextIO], object]) -> object:
        """The action on the stream; none any more once it failed."""
        if self._stream is None:
            return None
        try:
            return action(self._stream)
        except (OSError, ValueError, AttributeError):  # a broken pipe, a closed file, a stream that is none
            self._stream = None
            return None


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days} d {h} h" if days else f"{h} h {m:02} min" if h else f"{m} min {s:02} s"
