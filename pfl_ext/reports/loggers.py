"""Loggers: what else gets the records of a run while it runs, such as TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .results import CONFIG, ResultsFolder, read_config, tidy

__all__ = ["LOGGERS", "Logger", "LoggerFactory", "check_loggers", "loggers_of", "scalars"]


class Logger(Protocol):
    """Gets every record of a run as it comes. Two methods, so that one of your own is short."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Take the record of a round, as metrics.jsonl has it; `scalars` makes names and numbers of it."""

    def close(self) -> None:
        """Take no more. After an error too."""


LoggerFactory = Callable[[ResultsFolder], Logger]
"""Makes the logger of a run from its folder, which has config.toml already, and earlier records if the run goes on."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by names in groups: what stands before the ``/`` is the group, and a chart each beside.

    - ``test accuracy/personal``: the mean over the clients, or the number where there is one;
    - ``test accuracy over clients/personal lowest5``: all other statistics over the clients;
    - ``test accuracy of new clients/personal``: of clients that joined late;
    - ``training/loss``, ``communication/up_bytes``, ``clock/wait-free``, ``round/seconds``.

    What clients do after the last round is a group of its own, ``after the last round: test accuracy/personal``.
    """
    found = {}
    for row in tidy(record):
        if row["model"] is None:
            name = f"{row['group']}/{row['metric']}"
        else:
            whose = {"new_clients": " of new clients", "participants": " of the round's clients"}
            group = f"{row['data']} {row['metric']}{whose.get(row['group'], '')}"
            if row["statistic"] in (None, "mean"):
                name = f"{group}/{row['model']}"
            else:
                name = f"{group} over clients/{row['model']} {row['statistic']}"
        found[name if row["stage"] == "round" else f"after the last round: {name}"] = row["value"]
    return found


def _step(record: Mapping[str, Any]) -> int:
    """The round of a record; of what comes after the last round that one."""
    return int(record["round"]) - ("stage" in record)


def check_loggers(names: Sequence[str | LoggerFactory]) -> None:
    """Refuse loggers that cannot be made, before anything runs.

    Raises:
        ValueError: there is none of such a name.
        ImportError: the package of one is not installed; the message names the extra.
    """
    for name in names:
        if isinstance(name, str):
            if name not in LOGGERS:
                raise ValueError(f"log is {name!r}; accepted are {', '.join(LOGGERS)}")
            try:
                found = importlib.util.find_spec(name) is not None
            except ValueError:  # of a module that is there and says nothing of where it is from
                found = sys.modules.get(name) is not None
            if not found:
                raise ImportError(f"log is {name!r}, and its package is not installed: pip install 'pfl_ext[{name}]'")


def loggers_of(names: Sequence[str | LoggerFactory], folder: ResultsFolder) -> list[Logger]:
    """The loggers of a run; those that were opened are closed if another cannot be.

    Raises:
        ValueError, ImportError: as `check_loggers`.
    """
    check_loggers(names)
    opened: list[Logger] = []
    try:
        for name in names:
            opened.append((LOGGERS[name] if isinstance(name, str) else name)(folder))
    except BaseException:
        for logger in opened:
            logger.close()
        raise
    return opened


def _options(folder: ResultsFolder) -> dict[str, Any]:
    """The run's options by names such as ``federation.rounds``."""
    if not (folder.path / CONFIG).is_file():
        return {}
    found: dict[str, Any] = {}
    for section, table in read_config(folder.path).items():
        own = {f"{section}.{name}": value for name, value in table.items()} if isinstance(table, Mapping) else {}
        found |= own or {section: table}
    return found


def _name_of(folder: ResultsFolder) -> str:
    """A comparison's folder and the run's in it, or the run's own."""
    path = folder.path.resolve()
    inside = (path.parent / CONFIG).is_file()
    return f"{path.parent.name}/{path.name}" if inside else path.name


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


class _TensorBoard:
    """Event files in the folder ``tensorboard`` of the results."""

    def __init__(self, folder: ResultsFolder) -> None:
        made = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        # The files of an earlier process may hold rounds that a resumed run repeats; from step 0 on they are void.
        self._writer = made(str(folder.path / "tensorboard"), purge_step=0)
        for record in folder.records():
            self.append(record)

    def append(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, _step(record))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


# ---- Weights & Biases ------------------------------------------------------------------------------------------------


class _WandB:
    """A run of Weights & Biases, by its own variables: WANDB_MODE=offline, WANDB_PROJECT (else pfl_ext), ..."""

    def __init__(self, folder: ResultsFolder) -> None:
        wandb = importlib.import_module("wandb")
        records, file = folder.records(), folder.path / "wandb-run.txt"
        known = bool(records) and file.is_file()  # it goes on there
        name = file.read_text(encoding="utf-8").strip() if known else uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pfl_ext"),
            dir=str(folder.path),
            name=_name_of(folder),
            group=folder.path.resolve().parent.name,
            id=name,
            resume="allow" if known else None,
            config=_options(folder),
            settings=wandb.Settings(console="off"),  # it would catch what the progress display writes
        )
        with folder.replacing(file.name) as path:
            path.write_text(f"{name}\n", encoding="utf-8")
        for record in records if not known else ():
            self.append(record)

    def append(self, record: Mapping[str, Any]) -> None:
        # A step of its own for what comes after the last round: one that was logged takes no more.
        self._run.log({**scalars(record), "round": _step(record)}, step=int(record["round"]))

    def close(self) -> None:
        self._run.finish()


# ---- MLflow ----------------------------------------------------------------------------------------------------------


class _MLflow:
    """A run of MLflow, by its own variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME (else pfl_ext)."""

    def __init__(self, folder: ResultsFolder) -> None:
        mlflow = importlib.import_module("mlflow")
        self._metric = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pfl_ext")
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self._client.create_experiment(name)
        records, file = folder.records(), folder.path / "mlflow-run.txt"
        known = bool(records) and file.is_file()
        if known:
            self._run = file.read_text(encoding="utf-8").strip()
            self._client.set_terminated(self._run, "RUNNING")
        else:
            self._run = self._client.create_run(where, run_name=_name_of(folder)).info.run_id
            for option, value in _options(folder).items():
                self._client.log_param(self._run, option, str(value)[:500])
            with folder.replacing(file.name) as path:
                path.write_text(f"{self._run}\n", encoding="utf-8")
            for record in records:
                self.append(record)

    def append(self, record: Mapping[str, Any]) -> None:
        now, step = int(1000 * time.time()), _step(record)
        metrics = [
            self._metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step) for name, value in scalars(record).items()
        ]
        for begin in range(0, len(metrics), 1000):  # no more in one call
            self._client.log_batch(self._run, metrics[begin : begin + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._run)


LOGGERS: dict[str, LoggerFactory] = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow}
"""The loggers by the names of ``--log``; each is an extra of the package."""
