"""The race of whole rounds: all contestants do the same work, and one that does not is found out."""

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pfl_ext.benchmarks import (
    ditto,
    empty_turn,
    federation,
    harness,
    machine,
    many_clients,
    overlap,
    report,
    round_profile,
    round_race,
    small_clients,
)
from pfl_ext.benchmarks.case import WrongResult
from pfl_ext.benchmarks.opponents import ditto as ditto_opponents
from pfl_ext.benchmarks.opponents import federation as opponents
from pfl_ext.benchmarks.opponents import fluke, pfl
from pfl_ext.benchmarks.round_race import Outcome, Racer, Result
from pfl_ext.data import load
from pfl_ext.engines import InProcess, Workers
from pfl_ext.federation import WorkingModel


@pytest.fixture(scope="module")
def small() -> federation.Setting:
    return federation.setting(federation.enlarged_digits(), clients=3, fraction=0.05)


def rows_of(*results):
    """The lines of a quick start of 3 clients in which these racers took these seconds."""
    return round_race.rows("round", "some samples", 3, [Result(r, [Outcome(t) for t in times]) for r, times in results])


@pytest.fixture(scope="module")
def outcomes(small):
    return {racer.name: racer.run() for racer in federation.contestants(small, [1])}


def test_clients_hold_whole_batches_and_a_test(small):
    assert small.partition.clients == 3
    assert all(len(train) > 0 and len(train) % 10 == 0 for train in small.partition.train)
    assert all(len(test) > 0 for test in small.partition.test)
    assert sum(p.numel() for p in small.network.parameters()) == 582_026


def test_all_contestants_end_with_the_same_model_and_report_the_same(small, outcomes):
    ours = outcomes.pop("pfl_ext")
    begin = torch.cat([p.detach().flatten() for p in small.network.parameters()])
    assert not torch.equal(ours.model, begin)
    tested = sum(map(len, small.partition.test))
    for name in ("PFLlib", "fluke", "loop over tensors"):
        theirs = outcomes[name]
        # Some steps in float32: sums of a thousand products, in another order.
        assert (theirs.model - ours.model).norm() < 1e-4 * (ours.model - begin).norm()
        assert theirs.reported.accuracy == pytest.approx(ours.reported.accuracy, abs=1.01 / tested)
        assert theirs.reported.train_loss == pytest.approx(ours.reported.train_loss, rel=1e-4)
    assert outcomes["PFLlib"].reported.auc == pytest.approx(outcomes["loop over tensors"].reported.auc, abs=1e-3)


def test_a_contestant_that_sees_other_batches_is_found_out(small):
    clients = [dataclasses.replace(c, order=c.order.flip(0)) for c in small.clients()]
    ours, *others = federation.contestants(small, [1])
    tensors = next(racer for racer in others if racer.name == "loop over tensors")
    other = Racer(tensors.name, tensors.kind, 1, lambda: federation._tensors(small, clients, 10, 1))
    with pytest.raises(WrongResult, match=r"loop over tensors, 1 core: its model is .* from ours"):
        round_race.compare(WorkingModel(copy.deepcopy(small.network)).state(), [ours, other], 1)


def test_the_order_decides_the_batches_of_an_opponent(small):
    client = small.clients()[0]
    first = dataclasses.replace(client, x=client.x[:20], y=client.y[:20], order=torch.arange(20))
    swapped = dataclasses.replace(first, order=torch.arange(20).roll(10))
    models = [opponents.tensor_round(small.network, [c], 10, 0.1, 10)[0] for c in (first, swapped)]
    assert not torch.equal(models[0][0].weight, models[1][0].weight)


def test_a_run_beside_other_programs_is_repeated(monkeypatch, capsys):
    used = iter([0.0, 0.9, 0.7, 0.0, 0.01])  # before and during the first run, before, before and during the second
    monkeypatch.setattr(round_race.machine.OtherPrograms, "cores", lambda self: next(used))
    monkeypatch.setattr(round_race.time, "sleep", lambda seconds: None)
    seconds = iter([9.0, 2.0])
    racer = Racer("ours", "ours", 1, lambda: Outcome(next(seconds)))
    (result,) = round_race.compare(torch.zeros(1), [racer], 1, patience=1)
    assert result.seconds == [2.0]
    assert "other programs used 0.90 cores; again" in capsys.readouterr().err
    monkeypatch.setattr(round_race.machine.OtherPrograms, "cores", lambda self: 1.0)
    with pytest.raises(TimeoutError, match="measure when they have ended"):
        round_race.compare(torch.zeros(1), [racer], 1, patience=1e-9)


