"""A client of a federation as a Flower app: a message is a request, and what comes of it the reply."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from pfl_ext.data import PARTITIONERS, Dataset, Partition, load
from pfl_ext.federation import Client, ClientRuntime, Method, Plan, Settings, stream, threads
from pfl_ext.federation.mapped import opened
from pfl_ext.federation.method import Models
from pfl_ext.options import of_signature
from pfl_ext.tasks import Task

from .arrays import copied, record_of, records_in
from .elsewhere import described
from .parts import Auxiliary, Given, Network, Parts, Whole, network_digest
from .records import answer_of, read_question, read_request, reply_of
from .state import ContextStore, NodeFiles

__all__ = ["OwnData", "client_app"]

OwnData = Callable[[Context], Dataset | tuple[Dataset, Partition]]
"""Loads the data of one node: a dataset, of which its test part is for testing, or one cut for a single client."""


def client_app(
    method: Method | None = None,
    *,
    network: Network | None = None,
    settings: Settings | None = None,
    data: Whole | None = None,
    task: Task | None = None,
    auxiliary: Auxiliary | None = None,
    own_data: OwnData | None = None,
) -> ClientApp:
    """A Flower app of a client that carries out requests of :func:`~.server.server_app`.

    What is not given is read from the app's configuration. A node whose ``--node-config`` has ``data`` reads its
    samples from there (``npz:PATH``, ``folder:PATH``) and never sees those of another. Without it the client takes its
    part of the run's data, as in a simulation. What it keeps between rounds is in ``context.state``.

    Args:
        method, network, settings, data, task, auxiliary: as for the server.
        own_data: loads the node's own samples in place of ``data`` of its configuration.
    """
    given = Given(method, network, settings, data, task, auxiliary)
    app = ClientApp()

    def reply(message: Message, context: Context) -> Message:
        node = _Node(given.parts(context.run_config), context, own_data)
        return Message(node.answer(message.content), reply_to=message)

    app.train()(reply)
    app.evaluate()(reply)
    app.query()(reply)
    return app


class _Runtime(ClientRuntime):
    """A client's runtime, which sees nothing of the server but what it was sent."""

    shared: Tensor | None = None
    """The global model as the server sent it; None where the method has none."""

    def models(self, client: Client, received: Any) -> Models:
        """A client's models by name, the global one first."""
        found: Models = {} if self.shared is None else {"global": self._with_own_buffers(client, self.shared)}
        return found | dict(self.method.models(client, received))


@functools.lru_cache(maxsize=1)
def _whole(config: str) -> tuple[Dataset, Partition]:
    """The data of a configuration, once in a process: a simulation asks for each of its clients."""
    return Given().parts(json.loads(config)).whole()


