"""Nodes with data of their own, of any form: what they say of it, and runs as of one process on the same samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed here: make flower makes an environment with it")

from flower_in_process import Nodes, node_context
from flwr.app import Context
from torch import Tensor, nn

from pfl_ext.algorithms import Ditto
from pfl_ext.data import PARTITIONERS, Dataset, Partition, load
from pfl_ext.experiment import Experiment
from pfl_ext.federation import Federation, Settings, checkpoint, stream
from pfl_ext.flower import client_app, server_app
from pfl_ext.flower.elsewhere import Introduction, described

CLIENTS = 3
GREY = (127.5, 127.5, 127.5)


def _timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return json.loads(json.dumps([{k: v for k, v in r.items() if not k.startswith("seconds")} for r in lines]))


# ---- forms of samples and targets ------------------------------------------------------------------------------------


class _OfTwo(nn.Module):
    """Takes a dictionary of numbers and tokens."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedded, self.last = nn.Embedding(7, 4), nn.Linear(4 + 3, outputs)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        return self.last(torch.cat([self.embedded(tokens).mean(1), numbers], 1))


class _EachToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.last = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.embedded(tokens))


def _samples(form: str, count: int, seed: int) -> Dataset:
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (count, 5), generator=draws)
    numbers = torch.randn(count, 3, generator=draws)
    if form == "numbers to predict, of a dictionary":
        inputs = {"tokens": tokens.to(torch.int16), "numbers": numbers}
        return Dataset.from_tensors(inputs, numbers.sum(1, keepdim=True), name="samples")
    if form == "a token to predict at each place":
        return Dataset.from_tensors(tokens, tokens.roll(-1, 1), name="samples", classes=tuple("abcdefg"))
    labels = (numbers[:, :2] > 0).to(torch.uint8)  # several of two
    return Dataset.from_tensors(numbers, labels, name="samples", classes=("high", "wide"))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "numbers to predict, of a dictionary": lambda: _OfTwo(1),
    "a token to predict at each place": _EachToken,
    "several labels": lambda: nn.Linear(3, 2),
}


