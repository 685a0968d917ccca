"""The progress display: how far a run is, and all runs of a comparison; how long they still take.

It is drawn with rich, which measures terminals, keeps a display of several lines in place while other lines are printed
above it, and knows which characters and colours a terminal has. It is imported when a display begins.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, TextIO

from pfl_ext.federation.turns import Turns
from pfl_ext.metrics import SHARES, digits_of, scale_of, word_of

__all__ = ["Progress", "duration", "shown_values", "value_words"]

_MEDIAN_OF = 15  # rounds that the time left is judged by: few enough to follow a change, enough to pass over outliers
_WIDTH = 100  # columns that the display takes at most
_LOOK = 0.1  # seconds between two looks at how far a run is; an answer to Ctrl-C waits no longer
_NOTEBOOK = 0.5  # seconds between two pictures in a notebook, each of which goes to a browser
_FIRST, _LATER = 5.0, 60.0  # seconds between two lines in a log: at the beginning, and of a run that takes long
_TRAINING = 0.8  # the part of a round that training takes, before anything is known
_BESIDE = 36  # columns beside a bar, so that it keeps its length while the numbers change
_LONG_ROUND = 0.4  # seconds from which on a round has a bar of its own

_STAGES = {
    "train": "training clients",
    "rest": "clients that rest",
    "personal": "personal training",
    "evaluate": "evaluating clients",
    "test": "testing the global model",
    "finish": "clients' own training",
}
_PART = {"train": (0.0, _TRAINING), "evaluate": (_TRAINING, 1.0), "test": (1.0, 1.0)}


@dataclass
class _Run:
    """The run that is on its way."""

    title: str
    label: str
    rounds: int
    start: int
    turns: Turns
    began: float
    last: float
    """When the last round was over."""
    round: int
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_OF))
    values: dict[str, float] = field(default_factory=dict)

    @property
    def part(self) -> float:
        """How much of the round in work is done, from 0 to 1."""
        asked, done = self.turns.asked, self.turns.done
        if not asked or self.turns.stage not in _PART or self.round >= self.rounds:
            return 0.0
        low, high = _PART[self.turns.stage]
        return low + (high - low) * min(1.0, done / asked)

    def seconds_left(self, now: float) -> float:
        """The rounds that are left times the median time of the last ones; before the first by its clients' turns."""
        left = max(0, self.rounds - self.round)
        if self.durations:
            typical = statistics.median(self.durations)
            return max(0.0, left * typical - min(typical, now - self.last)) if left else 0.0
        return (now - self.began) * (left / self.part - 1) if self.part else math.nan


