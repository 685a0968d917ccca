"""The round loop: select clients, let them train, let the server answer, evaluate, save."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.data import Dataset, Partition
from pfl_ext.ops import all_finite
from pfl_ext.tasks import Task, task_of

from .checkpoint import Checkpoints
from .clock import clock_of
from .engine import Engine, InProcess
from .evaluation import ClientResult, Evaluator
from .identity import identity_of
from .interruption import Interrupted, interruptible
from .messages import Diverged, Request
from .method import Method
from .model import WorkingModel
from .plan import Plan
from .requirements import check_batch, check_buffers, check_run, usable_device
from .rounds import Asynchronous, Round, Synchronous, diverged, members, received
from .runtime import ClientRuntime, seed_layers, state_of, threads
from .server import Server
from .settings import Settings
from .state import RunState
from .streams import seed_of

__all__ = ["Federation", "Record"]

_GROUP = 8  # clients that are asked at once after the last round, between two checkpoints

Record = dict[str, Any]
"""What is told of a round: plain numbers, lists and dictionaries, as JSON has them (:mod:`pfl_ext.reports.results`)."""


class Federation:
    """A method on clients' data, round by round.

    >>> dataset = data.load("digits")                                                           # doctest: +SKIP
    >>> partition = data.PARTITIONERS["ds1"](dataset, 10, generator=stream(0, "partition"))     # doctest: +SKIP
    >>> run = Federation(PersFL(), nn.mlp((1, 8, 8), 10), dataset, partition, Settings(rounds=20))  # doctest: +SKIP
    >>> run.run()[-1]["models"]["personal"]["test"]["accuracy"]["mean"]                         # doctest: +SKIP

    Args:
        method: what clients and server do.
        module: the network with its initial weights, or several (:class:`pfl_ext.nn.Networks`); a copy is trained.
        dataset, partition: the data; every client needs training samples.
        settings: the rest.
        task: what is learned (:mod:`pfl_ext.tasks`); by default what the targets are for.
        engine: where clients' turns run; by default in this process. It belongs to this run, which closes it.
        folder: where checkpoints go, and clients' vectors with ``store=mapped``. None saves nothing.
        resume: go on from the newest good checkpoint in the folder, bit-identical to a run that was never stopped.
        auxiliary: unlabelled data of the server, for methods that distil there. Its targets are never used.
        extra_tests: by their names, test sets of the dataset's classes and shape on which models are evaluated as on
            the global one, after the last round: the global model, and personal ones with ``personal_global_test``.
            Each is given in parts (:func:`pfl_ext.data.load_test`), over which results are averaged.

    Attributes:
        server: the server's vectors.
        identity: what a run that goes on where this one stopped must have in common with it.
        client_results: every client's results in the last evaluation of this object.
        answer: is given the answer to the first Ctrl-C, and by default writes it to stderr. It is called at once,
            wherever the program is, and so may do little more than to note it.
    """

    def __init__(
        self,
        method: Method,
        module: nn.Module,
        dataset: Dataset,
        partition: Partition,
        settings: Settings | None = None,
        *,
        task: Task | None = None,
        engine: Engine | None = None,
        folder: Path | str | None = None,
        resume: bool = False,
        auxiliary: Dataset | None = None,
        extra_tests: Mapping[str, Sequence[Dataset]] | None = None,
    ) -> None:
        self.settings = s = Settings() if settings is None else settings
        device, tests = usable_device(s), extra_tests or {}
        self.method, self.dataset, self.partition = method, dataset.to(device), partition
        self.task = task_of(dataset) if task is None else task
        check_run(method, self.task, module, self.dataset, partition, s, tests)
        self.folder = None if folder is None else Path(folder)
        self.engine: Engine = InProcess() if engine is None else engine
        module = copy.deepcopy(module).to(device)
        held_out = self.dataset.subset(partition.server) if len(partition.server) else None
        unlabelled = None if auxiliary is None else auxiliary.to(device)
        self.server = Server(self.task, module, s, partition.clients, unlabelled, held_out)
        kind: type[Synchronous | Asynchronous] = Synchronous if method.buffer is None else Asynchronous
        samples, clock = [len(rows) for rows in partition.train], clock_of(s, partition.clients, s.seed)
        rounds = kind(method, s, self.server, self.engine, samples, clock)
        self.identity = identity_of(method, self.task, s, self.dataset, partition, self.server, rounds, self.engine)
        for model in self.server.models:
            check_batch(self.task, model, self.dataset, partition)
        method.set_up(self.server)
        check_buffers(method, self.server)
        plan = Plan.of(method, self.task, module, self.dataset, partition, s, tests, self.folder, unlabelled)
        self._checkpoints = None if self.folder is None else Checkpoints(self.folder / "checkpoints", self.identity)
        if self._checkpoints is not None and not resume:
            self._checkpoints.begin()
        self._plan = plan
        self.engine.start(plan)
        self._state = RunState(self.server, self.engine, rounds, partition.clients)
        shared = [method.global_model(self.server, model) for model in self.server.models]
        count = sum(state is not None for state in shared)
        self._evaluate = Evaluator(self.engine, self.task, s, partition, plan.tests, count)
        self.client_results: list[ClientResult] = []
        self.answer: Callable[[str], None] = _write_answer
        self._at_work = "round 1"  # what is finished before the run stops
        self._names: set[str] = set()  # of what clients have received
        if resume:
            self._resume()

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return self._state.round

    @property
    def recorded(self) -> int:
        """The round of the last record."""
        return self._state.recorded

    @property
    def moment(self) -> int:
        """How far the run is, after the last round too: the number of the checkpoint that would be written now."""
        return self.round + self._state.personalized

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self) -> list[Record]:
        """All rounds that are left, and what clients do on their own after them; returns their records."""
        return list(self.rounds())

    def rounds(self) -> Iterator[Record]:
        """The same round by round: whoever takes a record observes the run, and a checkpoint is written afterwards.

        The first Ctrl-C (or SIGTERM) is answered at once and ends it after the round, saved; a second one at once.

        Raises:
            Interrupted: it was stopped.
            Diverged: a client's training gave NaN, and the setting is to stop. Earlier checkpoints are there.
        """
        s = self.settings
        if s.rounds == 0 and "finish" not in self.method.stages:
            raise ValueError("0 rounds, and the method has no personal stage: there is nothing to run")
        with contextlib.closing(self.engine), interruptible(self._heard) as stop:
            self.engine.publish(self.server)
            while self.round < s.rounds:
                yield self._one_round()
                self._pause(stop, due=self.round == s.rounds or self.round % s.checkpoint_every == 0)
            if "finish" in self.method.stages and self.recorded <= s.rounds:
                begin = time.perf_counter()
                self._at_work = "some clients' own training"
                # In groups, saved only between them: what is saved never holds a client that is done and not counted.
                clients, done = self.partition.clients, self._state.personalized
                self.engine.turns.expect("finish", self.round, clients, done)
                while self._state.personalized < clients:
                    self._personalize_some()
                    self._pause(stop)
                dropped = {"dropped": self._state.dropped_last} if self._state.dropped_last else {}
                record: Record = {"round": self.round + 1, "stage": "personalized", **dropped}
                record["communication"] = {"up_parameters": 0, "up_bytes": 0, **self._state.received_last}
                record["training"] = self._state.reports.means(range(self.partition.clients))
                yield self._timed(record, begin)
                self._pause(stop, due=True)

    def _heard(self) -> None:
        """Say, on the first Ctrl-C, that the run stops after its round."""
        saving = "" if self._checkpoints is None else ", then saving"
        self.answer(f"finishing {self._at_work}{saving}; again to stop now")

    def _one_round(self) -> Record:
        begin = time.perf_counter()
        t, s = self.round + 1, self.settings
        self._at_work = f"round {t}"
        there, before = (members(s, self.partition.clients, round) for round in (t, t - 1))
        self.server.begin(t, there, there - before)
        round = self._state.rounds.round(t)
        for client, report in round.reports.items():
            self._state.reports.update(client, report)
        self._aggregate(t, round)
        record: Record = {
            "round": t,
            "clients": (clients := round.uploads.clients),
            **({"dropped": round.dropped} if round.dropped else {}),
            "communication": {
                "up_parameters": round.uploads.parameters(),
                "up_bytes": round.uploads.bytes(),
                **received(round.replies),
            },
            "training": {"trained_parameters": round.trained_parameters, **self._state.reports.means(clients)},
            **({"server": dict(self.server.report)} if self.server.report else {}),
            "work": [list(work) for work in round.works],
        }
        round.uploads.release()
        self.engine.publish(self.server)
        times = self._state.rounds.times(round.works)
        record |= {"clock": times} if times else {}
        self._state.round = t
        return self._timed(record, begin, t % s.evaluate_every == 0 or t == s.rounds)

    def _timed(self, record: Record, begin: float, evaluate: bool = True) -> Record:
        """A record with the evaluation and the times."""
        record["seconds_training"] = time.perf_counter() - begin
        if evaluate:
            took_part = record.get("clients", ())
            found, self.client_results = self._evaluate(self.round, self._state.reports, took_part)
            record |= found
        record["seconds"] = time.perf_counter() - begin
        self._state.recorded = record["round"]
        return record

    def _aggregate(self, t: int, round: Round) -> None:
        """The server's part, with the threads of a client's turn: where it trains, their number decides the bits."""
        with threads(self.settings.threads), torch.random.fork_rng(devices=[]):
            seed_layers(seed_of(self.settings.seed, "server/layers", t), self.dataset.device)
            self.method.aggregate(self.server, round.uploads)
        self._names |= {name for reply in round.replies for name in reply.received}
        for name in self._names & self.server.keys():
            if not all_finite(self.server[name]):
                raise Diverged(None, t, name)

    def _personalize_some(self) -> None:
        """What the next clients do on their own after the last round."""
        group = range(self._state.personalized, min(self._state.personalized + _GROUP, self.partition.clients))
        for reply in self.engine.run([Request(k, self.round, "finish") for k in group]):
            for name, count in received([reply]).items():
                self._state.received_last[name] += count
            self._state.dropped_last += [reply.client] if diverged(self.settings, reply) else []
            self._state.reports.update(reply.client, reply.report)
        self._state.personalized = group.stop

    # ---- models ------------------------------------------------------------------------------------------------------

    def global_model(self, network: int | None = None) -> nn.Module:
        """The network as the global model has it: a copy with all parameters and buffers, frozen ones too, to evaluate.

        Args:
            network: where there are several networks, the number of one.

        Raises:
            ValueError: the method has no global model, or the run no such network.
        """
        count = len(self.server.models)
        if network is None and count > 1:
            raise ValueError(f"the run has {count} networks, each with a global model of its own: network=0 is one")
        network = network or 0
        if network not in range(count):
            raise ValueError(f"network is {network}; the run has networks 0 to {count - 1}")
        state = self.method.global_model(self.server, self.server.models[network])
        if state is None:
            raise ValueError(f"{self.method.name} has no global model; personal_model(client) gives a client's")
        return self._module_of(state, network)

    def personal_model(self, client: int) -> nn.Module:
        """The same of a client's personal model; of a method that trains none, the global one as that client has it.

        Raises:
            ValueError: there is no such client, or it has no model.
        """
        if not 0 <= client < self.partition.clients:
            raise ValueError(f"client is {client}; the run has clients 0 to {self.partition.clients - 1}")
        with torch.random.fork_rng(devices=[]):
            runtime = self._runtime()
            models = runtime.models(*runtime.begin(Request(client, self.round, "evaluate")))
        if not models:
            raise ValueError(f"{self.method.name} has neither a personal nor a global model")
        name = next((name for name in ("personal", "global") if name in models), next(iter(models)))
        return self._module_of(state_of(name, models[name]), self.server.networks[client])

    def _runtime(self) -> ClientRuntime:
        """A runtime of all clients in this process."""
        if isinstance(self.engine, InProcess):
            self.engine.publish(self.server)
            return self.engine.runtime
        plan = dataclasses.replace(self._plan, module=copy.deepcopy(self._plan.module))
        store = plan.store()
        store.restore(self.engine.state())
        runtime = ClientRuntime(plan, store)
        runtime.server = self.server
        return runtime

    def _module_of(self, state: Tensor, network: int) -> nn.Module:
        module = copy.deepcopy(self.server.models[network].module)
        s = self.settings
        WorkingModel(module, s.local_buffers, s.server_buffers).load(state)
        return module.to(memory_format=torch.contiguous_format).eval()

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _pause(self, stop: Event, due: bool = False) -> None:
        """Save, where the run has a folder, if that is due or was long ago; end if somebody asked for it."""
        if self._checkpoints is not None and (due or stop.is_set() or self._checkpoints.late()):
            shards = self.engine.save(self._checkpoints.stem(self.moment))
            self._checkpoints.save(self.moment, *self._state.content(clients=not shards), shards)
        if stop.is_set():
            raise Interrupted(f"stopped after round {self.round}")

    def _resume(self) -> None:
        if self._checkpoints is None:
            raise ValueError("a run without a folder has nothing to resume from")
        found = self._checkpoints.newest()
        if found is not None:  # else killed before its first checkpoint: it begins anew
            self._restore(*found)
        if self._state.personalized and self.round < self.settings.rounds:
            raise ValueError("the saved run has personalised its clients already; it cannot be given more rounds")

    def read(self, folder: Path | str, checkpoint: Path | None = None) -> None:
        """Take over what the newest good checkpoint of a run's folder holds, to look at it; nothing there changes.

        What is only looked at may be looked at anywhere: on another device, and in one process.

        Args:
            folder: the run's.
            checkpoint: that one of the folder in place of the newest.
        """
        saved = Checkpoints(Path(folder) / "checkpoints", self.identity)
        found = saved.newest(checkpoint, whatever=("device", "reduction"))
        if found is None:
            raise FileNotFoundError(f"{folder} has no checkpoint")
        self._restore(*found)
        self.engine.publish(self.server)

    def _restore(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if state["round"] > self.settings.rounds:
            raise ValueError(f"the saved run has {state['round']} rounds; {self.settings.rounds} are asked for")
        self._state.restore(state, tensors)


def _write_answer(text: str) -> None:
    """Write a line to stderr past Python's buffers, in the middle of whose work a signal may come."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
