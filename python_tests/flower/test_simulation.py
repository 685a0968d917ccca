"""Methods on Flower, in its simulation on ray: the bits of one process, and clients that misbehave."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed here: make flower makes an environment with it")

from pfl_ext.algorithms import METHODS
from pfl_ext.federation import Diverged, Federation, InProcess, Reply, Request, checkpoint

FAULTS = ("raises", "late", "nan", "shape", "name", "dtype", "pickle", "claim", "json")


@pytest.mark.parametrize("name", [*METHODS, "buffers", "server buffers", "until arrival"])
def test_a_simulation_gives_the_bits_of_one_process(name: str, simulated: Any) -> None:
    run = simulated.code.federation(name)
    assert simulated.found[name] == simulated.code.history(run.run())
    expected = {f"server/{key}": x for key, x in run.server.items()}
    expected |= {f"clients/{key}": x for key, x in run.engine.state().items()}
    for key, tensor in expected.items():
        assert torch.equal(simulated.tensors[f"{name}/{key}"], tensor), key


def test_nodes_whose_data_a_function_loads_give_the_bits_of_one_process_on_the_same_samples(simulated: Any) -> None:
    run = simulated.code.given("own data")
    dataset, partition = simulated.code.together()
    whole = Federation(run.method, run.network(dataset), dataset, partition, run.settings)
    whole.run()
    (path,) = (simulated.folder / "own data/checkpoints").iterdir()
    _, state, tensors = checkpoint.load(path)
    assert state["round"] == 2
    server = {key.removeprefix("server/"): x for key, x in tensors.items() if key.startswith("server/")}
    assert server.keys() == whole.server.keys() and all(torch.equal(server[k], x) for k, x in whole.server.items())


class _Without(InProcess):
    """One process in which a client is left out of the first round."""

    def __init__(self, client: int) -> None:
        self.client = client

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        for reply, request in zip(super().run(requests, costs), requests, strict=True):
            out = (request.client, request.round, request.stage) == (self.client, 1, "train")
            yield Reply(self.client, error=Diverged(self.client, 1, "model")) if out else reply


@pytest.mark.parametrize("how", FAULTS)
def test_a_client_that_misbehaves_is_named_and_left_out_and_the_round_goes_on(how: str, simulated: Any) -> None:
    code = simulated.code
    dropped, later, first = simulated.found[f"fault:{how}"]
    assert dropped == [code.BAD] and later == [None]  # it takes part again
    expected = next(code.federation(f"fault:{how}", engine=_Without(code.BAD)).rounds())
    got, want = json.loads(first)[0], json.loads(code.history([expected]))[0]
    # What a client received that does not answer, or not as it should, nobody knows.
    for record in (got, want):
        record.pop("communication")
    assert got == want


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "it answered with an error: .*no more memory"),
        ("late", "it has not answered within 6 seconds|it answered with an error: .*[Ee]xpired"),
        ("shape", r"it sent model \[\d+\] of float32, and most sent model \[\d+\] of float32"),
        ("name", r"it sent other \[\d+\] of float32, and most sent model"),
        ("dtype", r"it sent model \[\d+\] of float64, and most sent model"),
        ("pickle", "model is no array of numbers: it does not begin as a .npy file"),
        ("claim", r"model is no array of numbers: 16 bytes for the shape \[9999999999\]"),
        ("json", "the message holds JSON that is nested too deeply"),
    ],
)
def test_the_log_says_who_was_left_out_and_why(how: str, told: str, simulated: Any) -> None:
    import re

    assert re.search(f"client {simulated.code.BAD} is left out of round 1: {told}", simulated.log)


def test_nothing_that_a_client_sends_runs_code_at_the_server(simulated: Any) -> None:
    assert "fault:pickle" in simulated.found
    assert not (simulated.folder / "code-was-run").exists()


def test_a_checkpoint_of_a_simulation_goes_on_in_one_process_and_the_other_way_round(simulated: Any) -> None:
    code = simulated.code
    whole = json.loads(code.history(code.federation("resumed").run()))
    assert json.loads(simulated.found["resumed"]["begun"]) == whole[:2]
    resumed = code.federation("resumed", folder=simulated.folder / "a", resume=True)
    assert resumed.round == 2
    assert json.loads(code.history(resumed.run())) == whole[2:]
    assert json.loads(simulated.found["resumed"]["ended"]) == whole[2:]


def test_nodes_with_another_configuration_and_clients_that_do_not_come_are_named_before_the_first_round(
    simulated: Any,
) -> None:
    told = simulated.found["refused"]
    assert told.startswith("clients 0, 1, 2, 3, 4, 5, 6 of 7 have not connected in 0.1 seconds; node ")
    assert "client 3 runs another method or other settings than the server" in told
