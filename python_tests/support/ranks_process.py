"""What the ranks of a test do: a file that torchrun starts, with the name of a scenario and a file for its answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from example_files import EXAMPLES
from faulty import Faulty
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS
from pfl_ext.cli import main
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Torchrun, lead
from pfl_ext.engines.exchange import Exchange
from pfl_ext.federation import Federation, ForeignCheckpoint, InProcess, Record, Settings
from pfl_ext.federation.checkpoint import digest
from pfl_ext.nn import Networks

SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0, 5.0), "lambdas": (0.0, 0.5)},
    "fedgen": {"generator_steps": 3},
    "fedbuff": {"buffer": 2},
    "cfl": {"first_cut": 2, "eps1": 100.0, "eps2": 0.0, "smallest": 1},
    "perada": {"kd_steps": 4, "kd_batch_size": 5, "kd_distance": True},
    "feddf": {"kd_steps": 4, "kd_batch_size": 5},
}


SWEEP = ["sweep", "fedavg", "ditto", "--vary", "method.lam=0.1,1", "--clients=4", "--train-samples=200", "--lr=0.1"]
SWEEP += ["--rounds=1", "--quiet", "--no-plots"]
_NET = EXAMPLES / "own" / "net.py"
_OWN = ["run", f"{_NET}:Patient", f"--network={_NET}:Net", f"--task={_NET}:Huber", f"--optimizer={_NET}:slow_adam"]
_OWN += [f"--data={_NET}:load", "--partition=iid", "--clients=3", "--rounds=2", "--quiet", "--no-plots"]


def points() -> Dataset:
    """80 points of three classes in four dimensions."""
    y = torch.arange(80) % 3
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(4)[y]
    return Dataset("points", x, y, ("a", "b", "c"), torch.zeros(80, dtype=torch.bool))


def uneven() -> Partition:
    """Five clients with 4 to 20 training samples, in no order."""
    sizes, begin = (12, 4, 20, 7, 9), 0
    train, validation, test = [], [], []
    for size in sizes:
        train.append(torch.arange(begin, begin + size))
        validation.append(torch.arange(begin + size, begin + size + 2))
        test.append(torch.arange(begin + size + 2, begin + size + 4))
        begin += size + 4
    return Partition(
        tuple(train), tuple(validation), tuple(test), torch.arange(begin, 80), torch.cat([*test, torch.arange(72, 80)])
    )


def network() -> nn.Module:
    """With batch normalisation, and dropout, which draws from torch's own generator."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


def plain() -> nn.Module:
    """Without both."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def told(records: list[Record]) -> list[Record]:
    """Records without times of the wall clock."""
    return [{k: v for k, v in record.items() if not k.startswith("seconds")} for record in records]


def federation(name: str, engine: Any, settings: Settings, **more: Any) -> Federation:
    """A small run of a method."""
    options = {"lr": 0.1, "batch_size": 4, "momentum": 0.5} | SHORT.get(name, {})
    data = more.pop("data", None) or points()
    auxiliary = data.subset(torch.arange(20)).unlabelled(data)
    method = METHODS[name](**options)
    module = more.pop("module", None) or network()
    return Federation(method, module, data, uneven(), settings, engine=engine, auxiliary=auxiliary, **more)


def outcome(name: str, engine: Any, settings: Settings, **more: Any) -> str:
    """The records, the server's vectors and what clients keep, as text."""
    run = federation(name, engine, settings, **more)
    kept: dict[str, Tensor] = {}
    records = []
    for record in run.rounds():
        records.append(record)
        kept = run.engine.state()  # while the engine is open
    vectors = {f"server/{key}": value for key, value in run.server.items()} | kept
    return json.dumps({"records": told(records), "digests": {key: digest(v) for key, v in sorted(vectors.items())}})


# ---- scenarios -------------------------------------------------------------------------------------------------------


def every_method(folder: Path) -> dict[str, bool]:
    """Whether each method gives the bits of one process."""
    settings = Settings(rounds=3, participation=0.6, personal_global_test=True, clock="log-normal")
    return {name: outcome(name, Torchrun(), settings) == outcome(name, InProcess(), settings) for name in METHODS}


