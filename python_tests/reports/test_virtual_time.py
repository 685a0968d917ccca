from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pfl_ext.cli import main
from pfl_ext.federation import Clock, Timeline, Work
from pfl_ext.reports import time_to_target
from pfl_ext.reports.virtual_time import Timed

COMMON = ["--data", "digits", "--partition", "dirichlet", "--clients", "4", "--rounds", "3", "--lr", "0.1", "--quiet"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runtime") / "compared"
    compared = ["compare", "ditto", "fedasync", *COMMON, "--no-plots", "--clock", "log-normal", "--clock-up", "1e5"]
    assert main([*compared, "--set", "ditto.personal_epochs=2", "--seeds", "0,1", "--output", str(folder)]) == 0
    return folder


def _table(text: str) -> list[dict[str, str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_the_first_round_at_the_target_counts() -> None:
    def record(personal: float, everywhere: float) -> dict[str, Any]:
        accuracy = {"mean": 1.0, "weighted_mean": personal}
        tests = {"test": {"accuracy": accuracy}}
        return {"models": {"personal": tests, "global": {**tests, "global_test": {"accuracy": everywhere}}}}

    history = [record(0.3, 0.1), {}, record(0.5, 0.2), record(0.4, 0.6)]
    assert time_to_target(history, [1, 2, 3, 4], 0.4) == 3
    assert time_to_target(history, [1, 2, 3, 4], 0.4, "global") == 4
    assert time_to_target(history, [1, 2, 3, 4], 0.9) is None


def test_times_afterwards_are_those_of_the_run(results: Path) -> None:
    timed = Timed(results / "ditto-seed0", {})
    for protocol in ("compute-and-wait", "wait-free"):
        assert timed.times(protocol) == [record["clock"][protocol] for record in timed.records]


def test_a_run_is_timed_by_another_clock(results: Path) -> None:
    slow = Timed(results / "ditto-seed0", {"clock": "constant", "clock_up": 10.0})
    assert slow.times("wait-free")[-1] > 3 * slow.works[0].up / 10
    timed = Timed(results / "ditto-seed0", {})
    clock = timed.of_ratio(0.5)
    works = timed.works
    training = sum(clock.train(work.client, work.personal) for work in works)
    links = sum(clock.send(work) + clock.receive(work) for work in works)
    assert training == pytest.approx(0.5 * links)


def test_the_table_has_both_protocols_and_means_over_seeds(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["virtual-time", str(results), "--target", "0.05", "1.1", "--against", "ditto"]) == 0
    rows = {(row["run"], row["protocol"]): row for row in _table(capsys.readouterr().out)}
    assert list(rows) == [("ditto", "compute-and-wait"), ("ditto", "wait-free"), ("fedasync", "asynchronous")]
    waiting, free = rows["ditto", "compute-and-wait"], rows["ditto", "wait-free"]
    seeds = [Timed(results / f"ditto-seed{seed}", {}).times("compute-and-wait") for seed in (0, 1)]
    (seconds, _), (faster, times) = (row["all rounds (s)"].split() for row in (waiting, free))
    assert float(seconds) == pytest.approx((seeds[0][-1] + seeds[1][-1]) / 2, rel=1e-3)
    assert float(waiting["to 5 % (s)"].split()[0]) == pytest.approx((seeds[0][0] + seeds[1][0]) / 2, rel=1e-3)
    assert waiting["to 110 % (s)"] == "-"
    speedup = float(seconds) / float(faster)
    assert float(times.strip("(x)")) == pytest.approx(speedup, rel=1e-2) and speedup > 1


def test_speedups_over_ratios_are_highest_where_both_take_equally_long(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--clock", "constant", "--ratios", "0.02,0.5,50"]
    assert main(["virtual-time", str(results / "ditto-seed0"), *arguments]) == 0
    found = [float(row["all rounds"].rstrip("x")) for row in _table(capsys.readouterr().out)]
    assert len(found) == 3 and min(found[0], found[2]) >= 1 and found[1] > max(found[0], found[2])


def test_a_picture_is_drawn_of_synchronous_and_asynchronous_runs(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("ditto-seed0", "fedasync-seed0"):
        assert main(["virtual-time", str(results / name), "--picture", str(tmp_path / f"{name}.png")]) == 0
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_spans_of_an_asynchronous_run_end_when_its_uploads_arrive(results: Path) -> None:
    timed = Timed(results / "fedasync-seed0", {})
    ends = [span.end for span in timed.spans("asynchronous", 3) if span.what == "send"]
    assert ends == pytest.approx([record["clock"]["asynchronous"] for record in timed.records])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fedasync-seed0", "--clock-up", "5"], "asynchronous: its models depend on the clock"),
        (["nothing"], "holds no results"),
        (["ditto-seed0", "--against", "scd"], "no compute-and-wait run scd"),
        (["ditto-seed0", "--clock-up", "fast"], ": --clock-up is 'fast'"),
        (["ditto-seed0", "--clock-up", "0"], ": --clock-up is 0.0"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    results: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["virtual-time", str(results / arguments[0]), *arguments[1:]]) == 1
    assert message in capsys.readouterr().err


def test_a_round_of_work_read_from_json_is_timed_like_the_original() -> None:
    clock = Clock.drawn(2, (0.1, 5.0, 7.0, 0.5), 0.5, 0)  # type: ignore[arg-type]
    works = [Work(0, 3, 4, 5, 6), Work(1, 2, 2, 2, 2)]
    assert Timeline(clock, "wait-free").round(works) == Timeline(clock, "wait-free").round([list(w) for w in works])
