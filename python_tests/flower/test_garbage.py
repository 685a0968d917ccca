"""Whatever a client sends, the run goes on: replies that are changed at random, by nodes in this process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed here: make flower makes an environment with it")

from example_files import load_file
from flower_in_process import Nodes, node_context
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from pfl_ext.algorithms import METHODS
from pfl_ext.federation import Federation, Settings
from pfl_ext.flower import GridEngine, client_app

CODE = load_file(Path(__file__).parent / "in_simulation.py")
BAD = 2
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 7, 2**53, 10**400, 1e308, -0.5, math.nan, math.inf),
    *("", "model", "a\nb\x1b[2J", "9" * 5000, "\ud800", [], [1], [[]], {}, {"model": 1}, {"a": {"b": [None]}}),
)


def _changed(nest: Any, chance: random.Random) -> Any:
    """The same with one thing in it replaced, removed or added."""
    if chance.random() < 0.2 or not isinstance(nest, dict | list) or not nest:
        return chance.choice(VALUES)
    if isinstance(nest, list):
        place = chance.randrange(len(nest))
        return [_changed(x, chance) if i == place else x for i, x in enumerate(nest)]
    name = chance.choice(sorted(nest))
    found = {**nest, name: _changed(nest[name], chance)}
    how = chance.random()
    if how < 0.1:
        del found[name]
    elif how < 0.2:
        found[chance.choice(("other", "", "a\nb"))] = chance.choice(VALUES)
    return found


def _changed_array(array: Array, chance: random.Random) -> Array:
    data = bytearray(array.data)
    how = chance.randrange(6)
    if how == 0:
        data[chance.randrange(min(len(data), 128))] = chance.randrange(256)
    elif how == 1:
        del data[chance.randrange(len(data)) :]
    elif how == 2:
        begin = data.find(b"(") + 1
        shape = chance.choice((b"0, 99999999999, 99999999999", b"999999999999999,", b"0,", b""))
        data[begin : data.find(b")")] = shape
    elif how == 3:
        data[-4:] = b"\xff" * 4  # NaN
    elif how == 4:
        return Array(array.numpy().astype(chance.choice(("float64", "float16", "int64", "bool"))))
    else:
        return Array(array.numpy().reshape(-1)[: chance.randrange(4)].copy())
    return Array("float32", (1,), chance.choice(("numpy.ndarray", "numpy.ndarray", "pickle")), bytes(data))


def _change(content: RecordDict, chance: random.Random) -> None:
    """Change one record of a reply."""
    name = chance.choice(sorted(content))
    record = content[name]
    if chance.random() < 0.05:
        del content[name]
    elif isinstance(record, ConfigRecord):
        text = json.dumps(_changed(json.loads(str(record["json"])), chance))
        content[name] = ConfigRecord({"json": text if chance.random() < 0.9 else text[: len(text) // 2]})
    else:
        arrays = dict(record)
        if not arrays or chance.random() < 0.1:
            arrays["other"] = Array(CODE.torch.zeros(3).numpy())
        else:
            which = chance.choice(sorted(arrays))
            arrays[which] = _changed_array(arrays[which], chance)
        content[name] = ArrayRecord(arrays)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], Federation]]:
    """Runs a method on such nodes; its records, and what the server has."""
    dataset, partition = CODE.whole()
    monkeypatch.setattr(CODE, "whole", lambda: (dataset, partition))  # once, and not for every message

    def run(
        name: str, change: Callable[[RecordDict], None], method: dict[str, Any] | None = None, **settings: Any
    ) -> tuple[list[Any], Federation]:
        given = dataclasses.replace(CODE.given(name), settings=Settings(diverged="drop", **settings))
        if method is not None:
            given = dataclasses.replace(given, method=METHODS[name](lr=0.1, batch_size=4, **method))

        def changed(node: int, message: Message, content: RecordDict) -> None:
            if node == 100 + BAD and '"hello"' not in str(message.content["pfl_ext"]["json"]):
                change(content)

        app = client_app(
            given.method, network=given.network, settings=given.settings, data=given.data, auxiliary=given.auxiliary
        )
        contexts = {100 + k: node_context(100 + k, {"partition-id": k}) for k in range(CODE.CLIENTS)}
        engine = GridEngine(Nodes(app, contexts, monkeypatch, changed), given.parts({}).run, timeout=5, wait=5)
        engine.gather(CODE.CLIENTS)
        federation = Federation(
            given.method, given.network(dataset), dataset, partition, given.settings, engine=engine,
            auxiliary=CODE.auxiliary(dataset, partition),
        )  # fmt: skip
        return engine.follow(federation).run(), federation

    return run


def _check(records: list[Any], federation: Federation, rounds: int) -> int:
    """In how many rounds the client was left out; nobody else was, and the server has numbers."""
    assert [record["round"] for record in records] == list(range(1, rounds + 1))
    assert all(set(record.get("dropped") or []) <= {BAD} for record in records)
    assert all(bool(vector.isfinite().all()) for vector in federation.server.values())
    return sum(bool(record.get("dropped")) for record in records)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "scaffold"])
def test_a_run_goes_on_whatever_a_client_answers(name: str, run: Callable[..., tuple[list[Any], Federation]]) -> None:
    dropped = 0
    for seed in range(6):
        chance = random.Random(seed)
        dropped += _check(*run(name, lambda content: _change(content, chance), rounds=2, seed=seed), 2)  # noqa: B023
    assert dropped >= 2  # most changes are seen; others, of a metric, are as good as what was there


def _other(array: Array, how: str) -> Array:
    x = array.numpy()
    return Array(x.reshape(-1)[:-1].copy() if how == "shape" else x.astype("float64") if how == "dtype" else x)


@pytest.mark.parametrize("how", ["shape", "name", "dtype", "nothing"])
@pytest.mark.parametrize("name", ["fedbuff", "fedasync"])
def test_a_client_that_is_asked_alone_is_compared_with_what_others_sent_before(
    name: str, how: str, run: Callable[..., tuple[list[Any], Federation]]
) -> None:
    def change(content: RecordDict) -> None:
        if how == "nothing":
            content.clear()
        elif content.get("sent"):
            sent = content["sent"].items()
            content["sent"] = ArrayRecord({n + "x" * (how == "name"): _other(array, how) for n, array in sent})

    # Two places: after the first two clients each is asked alone.
    method, rounds = ({"buffer": 2}, 8) if name == "fedbuff" else ({}, 16)
    found = run(name, change, method, rounds=rounds, participation=0.34, seed=1, clock="log-normal")
    assert _check(*found, rounds) >= 1


def test_a_client_that_reports_other_names_in_every_round_is_left_out_when_they_are_too_many(
    run: Callable[..., tuple[list[Any], Federation]],
) -> None:
    answers = itertools.count()

    def change(content: RecordDict) -> None:
        plain = json.loads(str(content["pfl_ext"]["json"]))
        if plain["work"][1]:  # a training, not an evaluation
            number = next(answers)
            plain["report"] = {f"{number}/{i}": 0.0 for i in range(400)}
            content["pfl_ext"] = ConfigRecord({"json": json.dumps(plain)})

    records, federation = run("fedavg", change, rounds=4)
    assert _check(records, federation, 4) == 2
    assert [bool(record.get("dropped")) for record in records] == [False, False, True, True]
