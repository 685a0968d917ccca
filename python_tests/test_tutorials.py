"""What the tutorials say is done, from their first line to their last."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, Kept, blocks, follow

TUTORIALS = DOCS / "tutorials"
OF_FLOWER = "flower.md"  # python_tests/flower: with the real one


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Follows a tutorial in an empty folder; returns its names and what it printed."""

    def run(name: str) -> tuple[dict[str, Any], str]:
        pytest.importorskip("matplotlib")
        monkeypatch.chdir(tmp_path)
        with Kept():
            names = follow(TUTORIALS / name)
        return names, capsys.readouterr().out

    return run


def test_all_are_in_the_list_and_tested() -> None:
    pages = {path.name for path in TUTORIALS.glob("*.md")} - {"index.md"}
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (TUTORIALS / "index.md").read_text(encoding="utf-8"))
    assert set(listed) == pages and len(listed) == len(pages)
    tested = set(re.findall(r"followed\(\"([\w-]+\.md)\"\)", Path(__file__).read_text(encoding="utf-8")))
    assert tested | {OF_FLOWER} == pages


def test_a_first_run(followed: Any) -> None:
    pytest.importorskip("uplot")
    names, _ = followed("first-run.md")
    assert len(names["clients"]) == 10
    assert "<html" in Path("results/first/report.html").read_text(encoding="utf-8")
    with Path("results/ditto/metrics.csv").open(encoding="utf-8") as file:
        assert [row["round"] for row in csv.DictReader(file)] == [str(n) for n in range(1, 9)]
    assert Path("client3.safetensors").is_file()
    for name in re.findall(r"^\| `([\w./]+)` \|", (TUTORIALS / "first-run.md").read_text(encoding="utf-8"), re.M):
        assert name == "ditto" or Path("results/ditto", name).exists(), name


def test_own_data_and_network(followed: Any) -> None:
    names, told = followed("own-data-and-network.md")
    assert list(names["found"]) == ["standalone", "fedavg", "ditto"]
    assert "3 clients, fingerprint" in told


def test_an_own_method(followed: Any) -> None:
    _, told = followed("own-method.md")
    assert "step is 2.0; accepted is a value above 0, up to 1" in told
    records = [Path("results", *name, "metrics.csv").read_text() for name in (("own-head", "fedper-seed0"),)]
    assert records and "personal" in records[0]


def test_ops_in_a_loop(followed: Any) -> None:
    names, _ = followed("ops-in-your-loop.md")
    assert all(p.grad is not None for p in names["student"].parameters())


def test_a_paper_s_table(followed: Any) -> None:
    _, told = followed("paper-table.md")
    assert "DS-1 Opt Teacher, paper" in told
    with Path("results/table/comparison.csv").open(encoding="utf-8") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["fedavg", "weak", "strong"]
    assert Path("results/table/comparison.tex").is_file()


def test_the_readers_of_pages_see_code_and_files() -> None:
    found = list(blocks(TUTORIALS / "own-method.md"))
    assert [block.file for block in found if block.file] == ["cautious.py", "own_head.py"]
    (config,) = (block for block in blocks(TUTORIALS / "paper-table.md") if block.kind == "toml")
    assert config.file == "table.toml"
