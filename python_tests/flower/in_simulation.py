"""One Flower simulation, on ray, that does everything the tests look at: its start takes longer than all that it does.

``python in_simulation.py FOLDER`` leaves what came of it there: JSON, and tensors in safetensors.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from safetensors.torch import save_file
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS, FedAvg
from pfl_ext.data import PARTITIONERS, Dataset, Partition
from pfl_ext.federation import Federation, Record, Settings, stream
from pfl_ext.flower import FusedFedAvg, GridEngine, client_app, server_app, write_arrays
from pfl_ext.flower.grid import ArrivingGrid
from pfl_ext.flower.parts import Given
from pfl_ext.nn import Networks

CLIENTS = 6
EXAMPLES = ("averaging", "distillation", "proximal", "sharpness", "spectral")
SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0, 5.0), "lambdas": (0.0, 0.5)},
    "fedgen": {"generator_steps": 3},
}
NETWORKS = {"networks, distilled": "feddf", "networks, prototypes": "fedproto"}
"""Runs with networks of different shapes, and their methods."""


# ---- the runs --------------------------------------------------------------------------------------------------------


def whole() -> tuple[Dataset, Partition]:
    """120 points of three classes in four dimensions, cut for six clients."""
    y = torch.arange(120) % 3
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(4)[y]
    dataset = Dataset("points", x, y, ("a", "b", "c"), torch.zeros(120, dtype=torch.bool))
    return dataset, PARTITIONERS["iid"](dataset, CLIENTS, generator=torch.Generator().manual_seed(1), validation=0.2)


def network(dataset: Dataset) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def networks(dataset: Dataset) -> nn.Module:
    """That one and a smaller one, with as many features; the clients have them in turn."""
    torch.manual_seed(2)
    return Networks([network(dataset), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))])


def auxiliary(dataset: Dataset, partition: Partition) -> Dataset:
    return dataset.subset(torch.arange(20)).unlabelled(dataset)


def given(name: str) -> Given:
    """A run, with unlabelled data."""
    return dataclasses.replace(_given(name), auxiliary=auxiliary)


def _given(name: str) -> Given:
    """The run of a method; of ``fault:HOW`` one in which a client misbehaves; of ``buffers`` one with a policy."""
    quick = {"lr": 0.1, "batch_size": 4}
    settings: dict[str, Any] = {"rounds": 2, "participation": 0.7, "seed": 3}
    if name.startswith("fault:"):
        # The step size tells the runs apart.
        how = list(FAULTS).index(name.removeprefix("fault:"))
        return Given(FedAvg(lr=0.2 + 0.01 * how), network, Settings(rounds=2, diverged="drop"), whole)
    if name == "buffers":
        settings |= {"local_buffers": ("BatchNorm1d",), "seed": 4}
        return Given(METHODS["ditto"](**quick), network, Settings(**settings), whole)
    if name == "server buffers":
        settings |= {"server_buffers": ("BatchNorm1d",), "seed": 5}
        return Given(METHODS["ditto"](**quick), network, Settings(**settings), whole)
    if name == "until arrival":
        settings |= {"protocol": "until-arrival", "clock": "log-normal", "clock_up": 1e4, "seed": 6}
        return Given(METHODS["scd"](**quick), network, Settings(**settings), whole)
    if name in NETWORKS:
        return Given(METHODS[NETWORKS[name]](**quick), networks, Settings(**settings | {"seed": 9}), whole)
    if name == "resumed":
        return Given(METHODS["ditto"](**quick), network, Settings(rounds=4, seed=8, checkpoint_every=1), whole)
    if name == "own data":
        return Given(METHODS["ditto"](**quick), network, Settings(**settings | {"seed": 9}), _nobody)
    return Given(METHODS[name](**{**quick, **SHORT.get(name, {})}), network, Settings(**settings), whole)


def federation(name: str, **more: Any) -> Federation:
    run = given(name)
    assert run.method is not None and run.network is not None
    dataset, partition = whole()
    unlabelled = auxiliary(dataset, partition)
    return Federation(run.method, run.network(dataset), dataset, partition, run.settings, auxiliary=unlabelled, **more)


def history(records: Sequence[Record]) -> str:
    """Everything that records say but times."""
    return json.dumps([{k: v for k, v in record.items() if not k.startswith("seconds")} for record in records])


# ---- nodes with data of their own ------------------------------------------------------------------------------------


def of_node(client: int) -> tuple[Dataset, Partition]:
    """What a node has, as a function of a user's loads it: ten to fifteen of the points, cut for one client."""
    data = whole()[0].subset(torch.arange(20 * client, 20 * client + 10 + client))
    return data, PARTITIONERS["iid"](data, 1, generator=stream(9, "partition", client))


