"""A task whose metrics are others than the accuracy goes through tables, plots, progress, clocks and landscapes."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import torch

import pfl_ext
from pfl_ext.cli import main
from pfl_ext.data import Dataset
from pfl_ext.metrics import LOWER_IS_BETTER, SHARES, digits_of, scale_of, sign_of, word_of
from pfl_ext.reports import Progress, best_rounds, read_config, rounds_to_converge, time_to_target
from pfl_ext.running import Compared

FILE = """
import torch
from pfl_ext.data import Dataset


def load():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    return x[:200], y[:200, None], x[200:], y[200:, None]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numbers")


@pytest.fixture(scope="module")
def compared(folder: Path) -> Compared:
    (folder / "numbers_to_predict.py").write_text(FILE, encoding="utf-8")
    return pfl_ext.compare(
        ["fedavg", "ditto"],
        data=f"{folder}/numbers_to_predict.py:load",
        network=torch.nn.Linear(3, 1),
        partition="iid",
        clients=3,
        rounds=3,
        lr=0.02,
        clock="constant",
        metric="mae",
        columns=["method", "personal: local test"],
        output=folder / "out",
        quiet=True,
    )


def test_what_is_a_share_and_where_low_is_good_is_said_once() -> None:
    assert [scale_of(m) for m in ("accuracy", "auc", "iou", "loss", "r2", "mine")] == [100, 100, 100, 1, 1, 1]
    assert [sign_of(m) for m in ("accuracy", "r2", "mine", "loss", "mae", "rmse", "perplexity")] == [1] * 3 + [-1] * 4
    assert not SHARES & LOWER_IS_BETTER
    assert [digits_of("auc"), digits_of("mae")] == [2, 4] and word_of("iou") == "IoU" and word_of("mine") == "mine"


def test_tables_show_the_metric_as_it_is(compared: Compared) -> None:
    last = compared["ditto"].results.records()[-1]["models"]["personal"]["test"]["mae"]
    row = compared.rows()[1]
    assert row["personal: local test"] == last["mean"] and row["variance"] == last["variance"]
    assert row["best on test"] <= row["personal: local test"]  # the lowest of all rounds
    assert str(compared).splitlines()[0].split("|")[1:-1] == [" method ", " personal: local test "]
    with (compared.folder / "comparison.csv").open(encoding="utf-8") as file:
        assert {"global: local test", "lowest 5 %"} <= set(next(csv.reader(file)))
    users = (compared.folder / "users.md").read_text(encoding="utf-8")
    assert users.startswith("MAE of each user's personal model") and "per cent" not in users
    assert {"curves.png", "clients.png", "density.png"} <= {path.name for path in compared.folder.iterdir()}
    assert "| mae " in str(compared["ditto"]) and f"{last['mean']:.4f}" in str(compared["ditto"])


def test_the_lowest_loss_is_the_best_round(compared: Compared) -> None:
    history = compared["fedavg"].results.records()
    losses = [record["models"]["global"]["test"]["mae"]["mean"] for record in history]
    assert losses == sorted(losses, reverse=True)
    assert best_rounds(history, "mae")["global"]["best_on_test"]["round"] == 3  # type: ignore[index]
    assert best_rounds(history, "r2")["global"]["best_on_test"]["round"] == 3  # type: ignore[index]
    assert rounds_to_converge(history, "global", metric="mae") == 3
    between = (losses[0] + losses[1]) / 2
    assert time_to_target(history, [1.0, 2.0, 3.0], between, metric="mae") is None  # no personal model
    splits = [{"models": {"personal": {"test": {"mae": {"weighted_mean": loss}}}}} for loss in losses]
    assert time_to_target(splits, [1.0, 2.0, 3.0], between, metric="mae") == 2.0


def test_a_round_near_the_best_is_found_for_every_sign() -> None:
    def history(*values: float) -> list[dict[str, object]]:
        return [
            {"round": r, "models": {"global": {"test": {"r2": {"mean": value}, "loss": {"mean": value}}}}}
            for r, value in enumerate(values, 1)
        ]

    assert rounds_to_converge(history(-0.9, -0.5, -0.502), "global", metric="r2") == 2
    assert rounds_to_converge(history(0.9, 0.2, 0.199, 0.5), "global", metric="loss") == 2


def test_progress_shows_shares_in_per_cent_and_nothing_else() -> None:
    stream = io.StringIO()
    with Progress(stream=stream) as progress:
        progress.begin("", 1)
        progress.update(1, **{"global accuracy": 0.2457, "personal rmse": 0.5})
    assert "global accuracy 24.57 %, personal RMSE 0.5000" in stream.getvalue()


def test_clocks_and_landscapes_take_such_a_run(
    compared: Compared, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert read_config(compared["ditto"].folder)["metric"] == "mae"
    assert main(["virtual-time", str(compared["ditto"].folder), "--target", "9", "0"]) == 0
    out = capsys.readouterr().out
    assert "to 9 (s)" in out and "to 9 %" not in out
    data = ["--data", f"{folder}/numbers_to_predict.py:load", "--partition", "iid", "--clients", "2", "--rounds", "1"]
    named = folder / "small_network.py"
    named.write_text("from torch import nn\n\n\ndef Net():\n    return nn.Linear(3, 1)\n", encoding="utf-8")
    network = ["--network", f"{named}:Net", "--metric", "r2"]
    assert main(["run", "ditto", *data, *network, "--quiet", "--output", "one"]) == 0
    assert "| r2 " in capsys.readouterr().out
    assert main(["landscape", "one", "--points", "3", "--trust-code"]) == 0
    assert "| one | personal |" in capsys.readouterr().out


def test_tensorboard_has_every_metric(compared: Compared, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    data = Dataset.from_tensors(x, y)
    network = torch.nn.Linear(3, 1)
    options = {"partition": "iid", "clients": 2, "rounds": 1, "quiet": True, "plots": False, "log": ["tensorboard"]}
    run = pfl_ext.run("fedavg", data=data, network=network, output=tmp_path / "run", **options)
    events = next((run.folder / "tensorboard").iterdir()).read_bytes()
    assert b"test rmse/global" in events and b"test r2/global" in events
