"""From an experiment to a run in a folder, and from the folder back to its models."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .data import Dataset, Partition
from .engines import EngineOptions, InProcess, begun_before_restart, note_begun
from .experiment import Experiment, restored
from .federation import Client, Federation, ForeignCheckpoint, Request, Settings, WorkingModel, state_of, stream
from .options import nearest
from .reports import (
    CONFIG,
    LOCK,
    Logger,
    LoggerFactory,
    Look,
    Progress,
    ResultsFolder,
    Runs,
    accuracy_curves,
    client_density,
    client_distribution,
    lock,
    loggers_of,
    partitions,
    read_config,
    recorded,
    shown_values,
    versions,
)

__all__ = ["SavedModels", "config_of", "differences", "draw", "has_results", "run_in"]

# What a run leaves in its folder. Only these are removed to overwrite it: the folder may hold a user's own files too.
_LEFT = (
    CONFIG,
    "versions.json",
    "metrics.jsonl",
    "metrics.csv",
    "metrics-long.csv",
    "clients.csv",
    "classes.csv",
    "clients",
    "clients.store",
    "checkpoints",
    "partition.safetensors",
    "mlflow-run.txt",
    "tensorboard",
    "wandb",
    "wandb-run.txt",
    "curves.png",
    "clients.png",
    "density.png",
    "partition.png",
)


def has_results(folder: Path) -> bool:
    """Whether a run has left rounds in a folder."""
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def run_in(
    folder: Path,
    experiment: Experiment,
    dataset: Dataset,
    partition: Partition,
    *,
    look: Look | None = None,
    label: str = "",
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    log: Sequence[str | LoggerFactory] = (),
    progress: Progress | None = None,
    make: Callable[..., Federation] | None = None,
    labels: bool = True,
    seen: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> Mapping[str, Any]:
    """Run an experiment in a folder, with everything a results folder has; returns the last round's record.

    Args:
        folder: where results and checkpoints go.
        experiment: what runs.
        dataset, partition: its data, as :meth:`Experiment.make_data` makes them.
        look: which metric the progress display shows, and the tables and pictures that are made of the results.
        label: what the progress display calls it, such as "ditto, seed 1"; else the method.
        resume: go on from the folder's last good checkpoint. So does a run that was begun before torchrun started all
            processes again.
        overwrite: remove the results of an earlier run in the folder. They stay if this one cannot begin.
        quiet: show no progress.
        log: loggers that get every record too: names of :data:`pfl_ext.reports.LOGGERS`, or what makes one.
        progress: the display of the runs that this is one of; by default one of its own.
        make: makes the federation, where that is not :meth:`Experiment.make` alone.
        labels: whether the data's targets are here, so that the clients' classes can be counted.
        seen: called with every record.

    Raises:
        ForeignCheckpoint: the folder's run, which was to be resumed, has other options; the message lists them.
        ValueError: the task has no such metric, or what the federation refuses.
    """
    look, experiment = look or Look(), experiment.resolved(dataset)
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    if begun_before_restart(str(folder.resolve())):
        resume, overwrite = True, False
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(folder))
        with _set_aside(folder) if overwrite else contextlib.nullcontext():
            # A run that was killed early may have left less than a results folder.
            begun = resume and (folder / "metrics.jsonl").exists()
            before = {path.name for path in folder.iterdir()}
            results = ResultsFolder.open(folder) if begun else ResultsFolder.create(folder)
            try:
                with _differences_listed(folder, experiment):
                    federation = (make or experiment.make)(dataset, partition, folder=folder, resume=resume)
                look = look.of(federation.task.metric)
                _check_metric(federation, look)
            except BaseException:
                if not begun:  # a run that cannot begin leaves nothing
                    _remove_new(folder, before, absent)
                raise
        note_begun(str(folder.resolve()))
        results.write_toml(CONFIG, config_of(experiment, look))
        results.write_json("versions.json", versions())
        with results.replacing("partition.safetensors") as path:
            partition.save(path)
        if labels:
            results.write_classes(partition.classes(dataset))
        rounds = experiment.settings.rounds
        if progress is None:
            progress = stack.enter_context(Progress(quiet=quiet))
        progress.begin(label or experiment.method, rounds, start=federation.round, turns=federation.engine.turns)
        stack.callback(progress.end)
        if not quiet:
            federation.answer = progress.answer
        logging = [_Logging(logger, progress.message) for logger in loggers_of(log, results)]
        for logger in logging:
            stack.callback(logger.close)
        stack.push(_at_end(results.write_csv))
        for record in recorded(federation, results):
            progress.update(min(record["round"], rounds), **shown_values(record, look.metric or ""))
            seen(record)
            for logger in logging:
                logger.append(record)
    return results.records()[-1]


class _Logging:
    """A logger whose errors, such as those of a network, do not end the run: it gets no more records, which is said."""

    def __init__(self, logger: Logger, say: Callable[[str], None]) -> None:
        self._logger, self._say = logger, say
        self._broken = False

    def append(self, record: Mapping[str, Any]) -> None:
        if not self._broken:
            self._try(lambda: self._logger.append(record))

    def close(self) -> None:
        self._try(self._logger.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if not self._broken:
                name = type(self._logger).__name__.lstrip("_")
                self._say(f"{name} gets no more records ({type(error).__name__}: {error}); the run goes on")
            self._broken = True


def _at_end(write: Callable[[], None]) -> Callable[..., None]:
    """The exit of a block that writes something; after an error it may fail unheard, for that would hide the first."""

    def end(_: object, error: BaseException | None, __: object) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(OSError):
            write()

    return end


@contextlib.contextmanager
def _set_aside(folder: Path) -> Iterator[None]:
    """Remove an earlier run's results when the block ends well; put them back when it does not."""
    if not has_results(folder):
        yield
        return
    aside = Path(tempfile.mkdtemp(prefix=".overwritten-", dir=folder))
    old = [name for name in _LEFT if (folder / name).exists()]
    for name in old:
        (folder / name).rename(aside / name)
    try:
        yield
    except BaseException:
        for name in _LEFT:
            _remove(folder / name)
        for name in old:
            (aside / name).rename(folder / name)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _remove_new(folder: Path, before: set[str], absent: Sequence[Path]) -> None:
    """Remove what a run without a round has made, and those folders if nothing else is in them."""
    for name in _LEFT:
        if name not in before:
            _remove(folder / name)
    if absent and [path.name for path in folder.iterdir()] == [LOCK]:
        _remove(folder / LOCK)
    for path in absent:
        with contextlib.suppress(OSError):
            path.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def config_of(experiment: Experiment, look: Look) -> dict[str, Any]:
    """What a run's ``config.toml`` says: every option with its value, given or default."""
    shown = {"metric": look.metric, "statistic": look.statistic, "columns": look.columns}
    return {**shown, **experiment.sections()}