class _Node:
    """The client of a node, made anew for every message, as Flower has it."""

    def __init__(self, parts: Parts, context: Context, own_data: OwnData | None) -> None:
        self.parts, self.context = parts, context
        config = context.node_config
        self.client = int(config.get("client", config.get("partition-id", -1)))
        if self.client < 0:
            raise ValueError("the node has no number: give it one by --node-config 'client=0', each node another")
        self.own = own_data is not None or "data" in config
        cut = self._cut_own(own_data) if self.own else self._cut_whole()
        self.dataset, self.partition = cut
        self.position = 0 if self.own else self.client
        if self.position >= self.partition.clients:
            raise ValueError(f"the node has the number {self.client}; the run has clients 0 to {cut[1].clients - 1}")

    def _cut_whole(self) -> tuple[Dataset, Partition]:
        if self.parts.experiment is None:
            return self.parts.whole()
        return _whole(json.dumps(dict(self.context.run_config), sort_keys=True))

    def _cut_own(self, own_data: OwnData | None) -> tuple[Dataset, Partition]:
        """The node's own data, cut into training, validation and test samples of a single client."""
        experiment, settings = self.parts.experiment, self.parts.settings
        some = {} if experiment is None else experiment.data_options
        found = load(str(self.context.node_config["data"])) if own_data is None else own_data(self.context)
        if isinstance(found, tuple):
            return found
        found = found.normalised(some.get("mean"), some.get("std"))
        given = {} if experiment is None else experiment.partition_options
        options = {name: given[name] for name in of_signature(PARTITIONERS["iid"]) if name in given}
        generator = stream(settings.seed, "partition", self.client)
        return found, PARTITIONERS["iid"](found, 1, generator=generator, **{**options, "server": 0.0})

    def answer(self, content: RecordDict) -> RecordDict:
        """Carry out a message of the server, and return the content of the reply."""
        plain = read_question(content)
        if plain.get("what") == "hello":
            return answer_of(self._introduction())
        if plain.get("run") != self.parts.run:
            raise ValueError(
                "the server runs another method or other settings than this node: both need the same configuration"
            )
        if plain.get("client") != self.client:
            raise ValueError(f"the request is for client {plain.get('client')}; this node is client {self.client}")
        if "what" in plain:
            return self._about_kept(plain, content)
        request, shared = read_request(content)
        runtime = self._runtime()
        runtime.server = {name: opened(vector) for name, vector in (request.received or {}).items()}
        runtime.shared = shared
        with threads(self.parts.settings.threads):
            return reply_of(runtime(request))

    def _introduction(self) -> dict[str, Any]:
        cut, k, dataset = self.partition, self.position, self.dataset
        return {
            "client": self.client,
            "own": self.own,
            "run": self.parts.run,
            "sizes": {part: len(getattr(cut, part)[k]) for part in ("train", "validation", "test")},
            "network": network_digest(self.parts, dataset),
            **described(dataset),
        }

    def _runtime(self) -> _Runtime:
        """The runtime of this client alone, with what it keeps."""
        parts, experiment = self.parts, self.parts.experiment
        tests = {} if experiment is None or self.own else experiment.make_extra_tests(self.dataset)
        module = parts.network(self.dataset)
        public = parts.auxiliary(self.dataset, self.partition) if parts.method.public else None
        plan = Plan.of(
            parts.method,
            parts.task(self.dataset),
            module,
            self.dataset,
            self.partition,
            parts.settings,
            tests,
            None,
            public,
        )
        plan = dataclasses.replace(plan, rows={self.client: plan.rows[self.position]})
        return _Runtime(plan, self._store(plan))

    def _store(self, plan: Plan) -> ContextStore:
        return ContextStore(self.context, self.parts.run, plan.kept(), plan.networks)

    # ---- what is kept, for checkpoints -------------------------------------------------------------------------------

    def _about_kept(self, plain: dict[str, Any], content: RecordDict) -> RecordDict:
        store, what = self._runtime().store, plain["what"]
        assert isinstance(store, ContextStore)
        if what == "give":
            answer = answer_of({})
            answer["kept"] = record_of(store.content())
            return answer
        if what == "take":
            store.replace(copied(records_in(content, ArrayRecord)["kept"]))
            return answer_of({})
        files = self._files()
        if what == "save":
            if files is not None:
                files.save(int(plain["moment"]), store.content())
            return answer_of({"saved": files is not None})
        if what == "restore":
            return answer_of({"moment": self._restore(files, store, int(plain["moment"]))})
        raise ValueError(f"the request is {what!r}, which this release does not know")

    def _restore(self, files: NodeFiles | None, store: ContextStore, moment: int) -> int | None:
        """Go back to the copy of a checkpoint, or to the newest one before it; None: there is none."""
        usable = [] if files is None else [copy for copy in files.moments() if copy <= moment]
        if files is None or not usable:
            store.replace({})
            return None
        store.replace(files.load(max(usable)))
        return max(usable)

    def _files(self) -> NodeFiles | None:
        folder = self.context.node_config.get("state")
        return None if folder is None else NodeFiles(Path(str(folder)), self.parts.run, self.client)
