"""The command lines of ``pfl-ext compare`` and ``sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pfl_ext.cli import main
from pfl_ext.commands import compare, sweep

FILE = """
[method]
momentum = 0.5
[method.ditto]
lr = "fast"
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_command_line_becomes_a_request_without_running_anything(tmp_path: Path) -> None:
    request = compare.parse(["fedavg", "ditto", "--seeds", "0,1", "--set", "ditto.lam=0.5", "--metric", "auc"])
    assert [label for label, _ in request.experiments] == ["fedavg", "ditto", "fedavg", "ditto"]
    assert [made.settings.seed for _, made in request.experiments] == [0, 0, 1, 1]
    assert request.experiments[1][1].method_options == {"lam": 0.5} and request.look.metric == "auc"
    assert request.output.folder == Path("results/compare-digits-ds1")
    assert not list(tmp_path.iterdir())


def test_a_sweep_is_its_points_and_the_runs_that_each_adds() -> None:
    request = sweep.parse(["fedavg", "ditto", "--vary", "method.lam=1,2"])
    assert [(point.values, [label for label, _ in some]) for point, some in request.points] == [
        ({"method.lam": "1"}, ["fedavg", "ditto"]),
        ({"method.lam": "2"}, ["ditto"]),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "fedavg", "--lam", "1"], "--lam is an option of the method ditto, "),
        (["compare", "fedavg", "--lam", "1"], ": --set METHOD.lam=VALUE sets it"),
        (["compare", "fedavg", "fedavg"], "the method fedavg is named more than once"),
        (["compare", "fedavg", "--seeds", "0,1,0"], "the seed 0 is named more than once"),
        (["compare", "fedavg", "--seeds", "a"], "--seeds is 'a'; accepted is a list of integers"),
        (["compare", "fedavg", "--lr", "fast"], ": --lr is 'fast'; accepted is a number"),
        (["compare", "ditto", "--lr", "0.1", "--config", "some.toml"], ": method.lr is 'fast'; accepted is a number"),
        (["compare", "fedavg", "--metric", "speed"], ": --metric is 'speed'; the task classification has accuracy"),
        (["sweep", "fedavg", "--vary", "method.lr=1,fast"], ": method.lr is 'fast'; accepted is a number"),
        (["sweep", "fedavg", "--vary", "method.lr=1", "--alpha", "1"], "; this run has ds1"),
    ],
)
def test_a_wrong_command_line_is_one_line_before_anything_runs(
    arguments: Sequence[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.toml").write_text(FILE, encoding="utf-8")
    assert main(arguments) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "results").exists()
