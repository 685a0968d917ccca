"""A SuperLink and SuperNodes with data of their own: real processes on the loopback, with TLS."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed here: make flower makes an environment with it")

from flower_deployment import Deployment, deployment
from PIL import Image
from safetensors.torch import load_file

from pfl_ext.data import Dataset, Partition
from pfl_ext.experiment import Experiment
from pfl_ext.federation import Federation, stream
from pfl_ext.flower.state import NodeFiles
from pfl_ext.reports import read_config

NODES = 2
OPTIONS = ["--clients", "2", "--rounds", "2", "--lr", "0.1", "--network", "mlp", "--checkpoint-every", "1"]
GREY = (0.5, 0.5, 0.5)
OWN = [*OPTIONS, "--data-mean", "0.5,0.5,0.5", "--data-std", "0.5,0.5,0.5"]  # each node would have a mean of its own
CLASSES = ("healthy", "ill")


def _write_clinics(folder: Path) -> None:
    """Images of two clinics: an archive of the one, a folder of the other."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, size=(NODES, 30, 6, 6, 3), dtype=np.uint8)
    y = (x.mean(axis=(2, 3, 4)) > 127).astype("int64")
    one = {"x_train": x[0, :20], "y_train": y[0, :20], "x_test": x[0, 20:], "y_test": y[0, 20:]}
    np.savez(folder / "clinic0.npz", **one, classes=np.array(CLASSES))
    for i, (image, label) in enumerate(zip(x[1], y[1], strict=True)):
        place = folder / "clinic1" / ("train" if i < 20 else "test") / CLASSES[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:02}.png")


def _source(folder: Path, number: int) -> str:
    return (f"npz:{folder}/clinic0.npz", f"folder:{folder}/clinic1")[number]


def _together(folder: Path, experiment: Experiment) -> tuple[Dataset, Partition]:
    """The same samples in one place, each clinic with the split that its node makes."""
    from pfl_ext.data import PARTITIONERS, load

    sets = [load(_source(folder, k)) for k in range(NODES)]
    own = [
        PARTITIONERS["iid"](data, 1, generator=stream(experiment.settings.seed, "partition", k))
        for k, data in enumerate(sets)
    ]
    begin = [0, len(sets[0])]
    both = Dataset(
        "both",
        torch.cat([data.inputs for data in sets]),
        torch.cat([data.targets for data in sets]),
        sets[0].classes,
        torch.cat([data.is_test for data in sets]),
    ).normalised(GREY, GREY)
    parts = {
        name: tuple(getattr(cut, name)[0] + first for cut, first in zip(own, begin, strict=True))
        for name in ("train", "validation", "test")
    }
    nothing = torch.empty(0, dtype=torch.int64)
    return both, Partition(**parts, server=nothing, global_test=nothing)


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "app/results/metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in lines]


def _start(run: Deployment, number: int) -> None:
    run.node(f"node{number}", f'client={number} data="{_source(run.folder, number)}" state="{run.folder}/{number}"')


def test_nodes_with_their_own_data_and_a_superlink_that_is_killed_give_the_bits_of_an_unbroken_run_in_one_process(
    tmp_path: Path, flower_environment: dict[str, str]
) -> None:
    _write_clinics(tmp_path)
    with deployment(tmp_path, flower_environment) as run:
        run.run("pfl-ext", "flower", "new", "app", "ditto", *OWN)
        run.superlink()
        for k in range(NODES):
            _start(run, k)
        run.run("flwr", "run", "app", "clinics")
        run.wait_until(tmp_path / "app/results/checkpoints/checkpoint-00000001.safetensors")
        run.kill_server()
        run.superlink()  # the nodes have stayed, and find it
        more = "flower.resume=true"
        said = run.run("flwr", "run", "app", "clinics", "--stream", "--run-config", more, timeout=300)
        assert "round 2" in said and "round 1:" not in said and "done after round 2" in said
        assert "goes on with" not in said  # every node had its copy
    config = read_config(tmp_path / "app/results")
    experiment = Experiment.from_sections({name: table for name, table in config.items() if isinstance(table, dict)})
    dataset, partition = _together(tmp_path, experiment)
    whole = Federation(
        experiment.make_method(), experiment.make_network(dataset), dataset, partition, experiment.settings
    )
    expected = [{k: v for k, v in record.items() if not k.startswith("seconds")} for record in whole.run()]
    assert _records(tmp_path) == json.loads(json.dumps(expected))
    kept = whole.engine.state()
    for k in range(NODES):
        (name,) = {path.name.split("-")[2] for path in (tmp_path / str(k)).iterdir()}
        files = NodeFiles(tmp_path / str(k), name, k)
        assert torch.equal(files.load(2)["personal"], kept["personal/rows"][k])
    # No node has what another keeps, and the server has nothing of either.
    assert {path.name.split("-")[1] for path in (tmp_path / "0").iterdir()} == {"0"}
    content = (tmp_path / "app/results/checkpoints/checkpoint-00000002.safetensors").read_bytes()
    assert files.load(2)["personal"].numpy().tobytes() not in content


def test_flwr_run_in_simulation_leaves_the_results_of_pfl_ext_run(
    tmp_path: Path, flower_environment: dict[str, str]
) -> None:
    options = [*OPTIONS, "--train-samples", "200", "--diverged", "drop"]
    with deployment(tmp_path, flower_environment) as run:
        run.run("pfl-ext", "flower", "new", "app", "ditto", *options)
        run.simulation()
        resources = "num-supernodes=2 client-resources-num-cpus=1 init-args-num-cpus=2"
        said = run.run(*("flwr", "run", "app", "simulation", "--stream", "--federation-config", resources), timeout=300)
        assert "done after round 2" in said
        run.run("pfl-ext", "run", "ditto", *options, "--output", "plain", "--quiet", "--no-plots")
    ours, plain = tmp_path / "app/results", tmp_path / "plain"
    lines = (plain / "metrics.jsonl").read_text().splitlines()
    told = [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in lines]
    assert _records(tmp_path) == told
    assert (ours / "config.toml").read_text() == (plain / "config.toml").read_text()
    for name in ("partition.safetensors", "checkpoints/checkpoint-00000002.safetensors"):
        both = [load_file(folder / name) for folder in (ours, plain)]
        assert both[0].keys() == both[1].keys()
        assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])


@pytest.mark.skipif("PFL_EXT_LONG" not in os.environ, reason="takes minutes: PFL_EXT_LONG=1 runs it")
def test_a_node_that_is_killed_is_left_out_and_takes_part_again_when_it_is_back(
    tmp_path: Path, flower_environment: dict[str, str]
) -> None:
    _write_clinics(tmp_path)
    with deployment(tmp_path, flower_environment) as run:
        run.run("pfl-ext", "flower", "new", "app", "ditto", *OWN)
        run.superlink()
        for k in range(NODES):
            _start(run, k)
        run.run("flwr", "run", "app", "clinics", "--run-config", "federation.rounds=5 flower.timeout=30.0")
        saved = tmp_path / "app/results/checkpoints"
        run.wait_until(saved / "checkpoint-00000001.safetensors")
        run.kill("node1")
        run.wait_until(saved / "checkpoint-00000002.safetensors")
        _start(run, 1)
        run.wait_until(saved / "checkpoint-00000005.safetensors", seconds=600)
    dropped = [record.get("dropped") for record in _records(tmp_path)]
    assert dropped[0] is None and dropped[1] == [1] and dropped[4] is None
    assert [record["clients"] for record in _records(tmp_path)][1::3] == [[0], [0, 1]]