def own_data(context: Context) -> Dataset | tuple[Dataset, Partition]:
    """Half of the nodes leave it to the app to cut their data."""
    client = int(context.node_config["partition-id"])
    return of_node(client) if client % 2 else of_node(client)[0]


def together() -> tuple[Dataset, Partition]:
    """The same samples in one place."""
    parts: dict[str, tuple[Tensor, ...]] = {
        name: tuple(getattr(of_node(k)[1], name)[0] + 20 * k for k in range(CLIENTS))
        for name in ("train", "validation", "test")
    }
    nothing = torch.empty(0, dtype=torch.int64)
    return whole()[0], Partition(**parts, server=nothing, global_test=nothing)


def _nobody() -> tuple[Dataset, Partition]:
    raise AssertionError("nodes have data of their own, and the run's were asked for")


RUNS = (*METHODS, *NETWORKS, "buffers", "server buffers", "until arrival")


# ---- clients that misbehave ------------------------------------------------------------------------------------------

BAD = 2  # the client, in the first round
LATE = 6.0  # seconds after which a client is left out; the others answer in a tenth of one, if nobody else computes


class _Payload:
    """What would run code at whoever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(os.environ["PFL_EXT_TEST_FOLDER"]) / "code-was-run",))


def _raises(reply: Message) -> None:
    raise RuntimeError("no more memory")


def _is_late(reply: Message) -> None:
    """Until the server has gone on without it."""
    end = time.monotonic() + 60.0
    while not (Path(os.environ["PFL_EXT_TEST_FOLDER"]) / "gone-on").exists() and time.monotonic() < end:
        time.sleep(0.05)


def _sends(change: Callable[[dict[str, Array]], None]) -> Callable[[Message], None]:
    def fault(reply: Message) -> None:
        name = next(iter(reply.content.array_records))
        name = "sent" if "sent" in reply.content.array_records else name
        arrays = dict(reply.content.array_records[name])
        change(arrays)
        reply.content[name] = ArrayRecord(arrays)

    return fault


def _first(arrays: dict[str, Array]) -> str:
    return next(iter(arrays))


def _nan(arrays: dict[str, Array]) -> None:
    value = arrays[_first(arrays)].numpy().copy()
    value.reshape(-1)[0] = float("nan")
    arrays[_first(arrays)] = Array(value)


def _shape(arrays: dict[str, Array]) -> None:
    arrays[_first(arrays)] = Array(arrays[_first(arrays)].numpy().reshape(-1)[:-1].copy())


def _name(arrays: dict[str, Array]) -> None:
    arrays["other"] = arrays.pop(_first(arrays))


def _dtype(arrays: dict[str, Array]) -> None:
    arrays[_first(arrays)] = Array(arrays[_first(arrays)].numpy().astype("float64"))


def _pickle(arrays: dict[str, Array]) -> None:
    import pickle

    arrays[_first(arrays)] = Array("float32", (1,), "numpy.ndarray", pickle.dumps(_Payload()))


def _claim(arrays: dict[str, Array]) -> None:
    import numpy as np

    data = Array(np.zeros(4, dtype="float32")).data.replace(b"(4,), }" + b" " * 9, b"(9999999999,), }")
    arrays[_first(arrays)] = Array("float32", (4,), "numpy.ndarray", data)


def _no_json(reply: Message) -> None:
    for name in reply.content.config_records:
        reply.content[name] = ConfigRecord({"json": "[" * 100_000})
    for name in reply.content.metric_records:
        reply.content[name] = MetricRecord({"num-examples": [1, 2]})


FAULTS: dict[str, Callable[[Message], None]] = {
    "raises": _raises,
    "late": _is_late,
    "nan": _sends(_nan),
    "shape": _sends(_shape),
    "name": _sends(_name),
    "dtype": _sends(_dtype),
    "pickle": _sends(_pickle),
    "claim": _sends(_claim),
    "json": _no_json,
}


# ---- the apps --------------------------------------------------------------------------------------------------------

NAMES = {
    given(name).parts({}).run: name for name in (*RUNS, *(f"fault:{how}" for how in FAULTS), "resumed", "own data")
}


def _client_of(name: str) -> ClientApp:
    run = given(name)
    own = own_data if name == "own data" else None
    return client_app(
        run.method,
        network=run.network,
        settings=run.settings,
        data=run.data,
        auxiliary=run.auxiliary,
        own_data=own,
    )


def route(message: Message, context: Context) -> Message:
    """Hand a message to the client that it is for."""
    if "pfl_ext" not in message.content:
        return _of_strategy(message, context)
    plain = json.loads(message.content["pfl_ext"]["json"])
    name = NAMES.get(plain["run"], "ditto")
    reply = _client_of(name)(message, context)
    if name.startswith("fault:") and [plain.get(key) for key in ("client", "round", "stage")] == [BAD, 1, "train"]:
        FAULTS[name.removeprefix("fault:")](reply)
    return reply


def _of_strategy(message: Message, context: Context) -> Message:
    what = str(message.content["test"]["what"])
    if what in EXAMPLES:
        return importlib.import_module(f"{what}_flower").client(message, context)
    client = int(context.node_config["partition-id"])
    model = network(whole()[0])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(client)))
    metrics = MetricRecord({"num-examples": 10 + client, "loss": float(client)})
    reply = Message(RecordDict({"arrays": write_arrays(model), "metrics": metrics}), reply_to=message)
    if client == BAD and what in FAULTS:
        FAULTS[what](reply)
    return reply


class _Labelled(ArrivingGrid):
    """A grid whose messages say what they are for."""

    def __init__(self, grid: Grid, what: str) -> None:
        super().__init__(grid)
        self.what = what

    def push_messages(self, messages: Any) -> Any:
        for message in (messages := list(messages)):
            message.content["test"] = ConfigRecord({"what": self.what})
        return super().push_messages(messages)


def _engine(grid: Grid, name: str, timeout: float = 60.0) -> GridEngine:
    engine = GridEngine(grid, given(name).parts({}).run, timeout=timeout, wait=240)  # its start imports torch
    engine.gather(CLIENTS)
    return engine


def _strategies(grid: Grid, folder: Path, found: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    start, results = FusedFedAvg.start, []

    def kept(self: FusedFedAvg, *args: Any, **more: Any) -> Any:
        results.append(start(self, *args, **more))
        return results[-1]

    FusedFedAvg.start = kept  # type: ignore[method-assign]
    context = Context(0, 0, {}, RecordDict(), {})
    for name in EXAMPLES:
        importlib.import_module(f"{name}_flower").server(_Labelled(grid, name), context)
        result = results[-1]
        rounds = {t: dict(metrics) for t, metrics in result.train_metrics_clientapp.items()}
        evaluated = {t: dict(metrics) for t, metrics in result.evaluate_metrics_clientapp.items()}
        found[f"example:{name}"] = {"train": rounds, "evaluate": evaluated}
        tensors |= {f"example:{name}/{key}": x for key, x in result.arrays.to_torch_state_dict().items()}
    arrays = write_arrays(network(whole()[0]))
    once: dict[str, Any] = {"fraction_evaluate": 0.0}
    cases: list[tuple[str, str, FlowersFedAvg]] = [
        ("flower", "plain", FlowersFedAvg(**once)),
        ("fused", "plain", FusedFedAvg(**once)),
        ("streaming", "plain", FusedFedAvg(streaming=True, **once)),
        ("half", "plain", FusedFedAvg(lr=0.5, **once)),
        ("streaming half", "plain", FusedFedAvg(lr=0.5, streaming=True, **once)),
        *((f"fault:{how}", how, FusedFedAvg(**once)) for how in FAULTS),
        ("streaming fault", "nan", FusedFedAvg(streaming=True, **once)),
    ]
    for label, what, strategy in cases:
        (folder / "gone-on").unlink(missing_ok=True)
        result = strategy.start(_Labelled(grid, what), arrays, num_rounds=1, timeout=LATE if what == "late" else 60)
        (folder / "gone-on").touch()
        found[f"strategy:{label}"] = dict(result.train_metrics_clientapp[1])
        tensors |= {f"strategy:{label}/{key}": x for key, x in result.arrays.to_torch_state_dict().items()}


def _interrupted(grid: Grid, folder: Path) -> dict[str, str]:
    """A run that begins here and ends in one process, and one the other way round."""
    engine = _engine(grid, "resumed")
    first = engine.follow(federation("resumed", engine=engine, folder=folder / "a")).rounds()
    begun = history([next(first), next(first)])
    next(first)  # its checkpoint of round 2 is written when round 3 is asked for
    first.close()
    for path in sorted((folder / "a/checkpoints").iterdir())[2:]:
        path.unlink()
    other = federation("resumed", folder=folder / "b").rounds()
    _ = [next(other) for _ in range(3)]
    other.close()
    engine = _engine(grid, "resumed")
    second = engine.follow(federation("resumed", engine=engine, folder=folder / "b", resume=True))
    return {"begun": begun, "ended": history(second.run())}


def main(folder: Path) -> None:
    server, client = ServerApp(), ClientApp()
    for kind in (client.train, client.evaluate, client.query):
        kind()(route)
    found: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}

    @server.main()
    def everything(grid: Grid, context: Context) -> None:
        for name in RUNS:
            engine = _engine(grid, name)
            run = engine.follow(federation(name, engine=engine))
            found[name] = history(run.run())
            kept: Mapping[str, Tensor] = engine.state()
            tensors.update({f"{name}/server/{key}": x.clone() for key, x in run.server.items()})
            tensors.update({f"{name}/clients/{key}": x.clone() for key, x in kept.items()})
        for how in FAULTS:
            engine = _engine(grid, f"fault:{how}", timeout=LATE if how == "late" else 60)
            run = federation(f"fault:{how}", engine=engine)
            rounds = engine.follow(run).rounds()
            first = next(rounds)
            if how == "late":
                (folder / "gone-on").touch()
                engine.timeout = 60.0
            found[f"fault:{how}"] = [first.get("dropped"), [r.get("dropped") for r in rounds], history([first])]
        found["resumed"] = _interrupted(grid, folder)
        own = given("own data")
        app = server_app(
            own.method, network=own.network, settings=own.settings, data=own.data, folder=folder / "own data"
        )
        app(grid, Context(0, 0, {}, RecordDict(), {"partition.clients": CLIENTS}))
        try:
            GridEngine(grid, "other", timeout=60, wait=0.1).gather(CLIENTS + 1)
        except TimeoutError as error:
            found["refused"] = str(error)
        _strategies(grid, folder, found, tensors)

    from flwr.simulation import run_simulation

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, CLIENTS, backend_config=resources)  # type: ignore[arg-type]
    (folder / "found.json").write_text(json.dumps(found))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "found.safetensors")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    os.environ["PFL_EXT_TEST_FOLDER"] = str(where)
    main(where)
