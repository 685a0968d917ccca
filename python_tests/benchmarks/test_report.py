"""CSV, table, plot and the part of a README, from numbers made up here."""

import csv
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from pfl_ext.benchmarks import averaging, report
from pfl_ext.benchmarks.case import Case, Contestant, Expected, Spec
from pfl_ext.benchmarks.measure import Result
from pfl_ext.benchmarks.report import Row

COLUMNS = (
    "family,op,shapes,clients,dtype,threads,contestant,kind,median_ms,q25_ms,q75_ms,min_ms,rounds,ratio_to_ours,"
    "ratio_of_medians,limit_ms,share_of_bandwidth,read_bandwidth_gb_s,peak_extra_mib,machine,isa,torch,numpy,python,"
    "pfl_ext,commit,date"
)
MACHINE = '"CPU, 2 cores",avx2,2.14.1,2.4.6,3.11.7,0.1.0,abc1234,2026-01-02'
FIXTURE = f"""{COLUMNS}
averaging,average,lenet,8,float32,2,pfl_ext,ours,0.1,0.09,0.125,0.08,30,1,1,0.08,0.8,25,0.25,{MACHINE}
averaging,average,lenet,8,float32,2,PFLlib,naive,0.29,0.28,0.3,0.27,30,2.9,2.9,0.08,0.28,25,1.5,{MACHINE}
averaging,average,lenet,8,float32,2,_foreach_add_,skilled,0.2,0.19,0.21,0.18,30,2,2,0.08,0.4,25,,{MACHINE}
averaging,average,resnet18,20,bfloat16,1,pfl_ext,ours,123.4,120,130,119,5,1,1,120,0.9724,25,21.3,{MACHINE}
averaging,average,resnet18,20,bfloat16,1,_foreach_add_,skilled,1480.8,1400,1500,1390,5,12,12,120,0.08,25,42.6,{MACHINE}
averaging,rows,lenet,8,float32,2,pfl_ext,ours,0.05,0.04,0.06,0.04,30,1,1,0.08,1.6,25,,{MACHINE}
averaging,rows,lenet,8,float32,2,w @ M,skilled,0.045,0.04,0.05,0.04,30,0.9,0.9,0.08,1.8,25,,{MACHINE}
"""
TABLE = """\
pfl_ext: median in ms [quartiles]. Others: their time as a multiple of ours, so 2.00x took twice as long. Bandwidth: \
the bytes that must be read and written by our time, as a share of the read bandwidth measured in the same rounds with \
the same threads (above 100%: the data stay in the cache). Memory: peak beyond the input in MiB, ours / others.

**`weighted_average(clients, weights)`: clients as lists of tensors**

| shapes | C | dtype | threads | pfl_ext | bandwidth | PFLlib | \\_foreach_add\\_ | memory |
| --- | --: | --- | --: | --: | --: | --: | --: | --: |
| lenet | 8 | float32 | 2 | 0.1 [0.09, 0.125] | 80% | 2.90x | 2.00x | 0.2 / 1.5 |
| resnet18 | 20 | bfloat16 | 1 | 123 [120, 130] | 97% | - | 12x | 21 / 43 |

**`weighted_average(M, weights)`: clients as the rows of one matrix**

| shapes | C | dtype | threads | pfl_ext | bandwidth | w @ M | memory |
| --- | --: | --- | --: | --: | --: | --: | --: |
| lenet | 8 | float32 | 2 | 0.05 [0.04, 0.06] | 160% | 0.90x | - |

Naive peers: PFLlib (per parameter, weighted clones added to a zeroed copy of a model).

Skilled users: \\_foreach_add\\_; w @ M.

Measured on 2026-01-02: CPU, 2 cores, avx2 kernels, pfl_ext 0.1.0 at commit abc1234, torch 2.14.1, NumPy 2.4.6, \
Python 3.11.7. Reproduce: `pfl-ext bench averaging`.
"""


@pytest.fixture
def fixture_csv(tmp_path: Path) -> Path:
    path = tmp_path / "averaging.csv"
    path.write_text(FIXTURE)
    return path


