"""Requests go through Flower's Grid to the nodes that the clients are at."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from logging import INFO, WARNING
from typing import Any, TypeAlias

import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from torch import Tensor

from pfl_ext.federation import ClientRuntime, ClientStore, Diverged, Federation, Here, Plan, Reply, Request, threads
from pfl_ext.ops import all_finite

from .arrays import copied, record_of, records_in
from .elsewhere import Introduction
from .grid import arriving, content_of
from .records import REPORTS, question_of, read_answer, read_reply, request_of, told

__all__ = ["GridEngine", "Lost"]

_Kinds: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""The shapes and types of an upload's vectors by their names."""
_TYPES = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


class Lost(Diverged):
    """A client did not answer in time, or answered with what is no reply."""

    def __str__(self) -> str:
        """Who, when, what, and what to do."""
        left_out = f"client {self.client} is left out of round {self.round}: {self.what}"
        return f"{left_out}. Runs with diverged=drop go on without such clients"


class _Taken(ValueError):
    """Another node has the client's number: perhaps the same one before it was restarted, which Flower forgets late."""


class GridEngine(Here):
    """Clients at the nodes of a Flower federation.

    A client gets what the method sends to it and nothing else. What it keeps stays in its node's context.

    Args:
        grid: Flower's, of the run.
        run: which run it is: nodes with another one refuse its requests.
        timeout: seconds in which a client must have answered a request.
        wait: seconds in which all clients must have connected before the first round.
    """

    def __init__(self, grid: Grid, run: str, *, timeout: float = 3600.0, wait: float = 600.0) -> None:
        self._grid, self._run, self.timeout, self._wait = grid, run, timeout, wait
        self._nodes: dict[int, Introduction] = {}
        self._met: set[int] = set()
        self._refused: dict[int, str] = {}
        self._moment: Callable[[], int] | None = None
        self._saved: int | None = None

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def first(self) -> Introduction:
        """The first node to come.

        Raises:
            TimeoutError: there is none.
        """
        end = time.monotonic() + self._wait
        while not self._nodes:
            self._meet()
            if not self._nodes and time.monotonic() > end:
                raise TimeoutError(f"no client has connected in {self._wait:g} seconds")
            time.sleep(0.0 if self._nodes else 0.5)
        return next(iter(self._nodes.values()))

    def gather(self, clients: int) -> list[Introduction]:
        """Wait until clients 0, 1, ... are all there.

        Raises:
            TimeoutError: some are not; the message names them.
            ValueError: a node has another configuration.
        """
        end = time.monotonic() + self._wait
        while True:
            self._meet()
            missing = [k for k in range(clients) if k not in self._nodes]
            if not missing:
                return [self._nodes[k] for k in range(clients)]
            if time.monotonic() > end:
                named = ", ".join(map(str, missing))
                said = f"clients {named} of {clients} have not connected in {self._wait:g} seconds"
                raise TimeoutError("; ".join([said, *(f"node {node}: {why}" for node, why in self._refused.items())]))
            time.sleep(0.5)

    def _meet(self) -> None:
        """Ask nodes that are new who they are."""
        online = set(self._grid.get_node_ids())
        new = sorted(online - self._met)
        if not new:
            return
        self._met |= set(new)
        hello = question_of({"what": "hello", "run": self._run})
        messages = [Message(hello, node, MessageType.QUERY, ttl=self.timeout) for node in new]
        for node, answer in zip(new, self._exchange(messages), strict=True):
            try:
                self._welcome(Introduction.read(node, read_answer(_content(answer))))
                self._refused.pop(node, None)
            except ValueError as error:
                self._refused[node] = told(error)
                log(WARNING, "node %s is left out: %s", node, self._refused[node])
                if isinstance(answer, str) or isinstance(error, _Taken):  # asked again
                    self._met.discard(node)

    def _welcome(self, node: Introduction) -> None:
        if node.run != self._run:
            raise ValueError(f"client {node.client} runs another method or other settings than the server")
        before = self._nodes.get(node.client)
        if before is not None and before.node in set(self._grid.get_node_ids()):
            raise _Taken(f"it calls itself client {node.client}, and so does node {before.node}, which came first")
        self._nodes[node.client] = node
        log(INFO, "client %s is node %s", node.client, node.node)
        if before is not None and self._saved is not None:  # it has come back, perhaps without what it kept
            self._go_back([node], self._saved)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def start(self, plan: Plan) -> None:
        """Make the runtime of what belongs to no client."""
        if plan.settings.store != "memory":
            raise ValueError(f"store is {plan.settings.store!r}; nodes keep their client's vectors in their context")
        self._plan = plan
        self._kept = plan.kept()
        self._own = any(node.own for node in self._nodes.values())
        if self._own and plan.method.buffer is not None and self._kept:
            raise ValueError(
                f"{plan.method.name} would send what clients keep to the server; these nodes' own stays there"
            )
        self._runtime = ClientRuntime(plan, ClientStore(0, self._kept))
        self._server: Mapping[str, Tensor] = {}
        self._kinds: dict[int, dict[int, _Kinds]] = {}
        self._reported: dict[int, set[str]] = {}

    def publish(self, server: Mapping[str, Tensor]) -> None:
        """Have them for the requests that follow."""
        self._server = self._runtime.server = server

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        """The replies; what is evaluated on test sets of the server is so here."""
        if not requests:
            return
        if requests[0].stage == "test":
            for request in requests:
                with threads(self._plan.settings.threads):
                    reply = self._runtime(request)
                yield reply
            return
        self._meet()
        answers = self._answers(requests)
        replies = [self._reply(request, answer) for request, answer in zip(requests, answers, strict=True)]
        networks = self._plan.networks
        for network in set(networks.values()):
            some = [i for i, request in enumerate(requests) if networks[request.client] == network]
            _leave_out_others(requests, replies, some, self._sizes(network), self._kinds.setdefault(network, {}))
        lost = [reply.error for reply in replies if isinstance(reply.error, Lost)]
        for error in lost:
            log(WARNING, "%s", error)
        # An asynchronous method asks for one client at a time, and goes on with the others.
        if requests[0].stage == "train" and len(lost) == len(requests) and self._plan.method.buffer is None:
            raise lost[0]
        yield from replies

    def _answers(self, requests: Sequence[Request]) -> list[Message | str]:
        """Send requests to the nodes of their clients, and wait for what comes back."""
        there = set(self._grid.get_node_ids())
        runtime, networks = self._runtime, self._plan.networks
        every = [runtime.method.global_model(self._server, model) for model in runtime.models_of]
        known: dict[int, Array] = {}
        alive: list[Any] = [*every]  # while their arrays are known by their ids
        messages, places = [], []
        for place, request in enumerate(requests):
            node = self._nodes.get(request.client)
            if node is None or node.node not in there:
                continue
            alive.append(received := self._received(request))
            shared = every[networks[request.client]] if request.stage == "evaluate" else None
            content = request_of(request, self._run, received, shared, known)
            messages.append(Message(content, node.node, _TYPES.get(request.stage, MessageType.TRAIN), ttl=self.timeout))
            places.append(place)
        answers: list[Message | str] = ["it is not connected"] * len(requests)
        for place, answer in zip(places, self._exchange(messages), strict=True):
            answers[place] = answer
        return answers

    def _sizes(self, network: int) -> set[int]:
        """Of models and parts of models: the server has vectors of them, or a row for each client."""
        return {self._runtime.models_of[network].size} | {
            vector.shape[-1] for vector in self._server.values() if vector.dim()
        }

    def _received(self, request: Request) -> dict[str, Tensor]:
        if request.received is not None:
            return {name: self.fetch(vector) for name, vector in request.received.items()}
        if request.stage == "keep":
            return {}
        return self._runtime.method.sends(self._server, request.client, request.stage)

    def _reply(self, request: Request, answer: Message | str) -> Reply:
        """The reply of a message, or an error that tells why there is none."""
        try:
            reply = read_reply(_content(answer), request)
            names = self._reported.setdefault(request.client, set())
            if len(names | reply.report.keys()) > REPORTS:
                raise ValueError(f"it has reported numbers of more than {REPORTS} names")
            names.update(reply.report)
        except ValueError as error:
            return Reply(request.client, error=Lost(request.client, request.round, told(error)))
        if reply.error is None:
            for name, vector in (*reply.sent.items(), *reply.kept.items()):
                if not all_finite(self.fetch(vector)):
                    reply = Reply(
                        request.client, error=Diverged(request.client, request.round, f"upload {name[:100]!r}")
                    )
                    break
        return reply

    def _exchange(self, messages: Sequence[Message]) -> list[Message | str]:
        """Send messages and wait for the answers; text says why there is none."""
        found: list[Message | str] = [f"it has not answered within {self.timeout:g} seconds"] * len(messages)
        waiting: dict[str, int] = {}
        for place, message in enumerate(messages):
            ids = list(self._grid.push_messages([message]))
            if ids and ids[0]:
                waiting[ids[0]] = place
            else:
                found[place] = "Flower could not deliver the request"
        for answer in arriving(self._grid, set(waiting), self.timeout):
            found[waiting[answer.metadata.reply_to_message_id]] = answer
        return found

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def follow(self, federation: Federation) -> Federation:
        """Save what clients keep with this federation's checkpoints; go back to one that it has begun from."""
        self._moment = lambda: federation.moment
        if self._own and federation.moment:
            self._saved = federation.moment
            self._go_back(list(self._nodes.values()), federation.moment)
        return federation

    def _go_back(self, nodes: Sequence[Introduction], moment: int) -> None:
        for node, answer in zip(nodes, self._ask(nodes, {"what": "restore", "moment": moment}), strict=True):
            found = _plain(answer).get("moment") if self._kept else moment
            if found != moment:
                copy = "no copy" if found is None else f"a copy of {found} alone"
                log(WARNING, "client %s goes on with %s of what it kept at %s", node.client, copy, moment)

    def state(self) -> dict[str, Tensor]:
        """What clients keep, for a checkpoint.

        Of nodes with data of their own nothing: they are told to keep a copy themselves.
        """
        nodes = [self._nodes[k] for k in sorted(self._nodes)]
        if self._moment is None or not self._kept:
            return self._rows({})
        if self._own:
            self._saved = self._moment()
            answers = self._ask(nodes, {"what": "save", "moment": self._saved})
            without = [n.client for n, answer in zip(nodes, answers, strict=True) if not _plain(answer).get("saved")]
            if without:
                log(WARNING, "clients %s keep no copy of their vectors: --node-config has no state=FOLDER", without)
            return self._rows({})
        kept: dict[int, dict[str, Tensor]] = {}
        for node, answer in zip(nodes, self._ask(nodes, {"what": "give"}), strict=True):
            try:
                kept[node.client] = self._checked(copied(records_in(_content(answer), ArrayRecord)["kept"]))
            except (ValueError, KeyError) as error:
                log(WARNING, "the checkpoint has nothing of client %s: %s", node.client, told(error))
        return self._rows(kept)

    def _checked(self, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a client says that it keeps, if that is what a client of this run keeps."""
        for name, vector in kept.items():
            if name not in self._kept or (vector.shape, vector.dtype) != (
                self._kept[name].shape,
                self._kept[name].dtype,
            ):
                raise ValueError(f"it keeps {name} {list(vector.shape)} of {vector.dtype}, which is not of this run")
        return kept

    def _rows(self, kept: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The kept vectors in the form of :meth:`ClientStore.tensors`."""
        found = {}
        for name, initial in self._kept.items():
            clients = [k for k in sorted(kept) if name in kept[k]]
            rows = [kept[k][name] for k in clients]
            found[f"{name}/clients"] = torch.tensor(clients, dtype=torch.int64)
            found[f"{name}/rows"] = torch.stack(rows) if rows else initial.new_empty((0, *initial.shape))
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Give clients back what they kept; those with data of their own have it themselves."""
        if self._own or not self._kept:
            return
        kept: dict[int, dict[str, Tensor]] = {node: {} for node in self._nodes}
        for name in self._kept:
            for client, row in zip(tensors[f"{name}/clients"].tolist(), tensors[f"{name}/rows"], strict=True):
                kept[client][name] = row
        nodes = [self._nodes[k] for k in sorted(self._nodes)]
        for answer in self._ask(nodes, {"what": "take"}, [kept[node.client] for node in nodes]):
            _content(answer)

    def _ask(
        self, nodes: Sequence[Introduction], what: Mapping[str, Any], kept: Sequence[Mapping[str, Tensor]] | None = None
    ) -> list[Message | str]:
        messages = []
        for place, node in enumerate(nodes):
            content = question_of({**what, "run": self._run, "client": node.client})
            if kept is not None:
                content["kept"] = record_of(kept[place])
            messages.append(Message(content, node.node, MessageType.QUERY, ttl=self.timeout))
        return self._exchange(messages)

    def close(self) -> None:
        """Nothing to end: Flower ends what it has begun."""


def _content(answer: Message | str) -> RecordDict:
    """What is in an answer.

    Raises:
        ValueError: there is none; the message says why.
    """
    if isinstance(answer, str):
        raise ValueError(answer)
    return content_of(answer)


def _plain(answer: Message | str) -> dict[str, Any]:
    """The plain data of an answer; of none where there is none."""
    try:
        return read_answer(_content(answer))
    except ValueError:
        return {}


def _leave_out_others(
    requests: Sequence[Request],
    replies: list[Reply],
    places: Sequence[int],
    sizes: Set[int],
    heard: dict[int, _Kinds],
) -> None:
    """Leave out uploads that cannot be averaged with those of most: other names or types, or another size of a model.

    Args:
        requests: what was asked.
        replies: in their order; those left out are replaced.
        places: which of them are of clients with one network.
        sizes: of models and of their parts. A vector of another size is what a method likes it to be.
        heard: what each client sent last; each has one vote, also those that are not asked now.
    """
    if not requests or requests[0].stage != "train":
        return
    arrived = [place for place in places if replies[place].error is None]
    kinds = {place: _kinds(replies[place]) for place in arrived}
    heard |= {requests[place].client: kinds[place] for place in arrived}
    if not arrived:
        return
    names = dict(
        Counter(tuple(sorted((n, dtype) for n, (_, dtype) in k.items())) for k in heard.values()).most_common(1)[0][0]
    )
    shapes = {}
    for n in names:  # of as many votes, a size that the server has too
        votes = Counter(k[n][0] for k in heard.values() if n in k)
        shapes[n] = max(votes.items(), key=lambda pair: (pair[1], math.prod(pair[0]) in sizes))[0]
    for place in arrived:
        found, request = kinds[place], requests[place]
        wrong = {n: dtype for n, (_, dtype) in found.items()} != names or any(
            found[n][0] != shape for n, shape in shapes.items() if math.prod(shape) in sizes
        )
        if wrong:
            most = {n: (shapes[n], dtype) for n, dtype in names.items()}
            said = f"it sent {_shown(found)}, and most sent {_shown(most)}"
            replies[place] = Reply(request.client, error=Lost(request.client, request.round, told(said)))


def _kinds(reply: Reply) -> _Kinds:
    return {name: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for name, v in reply.sent.items()}


def _shown(kinds: _Kinds) -> str:
    text = ", ".join(f"{name} {list(shape)} of {dtype}" for name, (shape, dtype) in sorted(kinds.items())) or "nothing"
    return text if len(text) <= 200 else f"{text[:197]}..."
