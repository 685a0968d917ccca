"""How far an engine is within a round, for a display that looks at it from another thread."""

from __future__ import annotations

from collections.abc import Sequence

from .messages import Request, Stage

__all__ = ["Turns"]


class Turns:
    """Counts clients' turns. The engine writes, a display reads whenever it likes; nothing else depends on it.

    Attributes:
        stage: of the turns that were asked for last; None before the first.
        asked: how many turns of that stage there are in this round so far.
        done: how many of them are over.
    """

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.asked = self.done = 0
        self._round = -1
        self._expected: tuple[Stage, int, int, int] | None = None
        self._coming = 0  # of those expected, how many were not asked for yet

    def expect(self, stage: Stage, round: int, count: int, done: int = 0) -> None:
        """Note that ``count`` turns of a stage will be asked for in parts, of which ``done`` are over already."""
        self._expected = stage, round, count, done

    def begin(self, requests: Sequence[Request]) -> None:
        """Note what is asked for: more of the same stage and round, or something new."""
        if not requests:
            return
        stage, round = requests[0].stage, requests[0].round
        if (stage, round) != (self.stage, self._round) or self.done >= self.asked:
            self.asked = self.done = self._coming = 0
            if self._expected is not None and self._expected[:2] == (stage, round):
                self.asked, self.done = self._expected[2:]
                self._coming, self._expected = self.asked - self.done, None
        self.stage, self._round = stage, round
        known = min(self._coming, len(requests))
        self._coming -= known
        self.asked += len(requests) - known

    def end(self, count: int = 1) -> None:
        """Note that ``count`` more turns are over. Called by one thread at a time."""
        self.done += count
