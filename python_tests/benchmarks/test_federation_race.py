"""The race of whole rounds: all contestants do the same work, and one that does not is found out."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pfl_ext.benchmarks import (
    empty_turn,
    federation,
    harness,
    machine,
    many_clients,
    overlap,
    report,
    round_profile,
)
from pfl_ext.benchmarks.case import WrongResult
from pfl_ext.benchmarks.federation import Racer
from pfl_ext.benchmarks.opponents import federation as opponents
from pfl_ext.engines import InProcess, Workers


@pytest.fixture(scope="module")
def small() -> federation.Setting:
    return federation.setting(federation.enlarged_digits(), clients=3, fraction=0.05)


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
    for name in ("PFLlib", "loop over tensors"):
        theirs = outcomes[name]
        # Some steps in float32: sums of a thousand products, in another order.
        assert (theirs.model - ours.model).norm() < 1e-4 * (ours.model - begin).norm()
        assert theirs.reported.accuracy == pytest.approx(ours.reported.accuracy, abs=1.01 / tested)
        assert theirs.reported.train_loss == pytest.approx(ours.reported.train_loss, rel=1e-4)
    assert outcomes["PFLlib"].reported.auc == pytest.approx(outcomes["loop over tensors"].reported.auc, abs=1e-3)


def test_a_contestant_that_sees_other_batches_is_found_out(small):
    clients = [dataclasses.replace(c, order=c.order.flip(0)) for c in small.clients()]
    ours, _, tensors, *_ = federation.contestants(small, [1])
    other = Racer(tensors.name, tensors.kind, 1, lambda: federation._tensors(small, clients, 10, 1))
    with pytest.raises(WrongResult, match=r"loop over tensors, 1 core: its model is .* from ours"):
        federation.compare(small, [ours, other], 1)


def test_the_order_decides_the_batches_of_an_opponent(small):
    client = small.clients()[0]
    first = dataclasses.replace(client, x=client.x[:20], y=client.y[:20], order=torch.arange(20))
    swapped = dataclasses.replace(first, order=torch.arange(20).roll(10))
    models = [opponents.tensor_round(small.network, [c], 10, 0.1, 10)[0] for c in (first, swapped)]
    assert not torch.equal(models[0][0].weight, models[1][0].weight)


def test_a_run_beside_other_programs_is_repeated(small, monkeypatch, capsys):
    used = iter([0.0, 0.9, 0.7, 0.0, 0.01])  # before and during the first run, before, before and during the second
    monkeypatch.setattr(federation.machine.OtherPrograms, "cores", lambda self: next(used))
    monkeypatch.setattr(federation.time, "sleep", lambda seconds: None)
    seconds = iter([9.0, 2.0])
    racer = Racer("ours", "ours", 1, lambda: federation.Outcome(next(seconds)))
    ((_, times, _),) = federation.compare(small, [racer], 1, patience=1)
    assert times == [2.0]
    assert "other programs used 0.90 cores; again" in capsys.readouterr().err
    monkeypatch.setattr(federation.machine.OtherPrograms, "cores", lambda self: 1.0)
    with pytest.raises(TimeoutError, match="measure when they have ended"):
        federation.compare(small, [racer], 1, patience=1e-9)


def test_other_programs_are_those_that_are_not_ours(monkeypatch):
    busy, own, clock = iter([100.0, 109.0]), iter([(1, 1, 0, 0, 0), (3, 1, 2, 1, 0)]), iter([50.0, 60.0])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(machine.os, "times", lambda: next(own))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.OtherPrograms().cores() == pytest.approx(0.4)  # 9 s of all, 5 of ours, in 10 s


def test_rows_say_what_ran_and_how_far_from_the_passes_alone(small):
    racers = [Racer("pfl_ext", "ours", 1, None), Racer("PFLlib", "naive", 1, None), Racer("alone", "limit", 1, None)]
    times = [[2.0, 4.0], [6.0, 8.0], [1.5, 1.5]]
    lines = federation.rows(small, "some samples", [(r, t, None) for r, t in zip(racers, times, strict=True)])
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
    text = federation.markdown(federation.rows(small, "x", [(r, [1.0], None) for r in racers]) + lines)
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


def test_the_table_of_a_file_goes_into_a_readme(small, tmp_path: Path, capsys):
    racers = [Racer("pfl_ext", "ours", 1, None), Racer("alone", "limit", 1, None)]
    report.write_csv(tmp_path / "federation.csv", federation.rows(small, "x", [(r, [1.0], None) for r in racers]))
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


def test_empty_turns_are_timed_by_round_beside_their_step(small):
    lines = empty_turn.measure(repeats=3, clients=5)
    assert [(line.contestant, line.rounds) for line in lines] == [("pfl_ext", 3), ("the step alone", 3)]
    turn, step = lines
    assert turn.median_ms > step.median_ms > 0
    assert turn.share_of_bandwidth == pytest.approx(step.median_ms / turn.median_ms)
    racers = [Racer("pfl_ext", "ours", 1, None), Racer("alone", "limit", 1, None)]
    race = federation.rows(small, "x", [(r, [1.0], None) for r in racers])
    sentence = f"5 clients in one process, nothing evaluated) takes {1e3 * turn.median_ms:.0f} us ["
    assert sentence in federation.markdown([*race, *lines])
    assert "An empty turn" not in federation.markdown(race)


def test_a_quick_race_measures_rounds_profile_and_empty_turn(small, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(federation, "setting", lambda *_: small)
    monkeypatch.setattr(federation.machine, "cores", lambda: 1)
    monkeypatch.setattr(federation, "_EMPTY_ROUNDS", 2)
    assert harness.main(["federation", "--quick", "--output", str(tmp_path)]) == 0
    ops = [row.op for row in report.read_csv(tmp_path / "federation.quick.csv")]
    assert list(dict.fromkeys(ops)) == ["round", "profile", "empty turn"]
    printed = capsys.readouterr().out
    assert "An empty turn" in printed and "training samples of digits, enlarged: 3 clients" in printed


def test_on_two_cores_ours_has_two_workers(small):
    engine = federation._federation(small, 2).engine
    assert isinstance(engine, Workers) and engine.workers == 2
    assert isinstance(federation._federation(small, 1).engine, InProcess)


def test_personal_training_beside_the_upload_gives_the_model_of_waiting():
    found = [overlap.rounds(protocol, clients=2, width=5, count=2) for protocol in ("compute-and-wait", "wait-free")]
    assert all(len(times) == 2 for times, _ in found)
    assert torch.equal(found[0][1], found[1][1])