def test_the_table_of_a_small_csv_is_exactly_this(fixture_csv):
    assert report.markdown(averaging.FAMILY, report.read_csv(fixture_csv)) == TABLE


def test_a_csv_that_is_read_and_written_is_the_same_to_the_byte(fixture_csv, tmp_path):
    report.write_csv(tmp_path / "copy" / "averaging.csv", report.read_csv(fixture_csv))
    assert (tmp_path / "copy" / "averaging.csv").read_text() == FIXTURE


def test_columns_are_those_of_a_row():
    assert [field.name for field in fields(Row)] == COLUMNS.split(",")


def test_rows_of_a_case_compare_with_limit_and_bandwidth(tmp_path):
    ours = Contestant("pfl_ext", "ours", list, torch.float32)
    theirs = Contestant("w @ M", "skilled", list, torch.float32)
    empty = torch.empty(0, dtype=torch.float64)
    case = Case(Spec("rows", "lenet", 8, "float32", 2), [ours, theirs], Expected(empty, empty, 1), 8, 9_000_000)
    results = [Result(ours, [1.0, 1.0], 1, 1, 10e9, 2**21), Result(theirs, [3.0, 3.0], 3, 3, 10e9, None)]
    machine = dict.fromkeys(COLUMNS.split(",")[-8:], "x")
    report.write_csv(tmp_path / "a.csv", report.rows_of("averaging", case, results, machine))
    with (tmp_path / "a.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["limit_ms"], first["share_of_bandwidth"], first["read_bandwidth_gb_s"]) == ("0.9", "0.9", "10")
    assert (second["limit_ms"], second["share_of_bandwidth"], second["ratio_to_ours"]) == ("0.9", "0.3", "3")
    assert (first["peak_extra_mib"], second["peak_extra_mib"]) == ("2", "")


def test_a_csv_with_other_columns_is_refused(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("family,op\naveraging,average\n")
    with pytest.raises(ValueError, match="measure anew"):
        report.read_csv(path)


def test_a_failed_write_leaves_the_old_file_and_no_other(fixture_csv, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    rows = report.read_csv(fixture_csv)
    monkeypatch.setattr(report.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write_csv(fixture_csv, [replace(rows[0], clients=9)])
    assert fixture_csv.read_text() == FIXTURE
    assert list(fixture_csv.parent.iterdir()) == [fixture_csv]


def test_only_the_part_between_the_markers_is_replaced():
    begin, end = "<!-- benchmark:averaging:begin -->", "<!-- benchmark:averaging:end -->"
    old = f"# Title\r\n\n{begin}\nold table\n{end}\n\nrest"
    new = report.replace_between_markers(old, "averaging", "new table\n")
    assert new == f"# Title\r\n\n{begin}\nnew table\n{end}\n\nrest"
    assert report.replace_between_markers(new, "averaging", "new table\n") == new


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- benchmark:averaging:begin -->",
        "<!-- benchmark:averaging:end --><!-- benchmark:averaging:begin -->",
        "<!-- benchmark:spectral:begin --><!-- benchmark:spectral:end -->",
    ],
)
def test_missing_markers_are_an_error(text):
    with pytest.raises(ValueError, match="benchmark:averaging:begin"):
        report.replace_between_markers(text, "averaging", "table")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(fixture_csv, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    from pfl_ext.benchmarks.plot import draw

    draw(report.read_csv(fixture_csv), tmp_path / f"plot.{suffix}")
    assert (tmp_path / f"plot.{suffix}").stat().st_size > 1000


def test_a_plot_uses_the_familys_word_for_what_is_counted(fixture_csv, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    from pfl_ext.benchmarks.plot import draw

    with rc_context({"svg.fonttype": "none"}):  # letters, not their outlines
        draw(report.read_csv(fixture_csv), tmp_path / "plot.svg", "teachers")
    text = (tmp_path / "plot.svg").read_text()
    assert " teachers<" in text and " clients<" not in text


def test_a_plot_in_another_format_is_refused(fixture_csv, tmp_path):
    from pfl_ext.benchmarks.plot import draw

    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        draw(report.read_csv(fixture_csv), tmp_path / "plot.txt")
