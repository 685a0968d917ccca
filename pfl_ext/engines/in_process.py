"""All turns in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from pfl_ext.federation.turns import Diverged, Turns, threads_of_a_turn

__all__ = ["InProcess"]


class InProcess:
    """Runs turns one after the other, each with ``threads`` threads: that number decides the bits, workers do not."""

    def __init__(self, turns: Turns, threads: int = 1) -> None:
        """Run turns of these."""
        self._turns, self._threads = turns, threads

    def publish(self, server: Mapping[str, Tensor]) -> None:
        """Make the server's vectors visible to the turns that follow."""
        self._turns.server = server

    def map(self, turn: str, arguments: Sequence[tuple[Any, ...]], costs: Sequence[int] | None = None) -> Iterator[Any]:
        """The results of ``Turns.<turn>(*arguments[i])`` in order; a client's :class:`Diverged` is a result too."""
        call = getattr(self._turns, turn)
        for some in arguments:
            # Not across the yield: whoever takes the results computes with all threads.
            with threads_of_a_turn(self._threads):
                try:
                    result = call(*some)
                except Diverged as error:
                    result = error
            yield result

    def close(self) -> None:
        """Nothing to end."""
