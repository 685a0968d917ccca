"""The round loop: select clients, let them train, let the server answer, evaluate, save."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.data import AUGMENTATIONS, Dataset, Partition
from pfl_ext.metrics import classification_metrics, mean_metrics, summarize
from pfl_ext.ops import all_finite
from pfl_ext.reports import ResultsFolder

from . import checkpoint
from .clock import PROTOCOLS, Clock, Device, Timeline, Work
from .flight import Flight, Turn
from .mapped import LARGE, MappedTensor, opened, scratch_folder
from .method import Method, Options, Uploads, option
from .model import WorkingModel
from .privacy import Privacy, refuse_batch_norm
from .server import Server
from .store import ClientStore
from .streams import seed_of, stream
from .turns import Buffers, Diverged, Plan, Turned, Turns, Vectors, seed_layers, threads_of_a_turn

__all__ = ["Federation", "Interrupted", "Settings", "selected_clients"]

Record = dict[str, Any]
_GLOBAL_TEST_PART = 2048  # samples of the global test set in one task for the workers
_SPLITS = ("train", "validation", "test", "global_test")
_COLUMNS = ("local test", "std", "global test", "new clients")  # of a model in the tables of comparisons


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal after a round, and saved if it has a folder."""


@dataclass(frozen=True)
class Settings(Options):
    """How a federation runs, whatever the method."""

    rounds: int = option(20, "communication rounds T")
    participation: float = option(1.0, "fraction of the clients selected in a round")
    seed: int = option(0, "the one seed: partition, initial weights, client selection, batches")
    evaluate_every: int = option(1, "rounds between evaluations; the last round is always evaluated")
    evaluate_train: bool = option(False, "evaluate on the clients' training data too")
    evaluate_local: bool = option(False, "evaluate selected clients before and after their local training")
    personal_global_test: bool = option(
        False, "evaluate personal models on the global test set too (clients x its size)"
    )
    prediction_distance: bool = option(
        False, "report how far personal models' predictions are from the global one's (PerAda's Theorem 2)"
    )
    augmentation: str = option("none", "augmentation of training batches", choices=tuple(AUGMENTATIONS))
    drop_last: bool = option(
        False, "leave out the last batch of a pass where it is smaller: a few samples upset batch normalisation"
    )
    diverged: str = option("stop", "when a client's training gives NaN", choices=("stop", "drop"))
    new_clients: int = option(0, "how many clients, the last ones, join late; reported apart")
    join_round: int = option(0, "the first round late clients take part in; 0: none, they only personalise at the end")
    workers: int = option(1, "processes that train clients side by side; the results are the same to the bit")
    threads: int = option(1, "threads of each of them; unlike workers this may change the last bits")
    device: str = option("cpu", "where data, models and clients' vectors are, such as cuda; workers need cpu")
    store: str = option("memory", "where clients' vectors are kept", choices=("memory", "mapped"))
    protocol: str = option(
        "wait-free",
        "when a client trains its personal model: while its upload is on the way, before it is sent, or while it is on "
        "the way and for as long as that takes by the clock. The first two give the same models",
        choices=PROTOCOLS,
    )
    personal_cap: int = option(0, "most personal steps of a turn; 0: no limit")
    clock: str = option(
        "none",
        "virtual times in the records: devices and links that are the same for all clients, log-normal over them, or "
        "those of a file",
        choices=("none", "constant", "log-normal", "trace"),
    )
    clock_compute: float = option(0.001, "seconds a client trains on a sample (the median, where log-normal)")
    clock_up: float = option(1.25e6, "bytes a second from a client to the server (the median)")
    clock_down: float = option(6.25e6, "bytes a second from the server to a client (the median)")
    clock_latency: float = option(0.05, "seconds before a message arrives, beside its bytes (the median)")
    clock_spread: float = option(0.5, "standard deviation of the logarithms over the clients, where log-normal")
    clock_aggregation: float = option(0.0, "seconds the server takes for a new model")
    clock_trace: str = option("", "CSV or JSON file with client, compute, up, down, latency of every client")
    dp_noise: float = option(
        0.0, "differential privacy of every client's samples: noise in units of dp_clip; 0 with no dp_clip: none"
    )
    dp_clip: float = option(0.0, "norm to which the gradient of a sample is clipped; 0: no differential privacy")
    dp_delta: float = option(1e-5, "delta of the guarantee")
    checkpoint_every: int = option(10, "rounds between checkpoints; one is also written after a minute without")

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        super().__post_init__()
        self.check("rounds", self.rounds >= 0, "of 0 or more")
        self.check("participation", 0 < self.participation <= 1, "above 0, up to 1")
        self.check("new_clients", self.new_clients >= 0, "of 0 or more")
        self.check("join_round", self.join_round >= 0, "of 0 or more")
        self.check("dp_noise", self.dp_noise >= 0, "of 0 or more")
        self.check("dp_clip", self.dp_clip > 0 or (self.dp_clip == 0 and self.dp_noise == 0), "above 0 with dp_noise")
        self.check("dp_delta", 0 < self.dp_delta < 1, "above 0 and below 1")
        self.check("personal_cap", self.personal_cap >= 0, "of 0 or more")
        for name in ("clock_compute", "clock_up", "clock_down"):
            self.check(name, getattr(self, name) > 0, "above 0")
        for name in ("clock_latency", "clock_spread", "clock_aggregation"):
            self.check(name, getattr(self, name) >= 0, "of 0 or more")
        if (self.clock == "trace") != bool(self.clock_trace):
            raise ValueError(
                f"clock is {self.clock!r} and clock_trace {self.clock_trace!r}; clock=trace needs a file, and no other "
                "takes one"
            )
        for name in ("evaluate_every", "workers", "threads", "checkpoint_every"):
            self.check(name, getattr(self, name) >= 1, "of 1 or more")

    @property
    def privacy(self) -> Privacy | None:
        """The options of differential privacy, None without."""
        return Privacy(self.dp_noise, self.dp_clip, self.dp_delta) if self.dp_clip else None

    def make_clock(self, clients: int) -> Clock:
        """The clock for so many clients; without one (``none``) that of equal clients, which only orders events."""
        if self.clock == "trace":
            return Clock.trace(Path(self.clock_trace), clients, self.clock_aggregation)
        median = Device(self.clock_compute, self.clock_up, self.clock_down, self.clock_latency)
        spread = self.clock_spread if self.clock == "log-normal" else 0.0
        return Clock.drawn(clients, median, spread, self.seed, self.clock_aggregation)


