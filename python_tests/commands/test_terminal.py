"""The command line on a real terminal: the progress display, and what Ctrl-C does there."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from pfl_ext.reports import ResultsFolder

# Clients that wait: there is time to look and to press a key, and nobody's processor is used.
SLOW = """
import time

from pfl_ext.algorithms import FedAvg


class Slow(FedAvg):
    "FedAvg whose clients take their time."

    name = "slow"

    def train(self, client, received):
        time.sleep(0.1)
        return super().train(client, received)
"""
COLUMNS = 80
ARGUMENTS = ["run", "slow.py:Slow", "--clients", "10", "--rounds", "50", "--lr", "0.1", "--no-plots", "--output", "out"]


class Terminal:
    """A process on a terminal of its own, and what it has written there."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self._keyboard, end = pty.openpty()
        ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        variables = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        variables = {name: value for name, value in variables.items() if name not in ("COLUMNS", "NO_COLOR")}
        self.process = subprocess.Popen(
            command, cwd=cwd, env=variables, stdin=end, stdout=end, stderr=end, start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(end)
        self.written = ""

    def press(self, key: str) -> float:
        """Press a key; returns when."""
        os.write(self._keyboard, key.encode())
        return time.monotonic()

    def read(self, seconds: float) -> bool:
        """Take what comes within this time; whether the terminal is still in use."""
        if not select.select([self._keyboard], [], [], seconds)[0]:
            return True
        try:
            some = os.read(self._keyboard, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.written += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", some.decode("utf-8", "replace"))
        return bool(some)

    def until(self, pattern: str, seconds: float = 30.0) -> float:
        """Read until that was written; returns when."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.written):
            assert self.read(0.02) and time.monotonic() < end, f"no {pattern!r} in:\n{self.written[-3000:]}"
        return time.monotonic()

    def ended(self) -> int:
        """Read to the end; returns the status."""
        end = time.monotonic() + 30
        while self.read(0.05):
            assert time.monotonic() < end, self.written[-3000:]
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keyboard)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    begun: list[Terminal] = []
    (tmp_path / "slow.py").write_text(SLOW)

    def start(*more: str) -> Terminal:
        begun.append(Terminal([sys.executable, "-m", "pfl_ext", *ARGUMENTS, *more], tmp_path))
        return begun[-1]

    yield start
    for terminal in begun:
        terminal.close()


@pytest.mark.parametrize("engine", [[], ["--workers", "2"]], ids=["process", "workers"])
def test_a_terminal_shows_how_far_it_is_and_ctrl_c_is_answered_at_once(
    start: Callable[..., Terminal], engine: list[str], tmp_path: Path
) -> None:
    terminal = start(*engine)
    terminal.until("slow.py:Slow")
    # Before the first round is over: what is left is judged by its clients' turns.
    terminal.until(r"rounds +[━╸╺-]+ +0 of 50 +[\d. mins]+ left")
    terminal.until(r"round 1 +[━╸╺-]+ +[1-9] of 10 +training clients")
    terminal.until(r"rounds +[━╸╺-]+ +1 of 50 +[\d. mins]+ left, [\d. ms]+ a round")
    terminal.until(r"global accuracy \d\d\.\d\d %")
    pressed = terminal.press("\x03")
    answered = terminal.until(r"finishing round \d+, then saving; again to stop now")
    assert answered - pressed < 1.0
    assert terminal.ended() == 130
    done = len(ResultsFolder.open(tmp_path / "out").records())
    assert f"stopped after round {done}; pfl-ext resume" in terminal.written
    assert re.search(rf"slow.py:Slow: round {done} of 50 in [\d.]+ m?s, global accuracy", terminal.written)
    lines = re.split(r"[\r\n]+", terminal.written.partition("pfl-ext run: ")[0])
    assert max(map(len, lines)) <= COLUMNS  # longer ones would take two lines


def test_quiet_answers_too_and_a_second_ctrl_c_ends_it_now(start: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = start("--quiet")
    metrics = tmp_path / "out" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert terminal.read(0.05)
    assert not terminal.written
    terminal.press("\x03")
    terminal.until(r"finishing round \d+, then saving; again to stop now")
    terminal.press("\x03")
    assert terminal.ended() == 130
    assert "aborted; pfl-ext resume" in terminal.written and "stopped after" not in terminal.written
