"""The server of a federation as a Flower app: the round loop, with an engine that sends messages."""

from __future__ import annotations

from collections.abc import Mapping
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Method, Settings
from pfl_ext.reports import shown_values, value_words
from pfl_ext.runs import has_results, run_in
from pfl_ext.tasks import Task

from .elsewhere import dataset_of
from .engine import GridEngine
from .parts import Auxiliary, Given, Network, Parts, Whole, network_digest

__all__ = ["server_app"]


def server_app(
    method: Method | None = None,
    *,
    network: Network | None = None,
    settings: Settings | None = None,
    data: Whole | None = None,
    task: Task | None = None,
    auxiliary: Auxiliary | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
) -> ServerApp:
    """A Flower app of a server that runs a method on the clients of :func:`~.client.client_app`.

    What is not given is read from the app's configuration, which ``pfl-ext flower new`` writes. With all of it from
    there the results are a folder as ``pfl-ext run`` leaves it.

    Args:
        method: what clients and server do.
        network: makes the network of a dataset, with its initial weights.
        settings: the rest of the run.
        data: loads all clients' data, for a simulation. Where nodes have their own, it is not called.
        task: what is learned; by default what the targets are for.
        auxiliary: makes the unlabelled data, for methods that distil at the server, or whose clients see them too.
        folder: where checkpoints go; by default what ``flower.output`` of the configuration names.
        resume: go on from the newest good checkpoint there, as does ``flower.resume`` of the configuration.
    """
    given = Given(method, network, settings, data, task, auxiliary)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = {"flower.output": str(folder or ""), "flower.resume": resume, **context.run_config}
        _run(grid, given.parts(context.run_config), config)

    return app


def _run(grid: Grid, parts: Parts, config: Mapping[str, Any]) -> None:
    timeout, wait = float(config.get("flower.timeout", 3600.0)), float(config.get("flower.wait", 600.0))
    engine = GridEngine(grid, parts.run, timeout=timeout, wait=wait)
    dataset, partition = _data(engine, parts, config)
    digest = network_digest(parts, dataset)
    for node in engine.gather(partition.clients):
        if node.network != digest:
            raise ValueError(
                f"client {node.client} has another network or task than the server, or other initial weights"
            )
    output, resume = str(config["flower.output"]), bool(config["flower.resume"])
    if parts.experiment is None:
        _run_given(engine, parts, dataset, partition, output, resume)
        return
    if not output:
        raise ValueError("flower.output is empty; accepted is the folder for results and checkpoints")
    target, overwrite = Path(output), bool(config.get("flower.overwrite", False))
    if has_results(target) and not (resume or overwrite):
        raise ValueError(
            f"{target} holds the results of an earlier run: flower.resume=true goes on with it, flower.overwrite=true "
            "removes its results, flower.output names another folder"
        )
    experiment = parts.experiment

    def make(*args: Any, **more: Any) -> Federation:
        return engine.follow(experiment.make(*args, engine=engine, **more))

    metric = experiment.make_task(dataset).metric

    def tell(record: Mapping[str, Any]) -> None:
        _tell(record, metric)

    last = run_in(
        target,
        experiment,
        dataset,
        partition,
        resume=resume,
        overwrite=overwrite,
        quiet=True,
        make=make,
        labels=not engine.first().own,
        seen=tell,
    )
    log(INFO, "done after round %s: results in %s", last["round"], target)


def _run_given(
    engine: GridEngine, parts: Parts, dataset: Dataset, partition: Partition, output: str, resume: bool
) -> None:
    """A run whose parts were given in code: rounds and checkpoints, without a results folder."""
    federation = Federation(
        parts.method,
        parts.network(dataset),
        dataset,
        partition,
        parts.settings,
        task=parts.task(dataset),
        engine=engine,
        folder=output or None,
        resume=resume,
        auxiliary=parts.auxiliary(dataset, partition),
    )
    for record in engine.follow(federation).rounds():
        _tell(record, federation.task.metric)


def _tell(record: Mapping[str, Any], metric: str) -> None:
    """A line of the log for a round: Flower's log is where its users look."""
    dropped = [f"left out {record['dropped']}"] if record.get("dropped") else []
    round = "the clients' own training" if "stage" in record else f"round {record['round']}"
    words = [*value_words(shown_values(record, metric))] or ["not evaluated"]
    log(INFO, "%s: %s", round, ", ".join([*words, *dropped]))


# ---- data ------------------------------------------------------------------------------------------------------------


def _data(engine: GridEngine, parts: Parts, config: Mapping[str, Any]) -> tuple[Dataset, Partition]:
    """The run's data: those of a simulation, or what nodes say of theirs."""
    first = engine.first()
    if not first.own:
        dataset, partition = parts.whole()
        nodes = engine.gather(partition.clients)
        for node in nodes:
            if node.own or node.data != dataset.fingerprint:
                raise ValueError(f"client {node.client} has other data than the server, which has {dataset.name!r}")
        return dataset, partition
    clients = int(config.get("partition.clients", 0))
    if clients < 1:
        raise ValueError(f"partition.clients is {clients}; accepted is the number of nodes, each with data of its own")
    some = {} if parts.experiment is None else parts.experiment.data_options
    tested = bool(some.get("extra_tests")) or some.get("auxiliary") is not None
    return dataset_of(engine.gather(clients), parts.settings, tested=tested)