class Progress:
    """What runs show on stderr while they run: lines that stay in place on a terminal, a line now and then in a log.

    On a terminal there is a bar for the round in work (its clients' turns, where the engine counts them), for the
    rounds, and for the runs of a comparison; a line stays of every run that is over. In a notebook it is one output
    that is updated. Elsewhere it is plain lines: the first after 5 seconds, later one a minute, one when a run ends.

    A display must never end a run: when the stream is closed or broken, it goes quiet::

        with Progress() as progress:
            progress.begin("PersFL", rounds=20, turns=federation.engine.turns)
            for record in federation.rounds():
                progress.update(record["round"], accuracy=0.93, loss=0.21)
    """

    def __init__(
        self,
        runs: Sequence[str] = ("",),
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show nothing yet.

        Args:
            runs: A label for every run that will begin, in order. Those with the same one, such as a method's with
                several seeds, are expected to take the same time.
            quiet: Show nothing at all.
            stream: Default: stderr.
            clock: Seconds from any origin.
        """
        self._labels = list(runs)
        self._stream = None if quiet else (stream if stream is not None else sys.stderr)
        self._clock = clock
        self._lock = threading.RLock()
        self._run: _Run | None = None
        self._begun = 0  # how many runs
        self._took: list[tuple[str, float]] = []  # the label and the seconds of every run that is over
        self._notice = ""
        self._answered = ""  # the notice that a log has
        self._line_at = clock()  # when a log had its last line
        self._screen: _Screen | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what is shown -----------------------------------------------------------------------------------------------

    def begin(self, title: str, rounds: int, *, start: int = 0, turns: Turns | None = None) -> None:
        """Begin the next run; that before is over.

        Args:
            title: What it is, such as "ditto, seed 1".
            rounds: The number of its last round.
            start: The number of the last round that is done already, in a run that resumes.
            turns: How far its engine is within a round.
        """
        self.end()
        with self._lock:
            now = self._clock()
            label = self._labels[self._begun] if self._begun < len(self._labels) else title
            self._run = _Run(title, label, rounds, start, turns or Turns(), now, now, start)
            self._begun += 1
            self._notice = ""
        if self._stream is not None and self._thread is None:
            self._screen = self._safely(_screen_of)
            self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
            self._thread.start()

    def update(self, round: int, **values: float) -> None:
        """Note that ``round`` is done. Values such as ``accuracy=`` stay until they are given again.

        Names that end with a share, such as ``personal accuracy``, are shown in per cent.
        """
        with self._lock:
            run = self._run
            assert run is not None, "begin comes first"
            now = self._clock()
            done = round - run.round
            if done > 0:  # what clients do after the last round is none
                run.durations.extend([(now - run.last) / done] * min(done, _MEDIAN_OF))
            run.last, run.round = now, round
            run.values.update(values)

    def answer(self, text: str) -> None:
        """Show this as long as the run goes on. It only notes it: the middle of a signal is no place for more."""
        self._notice = text

    def message(self, text: str) -> None:
        """Print a line of its own above the display, such as a warning."""
        with self._lock:
            self._print(text)

    def end(self) -> None:
        """The run is over: leave a line of what came out."""
        with self._lock:
            run, self._run = self._run, None
            if run is None:
                return
            self._took.append((run.label, run.last - run.began))
            where = f"{run.round} rounds" if run.round >= run.rounds else f"round {run.round} of {run.rounds}"
            done = f"{where} in {duration(run.last - run.began)}" if run.round > run.start else where
            if (screen := self._screen) is not None:
                self._safely(lambda _: screen.show(None))
            self._print(", ".join([f"{self._title(run)}: {done}", *value_words(run.values)]))

    def close(self) -> None:
        """End the run and the display."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        self.end()
        if self._screen is not None:
            with contextlib.suppress(*_BROKEN):
                self._screen.close()
        self._screen = self._stream = None

    @property
    def seconds_left(self) -> float:
        """Of the run; NaN before anything is known."""
        return math.nan if self._run is None else self._run.seconds_left(self._clock())

    @property
    def seconds_left_in_all(self) -> float:
        """Of all runs: one that has not begun is expected to take as long as those with its label, else as any."""
        now, run = self._clock(), self._run
        left, known = 0.0, list(self._took)
        if run is not None:
            left = run.seconds_left(now)
            known.append((run.label, now - run.began + left))
        mean = statistics.mean(seconds for _, seconds in known) if known else math.nan
        for label in self._labels[self._begun :]:
            same = [seconds for other, seconds in known if other == label]
            left += statistics.mean(same) if same else mean
        return left

    # ---- how it is shown ---------------------------------------------------------------------------------------------

    def _title(self, run: _Run) -> str:
        several = len(self._labels) > 1
        return f"{run.title}, {self._begun} of {len(self._labels)}" if several else run.title

    def _watch(self) -> None:
        every = _NOTEBOOK if isinstance(self._screen, _Notebook) else _LOOK
        while not self._stop.wait(every):
            self.look()

    def look(self) -> None:
        """Show how far the run is now. A thread does so again and again from the first run's beginning on."""
        with self._lock:
            run, screen = self._run, self._screen
            if run is None:
                return
            if screen is None:
                self._log(run)
            else:
                self._safely(lambda _: screen.show(self._lines(run)))

    def _lines(self, run: _Run) -> _Lines:
        """What a terminal shows of a run: its bars and the text beside them."""
        now, turns = self._clock(), run.turns
        bars = []
        if len(self._labels) > 1:
            share = run.part / max(1, run.rounds) + run.round / max(1, run.rounds)
            left = _left(self.seconds_left_in_all)
            bars.append(("all runs", (len(self._took) + min(1.0, share)) / len(self._labels), self._of_all(), left))
        left = ", ".join(part for part in (_left(run.seconds_left(now)), _pace(run)) if part)
        done = (run.round + run.part) / run.rounds if run.rounds else 1.0
        bars.append(("rounds", done, f"{run.round} of {run.rounds}", left))
        typical = statistics.median(run.durations) if run.durations else 0.0
        at_work = run.round < run.rounds or turns.stage == "finish"
        if at_work and turns.asked and max(typical, now - run.last) >= _LONG_ROUND:
            name = f"round {run.round + 1}" if run.round < run.rounds else "at the end"
            bars.append(
                (name, turns.done / turns.asked, f"{turns.done} of {turns.asked}", _STAGES.get(str(turns.stage), ""))
            )
        return _Lines(self._title(run), bars, ", ".join(value_words(run.values)), self._notice)

    def _of_all(self) -> str:
        return f"{self._begun} of {len(self._labels)}"

    def _log(self, run: _Run) -> None:
        """A line for a log, if one is due."""
        now = self._clock()
        if self._notice and self._notice != self._answered:
            self._answered = self._notice
            self._print(self._notice)
        every = min(_LATER, max(_FIRST, (now - run.began) / 4))
        if now - self._line_at < every:
            return
        turns, parts = run.turns, [f"{self._title(run)}: round {run.round} of {run.rounds}"]
        if turns.asked and now - run.last >= every:  # nothing else tells that it goes on
            stage = _STAGES.get(str(turns.stage), "")
            parts.append(f"in the next {turns.done} of {turns.asked} {stage}".strip())
        parts += value_words(run.values)
        parts += [part for part in (_pace(run), _left(run.seconds_left(now))) if part]
        if len(self._labels) > 1 and (left := _left(self.seconds_left_in_all)):
            parts.append(f"all runs {left}")
        self._print(", ".join(parts))

    def _print(self, text: str) -> None:
        def write(stream: TextIO) -> None:
            if self._screen is not None:
                self._screen.print(text)
                return
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            stream.flush()

        self._line_at = self._clock()
        self._safely(write)

    def _safely(self, action: Callable[[TextIO], Any]) -> Any:
        """The action on the stream; none any more once it failed."""
        if self._stream is None:
            return None
        try:
            return action(self._stream)
        except _BROKEN:
            self._stream = None
            return None


_BROKEN = (OSError, ValueError, AttributeError)  # a broken pipe, a closed file or letters it does not have, no stream


# ---- screens ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lines:
    """What is on a screen."""

    title: str
    bars: Sequence[tuple[str, float, str, str]]
    """Each with a name, the part that is done, that part in numbers, and what is said beside it."""
    values: str
    notice: str


class _Terminal:
    """Lines at the bottom of a terminal; what is printed meanwhile goes above them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        # What is printed to stdout is redirected only where that is a terminal too: a file must have it.
        self._console = Console(file=stream, highlight=False, soft_wrap=False)
        self._console.on_broken_pipe = _broken_pipe  # type: ignore[method-assign]  # rich ends the process
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),
            redirect_stderr=stream is sys.stderr,
            vertical_overflow="crop",
        )
        self._live.start()
        # A run that is killed leaves the terminal as it is, and that should have a cursor.
        self._console.show_cursor(True)

    def show(self, lines: _Lines | None) -> None:
        """Show these in place of those before; None removes them."""
        self._live.update("" if lines is None else _picture(lines, min(_WIDTH, self._console.width)), refresh=True)

    def print(self, text: str) -> None:
        """Print a line above the progress bars."""
        self._console.print(_plain(text))

    def close(self) -> None:
        """End with what was printed."""
        self.show(None)
        self._live.stop()


def _broken_pipe() -> NoReturn:
    raise BrokenPipeError


class _Notebook:
    """One output of a notebook's cell, which is updated."""

    def __init__(self, stream: TextIO) -> None:
        from IPython.display import display

        self._above: list[str] = []
        self._lines: _Lines | None = None
        self._handle = display(self._bundle(), raw=True, display_id=True)

    def show(self, lines: _Lines | None) -> None:
        self._lines = lines
        self._handle.update(self._bundle(), raw=True)

    def print(self, text: str) -> None:
        self._above.append(text)
        self.show(self._lines)

    def close(self) -> None:
        self.show(None)

    def _bundle(self) -> dict[str, str]:
        """The output as HTML and as text."""
        import io

        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=_WIDTH, highlight=False, force_jupyter=False)
        for text in self._above:
            console.print(_plain(text))
        if self._lines is not None:
            console.print(_picture(self._lines, _WIDTH))
        page = '<pre style="line-height: 1.3; white-space: pre; overflow-x: auto">{code}</pre>'
        html = console.export_html(code_format=page, inline_styles=True, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}


