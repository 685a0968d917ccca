"""A file's metric is that of every table and picture: CheXpert's files ask for the AUC."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pfl_ext.cli import main
from pfl_ext.configuration import Configuration
from pfl_ext.reports import ResultsFolder

CONFIGS = Path(__file__).parents[2] / "configs" / "perada"
FILE = """
methods = ["fedavg"]
metric = "auc"
[partition]
name = "iid"
clients = 3
[network]
name = "mlp"
[federation]
rounds = 1
"""


@pytest.mark.parametrize("name", ["table1-chexpert", "table3"])
@pytest.mark.parametrize("size", ["", "-small"])
def test_chexperts_files_ask_for_the_auc(name: str, size: str) -> None:
    assert Configuration.read(CONFIGS / f"{name}{size}.toml").metric == "auc"


def test_tables_and_users_show_the_files_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (120, 4)).astype(np.uint8)
    images = random.integers(0, 256, (120, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "several.npz", x_train=images, y_train=labels)
    (tmp_path / "file.toml").write_text(FILE, encoding="utf-8")
    where = [
        "--config",
        str(tmp_path / "file.toml"),
        "--data",
        f"npz:{tmp_path / 'several.npz'}",
        "--quiet",
        "--no-plots",
    ]
    assert main(["compare", *where, "--output", str(tmp_path / "out")]) == 0
    last = ResultsFolder.open(tmp_path / "out" / "fedavg-seed0").records()[-1]["models"]["global"]
    auc, accuracy = (100 * last["test"][metric]["mean"] for metric in ("auc", "accuracy"))
    assert abs(auc - accuracy) > 0.01
    printed = capsys.readouterr().out
    users = (tmp_path / "out" / "users.md").read_text(encoding="utf-8")
    assert f"{auc:.2f}" in printed and f"{auc:.2f}" in users and users.startswith("AUC of each user")
    assert f"{accuracy:.2f}" not in users
    assert main(["run", "fedavg", *where, "--output", str(tmp_path / "one")]) == 0
    assert f"{auc:.2f}" in capsys.readouterr().out
