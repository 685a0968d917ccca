"""Goals beside measured numbers; the pages have what the CSV files give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pfl_ext.benchmarks import federation, goals, harness, many_clients, report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = {family: report.read_csv(RESULTS / f"{family}.csv") for family in {goal.family for goal in goals.GOALS}}


def _filled(page: str, name: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    begin, end = f"<!-- benchmark:{name}:begin -->\n", f"<!-- benchmark:{name}:end -->"
    return text.partition(begin)[2].partition(end)[0]


def test_every_goal_was_measured_and_eight_are_in_the_short_table() -> None:
    lines = goals.found(MEASURED)
    assert len(lines) == len(goals.GOALS)
    short = goals.markdown(lines, short=True)
    assert sum(line.startswith("|") for line in short.splitlines()) == 2 + 8
    assert "missed**" in short and f"{sum(line.missed for line in lines)} are missed" in short


def test_a_goal_is_missed_where_the_opponent_is_too_near() -> None:
    goal = goals.Goal("a", "averaging", "average", "resnet18", "PFLlib", 3.0, 20)
    ours, other = goal.rows(MEASURED)
    assert (ours.contestant, other.contestant, ours.threads) == ("pfl_ext", "PFLlib", 2)
    for ratio, missed in ((2.99, True), (3.0, False)):
        rows = [replace(row, ratio_to_ours=ratio) if row is other else row for row in MEASURED["averaging"]]
        (line,) = [each for each in goals.found({**MEASURED, "averaging": rows}) if each.goal == goals.GOALS[1]]
        assert line.reached == ratio
        assert goals.markdown([replace_goal(line, goal)]).count("missed**") == missed


def replace_goal(line: object, goal: goals.Goal) -> object:
    return replace(line, goal=goal)  # type: ignore[type-var]


def test_what_was_not_measured_is_said() -> None:
    with pytest.raises(ValueError, match=r"averaging\.csv has no PFLlib for the goal"):
        goals.GOALS[1].rows({"averaging": [row for row in MEASURED["averaging"] if row.contestant != "PFLlib"]})


def test_the_command_fills_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:summary:begin -->\n<!-- benchmark:summary:end -->\n")
    where = ["--output", str(RESULTS)]
    assert harness.main(["goals", "--summary", *where, "--readme", str(page)]) == 0
    assert harness.main(["goals", "--summary", *where]) == 0
    assert capsys.readouterr().out in page.read_text()
    assert harness.main(["goals", "--output", str(tmp_path)]) == 1


@pytest.mark.parametrize("family", ["averaging", "spectral", "sharpness", "distillation", "proximal"])
def test_the_page_of_a_family_has_its_csv_file(family: str) -> None:
    made = report.markdown(harness.FAMILIES[family], report.read_csv(RESULTS / f"{family}.csv"))
    assert _filled(f"docs/benchmarks/{family}.md", family) == made, "make readme"


def test_the_other_pages_have_theirs() -> None:
    lines = goals.found(MEASURED)
    assert _filled("README.md", "summary") == goals.markdown(lines, short=True), "make readme"
    assert _filled("docs/benchmarks/index.md", "goals") == goals.markdown(lines), "make readme"
    page = "docs/benchmarks/federation.md"
    made = federation.markdown(report.read_csv(RESULTS / "federation.csv"))
    assert _filled(page, "federation").strip() == made.strip(), "make readme"
    made = many_clients.markdown(report.read_csv(RESULTS / "federation.memory.csv"))
    assert _filled(page, "federation-memory").strip() == made.strip(), "make readme"
