from __future__ import annotations

import io
import math

import pytest

from pfl_ext.reports import Progress


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True

    def screen(self) -> list[str]:
        """What one sees: a carriage return goes back to the line's beginning and what follows is written over it."""
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for part in line.split("\r"):
                shown = part + shown[len(part) :]
            lines.append(shown.rstrip())
        return lines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def width(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return lambda columns: monkeypatch.setenv("COLUMNS", str(columns))


def test_a_terminal_shows_one_line_that_is_updated(clock, width):
    width(100)
    terminal = Terminal()
    with Progress(4, "PersFL", stream=terminal, clock=clock) as progress:
        for number in range(1, 4):
            clock.now += 2.0
            progress.update(number, accuracy=0.1234 * number)
        assert terminal.screen() == [
            "[###############.....] PersFL round 3/4 | accuracy 37.02 % | 2.0 s a round | 2.0 s left"
        ]
        clock.now += 2.0
        progress.update(4, loss=0.5)
    bar, empty = terminal.screen()
    assert bar.endswith("PersFL round 4/4 | accuracy 37.02 % | loss 0.5000 | 2.0 s a round | 8.0 s in all")
    assert empty == ""


@pytest.mark.parametrize("columns", [8, 30, 75, 200])
def test_the_line_never_wraps(clock, width, columns):
    width(columns)
    terminal = Terminal()
    progress = Progress(3, "a long title", stream=terminal, clock=clock)
    for number in (1, 2, 3):
        clock.now += 1.0
        progress.update(number, accuracy=0.5, accuracy_global=0.25)
    assert all(len(part) < columns for part in terminal.getvalue().split("\r"))
    assert terminal.screen()[0].lstrip("[#.] ").startswith("a long title"[: columns - 1].rstrip())


def test_a_shorter_line_leaves_nothing_of_the_longer_one(clock, width):
    width(57)  # too narrow for the bar, which would fill the line
    terminal = Terminal()
    progress = Progress(9, stream=terminal, clock=clock)
    for number, loss in ((1, 10.5), (2, 0.5)):
        clock.now += 1.0
        progress.update(number, loss=loss)
    assert terminal.screen() == ["round 2/9 | loss 0.5000 | 1.0 s a round | 7.0 s left"]


def test_a_fast_run_does_not_flood_the_terminal(clock, width):
    width(80)
    terminal = Terminal()
    with Progress(1000, stream=terminal, clock=clock) as progress:
        for number in range(1, 801):
            clock.now += 0.001
            progress.update(number)
    assert terminal.getvalue().count("\r") < 12
    assert "round 800/1000" in terminal.screen()[0]  # the last one is shown, even of a run that was stopped


def test_a_log_gets_a_line_every_five_seconds_and_the_last(clock):
    log = io.StringIO()
    with Progress(20, "FedAvg", stream=log, clock=clock) as progress:
        for number in range(1, 21):
            clock.now += 1.0
            progress.update(number, accuracy=0.5)
    lines = log.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [f"FedAvg round {n}/20" for n in (1, 6, 11, 16, 20)]
    assert lines[1] == "FedAvg round 6/20 | accuracy 50.00 % | 1.0 s a round | 14.0 s left"
    assert "\r" not in log.getvalue()


def test_time_left_follows_the_median_so_one_slow_round_changes_nothing(clock):
    progress = Progress(100, stream=io.StringIO(), clock=clock)
    assert math.isnan(progress.seconds_left)
    for number, seconds in enumerate([60.0, 1.0, 1.0, 1.0], 1):
        clock.now += seconds
        progress.update(number)
    assert progress.seconds_left == 96.0


def test_a_resumed_run_counts_its_own_rounds_only(clock):
    progress = Progress(100, start=90, stream=io.StringIO(), clock=clock)
    clock.now += 10.0
    progress.update(95)  # five rounds
    assert progress.seconds_left == 10.0


def test_long_times_are_readable(clock):
    log = io.StringIO()
    progress = Progress(1000, stream=log, clock=clock)
    clock.now += 100.0
    progress.update(1)
    assert "1 min 40 s a round | 1 d 3 h left" in log.getvalue()


def test_a_message_stands_above_the_line(clock, width):
    width(60)
    terminal = Terminal()
    progress = Progress(2, stream=terminal, clock=clock)
    clock.now += 1.0
    progress.update(1)
    progress.message("client 3 diverged: \u221e")
    above, line = terminal.screen()
    assert above == "client 3 diverged: ?"  # this terminal knows ASCII only
    assert "round 1/2" in line


def test_quiet_shows_nothing(clock, capsys):
    with Progress(1, quiet=True, clock=clock) as progress:
        progress.update(1)
        progress.message("x")
    assert capsys.readouterr() == ("", "")


class Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("how", ["closed", "broken", "none"])
def test_a_broken_stream_never_ends_a_run(clock, monkeypatch, how):
    stream = {"closed": io.StringIO(), "broken": Broken(), "none": None}[how]
    if how == "closed":
        stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress(2, clock=clock) as progress:
        progress.update(1)
        progress.message("x")
        progress.update(2, accuracy=math.nan)
    assert progress.seconds_left == 0