@pytest.mark.parametrize("form", NETWORKS)
def test_nodes_with_samples_of_any_form_give_the_bits_of_one_process_on_the_same(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def network(dataset: Dataset) -> nn.Module:
        torch.manual_seed(1)
        return NETWORKS[form]()

    def of_node(client: int) -> Dataset:
        return _samples(form, 12 + client, client)

    def cut(client: int) -> Partition:
        return PARTITIONERS["iid"](of_node(client), 1, generator=stream(4, "partition", client))

    def own_data(context: Context) -> tuple[Dataset, Partition]:
        client = int(context.node_config["client"])
        return of_node(client), cut(client)

    def nobody() -> tuple[Dataset, Partition]:
        raise AssertionError("nodes have data of their own, and the run's were asked for")

    method, settings = Ditto(lr=0.1, batch_size=4), Settings(rounds=2, seed=4)
    given: dict[str, Any] = {"network": network, "settings": settings, "data": nobody}
    app = client_app(method, **given, own_data=own_data)
    contexts = {100 + k: node_context(100 + k, {"client": k}) for k in range(CLIENTS)}
    server = server_app(method, **given, folder=tmp_path)
    server(Nodes(app, contexts, monkeypatch), node_context(0, {}, {"partition.clients": CLIENTS}))

    begin = [sum(12 + i for i in range(k)) for k in range(CLIENTS)]
    every = [of_node(k) for k in range(CLIENTS)]
    joined = _joined(every)
    nothing = torch.empty(0, dtype=torch.int64)
    parts = {
        name: tuple(getattr(cut(k), name)[0] + begin[k] for k in range(CLIENTS))
        for name in ("train", "validation", "test")
    }
    partition = Partition(**parts, server=nothing, global_test=nothing)
    whole = Federation(method, network(joined), joined, partition, settings)
    whole.run()
    (path,) = (tmp_path / "checkpoints").iterdir()
    _, state, tensors = checkpoint.load(path)
    assert state["round"] == 2
    assert all(torch.equal(tensors[f"server/{name}"], vector) for name, vector in whole.server.items())


def _joined(every: list[Dataset]) -> Dataset:
    def cat(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return torch.cat(parts)

    targets = torch.cat([data.targets for data in every])
    classes = every[0].classes or None
    return Dataset.from_tensors(cat([data.inputs for data in every]), targets, name="all", classes=classes)


# ---- samples of the server -------------------------------------------------------------------------------------------


def _write_images(path: Path, seed: int, size: int = 6, count: int = 24) -> Dataset:
    draws = np.random.default_rng(seed)
    x = draws.integers(0, 256, size=(count, size, size, 3), dtype=np.uint8)
    y = (x.mean(axis=(1, 2, 3)) > 127).astype("int64")
    half = count // 2
    np.savez(path, x_train=x[:half], y_train=y[:half], x_test=x[half:], y_test=y[half:], classes=["dark", "light"])
    return load(f"npz:{path}")


def _config(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        **{"method.name": "feddf", "method.lr": 0.1, "method.kd_steps": 2, "partition.clients": CLIENTS},
        **{"federation.rounds": 2, "federation.diverged": "drop", "network.name": "mlp"},
        "data.extra_tests": f"large=npz:{folder}/large.npz",
        "data.auxiliary": f"npz:{folder}/unlabelled.npz",
        "flower.output": str(folder / "results"),
        **more,
    }


def _run(folder: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = {
        100 + k: node_context(100 + k, {"client": k, "data": f"npz:{folder}/{k}.npz"}, config) for k in range(CLIENTS)
    }
    server_app()(Nodes(client_app(), contexts, monkeypatch), node_context(0, {}, config))


def test_samples_of_the_server_are_normalised_as_those_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [_write_images(tmp_path / f"{k}.npz", k) for k in range(CLIENTS)]
    _write_images(tmp_path / "large.npz", 7, size=9)
    _write_images(tmp_path / "unlabelled.npz", 8, size=5)
    with pytest.raises(ValueError, match=r"client 1 has data with the mean .*data\.mean and data\.std say how"):
        _run(tmp_path, _config(tmp_path), monkeypatch)
    grey = ",".join(map(str, GREY))
    _run(tmp_path, _config(tmp_path, **{"data.mean": grey, "data.std": grey}), monkeypatch)
    lines = [json.loads(line) for line in (tmp_path / "results/metrics.jsonl").read_text().splitlines()]

    one = tmp_path / "one"
    config = _config(tmp_path, **{"data.mean": grey, "data.std": grey})
    sections: dict[str, dict[str, Any]] = {}
    for key, value in config.items():
        section, _, option = key.partition(".")
        if section != "flower":
            sections.setdefault(section, {})[option] = value
    experiment = Experiment.from_sections(sections)
    both = Dataset(
        "all",
        torch.cat([data.inputs for data in every]),
        torch.cat([data.targets for data in every]),
        every[0].classes,
        torch.cat([data.is_test for data in every]),
    ).normalised(GREY, GREY)
    cuts = [PARTITIONERS["iid"](data, 1, generator=stream(0, "partition", k)) for k, data in enumerate(every)]
    parts = {
        name: tuple(getattr(cut, name)[0] + 24 * k for k, cut in enumerate(cuts))
        for name in ("train", "validation", "test")
    }
    nothing = torch.empty(0, dtype=torch.int64)
    partition = Partition(**parts, server=nothing, global_test=nothing)
    whole = experiment.make(both, partition, folder=one)
    assert _timeless(lines) == _timeless(whole.run())
    assert "large" in lines[-1]["models"]["global"]
    # Nobody here knows which classes the nodes' samples have.
    assert not (tmp_path / "results/classes.csv").exists()


# ---- what a node says ------------------------------------------------------------------------------------------------


def _said(**change: Any) -> dict[str, Any]:
    sizes = {"train": 8, "validation": 0, "test": 2}
    about = {"client": 1, "own": True, "run": "a", "sizes": sizes, "network": "n"}
    return {**about, **described(_samples("numbers to predict, of a dictionary", 10, 0)), **change}


def test_what_a_node_says_of_its_data_is_their_form_and_no_sample() -> None:
    plain = json.loads(json.dumps(_said()))
    assert plain["inputs"] == {"tokens": "int16[5]", "numbers": "float32[3]"} and plain["targets"] == "float32[1]"
    assert len(json.dumps(plain)) < 500
    found = Introduction.read(5, plain)
    assert found.node == 5 and found.sizes == plain["sizes"] and found.inputs == plain["inputs"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"client": math.inf}, "OverflowError"),
        ({"sizes": {"train": 10**15, "validation": 0, "test": 0}}, "1000000000000000 samples; 0 to"),
        ({"sizes": {"train": -1, "validation": 0, "test": 0}}, "-1 samples; 0 to"),
        ({"sizes": [1, 2, 3]}, "TypeError"),
        ({"inputs": 4}, "TypeError"),
        ({"inputs": ["uint8[3]", {"a": "uint8[3"}]}, "'uint8\\[3' is no type and shape"),
        ({"inputs": "complex64[3]"}, "'complex64\\[3\\]' is no type and shape"),
        ({"targets": "int64[" + "1" * 5000 + "]"}, "is no type and shape"),
        ({"targets": ["int64[]"]}, "TypeError"),
        ({"mean": [1.0]}, "AttributeError"),
        ({"std": {"": ["wide"]}}, "ValueError could not convert"),
    ],
)
def test_a_node_that_says_what_cannot_be_of_itself_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"it does not say what it is: .*{told}"):
        Introduction.read(5, _said(**change))


def test_nests_without_end_are_refused() -> None:
    nest: Any = "uint8[3]"
    for _ in range(5000):
        nest = [nest]
    with pytest.raises(ValueError, match="it does not say what it is: RecursionError"):
        Introduction.read(5, _said(inputs=nest))
