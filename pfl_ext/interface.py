"""``pfl_ext.run`` and ``pfl_ext.compare``: what the command line does, with a program's own objects too."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .comparison import Comparison, method_of
from .configuration import Configuration
from .data import Dataset
from .engines import leave_if_imported_by_a_worker
from .experiment import Experiment
from .federation import Method
from .named import PYTHON, TABLES, as_dataset, code_in, in_file, make_known, networks_of, register
from .options import Options, nearest, plain_value
from .reports import LoggerFactory, Look
from .running import Compared, Output, Run, compare_all, data_name, run_name, run_one
from .sections import (
    DATA_OPTIONS,
    NETWORK_OPTIONS,
    PARTITION_OPTIONS,
    TASK_OPTIONS,
    method_options,
    network_options,
    owners,
    partition_options,
    settings_options,
    spelled,
    task_options,
)
from .tasks import Task

__all__ = ["compare", "run"]

Named = str | type | Callable[..., Any]
"""A name as on the command line, or the class or function itself."""


def run(
    method: str | type[Method] | Method,
    *,
    data: str | Dataset | Any = None,
    partition: str | None = None,
    task: str | type[Task] | Task | None = None,
    network: Named | nn.Module | None = None,
    config: Path | str | None = None,
    trust_code: bool = False,
    output: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    plots: bool = True,
    log: Sequence[str | LoggerFactory] = (),
    metric: str | None = None,
    **options: Any,
) -> Run:
    """Run a method and leave what ``pfl-ext run`` leaves: a folder with options, versions, partition, tables, pictures.

    >>> run = pfl_ext.run("ditto", network=Net, data=(x, y), partition="iid", rounds=20, lr=0.1)    # doctest: +SKIP

    Args:
        method: a name, a class, or an object with its options. The code of ``file.py:Name`` is run.
        data: a name, a Dataset, a function that returns one, or what :func:`pfl_ext.named.as_dataset` takes.
        partition: a name.
        task: a name, a class, or an object with its options; by default what the targets are for.
        network: a name, or several with commas between; a module with its initial weights, or
            :class:`pfl_ext.nn.Networks`; or a class or function of ``input_shape`` and ``classes``, where it has
            parameters of these names.
        config: a TOML file, as ``--config`` takes it; what is given here comes before it.
        trust_code: let that file name code of Python files, which is then run.
        output: the results folder; by default one in ``results``.
        resume: go on from the folder's last good checkpoint.
        overwrite: remove the results of an earlier run in the folder.
        quiet: show no progress.
        plots: draw pictures.
        log: loggers that get every record too: "tensorboard", "wandb", "mlflow", or a function that
            makes one of your own (:class:`pfl_ext.reports.Logger`) for a results folder.
        metric: what tables and pictures show; by default the task's.
        options: all others of the command line, by the same names: ``rounds``, ``clients``, ``alpha``, ``data_root``,
            ``network_hidden``, and those of the method.

    Raises:
        ValueError: an option is unknown or has a value that is not accepted.
    """
    leave_if_imported_by_a_worker()
    read = Configuration() if config is None else Configuration.read(Path(config))
    given = _Given.of(data, partition, task, network)
    name, own = _named("method", method)
    _load_code(given, read, (), trust_code)
    sections = given.over(read.sections, options, [name], common=False)
    sections["method"] = {**_common(sections.get("method", {})), **own, "name": name}
    experiment = given.into(Experiment.from_sections(sections))
    folder = Path("results") / run_name(experiment) if output is None else Path(output)
    look = Look(metric or read.metric, read.statistic, read.columns)
    return run_one(experiment, Output(folder, resume, overwrite, quiet, tuple(log), plots), look)


def compare(
    methods: Sequence[str | type[Method] | Method] | Mapping[str, str | type[Method] | Method] = (),
    *,
    data: str | Dataset | Any = None,
    partition: str | None = None,
    task: str | type[Task] | Task | None = None,
    network: Named | nn.Module | None = None,
    seeds: Sequence[int] | None = None,
    config: Path | str | None = None,
    trust_code: bool = False,
    output: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    plots: bool = True,
    log: Sequence[str | LoggerFactory] = (),
    metric: str | None = None,
    statistic: str | None = None,
    columns: Sequence[str] | None = None,
    **options: Any,
) -> Compared:
    """Run several methods on the same clients and batches, and leave what ``pfl-ext compare`` leaves.

    >>> found = pfl_ext.compare(["fedavg", Ditto(lam=0.1), "scd"], data=load, network=Net, rounds=20)  # doctest: +SKIP
    >>> print(found)                                                                                # doctest: +SKIP
    >>> found["ditto"].personal_model(3)                                                            # doctest: +SKIP

    Args:
        methods: names, classes or objects; a mapping gives each a name of its own. What an object has other than the
            defaults comes before ``options``. Without any, those of ``config``.
        seeds: a run for each; the table has means and standard deviations.
        statistic: ``mean`` of the clients' results, or ``weighted_mean``.
        columns: of the table; by default all.
        data, partition, task, network, config: as of :func:`run`.
        trust_code, output, resume, overwrite, quiet, plots, log, metric: likewise.
        options: all others of the command line, of methods those that all have, such as ``lr``.

    Raises:
        ValueError: an option is unknown or has a value that is not accepted.
    """
    leave_if_imported_by_a_worker()
    read = Configuration() if config is None else Configuration.read(Path(config))
    given = _Given.of(data, partition, task, network)
    labels = _labelled(methods) if methods else dict.fromkeys(read.methods)
    if not labels:
        raise ValueError("no method is named, here or in config")
    _load_code(given, read, [label for label, method in labels.items() if method is None], trust_code)
    sections = given.over(read.sections, options, ["fedavg"], common=True)
    for label, method in labels.items():
        if method is not None:
            name, own = _named("method", method)
            there = sections.setdefault("method", {}).get(label, {})
            sections["method"][label] = {**there, **own, "name": name}
    comparison = Comparison(sections, tuple(labels), read.seeds if seeds is None else tuple(seeds))
    experiments = [(label, given.into(made)) for label, made in comparison.experiments()]
    folder = Path("results") / f"compare-{data_name(experiments[0][1])}" if output is None else Path(output)
    shown = None if columns is None else tuple(columns)
    look = Look(metric or read.metric, statistic or read.statistic, shown or read.columns)
    return compare_all(
        experiments, comparison.config(look), Output(folder, resume, overwrite, quiet, tuple(log), plots), look
    )


def _load_code(given: _Given, read: Configuration, labels: Sequence[str], trusted: bool) -> None:
    """Load the code that a configuration file names, if it may; what the program gives in its place is left out.

    Args:
        given: what the program gives.
        read: the file.
        labels: methods and variants of the file that run.
        trusted: whether it may.
    """
    tables = {s: {k: v for k, v in t.items() if k != "name" or s not in given.names} for s, t in read.sections.items()}
    methods = [("method", name) for label in labels if in_file(name := method_of(label, read.sections))]
    for section, name in (*code_in(tables), *methods):
        if not trusted:
            raise ValueError(
                f"{name} is Python code that a configuration file or a run's folder names, and would be run: give it "
                "here yourself, or trust_code=True if you trust both"
            )
        make_known(section, name)


def _labelled(methods: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(methods, Mapping):
        return dict(methods)
    found: dict[str, Any] = {}
    for method in methods:
        label = method if isinstance(method, str) else method.name
        if label in found:
            raise ValueError(f"the method {label} is named more than once; a mapping gives each a name of its own")
        found[label] = method
    return found


# ---- names of what is given ------------------------------------------------------------------------------------------


def _named(section: str, given: Any) -> tuple[str, dict[str, Any]]:
    """The name and the options of a method, task or network."""
    if isinstance(given, str):
        make_known(section, given)
        return given, {}
    if isinstance(given, Options):
        fields = dataclasses.fields(given)
        own = {f.name: value for f in fields if (value := getattr(given, f.name)) != f.default}
        if callable(own.get("optimizer")):
            own["optimizer"] = _registered("optimizer", own["optimizer"])
        return _registered(section, type(given)), own
    return _registered(section, given), {}


def _registered(section: str, given: Any) -> str:
    """The name of a class or function, which is made known; that of its file, if one can import it from there."""
    for known, found in TABLES[section].items():
        if found is given:
            return known
    own = str(getattr(given, "__name__", None) or plain_value(given))  # of a partial what it is made of
    home = getattr(given, "__module__", "")
    file = getattr(sys.modules.get(home), "__file__", None)
    package = None if home.partition(".")[0] == home else sys.modules.get(home.partition(".")[0])
    alone = home != "__main__" and getattr(package, "__file__", None) is None  # it imports nothing beside it by dots
    name = f"{PYTHON}{own}"
    if file and alone and getattr(sys.modules[home], own, None) is given:
        path = os.path.relpath(file)
        name = f"{file if path.startswith('..') else path}:{own}"
    register(section, name, given)
    return name


@dataclass(frozen=True)
class _Given:
    """What a program gives in place of names, and the names that stand for it."""

    names: Mapping[str, Mapping[str, Any]]
    module: nn.Module | None
    dataset: Dataset | None

    @staticmethod
    def of(data: Any, partition: str | None, task: Any, network: Any) -> _Given:
        """Look at each of them; None is left to the configuration file or the defaults."""
        names: dict[str, dict[str, Any]] = {}
        module = dataset = None
        if partition is not None:
            names["partition"] = {"name": partition}
        if isinstance(network, nn.Module):
            names["network"], module = {"name": f"{PYTHON}{type(network).__name__}"}, network
        elif isinstance(network, str):
            names["network"] = {"name": ",".join(_named("network", one)[0] for one in networks_of(network))}
        elif network is not None:
            names["network"] = {"name": _named("network", network)[0]}
        if task is not None:
            name, own = _named("task", task)
            names["task"] = {"name": name, **own}
        if isinstance(data, str) or inspect.isfunction(data):
            names["data"] = {"name": _named("data", data)[0]}
        elif data is not None:
            dataset = as_dataset(data, f"{PYTHON}data")
            names["data"] = {"name": f"{PYTHON}{dataset.name}"}
        return _Given(names, module, dataset)

    def over(
        self, sections: Mapping[str, Any], options: Mapping[str, Any], methods: Sequence[str], *, common: bool
    ) -> dict[str, dict[str, Any]]:
        """The tables of a file, overridden by what was given and by the options."""
        found = {name: dict(table) for name, table in sections.items()}
        for section, table in self.names.items():
            found.setdefault(section, {}).update(table)
        chosen = {
            section: found.get(section, {}).get("name", default.default)
            for section, default in (
                ("partition", PARTITION_OPTIONS["name"]),
                ("task", TASK_OPTIONS["name"]),
                ("network", NETWORK_OPTIONS["name"]),
            )
        }
        places = _places({**chosen, "method": methods[0]})
        for name, value in options.items():
            if name not in places:
                _refuse(name, places, {**chosen, **({} if common else {"method": methods[0]})})
            section, key = places[name]
            if name == "optimizer":
                value = _named("optimizer", value)[0]
            found.setdefault(section, {})[key] = value
        return found

    def into(self, experiment: Experiment) -> Experiment:
        """The experiment with the objects."""
        return dataclasses.replace(experiment, module=self.module, dataset=self.dataset)


def _places(chosen: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The table and key of every option by its name on the command line."""
    tables = {
        "federation": settings_options(),
        "method": method_options(chosen["method"]),
        "data": DATA_OPTIONS,
        "partition": PARTITION_OPTIONS | partition_options(chosen["partition"]),
        "task": task_options(chosen["task"]),
        "network": NETWORK_OPTIONS | network_options(chosen["network"]),
    }
    return {
        spelled(section, key): (section, key) for section, options in tables.items() for key in options if key != "name"
    }


def _refuse(name: str, known: Mapping[str, Any], chosen: Mapping[str, str]) -> None:
    """Refuse an option that nothing of the run has."""
    for section, own in chosen.items():
        key = name.removeprefix(f"{section}_") if section in ("task", "network") else name
        others = owners(section, key) if section == "method" or key != name or section == "partition" else []
        if others:
            raise ValueError(f"{name} is an option of the {section} {', '.join(others)}; this run has {own}")
    if others := owners("method", name):
        raise ValueError(f"{name} is an option of the method {', '.join(others)}: give it to an object of that class")
    raise ValueError(f"unknown option {name!r}{nearest(name, known)}")


def _common(table: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a table without the tables of single methods in it."""
    return {key: value for key, value in table.items() if not isinstance(value, Mapping)}