@dataclass
class _Arrived:
    """What the turns of a round left to the server."""

    uploads: Uploads
    works: list[Work]
    dropped: list[int]
    down: dict[str, Tensor]
    receivers: int


def selected_clients(seed: int, round: int, clients: int, participation: float) -> list[int]:
    """The clients of a round, in order. It depends on nothing else, so all methods select the same."""
    chosen = torch.randperm(clients, generator=stream(seed, "clients", round))[: _count(participation, clients)]
    return sorted(chosen.tolist())


def _count(participation: float, clients: int) -> int:
    return max(1, math.floor(participation * clients + 0.5))  # Python's round takes 2.5 clients to 2, and 3.5 to 4


def _bytes(vectors: Mapping[str, Tensor]) -> int:
    return sum(vector.nbytes for vector in vectors.values())


def _usable_device(settings: Settings) -> torch.device:
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {settings.device!r}, which cannot be used here: {reason}") from None
    if device.type != "cpu" and settings.workers > 1:
        raise ValueError(f"{settings.workers} workers on {settings.device}; workers train on the cpu")
    return device


def _normalisation(dataset: Dataset) -> list[list[float]] | None:
    """Mean and standard deviation of the channels, which a dataset's fingerprint does not cover."""
    return None if dataset.mean is None or dataset.std is None else [dataset.mean.tolist(), dataset.std.tolist()]


