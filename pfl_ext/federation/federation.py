"""The round loop: select clients, let them train, let the server answer, evaluate, save."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.data import AUGMENTATIONS, Dataset, Partition
from pfl_ext.evaluation import ResultsFolder, classification_metrics, summarize

from . import checkpoint
from .mapping import LARGE, MappedTensor, scratch_folder
from .method import Method, Options, Uploads, option
from .model import WorkingModel
from .server import Server
from .store import ClientStore
from .streams import seed_of, stream
from .turns import Buffers, Diverged, Plan, Turns, seed_layers, threads_of_a_turn

__all__ = ["Federation", "Interrupted", "Settings", "selected_clients"]

Record = dict[str, Any]
_GLOBAL_TEST_PART = 2048  # samples of the global test set in one task for the workers


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
    augmentation: str = option("none", "augmentation of training batches", choices=tuple(AUGMENTATIONS))
    diverged: str = option("stop", "when a client's training gives NaN", choices=("stop", "drop"))
    new_clients: int = option(0, "how many clients, the last ones, join late; reported apart")
    join_round: int = option(0, "the first round late clients take part in; 0: none, they only personalise at the end")
    workers: int = option(1, "processes that train clients side by side; the results are the same to the bit")
    threads: int = option(1, "threads of each of them; unlike workers this may change the last bits")
    device: str = option("cpu", "where data, models and clients' vectors are, such as cuda; workers need cpu")
    store: str = option("memory", "where clients' vectors are kept", choices=("memory", "mapped"))
    checkpoint_every: int = option(10, "rounds between checkpoints; one is also written after a minute without")

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        super().__post_init__()
        self.check("rounds", self.rounds >= 0, "of 0 or more")
        self.check("participation", 0 < self.participation <= 1, "above 0, up to 1")
        self.check("new_clients", self.new_clients >= 0, "of 0 or more")
        self.check("join_round", self.join_round >= 0, "of 0 or more")
        for name in ("evaluate_every", "workers", "threads", "checkpoint_every"):
            self.check(name, getattr(self, name) >= 1, "of 1 or more")


def selected_clients(seed: int, round: int, clients: int, participation: float) -> list[int]:
    """The clients of a round, in order. It depends on nothing else, so all methods select the same."""
    count = max(1, math.floor(participation * clients + 0.5))  # Python's round takes 2.5 clients to 2, and 3.5 to 4
    chosen = torch.randperm(clients, generator=stream(seed, "clients", round))[:count]
    return sorted(chosen.tolist())


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
        notify: Callable[[Record], None] | None = None,
    ) -> None:
        """See the class."""
        self.settings = Settings() if settings is None else settings
        device = _usable_device(self.settings)
        self.method, self.dataset, self.partition = method, dataset.to(device), partition
        module = copy.deepcopy(module).to(device)
        self._buffers = Buffers() if buffers is None else buffers
        self._notify = notify
        self._check()
        self._module = module
        layout = WorkingModel(copy.deepcopy(module), self._buffers.local, self._buffers.server)
        self.server = Server(method.server_state(layout), module, self.settings.seed, partition.clients)
        self.server.auxiliary = None if auxiliary is None else auxiliary.to(device)
        self.server.held_out = self.dataset.subset(partition.server) if len(partition.server) else None
        method.prepare_server(self.server)
        self._layout = [[name, list(shape)] for name, shape in zip(layout.names, layout.shapes, strict=True)]
        self.trained_parameters = method.trained_parameters(layout)
        self.folder = None if folder is None else Path(folder)
        self.results = None if self.folder is None else self._open_results(self.folder, resume)
        self.store = self._make_store(Turns.kept(method, layout))
        self._uploads = scratch_folder(self, 1 << 62) if self.settings.store == "mapped" else None
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

    def _make_engine(self) -> Any:
        from pfl_ext import engines  # the engines are built on this package

        s = self.settings
        plan = Plan(
            self.method,
            self._module,
            self.dataset,
            self.partition,
            self.store,
            self.server,
            s.seed,
            self._buffers,
            s.augmentation,
        )
        return (
            engines.InProcess(Turns(plan), s.threads) if s.workers == 1 else engines.Workers(s.workers, plan, s.threads)
        )

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
            "seed": s.seed,
            "participation": s.participation,
            "augmentation": s.augmentation,
            "new_clients": [s.new_clients, s.join_round],
            "diverged": s.diverged,
            "threads": s.threads,
            "device": s.device,
        }

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
        step = self.round + self.personalized
        checkpoint.save(self.folder / "checkpoints", step, self.identity(), state, tensors)
        self._saved_at = time.monotonic()

    def _resume(self) -> None:
        if self.folder is None:
            raise ValueError("a run without a folder has nothing to resume from")
        found = checkpoint.newest(self.folder / "checkpoints", self.identity())
        if found is None:  # killed before its first checkpoint: it begins anew
            if self.results is not None:
                self.results.truncate(0)
            return
        state, tensors = found
        if state["round"] > self.settings.rounds:
            raise ValueError(f"the saved run has {state['round']} rounds; {self.settings.rounds} are asked for")
        self.store.restore({name[8:]: tensor for name, tensor in tensors.items() if name.startswith("clients/")})
        for name in self.server:
            # A copy: what was read from a file may begin at an odd address, where a matrix product rounds differently.
            self.server[name] = tensors[f"server/{name}"].to(self.server[name].device, copy=True)
        self.round, self.personalized = state["round"], state["personalized"]
        self.records, self.reports = state["records"], state["reports"]
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
        members = self.partition.clients
        if s.new_clients and not (s.join_round and t >= s.join_round):
            members -= s.new_clients
        selected = selected_clients(s.seed, t, members, s.participation)
        clients, samples, vectors, dropped = [], [], [], []
        costs = [len(self.partition.train[k]) for k in selected]
        results = engine.map("train", [(k, t, s.evaluate_local) for k in selected], costs)
        for k, result in zip(selected, results, strict=True):
            if isinstance(result, Diverged):
                if s.diverged == "stop":
                    raise result
                dropped.append(k)
                continue
            sent, report = result
            clients.append(k)
            samples.append(len(self.partition.train[k]))
            vectors.append({name: self._kept_until_averaged(k, name, vector) for name, vector in sent.items()})
            self.reports[k] |= report
        if not clients:
            raise Diverged(dropped[0], t, "training, as that of all others selected,")
        uploads = Uploads(clients, samples, vectors)
        down = self.method.sends(self.server, selected[0], self.method.received())
        self._server_round(t, uploads)
        uploads.discard()
        engine.publish(self.server)
        self.round = t
        record: Record = {
            "round": t,
            "clients": clients,
            **({"dropped": dropped} if dropped else {}),
            "communication": self._communication(uploads, len(selected), down),
            "training": self._training(clients),
            **({"server": dict(self.server.report)} if self.server.report else {}),
        }
        record["seconds_training"] = time.perf_counter() - begin
        if t % s.evaluate_every == 0 or t == s.rounds:
            record |= self._evaluate(engine, t)
        self._keep(record, begin)

    def _server_round(self, t: int, uploads: Uploads) -> None:
        """The server's part, with the threads of a client's turn: where it trains, their number decides the bits."""
        self.server.round = t
        self.server.report.clear()
        with threads_of_a_turn(self.settings.threads):
            seed_layers(seed_of(self.settings.seed, "server/layers", t), self.dataset.inputs.device)
            self.method.server_round(self.server, uploads)
        for name in self.method.received():
            if name in self.server and not bool(torch.isfinite(self.server[name]).all()):
                raise Diverged(None, t, name)

    def _kept_until_averaged(self, client: int, name: str, vector: Tensor) -> Tensor | MappedTensor:
        """An upload, in a file where clients' vectors are: with all clients selected both are of the same size."""
        if self._uploads is None or vector.nbytes < LARGE:
            return vector
        return MappedTensor.copy(vector, self._uploads / f"{name}-{client}")

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
        everywhere = ("personal",) if s.personal_global_test else ()
        clients = range(self.partition.clients)
        costs = [sum(len(getattr(self.partition, split)[k]) for split in splits) for k in clients]
        found = list(engine.map("evaluate", [(k, t, splits, everywhere) for k in clients], costs))
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
        if "global" in models and len(self.partition.global_test):
            parts = self.partition.global_test.split(_GLOBAL_TEST_PART)
            logits, targets = zip(*engine.map("global_logits", [(part,) for part in parts]), strict=True)
            models["global"]["global_test"] = classification_metrics(torch.cat(logits), torch.cat(targets))
        late = {"new_clients": self._summaries(found[old:], range(old, len(clients)))} if s.new_clients else {}
        return {"models": models, **late}

    def _summaries(self, found: list[dict[str, float]], clients: range) -> Record:
        """{model: {split: {metric: summary over clients}}} of the clients' metrics."""
        models: Record = {}
        for name in sorted({name for metrics in found for name in metrics}):
            model, split, metric = name.split("/")
            sizes = [len(getattr(self.partition, split)[k]) if split != "global_test" else 1 for k in clients]
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
