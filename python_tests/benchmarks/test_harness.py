"""``pfl-ext bench`` as its user sees it."""

from pathlib import Path

import pytest

from pfl_ext.benchmarks import harness, report
from pfl_ext.benchmarks.measure import ReadBandwidth

TINY = ["averaging", "--shapes", "lenet", "--clients", "2", "--threads", "1", "--repeats", "2", "--seconds", "0.1"]


@pytest.fixture
def small_bandwidth_buffer(monkeypatch):
    monkeypatch.setattr(ReadBandwidth, "size", lambda self, data_bytes: 2**20)


def test_list_names_the_families(capsys):
    assert harness.main(["--list"]) == 0
    assert capsys.readouterr().out.startswith("averaging: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a family: averaging"),
        (["spectrum"], "unknown family 'spectrum'; accepted: averaging"),
        (["averaging", "--shapes", "vgg"], "--shapes: unknown 'vgg'; accepted: lenet, adapters, resnet18"),
        (["averaging", "--dtypes", "float32,int8"], "unknown 'int8'; accepted: float32, float64, bfloat16"),
        (["averaging", "--clients", "8,none"], "--clients: 'none' is not accepted; accepted: positive whole numbers"),
        (["averaging", "--clients", "0"], "--clients: '0' is not accepted"),
        (["averaging", "--threads", "some"], "--threads: 'some' is not accepted; accepted: whole numbers from 1 to"),
        (["averaging", "--threads", "100000"], "--threads: '100000' is not accepted"),
        (["averaging", "--repeats", "0"], "'0' is not accepted; a positive number is"),
        (["averaging", "--seconds", "long"], "'long' is not accepted; a positive number is"),
    ],
)
def test_unknown_names_and_values_end_with_code_2_and_what_is_accepted(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        harness.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("small_bandwidth_buffer")
def test_a_run_writes_the_csv_prints_the_table_and_reports_progress(tmp_path, capsys):
    assert harness.main([*TINY, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    rows = report.read_csv(tmp_path / "averaging.csv")
    assert list(dict.fromkeys(row.op for row in rows)) == ["average", "rows", "server_update", "streaming"]
    assert all(case[0].contestant == "pfl_ext" and case[0].kind == "ours" for case in report.by_case(rows))
    assert all(row.median_ms > 0 and row.share_of_bandwidth > 0 and row.rounds == 2 for row in rows)
    assert "[4/4] streaming lenet C=2 float32, 1 thread: " in printed.err
    assert "| lenet | 2 | float32 | 1 |" in printed.out

    assert harness.main(["averaging", "--table", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == printed.out


@pytest.mark.usefixtures("small_bandwidth_buffer")
def test_a_quick_run_leaves_the_full_result_alone(tmp_path):
    (tmp_path / "averaging.csv").write_text("full")
    assert harness.main([*TINY, "--quick", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "averaging.csv").read_text() == "full"
    assert report.read_csv(tmp_path / "averaging.quick.csv")


def test_results_go_to_the_source_tree_only_when_run_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report.results_folder(None) == Path("pfl_ext_benchmarks")
    Path("benchmarks/results").mkdir(parents=True)
    assert report.results_folder(None) == Path("benchmarks/results")
    assert report.results_folder(Path("there")) == Path("there")


def test_a_report_without_a_csv_says_how_to_get_one(tmp_path, capsys):
    assert harness.main(["averaging", "--table", "--output", str(tmp_path)]) == 1
    assert "`pfl-ext bench averaging` writes it" in capsys.readouterr().err


@pytest.mark.usefixtures("small_bandwidth_buffer")
def test_a_readme_gets_the_table_and_without_markers_stays_as_it_is(tmp_path, capsys):
    assert harness.main([*TINY, "--output", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- benchmark:averaging:begin -->\nold\n<!-- benchmark:averaging:end -->\nb\n")
    write = ["averaging", "--output", str(tmp_path), "--readme", str(readme)]
    assert harness.main(write) == 0
    expected = f"a\n<!-- benchmark:averaging:begin -->\n{table}<!-- benchmark:averaging:end -->\nb\n"
    assert readme.read_text() == expected

    readme.write_text("no markers\n")
    assert harness.main(write) == 1
    assert readme.read_text() == "no markers\n"
    assert "README.md: the lines <!-- benchmark:averaging:begin -->" in capsys.readouterr().err