class Federation:
    """A method on clients' data, round by round.

    >>> dataset = data.load("digits")                                                           # doctest: +SKIP
    >>> partition = data.ds1(dataset, 10, generator=torch.Generator().manual_seed(0))           # doctest: +SKIP
    >>> run = Federation(PersFL(), nn.mlp((1, 8, 8), 10), dataset, partition, Settings(rounds=20))  # doctest: +SKIP
    >>> run.run()["models"]["personal"]["test"]["accuracy"]["mean"]                             # doctest: +SKIP

    Args:
        method: what clients and server do.
        module: the network with its initial weights; a copy is trained.
        dataset, partition: the data; every client needs training samples.
        settings: the rest.
        folder: where results and checkpoints go. None keeps everything in memory and saves nothing.
        resume: go on from the newest good checkpoint in the folder, bit-identical to a run that was never stopped.
        buffers: the policy for the buffers of modules.
        auxiliary: unlabelled data of the server, for methods that distil there. Its targets are never used.
        extra_tests: by their names, test sets of the dataset's classes and shape on which models are evaluated as on
            the global one, after the last round: the global model, and personal ones with ``personal_global_test``.
            Each is given in parts (:func:`pfl_ext.data.load_test`), over which results are averaged.
        notify: called with each round's record.
    """

    def __init__(
        self,
        method: Method,
        module: nn.Module,
        dataset: Dataset,
        partition: Partition,
        settings: Settings | None = None,
        *,
        folder: Path | str | None = None,
        resume: bool = False,
        buffers: Buffers | None = None,
        auxiliary: Dataset | None = None,
        extra_tests: Mapping[str, Sequence[Dataset]] | None = None,
        notify: Callable[[Record], None] | None = None,
    ) -> None:
        """See the class."""
        self.settings = Settings() if settings is None else settings
        device = _usable_device(self.settings)
        self.method, self.dataset, self.partition = method, dataset.to(device), partition
        self.extra_tests = {name: tuple(x.to(device) for x in parts) for name, parts in (extra_tests or {}).items()}
        module = copy.deepcopy(module).to(device)
        self._buffers = Buffers() if buffers is None else buffers
        self._notify = notify
        self._module = module
        self._check()
        layout = WorkingModel(copy.deepcopy(module), self._buffers.local, self._buffers.server)
        self.server = Server(method.server_state(layout), module, self.settings.seed, partition.clients)
        self.server.auxiliary = None if auxiliary is None else auxiliary.to(device)
        self.server.held_out = self.dataset.subset(partition.server) if len(partition.server) else None
        method.prepare_server(self.server)
        self._layout = [[name, list(shape)] for name, shape in zip(layout.names, layout.shapes, strict=True)]
        # What is frozen, and clients that never took part, have these: a checkpoint does not.
        self._initial = checkpoint.digest(layout.state())
        self.trained_parameters = method.trained_parameters(layout)
        self.folder = None if folder is None else Path(folder)
        self.results = None if self.folder is None else self._open_results(self.folder, resume)
        self.store = self._make_store(Turns.kept(method, layout, self.settings.privacy))
        self._uploads = scratch_folder(self, 1 << 62) if self.settings.store == "mapped" else None
        self._clock = self.settings.make_clock(partition.clients)
        self._flight = self._make_flight()
        self._timelines = {name: Timeline(self._clock, name) for name in self._timed()}
        self.round = 0
        self.personalized = 0
        self.records: list[Record] = []
        self.reports: list[dict[str, float]] = [{} for _ in range(partition.clients)]
        self.client_rows: list[dict[str, Any]] = []
        self._saved_at = time.monotonic()
        self._stop = threading.Event()
        if resume:
            self._resume()

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.settings.new_clients >= self.partition.clients:
            raise ValueError(f"{self.settings.new_clients} of {self.partition.clients} clients are to join late")
        self.partition.check(self.dataset)
        self.method.check_data(self.partition)
        for name, parts in self.extra_tests.items():
            self._check_extra_test(name, parts)
        if self.settings.privacy is not None:
            refuse_batch_norm(self._module)
            if "private" not in vars(type(self.method)):
                private = "those whose clients train by plain SGD on the labels, such as fedavg, ditto and perada"
                raise ValueError(f"{self.method.name} has no differentially private form; {private} have one")

    def _check_extra_test(self, name: str, parts: Sequence[Dataset]) -> None:
        if not re.fullmatch(r"[\w.+-]+( [\w.+-]+)*", name) or name in (*_SPLITS, *_COLUMNS):
            raise ValueError(
                f"an extra test set is called {name!r}; letters, digits, spaces and any of . + - _ are accepted, and "
                f"none of {', '.join((*_SPLITS, *_COLUMNS))}"
            )
        if not sum(map(len, parts)):
            raise ValueError(f"the extra test set {name} is empty")
        ours = self.dataset
        for part in parts:
            if len(part.classes) != len(ours.classes) or part.multilabel != ours.multilabel:
                kinds = [f"{len(d.classes)} {'labels' if d.multilabel else 'classes'}" for d in (part, ours)]
                raise ValueError(
                    f"the extra test set {name} ({part.name}) has {kinds[0]}, {ours.name!r} has {kinds[1]}; the "
                    "same are accepted (an archive can name them in its classes)"
                )
            named = [not all(label.isdigit() for label in d.classes) for d in (part, ours)]
            if all(named) and part.classes != ours.classes:
                first = next((a, b) for a, b in zip(part.classes, ours.classes, strict=True) if a != b)
                raise ValueError(
                    f"the extra test set {name} ({part.name}) has a class {first[0]!r} where {ours.name!r} has "
                    f"{first[1]!r}; the same classes in the same order are accepted"
                )
            if part.input_shape != ours.input_shape:
                raise ValueError(
                    f"samples of the extra test set {name} ({part.name}) are {list(part.input_shape)}, those of "
                    f"{ours.name!r} {list(ours.input_shape)}; Dataset.in_shape_of makes them alike"
                )

    def _open_results(self, folder: Path, resume: bool) -> ResultsFolder:
        # A run that was killed early may have left less than a results folder.
        begun = (folder / "metrics.jsonl").exists()
        return ResultsFolder.open(folder) if resume and begun else ResultsFolder.create(folder)

    def _make_store(self, kept: dict[str, Tensor]) -> ClientStore:
        if self.settings.store == "mapped":
            folder = scratch_folder(self, 1 << 62) if self.folder is None else self.folder / "clients.store"
        elif self.settings.workers > 1:
            folder = scratch_folder(self, self.partition.clients * sum(vector.nbytes for vector in kept.values()))
        else:
            return ClientStore(self.partition.clients, kept)
        return ClientStore(self.partition.clients, kept, folder)

    def _make_flight(self) -> Flight | None:
        if self.method.buffer_size() is None:
            return None
        if self.settings.protocol == "until-arrival":
            raise ValueError(f"{self.method.name} is asynchronous; its protocol is compute-and-wait or wait-free")
        return Flight(self._clock, self.settings.protocol == "wait-free", self.settings.seed)

    def _timed(self) -> tuple[str, ...]:
        """The protocols that this run has a timeline of: both where they give the same models."""
        if self.settings.protocol == "until-arrival":
            return ("until-arrival",)
        return PROTOCOLS[:2] if self.settings.clock != "none" and self._flight is None else ()

    def _plan(self) -> Plan:
        return Plan(
            self.method,
            self._module,
            self.dataset,
            self.partition,
            self.store,
            self.server,
            self.settings.seed,
            self._buffers,
            self.settings.augmentation,
            self.settings.protocol,
            self.settings.personal_cap,
            self.settings.privacy,
            self.settings.drop_last,
            self.extra_tests,
        )

    def _make_engine(self) -> Any:
        from pfl_ext import engines  # the engines are built on this package

        s = self.settings
        if s.workers > 1:
            return engines.Workers(s.workers, self._plan(), s.threads)
        turns = self.turns()
        turns.deliver = self._delivered
        return engines.InProcess(turns, s.threads)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What two runs must have in common for one to go on where the other stopped."""
        s, auxiliary = self.settings, self.server.auxiliary
        return {
            "method": type(self.method).__name__,
            "options": dataclasses.asdict(self.method),
            "data": self.dataset.fingerprint,
            "normalisation": _normalisation(self.dataset),
            "auxiliary": None if auxiliary is None else [auxiliary.fingerprint, _normalisation(auxiliary)],
            "partition": self.partition.fingerprint,
            "network": self._layout,
            "initial_weights": self._initial,
            "seed": s.seed,
            "participation": s.participation,
            "augmentation": s.augmentation,
            "drop_last": s.drop_last,
            "privacy": None if s.privacy is None else dataclasses.asdict(s.privacy),
            "new_clients": [s.new_clients, s.join_round],
            "diverged": s.diverged,
            "threads": s.threads,
            "device": s.device,
            **({"personal_cap": s.personal_cap} if s.personal_cap else {}),
            **self._by_the_clock(),
        }

    def _by_the_clock(self) -> dict[str, Any]:
        """Protocol and clock, where they decide what the models become."""
        if self._flight is None and self.settings.protocol != "until-arrival":
            return {}
        return {"protocol": self.settings.protocol, "clock": [self._clock.aggregation, *self._clock.devices]}

    def save(self) -> None:
        """Write a checkpoint, if the run has a folder."""
        if self.folder is None:
            return
        tensors = {f"server/{name}": vector for name, vector in self.server.items()}
        tensors |= {f"clients/{name}": tensor for name, tensor in self.store.tensors().items()}
        state = {
            "round": self.round,
            "personalized": self.personalized,
            "records": self.records,
            "reports": self.reports,
        }
        if self._flight is not None:
            state["flight"], flying = self._flight.state()
            tensors |= {f"flight/{name}": vector for name, vector in flying.items()}
        step = self.round + self.personalized
        checkpoint.save(self.folder / "checkpoints", step, self.identity(), state, tensors)
        self._saved_at = time.monotonic()

    def _restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if state["round"] > self.settings.rounds:
            raise ValueError(f"the saved run has {state['round']} rounds; {self.settings.rounds} are asked for")
        self.store.restore({name[8:]: tensor for name, tensor in tensors.items() if name.startswith("clients/")})
        for name in self.server:
            # A copy: what was read from a file may begin at an odd address, where a matrix product rounds differently.
            self.server[name] = tensors[f"server/{name}"].to(self.server[name].device, copy=True)
        self.round, self.personalized = state["round"], state["personalized"]
        self.records, self.reports = state["records"], state["reports"]
        if self._flight is not None:
            flying = {name[7:]: tensor for name, tensor in tensors.items() if name.startswith("flight/")}
            self._flight.restore(state["flight"], flying)
        for timeline in self._timelines.values():
            for record in self.records:
                timeline.round(record.get("work", ()))

    def read(self, folder: Path | str) -> None:
        """Take over what the newest good checkpoint of a run's folder holds, to look at it; the folder stays as it is.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ForeignCheckpoint, DamagedCheckpoint: it is not of such a run, or not as it was written.
        """
        found = checkpoint.newest(Path(folder) / "checkpoints", self.identity())
        if found is None:
            raise FileNotFoundError(f"{folder} has no checkpoint")
        self._restore(*found)

    def turns(self) -> Turns:
        """Clients' turns in this process, with the server's and the clients' vectors as they are."""
        return Turns(self._plan())

    def _resume(self) -> None:
        if self.folder is None:
            raise ValueError("a run without a folder has nothing to resume from")
        found = checkpoint.newest(self.folder / "checkpoints", self.identity())
        if found is None:  # killed before its first checkpoint: it begins anew
            if self.results is not None:
                self.results.truncate(0)
            return
        self._restore(*found)
        if self.personalized and self.round < self.settings.rounds:
            raise ValueError("the saved run has personalised its clients already; it cannot be given more rounds")
        if self.results is not None:
            self.results.truncate(self.records[-1]["round"] if self.records else 0)

    def _save_if_due(self, due: bool) -> None:
        if due or self._stop.is_set() or time.monotonic() - self._saved_at > 60:
            self.save()
        if self._stop.is_set():
            raise Interrupted(f"stopped after round {self.round}")

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self) -> Record:
        """All rounds that are left, and what clients do on their own after them; returns the last record.

        The first Ctrl-C (or SIGTERM) ends it after the round, saved; a second one at once.

        Raises:
            Interrupted: it was stopped.
            Diverged: a client's training gave NaN, and the setting is to stop. Earlier checkpoints are there.
        """
        with self._signals():
            engine = self._make_engine()
            try:
                engine.publish(self.server)
                while self.round < self.settings.rounds:
                    self._one_round(engine)
                    last = self.round == self.settings.rounds
                    self._save_if_due(last or self.round % self.settings.checkpoint_every == 0)
                if self.method.has_personal_stage and not self._finished():
                    self._personal_stage(engine)
                    self.save()
            finally:
                engine.close()
        if not self.records:
            raise ValueError("0 rounds, and the method has no personal stage: there is nothing to run")
        return self.records[-1]

    def _finished(self) -> bool:
        return bool(self.records) and self.records[-1].get("stage") == "personalized"

    def _one_round(self, engine: Any) -> None:
        begin = time.perf_counter()
        t, s = self.round + 1, self.settings
        arrived = self._selected_turns(engine, t) if self._flight is None else self._turns_in_flight(engine, t)
        uploads = arrived.uploads
        communication = self._communication(uploads, arrived.receivers, arrived.down)
        self._server_round(t, uploads)
        uploads.discard()
        engine.publish(self.server)
        self.round = t
        record: Record = {
            "round": t,
            "clients": uploads.clients,
            **({"dropped": arrived.dropped} if arrived.dropped else {}),
            "communication": communication,
            "training": self._training(uploads.clients),
            **({"server": dict(self.server.report)} if self.server.report else {}),
            "work": [list(work) for work in arrived.works],
            **self._clocked(arrived.works),
        }
        record["seconds_training"] = time.perf_counter() - begin
        if t % s.evaluate_every == 0 or t == s.rounds:
            record |= self._evaluate(engine, t)
        self._keep(record, begin)

    def _members(self, t: int) -> int:
        """How many clients, the first ones, can be selected."""
        s = self.settings
        late = s.new_clients and not (s.join_round and t >= s.join_round)
        return self.partition.clients - (s.new_clients if late else 0)

    def _selected_turns(self, engine: Any, t: int) -> _Arrived:
        """All selected clients begin with the server's vectors and are waited for."""
        s, method = self.settings, self.method
        members = self._members(t)
        selected = selected_clients(s.seed, t, members, s.participation)
        down = method.sends(self.server, selected[0], method.received())
        sizes = [len(self.partition.train[k]) for k in range(members)]
        turns = engine.map("train", [(k, t, s.evaluate_local) for k in selected], [sizes[k] for k in selected])
        clients, works, vectors, dropped = [], list[Work](), list[Vectors](), []
        for k, turned in zip(selected, turns, strict=True):
            if self._is_dropped(turned):
                dropped.append(k)
                continue
            clients.append(k)
            vectors.append(self._delivered(k, t, turned.sent))
            works.append(self._work(k, turned, _bytes(down)))
        if not clients:
            raise Diverged(dropped[0], t, "training, as that of all others selected,")
        if s.protocol == "until-arrival" and method.has_personal_round:
            works = self._until_arrival(engine, t, works, vectors)
        receivers, names = len(selected), method.received_unselected()
        if names is not None:
            others = sorted(set(range(members)) - set(selected))
            broadcast = method.sends(self.server, 0, names)
            for k, turned in zip(others, engine.map("unselected", [(k, t) for k in others]), strict=True):
                if not self._is_dropped(turned):
                    works.append(self._work(k, turned, _bytes(broadcast)))
            receivers += len(others) if broadcast else 0
        return _Arrived(Uploads(clients, [sizes[k] for k in clients], vectors), works, dropped, down, receivers)

    def _until_arrival(self, engine: Any, t: int, works: list[Work], vectors: Sequence[Vectors]) -> list[Work]:
        """Clients train their own models until the new generic one arrives."""
        room = self._timelines["until-arrival"].room(works)
        arguments = [
            (work.client, t, {name: opened(vector) for name, vector in sent.items()}, samples)
            for work, sent, samples in zip(works, vectors, room, strict=True)
        ]
        found = []
        for work, turned in zip(works, engine.map("train_until_arrival", arguments, room), strict=True):
            dropped = self._is_dropped(turned)
            found.append(work if dropped else work._replace(personal=self._work(work.client, turned, 0).personal))
        return found

    def _turns_in_flight(self, engine: Any, t: int) -> _Arrived:
        """Clients begin and end by the clock, until the server has as many uploads as it takes for an update."""
        s, method, flight = self.settings, self.method, self._flight
        assert flight is not None
        members, size = self._members(t), method.buffer_size()
        down = method.sends(self.server, 0, method.received())
        flight.open(_count(s.participation, members))
        begun: list[int] = []

        def begin(clients: list[int], numbers: list[int]) -> list[Turned | Diverged]:
            begun.extend(clients)
            turns = zip(clients, numbers, strict=True)
            return list(engine.map("train", [(k, number, s.evaluate_local, True) for k, number in turns]))

        arrived: list[Turn] = []
        vectors, dropped = list[Vectors](), list[int]()
        while len(arrived) < (size or 1):
            turn = flight.next(members, self.round, _bytes(down), begin, self.store)
            if turn is None:
                raise Diverged(dropped[0], t, "training, as that of all others selected,")
            if isinstance(turn, Diverged):
                self._is_dropped(turn)
                dropped.append(turn.client or 0)
                continue
            arrived.append(turn)
            vectors.append(flight.take(turn))
            self.reports[turn.client] |= turn.report
        flight.keep(self.store)
        clients = [turn.client for turn in arrived]
        samples = [len(self.partition.train[k]) for k in clients]
        uploads = Uploads(clients, samples, vectors, [self.round - turn.version for turn in arrived])
        return _Arrived(uploads, [turn.work for turn in arrived], dropped, down, len(begun))

    def _is_dropped(self, turned: Turned | Diverged) -> bool:
        """Whether the client diverged and is left out; an error where that is to stop the run."""
        if isinstance(turned, Diverged) and self.settings.diverged == "stop":
            raise turned
        return isinstance(turned, Diverged)

    def _work(self, client: int, turned: Turned, down: int) -> Work:
        """Keep a turn's report; returns what it did."""
        self.reports[client] |= turned.report
        up = sum(vector.nbytes for vector in turned.sent.values())
        return Work(client, turned.trained["generic"], turned.trained["personal"], up, down)

    def _clocked(self, works: list[Work]) -> dict[str, dict[str, float]]:
        """When the round is over, for its record."""
        if self._flight is not None:
            return {"clock": {"asynchronous": self._flight.now}}
        for timeline in self._timelines.values():
            timeline.round(works)
        times = {protocol: timeline.time for protocol, timeline in self._timelines.items()}
        return {"clock": times} if times else {}

    def _server_round(self, t: int, uploads: Uploads) -> None:
        """The server's part, with the threads of a client's turn: where it trains, their number decides the bits."""
        self.server.round = t
        self.server.report.clear()
        with threads_of_a_turn(self.settings.threads):
            seed_layers(seed_of(self.settings.seed, "server/layers", t), self.dataset.inputs.device)
            self.method.server_round(self.server, uploads)
        for name in self.method.received():
            if name in self.server and not all_finite(self.server[name]):
                raise Diverged(None, t, name)

    def _delivered(self, client: int, round: int, vectors: Vectors) -> Vectors:
        """An upload, in files where clients' vectors are: with all clients selected both are of the same size."""
        if self._uploads is None:
            return vectors
        return {
            name: MappedTensor.copy(vector, self._uploads / f"{name}-{client}-{round}")
            if isinstance(vector, Tensor) and vector.nbytes >= LARGE
            else vector
            for name, vector in vectors.items()
        }

    def _communication(self, uploads: Uploads | None, receivers: int, down: dict[str, Tensor]) -> dict[str, int]:
        return {
            "up_parameters": uploads.parameters() if uploads is not None else 0,
            "up_bytes": uploads.bytes() if uploads is not None else 0,
            "down_parameters": receivers * sum(vector.numel() for vector in down.values()),
            "down_bytes": receivers * sum(vector.nbytes for vector in down.values()),
        }

    def _training(self, clients: list[int]) -> dict[str, Any]:
        """The mean over the round's clients of what each reported."""
        names = sorted({name for k in clients for name in self.reports[k]})
        found: dict[str, Any] = {"trained_parameters": self.trained_parameters}
        for name in names:
            found[name] = summarize([self.reports[k].get(name, math.nan) for k in clients])["mean"]
        return found

    def _personal_stage(self, engine: Any) -> None:
        begin = time.perf_counter()
        # In groups, saved only between them: what is saved never holds a client that is done and not counted.
        while self.personalized < self.partition.clients:
            group = range(self.personalized, min(self.personalized + 4 * self.settings.workers, self.partition.clients))
            results = engine.map("personalize", [(k, self.round) for k in group])
            for k, report in zip(group, results, strict=True):
                if isinstance(report, Diverged):
                    raise report
                self.reports[k] |= report
            self.personalized = group.stop
            self._save_if_due(False)
        down = self.method.sends(self.server, 0, self.method.received_last())
        record: Record = {"round": self.round + 1, "stage": "personalized"}
        record["communication"] = self._communication(None, self.partition.clients, down)
        record["training"] = self._training(list(range(self.partition.clients)))
        record["seconds_training"] = time.perf_counter() - begin
        record |= self._evaluate(engine, self.round)
        self._keep(record, begin)

    def _keep(self, record: Record, begin: float) -> None:
        record["seconds"] = time.perf_counter() - begin
        self.records.append(record)
        if self.results is not None:
            self.results.append(record)
            if "models" in record:  # the last evaluation, and each one
                self.results.write_clients(self.client_rows)
                self.results.write_clients(self.client_rows, record["round"])
        if self._notify is not None:
            self._notify(record)

    # ---- evaluating --------------------------------------------------------------------------------------------------

    def _evaluate(self, engine: Any, t: int) -> Record:
        s = self.settings
        splits = ("test", "validation") + (("train",) if s.evaluate_train else ())
        everywhere: tuple[str, ...] = ("personal",) if s.personal_global_test else ()
        clients = range(self.partition.clients)
        costs = [sum(len(getattr(self.partition, split)[k]) for split in splits) for k in clients]
        if s.prediction_distance:
            everywhere = (*everywhere, "global") if everywhere else ()
        # Once: CIFAR-10-C has 950,000 images, for every client's model.
        extra = self.extra_tests if t == s.rounds else {}
        arguments = [(k, t, splits, everywhere, s.prediction_distance, tuple(extra)) for k in clients]
        found = list(engine.map("evaluate", arguments, costs))
        self.client_rows = [
            {
                "client": k,
                "train_samples": len(self.partition.train[k]),
                "validation_samples": len(self.partition.validation[k]),
                "test_samples": len(self.partition.test[k]),
                **({"new": k >= len(clients) - s.new_clients} if s.new_clients else {}),
                **found[k],
                **self.reports[k],
            }
            for k in clients
        ]
        old = len(clients) - s.new_clients
        models = self._summaries(found[:old], range(old))
        if "global" in models:
            if len(self.partition.global_test):
                models["global"]["global_test"] = self._of_global_model(engine, self.partition.global_test)
            for name, parts in extra.items():
                rows = [torch.arange(len(part)) for part in parts]
                results = [self._of_global_model(engine, some, name, i) for i, some in enumerate(rows) if len(some)]
                models["global"][name] = mean_metrics(results)
        late = {"new_clients": self._summaries(found[old:], range(old, len(clients)))} if s.new_clients else {}
        return {"models": models, **late}

    def _of_global_model(self, engine: Any, rows: Tensor, *test: Any) -> dict[str, float]:
        """Metrics of the global model on samples of the global test set, or of a part of an extra one."""
        parts = [(some, *test) for some in rows.split(_GLOBAL_TEST_PART)]
        logits, targets = zip(*engine.map("global_logits", parts), strict=True)
        return classification_metrics(torch.cat(logits), torch.cat(targets))

    def _summaries(self, found: list[dict[str, float]], clients: range) -> Record:
        """{model: {split: {metric: summary over clients}}} of the clients' metrics."""
        models: Record = {}
        for name in sorted({name for metrics in found for name in metrics}):
            model, split, metric = name.split("/")
            sizes = [len(getattr(self.partition, split)[k]) if split in _SPLITS[:3] else 1 for k in clients]
            values = [metrics.get(name, math.nan) for metrics in found]
            models.setdefault(model, {}).setdefault(split, {})[metric] = summarize(values, sizes)
        return models

    # ---- signals -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM asks to stop after the round, the second does what it did before."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}

        def stop(number: int, frame: Any) -> None:
            self._stop.set()
            for other in numbers:
                signal.signal(other, before[other])

        for number in numbers:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, before[number])
