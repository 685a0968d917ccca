"""A complete Flower app of an experiment, as files. It needs no Flower: only running the app does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .experiment import Experiment
from .sections import method_options, settings_options

__all__ = ["write_app"]

# Written in any case: `flwr run --run-config` can only change what is there.
_ALWAYS = {
    "data": ("name",),
    "partition": ("name", "clients"),
    "task": ("name",),
    "network": ("name",),
    "federation": ("rounds", "participation", "seed", "diverged", "evaluate_every", "checkpoint_every"),
}
_FLOWER = {"resume": False, "overwrite": False, "timeout": 3600.0, "wait": 600.0}

_PYPROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "{method} on Flower"
requires-python = ">=3.11"
# pfl_ext and flwr are those of the environment that runs the app: pip install 'pfl_ext[flower]'.
dependencies = []

[tool.flwr.app]
publisher = "pfl_ext"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# All of it can be changed for a run: flwr run . --run-config "federation.rounds=5".
{tables}"""

_SERVER = '''\
"""The server: runs the method that pyproject.toml configures."""

from pfl_ext.flower import server_app

app = server_app()
'''

_CLIENT = '''\
"""A client: trains on the data of its node, or on its part of the simulation's."""

from pfl_ext.flower import client_app

# To read a node's data by a function of yours, which returns a pfl_ext.data.Dataset:
#
#     def own_data(context):
#         x, y = load(context.node_config["hospital"])
#         return Dataset.from_tensors(x, y, name="scans", classes=("healthy", "ill"))
#
#     app = client_app(own_data=own_data)

app = client_app()
'''

_README = """\
# {method} on Flower

Made by `pfl-ext flower new`. Method, data and settings are in `pyproject.toml`, below `[tool.flwr.app.config]`.
Results and checkpoints go to `flower.output` there, in the form that `pfl-ext run` gives them.

Simulation, all clients on this machine:

    flwr run . --stream --federation-config "num-supernodes={clients}"

Deployment: a SuperLink, and a SuperNode where each client's data is. `docs/flower.md` of pfl_ext shows how to make
the certificates.

    flower-superlink --host 0.0.0.0 --port 8000 \\
      --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key
    flower-supernode --superlink HOST:8000 --root-certificates ca.crt \\
      --node-config 'client=0 data="npz:/data/clinic.npz" state="/data/state"'

Each node has a number of its own, from 0. `data` is its own file or folder (`npz:PATH`, `folder:PATH`), which never
leaves it; `state` is a folder in which what the client keeps outlives a restart. Then, with `[superlink.clinics]` in
Flower's `config.toml` (`address = "HOST:8000"`, `root-certificates = "/path/ca.crt"`):

    flwr run . clinics --stream

A run that was stopped goes on with `--run-config "flower.resume=true"`.
"""


def write_app(folder: Path, experiment: Experiment, given: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Write the app of an experiment into a folder that does not exist yet, or is empty.

    Args:
        folder: where.
        experiment: what it runs.
        given: the options that were named, by tables; others have their defaults there.

    Returns:
        The files.

    Raises:
        ValueError: the folder is not empty, or its name makes no name of an app.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; name a folder that is not, or an empty one")
    package = re.sub(r"\W+", "_", folder.resolve().name.lower()).strip("_")
    if not package.isidentifier():
        raise ValueError(f"{folder.name!r} makes no name of a Python package; begin it with a letter")
    tables = _tables(experiment, given)
    tables["flower"] = {"output": str(folder.resolve() / "results"), **_FLOWER}
    text = {"method": experiment.method, "clients": experiment.clients or 2}
    files = {
        "pyproject.toml": _PYPROJECT.format(
            **text, name=package.replace("_", "-"), package=package, tables="\n".join(map(_table, tables.items()))
        ),
        "README.md": _README.format(**text),
        f"{package}/__init__.py": f'"""{experiment.method} on Flower."""\n',
        f"{package}/server_app.py": _SERVER,
        f"{package}/client_app.py": _CLIENT,
    }
    (folder / package).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in files]


def _tables(experiment: Experiment, given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables of the configuration: what was named, what belongs there in any case, and all of the method's."""
    every = experiment.sections()
    always = {**_ALWAYS, "method": ("name", *method_options(experiment.method))}
    found: dict[str, dict[str, Any]] = {}
    for section, table in every.items():
        names = [name for name in table if name in always[section] or name in given.get(section, {})]
        found[section] = {name: _plain(table[name]) for name in names if table[name] not in ((), [])}
    found["data"]["name"] = _absolute(experiment.data)
    for name in ("root", "file"):
        for table in (found["data"], found["partition"]):
            if name in table:
                table[name] = str(Path(table[name]).resolve())
    if "diverged" not in given.get("federation", {}):
        found["federation"]["diverged"] = "drop"  # a node that is away is no reason to stop
    assert found["federation"].keys() <= settings_options().keys()
    return found


def _plain(value: Any) -> Any:
    """As Flower's configuration has it: a list as text with commas, a table as NAME=VALUE,NAME=VALUE."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_absolute(str(entry))}" for name, entry in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _absolute(source: str) -> str:
    """The app runs in another folder: the source of data with a path that is good there too."""
    kind, colon, path = source.partition(":")
    return f"{kind}:{Path(path).resolve()}" if colon and Path(path.partition("@")[0]).exists() else source


def _table(entry: tuple[str, Mapping[str, Any]]) -> str:
    name, table = entry
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join([f"[tool.flwr.app.config.{name}]", *lines, ""])