def stores_and_protocols(folder: Path) -> dict[str, bool]:
    """The same for stores, protocols and settings that change what is sent when."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "mapped": ("ditto", {"store": "mapped"}),
        "mapped, asynchronous": ("fedbuff", {"store": "mapped"}),
        "wait-free": ("perada", {"protocol": "wait-free"}),
        "until-arrival": ("scd", {"protocol": "until-arrival", "clock": "log-normal"}),
        "several threads": ("scaffold", {"threads": 2}),
        "late clients": ("fedavg", {"new_clients": 1, "join_round": 2}),
        "local buffers": ("fedavg", {"local_buffers": ("BatchNorm1d",)}),
    }
    found = {}
    for case, (name, given) in cases.items():
        settings = Settings(**{"rounds": 3, **given})
        found[case] = outcome(name, Torchrun(), settings) == outcome(name, InProcess(), settings)
    return found


def networks(folder: Path) -> dict[str, bool]:
    """The same where clients have different networks."""
    found = {}
    for name in ("feddf", "fedmd", "fedproto"):
        for store in ("memory", "mapped"):
            settings = Settings(rounds=3, participation=0.6, store=store)
            one, two = (
                outcome(name, engine, settings, module=Networks([network(), plain()]))
                for engine in (Torchrun(), InProcess())
            )
            found[f"{name}, {store}"] = one == two
    return found


def stored(folder: Path) -> dict[str, bool]:
    """The same of data in files, of which each rank reads what it needs."""
    found, whole = {}, points()
    items = list(zip(whole.inputs, whole.targets.tolist(), strict=True))
    data = Dataset.from_torch(items, name="points", cache=folder / "cache", classes=whole.classes)
    for name in ("fedavg", "ditto"):  # all ranks have all samples, or those of their clients
        settings = Settings(rounds=2, participation=0.6)
        one, two = (outcome(name, engine, settings, data=data) for engine in (Torchrun(), InProcess()))
        found[name] = one == two == outcome(name, InProcess(), settings)
    return found


def own_code(folder: Path) -> list[int]:
    """A network, task, optimiser, data and method of a file, on the ranks and in this process."""
    return [
        main([*_OWN, f"--engine={engine}", "--output", str(folder / f"own-{engine}")])
        for engine in ("torchrun", "process")
    ]


def faults_of_clients(folder: Path) -> dict[str, Any]:
    """A client that diverges is named, or left out; an error of a method comes back as it is."""
    data, partition = points(), uneven()

    def run(engine: Any, how: str, **given: Any) -> Federation:
        settings = Settings(rounds=3, **given)
        return Federation(Faulty(lr=0.1, batch_size=4, how=how), plain(), data, partition, settings, engine=engine)

    one, two = (run(engine, "nan", diverged="drop") for engine in (InProcess(), Torchrun()))
    found: dict[str, Any] = {"dropped": told(one.run()) == told(two.run())}
    for how in ("nan", "raise"):
        try:
            run(Torchrun(), how).run()
        except Exception as error:
            found[how] = [type(error).__name__, str(error), str(error.__cause__)]
    found["after"] = outcome("ditto", Torchrun(), Settings(rounds=2)) == outcome(
        "ditto", InProcess(), Settings(rounds=2)
    )
    return found


def saved(folder: Path) -> dict[str, Any]:
    """Two rounds of a run that another number of ranks goes on with."""
    found = {}
    for name in ("ditto", "fedbuff", "fedbabu"):
        settings = Settings(rounds=2, checkpoint_every=1, clock="log-normal")
        run = federation(name, Torchrun(), settings, folder=folder / name)
        list(run.rounds())
        found[name] = sorted(path.name for path in (folder / name / "checkpoints").iterdir())
    return found


def resumed(folder: Path) -> dict[str, str]:
    """Two more."""
    settings = Settings(rounds=4, checkpoint_every=1, clock="log-normal")
    return {
        name: outcome(name, Torchrun(), settings, folder=folder / name, resume=True) for name in ("ditto", "fedbuff")
    }


def fast(folder: Path) -> dict[str, Any]:
    """How far an all-reduce is from the exact average, and what both send in a round."""
    found: dict[str, Any] = {}
    models = {}
    for reduction in ("exact", "fast"):
        engine = Torchrun(reduction)  # type: ignore[arg-type]
        run = federation("fedavg", engine, Settings(rounds=3, evaluate_every=3), folder=folder / reduction)
        before: list[dict[str, int]] = []
        for record in run.rounds():
            now = engine.sent()
            if record["round"] == 2:
                before = now
            if record["round"] == 3:
                found[reduction] = [
                    {k: v - a.get(k, 0) for k, v in b.items()} for a, b in zip(before, now, strict=True)
                ]
        models[reduction] = run.server["model"]
    for reduction in ("exact", "fast"):  # with the folder of the other
        try:
            other = Torchrun("fast" if reduction == "exact" else "exact")
            federation("fedavg", other, Settings(rounds=4), folder=folder / reduction, resume=True)
        except ForeignCheckpoint as error:
            found[f"{reduction} refused"] = str(error)
    rest = federation("fedavg", Torchrun("fast"), Settings(rounds=4), folder=folder / "fast", resume=True)
    found["rounds"] = [record["round"] for record in rest.rounds()]
    found["apart"] = float((models["exact"] - models["fast"]).abs().max())
    found["model"] = models["exact"].nbytes
    found["largest"] = float(models["exact"].abs().max())
    return found


def sweep(folder: Path) -> int:
    """A sweep as the command line runs it; the exit status."""
    return main([*SWEEP, "--output", str(folder / "sweep")])


def full_disk(folder: Path) -> None:
    """Rank 1 cannot keep what arrives there in the second round."""
    federation("ditto", Torchrun(), Settings(rounds=3)).run()


def _fail_on_rank_1() -> None:
    keep = Exchange._step

    def step(self: Exchange, vector: Tensor | None, heads: Any) -> None:
        if os.environ["RANK"] == "1" and heads[0][0] > 3:
            raise OSError(28, "No space left on device", "/scratch/slice")
        keep(self, vector, heads)

    Exchange._step = step  # type: ignore[method-assign]


SCENARIOS: dict[str, Callable[[Path], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        every_method,
        stores_and_protocols,
        networks,
        stored,
        own_code,
        faults_of_clients,
        saved,
        resumed,
        fast,
        sweep,
        full_disk,
    )
}


def _main(answer: Path, folder: Path, names: list[str]) -> int:
    answer.write_text(json.dumps({name: SCENARIOS[name](folder) for name in names}))
    return 0


if __name__ == "__main__":
    if "full_disk" in sys.argv:
        _fail_on_rank_1()
    sys.exit(lead(partial(_main, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))