def test_other_programs_are_those_that_are_not_ours(monkeypatch):
    busy, own, clock = iter([100.0, 109.0]), iter([(1, 1, 0, 0, 0), (3, 1, 2, 1, 0)]), iter([50.0, 60.0])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(machine.os, "times", lambda: next(own))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.OtherPrograms().cores() == pytest.approx(0.4)  # 9 s of all, 5 of ours, in 10 s


def test_rows_say_what_ran_and_how_far_from_the_passes_alone():
    racers = [Racer("pfl_ext", "ours", 1, None), Racer("PFLlib", "naive", 1, None), Racer("alone", "limit", 1, None)]
    times = [[2.0, 4.0], [6.0, 8.0], [1.5, 1.5]]
    lines = rows_of(*zip(racers, times, strict=True))
    assert [line.ratio_to_ours for line in lines[:2]] == [1.0, 2.5]
    assert lines[0].share_of_bandwidth == 0.5 and lines[0].limit_ms == 1500
    text = federation.markdown(lines)
    assert "| pfl_ext | 1 | 3.00 | - | 50% |" in text and "| PFLlib | 1 | 7.00 | 2.50x | - |" in text
    assert "some samples: 3 clients" in text


def test_the_profile_accounts_for_all_of_a_round(small):
    lines = federation.profile_rows(small, "some samples", 1)
    assert [line.contestant for line in lines] == list(round_profile.PARTS)
    spent = {line.contestant: line.median_ms for line in lines}
    by_autograd = ("training, forward", "training, backward", "step of SGD")
    whole = spent.pop("training, whole steps in one call")
    assert len({spent.pop(part) > 0 for part in by_autograd} - {whole > 0}) == 1  # the one way or the other
    assert all(spent.values())
    assert sum(line.share_of_bandwidth for line in lines) == pytest.approx(1)
    racers = [Racer("pfl_ext", "ours", 1, None), Racer("alone", "limit", 1, None)]
    text = federation.markdown([*rows_of(*((racer, [1.0]) for racer in racers)), *lines])
    assert ("| training, backward |" in text) != ("| training, whole steps in one call |" in text)
    assert "**not forward and backward passes**" in text