@torch.no_grad()
def _check_metric(federation: Federation, look: Look) -> None:
    """Refuse a metric that the run's task does not have."""
    task, model = federation.task, federation.server.model
    inputs, targets = federation.dataset.batch(torch.cat([*federation.partition.train])[:2])
    training = model.module.training
    model.module.eval()
    names = list(task.measured(*task.reduce(model(inputs), targets)))
    model.module.train(training)
    if look.metric not in names:
        close = nearest(str(look.metric), names)
        raise ValueError(f"metric is {look.metric!r}{close}; the task {task.name} has {', '.join(names)}")


@contextlib.contextmanager
def _differences_listed(folder: Path, experiment: Experiment) -> Iterator[None]:
    """Where a run is not that of the folder's checkpoints, say in which options."""
    try:
        yield
    except ForeignCheckpoint as error:
        try:
            theirs = read_config(folder)
        except (OSError, ValueError):
            raise error from None
        lines = differences(theirs, experiment.sections())
        if not lines:
            raise
        more = "Give the values of that run (pfl-ext resume FOLDER does), or name another folder"
        raise ForeignCheckpoint(f"the run in {folder} has other options:\n" + "\n".join(lines) + f"\n{more}") from None


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The options that two runs do not have in common and that decide what models become, a line for each."""
    free = {f.name for cls in (Settings, EngineOptions) for f in dataclasses.fields(cls) if not f.metadata["identity"]}
    lines = []
    for section, table in ours.items():
        old = theirs.get(section, {})
        for name in dict.fromkeys([*old, *table]):
            before, now = (_plain(options.get(name, "not set")) for options in (old, table))
            if before != now and not (section == "federation" and name in free):
                lines.append(f"  {section}.{name}: {before!r} there, {now!r} here")
    return lines


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def draw(runs: Runs, folder: Path, dataset: Dataset, partition: Partition, look: Look | None = None) -> None:
    """Draw runs on the same data into a folder; without matplotlib say so and go on."""
    metric = (look or Look()).metric or "accuracy"
    try:
        accuracy_curves(runs, folder / "curves.png", metric)
        client_distribution(runs, folder / "clients.png", f"personal/test/{metric}")
        client_density(runs, folder / "density.png", f"personal/test/{metric}")
        several = len(partitions(runs))
        note = f"the last seed's, one of {several} partitions" if several > 1 else ""
        partition.draw(dataset, folder / "partition.png", note)
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)


class SavedModels:
    """The models that a run has saved in its folder, as one client evaluates them. The folder stays as it is.

    Args:
        folder: the results of the run.
        experiment: that of its ``config.toml``.
        client: whose models and data.
        device: where they are computed with; by default that of the run.

    Raises:
        ValueError: the run has no such client, or the device cannot be used.
        FileNotFoundError: it has no checkpoint.
    """

    def __init__(self, folder: Path, experiment: Experiment, client: int, device: str | None = None) -> None:
        federation = restored(folder, experiment, device=device)
        self._partition = federation.partition
        if not 0 <= client < self._partition.clients:
            raise ValueError(f"client is {client}; the run has clients 0 to {self._partition.clients - 1}")
        engine = federation.engine
        assert isinstance(engine, InProcess)
        self.client: Client
        self.client, received = engine.runtime.begin(Request(client, federation.round, "evaluate"))
        self.model: WorkingModel = self.client.model
        self._models = engine.runtime.models(self.client, received)
        self.names = list(self._models)

    def state(self, name: str) -> Tensor:
        """A model as a state of the network.

        Raises:
            ValueError: it is no such state.
        """
        return state_of(name, self._models[name])

    def samples(self, split: str, most: int, seed: int) -> Tensor:
        """Indices of at most ``most`` samples of the client's ``split``, or of the ``global_test``.

        The same for all runs on one partition: any order will do, if it is not one class after the other.
        """
        indices: Tensor = self._partition.global_test if split == "global_test" else getattr(self.client, split)
        order = torch.randperm(len(indices), generator=stream(seed, "landscape/samples"))
        return indices[order[:most].to(indices.device)]
