"""Kills of Flower: a SuperLink with its ServerApp at random moments, the run resumed to the bits of an unbroken one.

A deployment on the loopback, with TLS, and two nodes with data of their own, which stay and find the new SuperLink. (A
node that is killed is left out while it is away, so such a run is another one.) Needs the environment of ``make
flower``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from flower_deployment import Deployment, deployment

_NODES, _ROUNDS = 2, 4
_OPTIONS = ["--clients", str(_NODES), "--rounds", str(_ROUNDS), "--lr", "0.1", "--network", "mlp"]
_LIMIT = 900.0  # on a busy machine a message takes a minute: it starts a process that imports torch


def _environment() -> dict[str, str]:
    """Of processes of Flower: none of them calls home."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    switches = ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "OMP_NUM_THREADS")
    return {**os.environ, "PATH": path, "FLWR_TELEMETRY_ENABLED": "0", **dict.fromkeys(switches, "1")}


def _write_clinics(folder: Path) -> None:
    """Data of two clinics, each in a file of its own."""
    draws = np.random.default_rng(0)
    for k in range(_NODES):
        x = draws.normal(size=(30, 5)).astype("float32")
        y = (x[:, k] > 0).astype("int64")
        np.savez(folder / f"clinic{k}.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])


def _node(run: Deployment, number: int) -> None:
    state = run.folder / f"state-{number}"
    run.node(f"node{number}", f'client={number} data="npz:{run.folder}/clinic{number}.npz" state="{state}"')


def _records(run: Deployment, app: str) -> list[dict[str, Any]]:
    path = run.folder / app / "results/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in lines]


def _submit(run: Deployment, app: str, resume: bool) -> None:
    run.run("flwr", "run", app, "clinics", "--run-config", f"flower.resume={str(resume).lower()}")


def _wait(run: Deployment, app: str, rounds: int, ended: bool = False) -> None:
    """Until so many rounds are recorded, and with ``ended`` until all is written."""
    end = time.monotonic() + _LIMIT
    last = run.folder / app / f"results/checkpoints/checkpoint-{_ROUNDS:08d}.safetensors"
    while len(_records(run, app)) < rounds or (ended and not last.exists()):
        assert time.monotonic() < end, (
            f"it hangs after {len(_records(run, app))} rounds:\n{run.log('superlink')[-3000:]}"
        )
        time.sleep(0.05)


def main() -> int:
    """Kill until there were as many kills as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--method", default="ditto", help="the method (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of the moments")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    moments, begin, kills, runs, found = random.Random(arguments.seed), time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="soak-flower-") as name, deployment(Path(name), _environment()) as run:
        _write_clinics(run.folder)
        run.superlink()
        for k in range(_NODES):
            _node(run, k)
        new = ("pfl-ext", "flower", "new")
        run.run(*new, "whole", arguments.method, *_OPTIONS, "--checkpoint-every", "1")
        _submit(run, "whole", resume=False)
        _wait(run, "whole", _ROUNDS, ended=True)
        whole = _records(run, "whole")
        while kills < arguments.kills:
            app = f"app{runs}"
            run.run(*new, app, arguments.method, *_OPTIONS, "--checkpoint-every", "1")
            _submit(run, app, resume=False)
            for _ in range(min(arguments.kills - kills, 3)):
                _wait(run, app, min(len(_records(run, app)) + moments.randint(1, 2), _ROUNDS - 1))
                time.sleep(moments.uniform(0, 1.0))
                run.kill_server()
                run.superlink()
                _submit(run, app, resume=True)
                kills += 1
            _wait(run, app, _ROUNDS, ended=True)
            runs += 1
            found += _records(run, app) != whole
            print(f"{kills} kills in {runs} runs, {found} differ; {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
