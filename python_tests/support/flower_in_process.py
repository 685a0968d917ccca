"""Flower without processes: nodes in this one, which answer when they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["Nodes", "node_context"]


def node_context(node: int, node_config: Mapping[str, Any], run_config: Mapping[str, Any] | None = None) -> Context:
    """The context of a node that has kept nothing yet."""
    return Context(1, node, dict(node_config), RecordDict(), dict(run_config or {}))


class Nodes(Grid):
    """A grid of nodes in this process.

    Args:
        app: of all of them.
        contexts: one for each, by the nodes' numbers.
        change: is given what a node has answered, and to what, and may change it.
    """

    def __init__(
        self,
        app: ClientApp,
        contexts: Mapping[int, Context],
        monkeypatch: pytest.MonkeyPatch,
        change: Callable[[int, Message, RecordDict], None] = lambda node, message, content: None,
    ) -> None:
        for which in ("_task_id", "_run_id", "_node_id"):  # as a simulation sets it, for messages
            monkeypatch.setattr(TaskIdentity, which, 1)
        self._app, self.contexts, self._change = app, contexts, change
        self._answers: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            name, node = f"message {len(self._answers)}", message.metadata.dst_node_id
            about = Metadata(1, name, node, 1, name, "", 0.0, 9.0, message.metadata.message_type)
            try:
                content = self._app(message, self.contexts[node]).content
            except Exception as error:
                self._answers[name] = make_message(about, error=Error(1, str(error)))
            else:
                self._change(node, message, content)
                self._answers[name] = make_message(about, content)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._answers[name] for name in message_ids]

    set_run = run = create_message = send_and_receive = None  # type: ignore[assignment]
