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
from .engines import EngineOptions, InProcess
from .experiment import Experiment
from .federation import Client, Federation, Request, WorkingModel, stream
from .reports import (
    LOCK,
    Progress,
    ResultsFolder,
    Runs,
    accuracy_curves,
    client_density,
    client_distribution,
    lock,
    partitions,
    recorded,
    tensorboard,
    versions,
)

__all__ = ["SavedModels", "draw", "has_results", "run_in"]

# What a run leaves in its folder. Only these are removed to overwrite it: the folder may hold a user's own files too.
_LEFT = (
    "config.json",
    "versions.json",
    "metrics.jsonl",
    "metrics.csv",
    "clients.csv",
    "clients",
    "clients.store",
    "checkpoints",
    "partition.safetensors",
    "tensorboard",
    "accuracy.png",
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
    label: str = "",
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    board: bool = False,
    make: Callable[..., Federation] | None = None,
    seen: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> Mapping[str, Any]:
    """Run an experiment in a folder, with everything a results folder has; returns the last round's record.

    Args:
        folder: where results and checkpoints go.
        experiment: what runs.
        dataset, partition: its data, as :meth:`Experiment.make_data` makes them.
        label: what the progress display calls it; else the method.
        resume: go on from the folder's last good checkpoint.
        overwrite: remove the results of an earlier run in the folder. They stay if this one cannot begin.
        quiet: show no progress.
        board: write TensorBoard files too.
        make: makes the federation, where that is not :meth:`Experiment.make` alone.
        seen: called with every record.
    """
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock(folder))
        with _set_aside(folder) if overwrite else contextlib.nullcontext():
            # A run that was killed early may have left less than a results folder.
            begun = resume and (folder / "metrics.jsonl").exists()
            before = {path.name for path in folder.iterdir()}
            results = ResultsFolder.open(folder) if begun else ResultsFolder.create(folder)
            try:
                federation = (make or experiment.make)(dataset, partition, folder=folder, resume=resume)
            except BaseException:
                if not begun:  # a run that cannot begin leaves nothing
                    _remove_new(folder, before, absent)
                raise
        results.write_json("config.json", experiment.sections())
        results.write_json("versions.json", versions())
        with results.replacing("partition.safetensors") as path:
            partition.save(path)
        rounds = experiment.settings.rounds
        progress = Progress(rounds, label or experiment.method, start=federation.round, quiet=quiet)
        stack.enter_context(progress)
        opened = tensorboard(results) if board else None
        if opened is not None:
            stack.push(_at_end(opened.close))
        stack.push(_at_end(results.write_csv))
        for record in recorded(federation, results):
            progress.update(min(record["round"], rounds), **_shown(record))
            seen(record)
            if opened is not None:
                opened.append(record)
    return results.records()[-1]


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


def _shown(record: Mapping[str, Any]) -> dict[str, float]:
    """What the progress display shows of a round: the accuracy of each model, else the training loss."""
    models = record.get("models", {})
    if not models:
        return {"loss": record["training"]["loss"]} if "loss" in record["training"] else {}
    return {
        f"{name} accuracy": splits["test"]["accuracy"]["mean"] for name, splits in models.items() if "test" in splits
    }


def draw(runs: Runs, folder: Path, dataset: Dataset, partition: Partition) -> None:
    """Draw runs on the same data into a folder; without matplotlib say so and go on."""
    try:
        accuracy_curves(runs, folder / "accuracy.png")
        client_distribution(runs, folder / "clients.png")
        client_density(runs, folder / "density.png")
        several = len(partitions(runs))
        note = f"the last seed's, one of {several} partitions" if several > 1 else ""
        partition.draw(dataset, folder / "partition.png", note)
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)


class SavedModels:
    """The models that a run has saved in its folder, as one client evaluates them. The folder stays as it is.

    Args:
        folder: the results of the run.
        experiment: that of its ``config.json``.
        client: whose models and data.

    Raises:
        ValueError: the run has no such client.
        FileNotFoundError: it has no checkpoint.
    """

    def __init__(self, folder: Path, experiment: Experiment, client: int) -> None:
        """See the class."""
        here = dataclasses.replace(
            experiment,
            settings=dataclasses.replace(experiment.settings, store="memory"),
            engine=EngineOptions(engine="process"),
            partition_file=folder / "partition.safetensors",
        )
        federation = here.make(*here.make_data(), extra_tests={})  # none of them is needed
        federation.read(folder)
        self._partition = federation.partition
        if not 0 <= client < self._partition.clients:
            raise ValueError(f"client is {client}; the run has clients 0 to {self._partition.clients - 1}")
        engine = federation.engine
        assert isinstance(engine, InProcess)
        self.model: WorkingModel = engine.runtime.model
        self.client: Client
        self.client, received = engine.runtime.begin(Request(client, federation.round, "evaluate"))
        self._models = engine.runtime.models(self.client, received)
        self.names = list(self._models)

    def state(self, name: str) -> Tensor:
        """A model as a state of the network.

        Raises:
            ValueError: it is no such state.
        """
        found = self._models[name]
        if not isinstance(found, Tensor):
            raise ValueError(
                f"the {name} model of this method is not one network's weights but a prediction made of several, or of "
                "samples that the client keeps; accepted are models that are a state of the network"
            )
        return found

    def samples(self, split: str, most: int, seed: int) -> Tensor:
        """Indices of at most so many samples of the client's ``split``, or of the ``global_test``.

        The same for all runs on one partition: any order will do, if it is not one class after the other.
        """
        indices: Tensor = self._partition.global_test if split == "global_test" else getattr(self.client, split)
        order = torch.randperm(len(indices), generator=stream(seed, "landscape/samples"))
        return indices[order[:most]]