def test_pfllib_opens_its_files_for_every_use_and_ends_where_a_loop_over_them_does(small, tmp_path: Path, monkeypatch):
    opened = []
    load = opponents.np.load
    monkeypatch.setattr(opponents.np, "load", lambda file: opened.append(Path(file.name).parent.name) or load(file))
    clients = small.clients()
    run = opponents.PFLlib(opponents.pfllib_network(small.network), clients, tmp_path, 10, 0.005, 10)
    run.round()
    assert sorted(opened) == ["test"] * 3 + ["train"] * 6
    other, _ = opponents.tensor_round(opponents.pfllib_network(small.network), clients, 10, 0.005, 10)
    for p, q in zip(run.server.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_the_table_of_a_file_goes_into_a_readme(tmp_path: Path, capsys):
    racers = [Racer("pfl_ext", "ours", 1, None), Racer("alone", "limit", 1, None)]
    report.write_csv(tmp_path / "federation.csv", rows_of(*((racer, [1.0]) for racer in racers)))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmark:federation:begin -->\n<!-- benchmark:federation:end -->\n")
    arguments = ["federation", "--output", str(tmp_path)]
    assert harness.main([*arguments, "--readme", str(readme)]) == 0
    assert harness.main([*arguments, "--table"]) == 0
    assert capsys.readouterr().out in readme.read_text()


def test_without_mnist_or_a_csv_the_error_says_what_to_do(tmp_path: Path, capsys):
    assert harness.main(["federation", "--data", str(tmp_path), "--output", str(tmp_path)]) == 1
    assert "mnist is not in" in capsys.readouterr().err
    assert harness.main(["federation", "--table", "--output", str(tmp_path)]) == 1
    assert "`pfl-ext bench federation` writes it" in capsys.readouterr().err


def test_a_round_of_many_clients_takes_time_by_both_clocks():
    assert all(seconds > 0 for seconds in many_clients.one_round(3, "memory"))


def test_the_table_of_many_clients_gives_the_processor_time_of_one():
    about = machine.describe()
    rows = [
        many_clients._row(op, 50, "mapped", seconds, 2.0**20 * 700, about)
        for op, seconds in ((many_clients._CLOCK, 3.0), (many_clients._PROCESSOR, 0.5))
    ]
    assert "| 50 | mapped | 3.0 | 10.0 | 700 |" in many_clients.markdown(rows)


def test_without_scikit_learn_the_race_names_the_extra_and_everything_else_works(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(ImportError, match=r"PFLlib's metrics are scikit-learn's: pip install 'pfl_ext\[dev\]'"):
        opponents.PFLlib(torch.nn.Linear(1, 1), [], tmp_path, batch_size=1, lr=0.1, classes=2)
    code = "import sys; sys.modules['sklearn'] = None; from pfl_ext.benchmarks import harness; harness.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_empty_turn_is_one_step_of_every_client_and_none_is_evaluated():
    run = empty_turn.federation(clients=3, rounds=2)
    first, last = run.run()
    assert [work[:3] for work in first["work"]] == [[k, 4, 0] for k in range(3)]  # four samples, one batch
    assert first["training"]["trained_parameters"] == 15
    assert "models" not in first and "models" in last


def test_empty_turns_are_timed_by_round_beside_their_step():
    lines = empty_turn.measure(repeats=3, clients=5)
    assert [(line.contestant, line.rounds) for line in lines] == [("pfl_ext", 3), ("the step alone", 3)]
    turn, step = lines
    assert turn.median_ms > step.median_ms > 0
    assert turn.share_of_bandwidth == pytest.approx(step.median_ms / turn.median_ms)
    racers = [Racer("pfl_ext", "ours", 1, None), Racer("alone", "limit", 1, None)]
    race = rows_of(*((racer, [1.0]) for racer in racers))
    sentence = f"5 clients in one process, nothing evaluated) takes {1e3 * turn.median_ms:.0f} us ["
    assert sentence in federation.markdown([*race, *lines])
    assert "An empty turn" not in federation.markdown(race)


def test_a_quick_race_measures_rounds_profile_and_empty_turn(small, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(federation, "setting", lambda *_: small)
    monkeypatch.setattr(federation.machine, "cores", lambda: 1)
    monkeypatch.setattr(federation, "_EMPTY_ROUNDS", 2)
    assert harness.main(["federation", "--quick", "--output", str(tmp_path)]) == 0
    ops = [row.op for row in report.read_csv(tmp_path / "federation.quick.csv")]
    every = ["round", "profile", small_clients.OP, small_clients.EVALUATED, ditto.OP, empty_turn.OP]
    assert list(dict.fromkeys(ops)) == every
    printed = capsys.readouterr().out
    assert "An empty turn" in printed and "training samples of digits, enlarged: 3 clients" in printed
    assert "10 clients, 20 samples of digits a client, 2 a round" in printed
    assert "Rounds of Ditto: 4 clients, 64 samples of digits, enlarged a client, 2 a round" in printed


def test_a_single_race_leaves_the_others_in_the_file(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(federation, "_EMPTY_ROUNDS", 2)
    old = rows_of((Racer("pfl_ext", "ours", 1, None), [1.0]), (Racer("alone", "limit", 1, None), [0.5]))
    report.write_csv(tmp_path / "federation.quick.csv", [dataclasses.replace(row, commit="before") for row in old])
    assert harness.main(["federation", "--quick", "--only", "empty-turn", "--output", str(tmp_path)]) == 0
    rows = report.read_csv(tmp_path / "federation.quick.csv")
    assert [row.op for row in rows] == [empty_turn.OP] * 2 + ["round"] * 2
    assert "Measured (round) on" in (printed := capsys.readouterr().out) and "at commit before" in printed


# ---- small clients and Ditto ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_run():
    s = small_clients.setting(federation._with_a_test_part(load("digits")), clients=6, samples=20, participation=0.5)
    return s, {(racer.name, racer.cores): racer.run() for racer in small_clients.contestants(s, [1])}


def test_all_ways_to_train_small_clients_have_one_model_after_the_first_round(small_run):
    s, outcomes = small_run
    begin = WorkingModel(copy.deepcopy(s.network)).state()
    ours = outcomes["pfl_ext", 1].model
    for outcome in outcomes.values():
        assert (outcome.model - ours).norm() < 1e-4 * (ours - begin).norm()


def test_small_clients_are_evaluated_once_in_ten_rounds(small_run):
    _, outcomes = small_run
    # Eleven rounds in this little time: only that all of them learn, and that an evaluation takes some of it.
    for outcome in outcomes.values():
        assert outcome.evaluated > outcome.seconds > 0
        assert outcome.accuracy > 50


def test_pfl_keeps_its_batches_and_takes_a_users_model_back():
    user = pfl._User(torch.arange(5.0)[:, None], torch.arange(5))
    assert [x.flatten().tolist() for x, _ in user.batches(2)] == [[0, 1], [2, 3], [4]]
    assert user.batches(2) is user.batches(2)


@pytest.fixture(scope="module")
def small_ditto():
    data = federation._with_a_test_part(federation.enlarged_digits())
    return ditto.setting(data, clients=4, samples=64, participation=0.5)


def test_all_ways_of_ditto_have_the_same_models_after_the_first_round(small_ditto):
    s = small_ditto
    one = WorkingModel(copy.deepcopy(s.network)).state()
    ours, *others = [(racer.name, racer.run().model) for racer in ditto.contestants(s, [1])]
    assert len(ours[1]) == 3 * len(one)  # the global model, and the personal ones of the two that took part
    assert not torch.equal(ours[1][: len(one)], ours[1][len(one) : 2 * len(one)])
    for name, model in others:
        same = ours[1][: len(model)]
        assert (model - same).norm() < 1e-4 * (same - one.repeat(len(model) // len(one))).norm(), name
    assert {name for name, model in others if len(model) < len(ours[1])} == {"fluke"}


def test_flukes_personal_models_are_those_of_its_own_objective(small_ditto, monkeypatch):
    s = small_ditto
    client, (order, personal) = s.cohorts()[0][0], ([0, 1], [1, 0])
    data = s.data()[client]
    loader = fluke.Loader(data.x[:2], data.y[:2], 1, [torch.tensor(order), torch.tensor(personal)])
    run = fluke.Ditto(opponents.pfllib_network(s.network), [loader], lr=0.1, lam=0.5)
    run.round([0])
    model = opponents.pfllib_network(s.network)
    start = [p.detach().clone() for p in model.parameters()]
    for i in personal:
        loss = torch.nn.functional.cross_entropy(model(data.x[i : i + 1]), data.y[i : i + 1])
        loss += 0.5 * sum((p - q).norm() for p, q in zip(model.parameters(), start, strict=True) if p.dim() > 1)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), gradients, alpha=-0.1)
    for p, q in zip(model.parameters(), run.personal(0).parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_fl_bench_normalises_one_sample_at_a_time_as_the_dataset_does(small_ditto):
    data = small_ditto.dataset
    mean, std = (torch.as_tensor(x).flatten().tolist() for x in (data.mean, data.std))
    images = ditto_opponents.Images(data.inputs.float(), data.targets, mean, std)
    torch.testing.assert_close(images[3][0], data.batch([3])[0][0], rtol=1e-5, atol=1e-6)


def test_on_two_cores_ours_has_two_workers(small):
    engine = federation._federation(small, 2).engine
    assert isinstance(engine, Workers) and engine.workers == 2
    assert isinstance(federation._federation(small, 1).engine, InProcess)


def test_personal_training_beside_the_upload_gives_the_model_of_waiting():
    found = [overlap.rounds(protocol, clients=2, width=5, count=2) for protocol in ("compute-and-wait", "wait-free")]
    assert all(len(times) == 2 for times, _ in found)
    assert torch.equal(found[0][1], found[1][1])
