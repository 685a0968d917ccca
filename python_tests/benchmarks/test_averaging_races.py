"""The averaging family: every contestant computes the average, and a wrong one is found out."""

from dataclasses import replace

import pytest
import torch

from pfl_ext.benchmarks import averaging, machine
from pfl_ext.benchmarks.case import Case, Contestant, Expected, Grid, Skipped, WrongResult, flatten
from pfl_ext.benchmarks.measure import ReadBandwidth, race
from pfl_ext.benchmarks.opponents import averaging as opponents

FAMILY = averaging.FAMILY


def cases(**grid):
    return list(FAMILY.cases(FAMILY.plan(Grid(all_threads=2, **grid))))


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_every_contestant_equals_the_float64_reference(dtype):
    races = [c for c in cases(shapes=("lenet",), clients=(1, 3), dtypes=(dtype,), threads=(1,)) if isinstance(c, Case)]
    assert {(c.spec.op, c.spec.clients) for c in races} == {(op, count) for op in FAMILY.ops for count in (1, 3)}
    for case in races:
        for contestant in case.contestants:
            case.check(contestant, contestant.run())


def test_opponents_agree_on_a_sum_done_by_hand():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 10.0])
    clients, samples = [[a], [b]], [3, 1]
    arrays = [[x.numpy() for x in client] for client in clients]
    modules = [torch.nn.ParameterList([torch.nn.Parameter(x)]) for (x,) in clients]
    averages = [
        opponents.pfllib(modules, samples),
        opponents.flower_copies(arrays, samples),
        opponents.flower_running_sum(arrays, samples),
        opponents.fl_bench(clients, samples),
        opponents.per_client_add(clients, samples),
        opponents.per_tensor_add(clients, samples),
        opponents.foreach_add(clients, samples),
        opponents.matrix_product(torch.stack([a, b]), samples),
        opponents.scaled_rows_sum(torch.stack([a, b]), samples),
        opponents.naive_streaming(clients, samples),
        opponents.streaming_foreach(clients, samples),
    ]
    assert [flatten(x).tolist() for x in averages] == [[2.0, 4.0]] * len(averages)

    server = [torch.tensor([0.0, 8.0])]
    updates = [
        opponents.naive_server_update(server, clients, samples, 0.5),
        opponents.server_update_foreach_deltas(server, clients, samples, 0.5),
        opponents.server_update_foreach_mix(server, clients, samples, 0.5),
    ]
    assert [flatten(x).tolist() for x in updates] == [[1.0, 6.0]] * len(updates)


def test_opponents_leave_the_clients_as_they_were():
    models = averaging.ClientModels("lenet", 2, "float32")
    before = models.matrix.clone()
    for spec in FAMILY.plan(Grid(shapes=("lenet",), clients=(2,), threads=(1,))):
        for contestant in averaging._BUILDERS[spec.op](spec, models).contestants:
            contestant.run()
    assert torch.equal(torch.stack([flatten(client) for client in models.clients]), before.double())
    assert torch.equal(models.matrix, before)


def test_lists_and_rows_hold_the_same_numbers_in_different_memory():
    models = averaging.ClientModels("lenet", 2, "float32")
    rows = torch.stack([flatten(client) for client in models.clients])
    assert torch.equal(rows, models.matrix.double())
    models.clients[0][0].zero_()
    assert models.matrix[0, 0] != 0


def test_a_client_too_few_is_found_out():
    (case,) = [c for c in cases(shapes=("lenet",), clients=(8,), threads=(1,)) if c.spec.op == "rows"]
    models = averaging.ClientModels("lenet", 8, "float32")
    forgetful = Contestant("forgetful", "naive", lambda: models.matrix[1:].mean(0), torch.float32)
    with pytest.raises(WrongResult, match=r"forgetful is wrong in \d+ of 62006 values"):
        race(replace(case, contestants=[*case.contestants, forgetful]), 1, 1.0, ReadBandwidth())


@pytest.mark.parametrize("result", [[1.0, 2.0 + 1e-5], [1.0, float("nan")], [1.0]])
def test_an_error_beyond_rounding_a_nan_and_a_missing_value_are_wrong(result):
    expected = Expected(torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0, 2.0]).double(), roundings=8)
    contestant = Contestant("some", "naive", list, torch.float32)
    expected.check(contestant, torch.tensor([1.0, 2.0 + 2**-22]), torch.float32)
    with pytest.raises(WrongResult, match="some"):
        expected.check(contestant, torch.tensor(result), torch.float32)


def test_the_default_grid_goes_into_detail_for_20_clients():
    plan = FAMILY.plan(Grid(all_threads=4))
    averages = [s for s in plan if s.op == "average"]
    assert {(s.shapes, s.clients) for s in averages} == {(x, c) for x in FAMILY.shapes for c in (8, 20, 100)}
    assert {s.threads for s in averages if s.clients == 20} == {1, 4}
    assert {s.threads for s in averages if s.clients != 20} == {4}
    assert {(s.shapes, s.clients) for s in plan if s.dtype != "float32"} == {("resnet18", 20)}
    assert {s.clients for s in plan if s.op in ("server_update", "streaming")} == {20}


def test_the_quick_grid_is_small():
    plan = FAMILY.plan(Grid(all_threads=4, quick=True))
    assert {s.shapes for s in plan} == {"lenet", "adapters"}
    assert {s.clients for s in plan} == {8, 20}
    assert {s.dtype for s in plan} == {"float32"}
    assert {s.threads for s in plan} == {4}


def test_numpy_sits_out_in_bfloat16_with_a_reason():
    average, *_ = [c for c in cases(shapes=("lenet",), clients=(2,), dtypes=("bfloat16",)) if isinstance(c, Case)]
    skipped = [c for c in cases(shapes=("lenet",), clients=(2,), dtypes=("bfloat16",)) if isinstance(c, Skipped)]
    assert not any("Flower" in contestant.name for contestant in average.contestants)
    assert {s.contestant for s in skipped} == {"Flower (copies)", "Flower (running sum)"}
    assert all("bfloat16" in s.reason for s in skipped)


def test_models_larger_than_the_memory_are_skipped_with_a_reason(monkeypatch):
    monkeypatch.setattr(averaging, "available_memory", lambda: 10**9)
    skipped = cases(shapes=("resnet18",), clients=(100,), threads=(1,))
    assert skipped and all(isinstance(s, Skipped) for s in skipped)
    assert "GiB" in skipped[0].reason


def test_memory_available_is_known_or_none():
    available = machine.available_memory()
    assert available is None or available > 0