_Screen = _Terminal | _Notebook


def _screen_of(stream: TextIO) -> _Screen | None:
    """The screen of a stream, None for a log."""
    if stream is sys.stderr and _in_notebook():
        return _Notebook(stream)
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        return _Terminal(stream)
    return None


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _picture(lines: _Lines, width: int) -> Any:
    """The lines as rich draws them."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:
        return Text(text, style, no_wrap=True, overflow="ellipsis")

    names = max(len(name) for name, *_ in lines.bars)
    counts = max(len(count) for *_, count, _ in lines.bars)
    bar_width = min(36, width - names - counts - _BESIDE - 6)
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(4 if bar_width >= 5 else 3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for name, part, count, text in lines.bars:
        done = min(1.0, max(0.0, part))
        bar = ProgressBar(1.0, done, bar_width, style="bright_black", complete_style="cyan", finished_style="cyan")
        table.add_row(name, *([bar] if bar_width >= 5 else []), Text(count, justify="right"), text)
    parts: list[Any] = [line(lines.title, "bold"), table]
    if lines.values:
        parts.append(line(lines.values))
    if lines.notice:
        parts.append(line(lines.notice, "bold yellow"))
    return Group(*parts)


# ---- words -----------------------------------------------------------------------------------------------------------


def shown_values(record: Mapping[str, Any], metric: str) -> dict[str, float]:
    """What is shown of a round: the metric of each model on its clients' test sets, else the training loss.

    Args:
        record: the round's.
        metric: which.
    """
    models = record.get("models", {})
    if not models:
        loss = record.get("training", {}).get("loss")
        return {} if loss is None else {"loss": loss}
    found = {}
    for name, splits in sorted(models.items(), key=lambda item: item[0] != "personal"):
        value = splits.get("test", {}).get(metric)
        if value is None:  # no client was asked
            value = splits.get("global_test", {}).get(metric)
        if value is not None:
            found[f"{name} {metric}"] = value["mean"] if isinstance(value, Mapping) else value
    return found


def value_words(values: Mapping[str, float]) -> Iterator[str]:
    """Values with their names; shares in per cent."""
    for name, value in values.items():
        model, _, metric = name.rpartition(" ")
        text = f"{scale_of(metric) * value:.{digits_of(metric)}f}" + (" %" if metric in SHARES else "")
        yield f"{model} {word_of(metric).replace('_', ' ')} {text}".strip()


def _pace(run: _Run) -> str:
    return f"{duration(statistics.median(run.durations))} a round" if run.durations else ""


def _left(seconds: float) -> str:
    if not seconds > 0:  # NaN is not
        return ""
    return f"{duration(seconds) if seconds < 10 or seconds >= 60 else f'{seconds:.0f} s'} left"


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days} d {h} h" if days else f"{h} h {m:02} min" if h else f"{m} min {s:02} s"
