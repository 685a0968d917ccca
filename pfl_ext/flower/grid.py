"""Flower's Grid, with replies that are handed on as they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

__all__ = ["ArrivingGrid", "arriving", "content_of"]

_POLLS = (0.02, 1.0)  # seconds between two looks for replies: at first, and at most


def arriving(grid: Grid, waiting: set[str], timeout: float | None, *, singly: bool = False) -> Iterator[Message]:
    """Replies to the messages of these ids as they arrive, until all are there or the time is over.

    Args:
        grid: where they arrive.
        waiting: the ids.
        timeout: seconds; None: for ever.
        singly: fetch one at a time, when the one before was taken: there is memory for one alone.
    """
    waiting, end, pause = set(waiting), time.monotonic() + (timeout or 0.0), _POLLS[0]
    while waiting and (timeout is None or time.monotonic() < end):
        before = len(waiting)
        for asked in [[name] for name in sorted(waiting)] if singly else [list(waiting)]:
            found = list(grid.pull_messages(asked))
            waiting -= {message.metadata.reply_to_message_id for message in found}
            while found:  # not held here while whoever takes it works on it
                yield found.pop(0)
        pause = _POLLS[0] if len(waiting) < before else min(_POLLS[1], 1.3 * pause)
        if waiting:
            time.sleep(pause)


def content_of(reply: Message) -> RecordDict:
    """What is in a reply.

    Raises:
        ValueError: it is an error; the message has the last line of it, which says what went wrong.
    """
    if reply.has_error():
        lines = [line.strip() for line in str(reply.error.reason).splitlines() if line.strip()]
        raise ValueError(f"it answered with an error: {lines[-1][:300] if lines else reply.error.code}")
    return reply.content


class ArrivingGrid(Grid):
    """Another grid whose :meth:`send_and_receive` does not wait for the last reply to hand on the first."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """The replies as they arrive, one at a time."""
        return arriving(self, {name for name in self.push_messages(messages) if name}, timeout, singly=True)

    def set_run(self, run: Any) -> None:
        """Tell the wrapped grid which run this is."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run of the wrapped grid."""
        return self._grid.run

    def create_message(self, *args: Any, **more: Any) -> Message:
        """Make a message, as the wrapped grid does."""
        return self._grid.create_message(*args, **more)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes of the wrapped grid."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, as the wrapped grid does."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch replies, as the wrapped grid does."""
        return self._grid.pull_messages(message_ids)
