from __future__ import annotations

import io
import math
import subprocess
import sys

import pytest

from pfl_ext.federation import Request
from pfl_ext.federation.turns import Turns
from pfl_ext.reports import Progress, progress, shown_values, value_words


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch):
    """Nothing looks by itself: the tests do."""
    monkeypatch.setattr(progress, "_LOOK", 1000.0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def screen(monkeypatch):
    """A terminal of that width, and what one sees on it."""
    pyte = pytest.importorskip("pyte")
    monkeypatch.setenv("TERM", "xterm")

    def screen(columns: int):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", "12")
        terminal, shown = Terminal(), pyte.Screen(columns, 12)

        def lines() -> list[str]:
            shown.reset()
            pyte.Stream(shown).feed(terminal.getvalue().replace("\n", "\r\n"))
            return [line.rstrip() for line in shown.display if line.strip()]

        return terminal, lines

    return screen


def turns(asked: int, done: int, stage: str = "train") -> Turns:
    found = Turns()
    found.begin([Request(k, 1, stage) for k in range(asked)])
    found.end(done)
    return found


# ---- words -----------------------------------------------------------------------------------------------------------


def test_shares_are_in_per_cent_and_the_personal_model_comes_first():
    models = {
        "global": {"test": {"macro_f1": {"mean": 0.25}}, "global_test": {"macro_f1": 0.2457}},
        "personal": {"test": {"macro_f1": {"mean": 0.5}}},
    }
    words = value_words(shown_values({"models": models}, "macro_f1"))
    assert list(words) == ["personal macro f1 50.00 %", "global macro f1 25.00 %"]
    assert list(value_words({"global accuracy": 0.2457, "loss": 1.5, "personal auc": math.nan})) == [
        "global accuracy 24.57 %",
        "loss 1.5000",
        "personal AUC nan %",
    ]


def test_a_round_that_asks_no_client_shows_the_global_test_and_one_without_evaluation_the_loss():
    record = {"models": {"global": {"global_test": {"accuracy": 0.75}}}, "training": {"loss": 2.0}}
    assert shown_values(record, "accuracy") == {"global accuracy": 0.75}
    assert shown_values({**record, "models": {}}, "accuracy") == {"loss": 2.0}


# ---- time ------------------------------------------------------------------------------------------------------------


def test_before_the_first_round_is_over_the_time_left_is_judged_by_its_clients(clock):
    shown = Progress(stream=io.StringIO(), clock=clock)
    counted = Turns()
    shown.begin("PersFL", 10, turns=counted)
    assert math.isnan(shown.seconds_left)
    counted.begin([Request(k, 1, "train") for k in range(8)])
    counted.end(2)
    clock.now += 2.0  # two of eight clients: training, eight tenths of a round, takes 8 seconds
    assert shown.seconds_left == pytest.approx(98.0)


def test_time_left_follows_the_median_so_one_slow_round_changes_nothing(clock):
    shown = Progress(stream=io.StringIO(), clock=clock)
    shown.begin("", 100)
    for number, seconds in enumerate([60.0, 1.0, 1.0, 1.0], 1):
        clock.now += seconds
        shown.update(number)
    assert shown.seconds_left == 96.0
    clock.now += 0.25
    assert shown.seconds_left == 95.75
    clock.now += 5.0  # a slow one again: it should have been over
    assert shown.seconds_left == 95.0


def test_a_resumed_run_counts_its_own_rounds_only(clock):
    shown = Progress(stream=io.StringIO(), clock=clock)
    shown.begin("", 100, start=90)
    clock.now += 10.0
    shown.update(95)  # five rounds
    assert shown.seconds_left == 10.0


def test_runs_to_come_are_expected_to_take_as_long_as_those_of_their_method(clock):
    shown = Progress(["fedavg", "ditto", "fedavg", "ditto"], stream=io.StringIO(), clock=clock)
    for title, seconds in (("fedavg, seed 0", 10.0), ("ditto, seed 0", 50.0)):
        shown.begin(title, 1)
        clock.now += seconds
        shown.update(1)
    shown.begin("fedavg, seed 1", 2)
    clock.now += 8.0
    shown.update(1)  # and 8 more: 16 seconds in all, where the first took 10
    assert shown.seconds_left == 8.0
    assert shown.seconds_left_in_all == 8.0 + 50.0


# ---- a terminal ------------------------------------------------------------------------------------------------------


def test_a_terminal_shows_runs_rounds_clients_and_what_came_out(clock, screen):
    terminal, lines = screen(90)
    with Progress(["fedavg", "ditto"], stream=terminal, clock=clock) as shown:
        shown.begin("fedavg", 1)
        clock.now += 10.0
        shown.update(1, **{"global accuracy": 0.25})
        shown.begin("ditto", 4, turns=turns(8, 4))
        clock.now += 4.0
        shown.look()
        done, title, *bars = lines()
        assert done == "fedavg, 1 of 2: 1 rounds in 10.0 s, global accuracy 25.00 %"
        assert title == "ditto, 2 of 2"
        assert [bar.split()[:2] + bar.split()[3:] for bar in bars] == [
            ["all", "runs", "2", "of", "2", "36", "s", "left"],
            ["rounds", bars[1].split()[1], "of", "4", "36", "s", "left"],
            ["round", "1", "4", "of", "8", "training", "clients"],
        ]
        # Half of the clients, of training that is eight tenths of the first of four rounds.
        widths = [bar.count("━") + bar.count("╸") for bar in bars]
        assert len(set(widths)) <= 2 and all(len(bar) <= 90 for bar in bars)
        clock.now += 4.0
        shown.update(1, **{"personal accuracy": 0.5})
        shown.answer("finishing round 2, then saving; again to stop now")
        shown.look()
        assert lines()[-2:] == ["personal accuracy 50.00 %", "finishing round 2, then saving; again to stop now"]
    assert lines() == [
        "fedavg, 1 of 2: 1 rounds in 10.0 s, global accuracy 25.00 %",
        "ditto, 2 of 2: round 1 of 4 in 8.0 s, personal accuracy 50.00 %",
    ]


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_line_is_never_longer_than_the_terminal(clock, screen, columns):
    terminal, lines = screen(columns)
    with Progress(["a"] * 12, stream=terminal, clock=clock) as shown:
        shown.begin("a method with a long name, seed 1, alpha=0.1", 3, turns=turns(5, 2))
        clock.now += 100.0
        shown.update(1, accuracy=0.5, loss=0.25)
        shown.look()
        assert 4 <= len(lines()) <= 6 and lines()[0].startswith("a method with a lo")


def test_a_message_stands_above_the_display(clock, screen):
    terminal, lines = screen(60)
    with Progress(stream=terminal, clock=clock) as shown:
        shown.begin("x", 2)
        shown.look()
        shown.message("client 3 diverged")
        shown.look()
        assert lines()[:2] == ["client 3 diverged", "x"]


# ---- a log -----------------------------------------------------------------------------------------------------------


def test_a_log_gets_few_lines_fewer_as_time_goes_by(clock):
    log = io.StringIO()
    with Progress(stream=log, clock=clock) as shown:
        shown.begin("FedAvg", 1000)
        for number in range(1, 1001):
            clock.now += 1.0
            shown.update(number, accuracy=0.5)
            shown.look()
    first, *_, last = lines = log.getvalue().splitlines()
    assert first == "FedAvg: round 5 of 1000, accuracy 50.00 %, 1.0 s a round, 16 min 35 s left"
    assert last == "FedAvg: 1000 rounds in 16 min 40 s, accuracy 50.00 %"
    assert 15 <= len(lines) <= 35 and "\r" not in log.getvalue() and "\x1b" not in log.getvalue()


def test_a_log_says_within_a_long_round_that_it_goes_on(clock):
    log = io.StringIO()
    with Progress(["a", "a"], stream=log, clock=clock) as shown:
        shown.begin("a, seed 0", 2, turns=turns(100, 50))
        clock.now += 60.0
        shown.look()
        shown.answer("finishing round 1; again to stop now")
        shown.look()
        shown.look()
    line, answer, end = log.getvalue().splitlines()
    assert line == (
        "a, seed 0, 1 of 2: round 0 of 2, in the next 50 of 100 training clients, 4 min 00 s left, "
        "all runs 9 min 00 s left"
    )
    assert answer == "finishing round 1; again to stop now" and end == "a, seed 0, 1 of 2: round 0 of 2"


def test_letters_that_a_log_does_not_have_are_replaced(clock):
    log = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Progress(stream=log, clock=clock) as shown:
        shown.message("client 3 diverged: \u221e")
    log.seek(0)
    assert log.read() == "client 3 diverged: ?\n"


def test_quiet_shows_nothing(clock, capsys):
    with Progress(quiet=True, clock=clock) as shown:
        shown.begin("", 1)
        shown.update(1)
        shown.message("x")
        shown.look()
    assert capsys.readouterr() == ("", "")


class Broken(Terminal):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("how", ["closed", "broken", "none"])
def test_a_broken_stream_never_ends_a_run(clock, monkeypatch, how):
    stream = {"closed": io.StringIO(), "broken": Broken(), "none": None}[how]
    if how == "closed":
        stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress(clock=clock) as shown:
        shown.begin("", 2)
        shown.update(1)
        shown.look()
        shown.message("x")
        shown.update(2, accuracy=math.nan)
        assert shown.seconds_left == 0


def test_rich_is_imported_by_a_display_and_by_nothing_else():
    code = "import sys, pfl_ext.reports, pfl_ext.cli, pfl_ext.commands.run; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
