from __future__ import annotations

import csv
import io
import math
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pfl_ext.metrics import summarize
from pfl_ext.reports import (
    Look,
    Spread,
    best_cells,
    comparison,
    main_columns,
    on_terminal,
    per_user,
    table,
    tails,
    transpose,
)
from pfl_ext.reports.tables import deviation, in_parts

NASTY = "a|b\\c `d` *e* _f_ [g](h) <i> ~j~ $k$ &amp; #l %m {n} ^o"
text = st.text(st.sampled_from(list("ab01 |\\`*_[]()<>~$&#%{}^\"',;\n\t±é-")), max_size=12)


def test_markdown_is_aligned_numbers_to_the_right():
    rows = [{"method": "FedAvg", "accuracy": 9.5, "rounds": 100}, {"method": "PersFL", "accuracy": math.nan}]
    assert table(rows) == (
        "| method | accuracy | rounds |\n"
        "| ------ | -------: | -----: |\n"
        "| FedAvg |     9.50 |    100 |\n"
        "| PersFL |        - |      - |\n"
    )


def test_latex_is_a_tabular():
    rows = [{"method": "Fed_Avg", "accuracy": Spread(97.126, 0.5), "loss": -1e-5}, {"method": "P", "loss": math.inf}]
    assert [" ".join(line.split()) for line in table(rows, style="latex").splitlines()] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"method & accuracy & loss \\",
        r"\midrule",
        r"Fed\_Avg & $97.13 \pm 0.50$ & $-1 \cdot 10^{-5}$ \\",
        r"P & - & $\infty$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_columns_choose_order_and_headings():
    rows = [{"a": 1, "b": 2, "c": 3}]
    assert table(rows, ["c", "a"], style="csv") == "c,a\n3,1\n"
    assert table(rows, {"b": "B, renamed"}, style="csv") == '"B, renamed"\n2\n'
    assert table(rows, ["d", "a"], style="csv") == "d,a\n,1\n"
    assert table([], ["a"]) == "| a   |\n| --- |\n"
    assert table([]) == "|  |\n|  |\n"


def test_csv_keeps_full_precision_and_splits_a_spread():
    rows = [{"m": "x", "acc": Spread(1 / 3, 0.1)}, {"m": "y", "acc": None}, {"m": "z", "acc": 2.0}]
    assert list(csv.reader(io.StringIO(table(rows, style="csv")))) == [
        ["m", "acc", "acc ±"],
        ["x", "0.3333333333333333", "0.1"],
        ["y", "", ""],
        ["z", "2.0", ""],
    ]


METHODS = [
    {"method": "a", "personal: local test": Spread(90.001, 1.0), "personal: std": 1.0, "global: local test": 80.0},
    {"method": "b", "personal: local test": Spread(90.004, 2.0), "personal: std": 2.0, "global: local test": 80.0},
    {"method": "c", "personal: local test": None, "personal: std": None, "global: local test": 80.0, "lowest 5 %": 7.0},
    {"method": "d", "personal: local test": 89.0, "personal: std": 9.0, "global: local test": math.nan},
]


def test_the_best_are_those_that_are_printed_alike_and_better_than_others():
    best = best_cells(METHODS, "accuracy")
    # Neither where all are alike, nor where one alone has a number, nor of a spread.
    assert [sorted(name for name in row if row[name]) for row in best] == [["personal: local test"]] * 2 + [[], []]
    assert best_cells(METHODS, "loss")[3]["personal: local test"]  # of a loss the lowest
    assert not best_cells(METHODS, "loss")[0]["personal: local test"]
    rows = [
        {"alpha": a, "method": m, "global: global test": v}
        for a, m, v in ((1, "a", 3.0), (1, "b", 2.0), (9, "a", 1.0), (9, "b", 1.5))
    ]
    marked = [bool(row.get("global: global test")) for row in best_cells(rows, "accuracy", within=["alpha"])]
    assert marked == [True, False, False, True]


def test_the_best_are_bold_and_digits_stay_below_each_other():
    rows = [{"m": "x", "p: local test": 99.5, "t": "y"}, {"m": "z", "p: local test": 9.25, "t": "n"}]
    best = [{"p: local test": True, "t": True}, {}]
    assert table(rows, best=best) == (
        "| m   | p: local test | t     |\n"
        "| --- | ------------: | ----- |\n"
        "| x   |     **99.50** | **y** |\n"
        "| z   |        9.25   | n     |\n"
    )
    latex = table([{"a": Spread(1.0, 0.5), "b": "x_1"}], style="latex", best=[{"a": True, "b": True}])
    assert r"$\mathbf{1.00 \pm 0.50}$ & \textbf{x\_1} \\" in latex
    assert "*" not in table(rows, style="csv", best=best)


def test_on_a_terminal_bold_is_bold(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = table([{"a*": 1.0, "b": "**x**"}, {"a*": 2.0, "b": "y"}], best=[{"a*": True}, {}])
    shown = on_terminal(text, Terminal())
    assert shown.splitlines()[2] == "|   \x1b[1m1.00\x1b[0m   | \\*\\*x\\*\\* |"
    plain = re.sub(r"\x1b\[\d+m", "", shown)
    assert [len(line) for line in plain.splitlines()] == [len(line) for line in text.splitlines()]
    assert on_terminal(text, io.StringIO()) == text
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(text, Terminal()) == text


def test_every_column_of_a_comparison_may_be_chosen(make_run):
    columns = list(comparison({"FedAvg": [make_run("a", [0.5, 0.7]), make_run("b", [0.6, 0.8])]})[0])
    assert "clients" in columns and len(columns) > 10
    assert Look(columns=tuple(columns)).columns == tuple(columns)


def test_the_main_columns_fit_100_characters():
    rows = [
        {**row, "rounds": 3, "personal: global test": 1.0, "lowest 5 %": 1.0, "best on test": 1.0} for row in METHODS
    ]
    chosen = ["personal: local test", "global: local test", "lowest 5 %"]
    assert main_columns(rows) == ["method", *chosen]
    assert main_columns([{"rho": 1, **row} for row in rows], ["rho"]) == ["rho", "method", *chosen]
    assert main_columns([{"method": "a", "global: global test": 1.0, "rounds": 2}]) == ["method", "global: global test"]
    assert main_columns([{"method": "a", "teacher: local test": 1.0, "x: local test": 2.0, "y: local test": 1.0}]) == [
        "method",
        "teacher: local test",
        "x: local test",
    ]
    asked = ["personal: new clients", "global: cifar10.1"]
    more = [{**row, **dict.fromkeys(asked, 1.0)} for row in rows[:1]]
    assert main_columns([{"method": "a", **dict.fromkeys((chosen[1], *asked), 1.0)}]) == [
        "method",
        chosen[1],
        asked[1],
    ]
    assert main_columns(more) == ["method", *chosen[:2], *asked]  # the last one does not fit
    counted = [{**row, "clients": 20} for row in rows]
    assert main_columns(counted) == ["method", *chosen]
    counted[1]["clients"] = 19  # means over others do not compare
    assert main_columns(counted) == ["method", chosen[0], "clients", *chosen[1:]]
    for length in (20, 40, 60):
        long = [{**row, "method": "m" * length} for row in rows]
        shown = table(long, main_columns(long), best=best_cells(long, "accuracy"))
        assert max(map(len, shown.splitlines())) <= 100 and "personal: local test" in shown


def test_small_numbers_do_not_vanish():
    assert "0.00012" in table([{"a": 0.000123}])
    assert "| 0.00 |" in table([{"a": 0.0}])
    assert "1.05 ± 0.00" in table([{"a": Spread(1.05, 0.004)}])
    assert "3 ± nan" in table([{"a": Spread(3.0, math.nan)}], digits=0)


@settings(max_examples=150, deadline=None)
@given(text, text)
@example(NASTY, "x")
def test_any_text_comes_back_from_csv(left, right):
    cells = list(csv.reader(io.StringIO(table([{"a": left, "b": right}], style="csv"), newline="")))
    assert cells == [["a", "b"], [left, right]]


@settings(max_examples=150, deadline=None)
@given(text)
@example(NASTY)
@example("\\|")
def test_any_text_stays_in_its_markdown_cell(content):
    lines = table([{"a": content, "b": "end"}]).splitlines()
    assert len(lines) == 3
    parts, cell, escaped = [], "", False
    for character in lines[2]:
        if character == "|" and not escaped:
            parts.append(cell)
            cell = ""
        elif escaped or character != "\\":
            cell += character
        escaped = character == "\\" and not escaped
    assert [part.strip() for part in parts] == ["", " ".join(content.split()), "end"]


@pytest.mark.parametrize(
    ("plain", "markdown"),
    [
        ("FedAvg_FT", "FedAvg_FT"),
        ("_x_", r"\_x\_"),
        ("a__b", r"a\_\_b"),
        ("*x*", r"\*x\*"),
        ("`x`", r"\`x\`"),
        ("[a](b)", r"\[a\](b)"),
        ("<b>", r"\<b\>"),
        ("$x$", r"\$x\$"),
        ("&amp;", r"\&amp;"),
    ],
)
def test_markdown_takes_no_text_for_markup(plain, markdown):
    assert table([{"a": plain}]).splitlines()[2].strip("| ") == markdown
    assert table([{plain: 1}]).splitlines()[0].strip("| ") == markdown


@settings(max_examples=150, deadline=None)
@given(text)
@example(NASTY)
def test_any_text_is_only_text_in_latex(content):
    line = table([{"a": content, "b": "end"}], style="latex").splitlines()[4]
    assert line.endswith(r"\\")
    cells = re.split(r"(?<!\\)&", line.removesuffix(r"\\"))
    assert len(cells) == 2
    # Without what the escapes stand for, nothing that LaTeX gives a meaning is left.
    left = re.sub(r"\\text[a-z]+\{\}|\\[{}$&#_%]|\$\\pm\$|\{[\[*]\}", "", cells[0])
    assert not set("\\{}$&#_%~^<>|") & set(left)


@pytest.mark.parametrize(("plain", "latex"), [("[1] x", "{[}1] x"), ("*best*", "{*}best*"), ("50 %", r"50 \%")])
def test_latex_takes_no_first_bracket_for_the_option_of_the_line_before(plain, latex):
    assert table([{"a": plain}], style="latex").splitlines()[4].split(r" \\")[0] == latex


def test_another_style_is_refused():
    with pytest.raises(ValueError, match="markdown, csv or latex; got 'html'"):
        table([], style="html")


def test_transpose_puts_users_down():
    rows = [{"method": "A", "user 0": 1.0, "mean": 2.0}, {"method": "B", "user 0": 3.0}]
    assert transpose(rows, "user") == [{"user": "user 0", "A": 1.0, "B": 3.0}, {"user": "mean", "A": 2.0}]


def test_comparison_has_one_row_a_method(make_run):
    clients = [0.5, 0.7, 0.9]
    runs = {"PersFL": make_run("p", clients), "FedAvg": make_run("f", [0.4, 0.4], models=["global"])}
    persfl, fedavg = comparison(runs)
    assert persfl == {
        "method": "PersFL",
        "rounds": 4,
        "personal: local test": pytest.approx(70),
        "personal: std": pytest.approx(100 * np.std(clients)),
        "personal: global test": pytest.approx(25),
        "global: local test": pytest.approx(70),
        "global: std": pytest.approx(100 * np.std(clients)),
        "global: global test": pytest.approx(75),
        "model": "personal",
        "variance": pytest.approx(100**2 * np.var(clients)),
        "lowest 5 %": pytest.approx(50),
        "top 5 %": pytest.approx(90),
        "clients": 3,
        "best by validation": pytest.approx(35),
        "best on test": pytest.approx(70),
        "rounds to 99 %": 1,
        "communicated MB": 6.0,
        "trained parameters": 62006,
        "seconds a round": 2.5,
    }
    assert list(fedavg) == list(persfl)
    assert fedavg["model"] == "global"
    assert fedavg["personal: local test"] is None
    assert fedavg["lowest 5 %"] == pytest.approx(40)


def test_comparison_over_seeds_gives_mean_and_sample_deviation(make_run):
    means = [0.5, 0.6, 0.9]
    runs = {
        "PersFL": [make_run(f"s{seed}", [mean, mean]) for seed, mean in enumerate(means)],
        "one": make_run("o", [1]),
    }
    row, one = comparison(runs)
    assert row["seeds"] == 3
    assert row["personal: local test"] == pytest.approx(Spread(100 * np.mean(means), 100 * np.std(means, ddof=1)))
    assert row["rounds"] == 4
    assert row["trained parameters"] == 62006
    assert row["model"] == "personal"
    assert one["seeds"] is None
    assert one["personal: local test"] == 100


def test_comparison_of_runs_without_evaluation_still_tells_the_cost(make_run):
    folder = make_run("a", [1.0])
    folder.truncate(0)
    folder.append({"round": 1, "seconds": 2.0, "clients": []})
    assert comparison({"A": folder}) == [{"method": "A", "rounds": 1, "seconds a round": 2.0}]
    assert comparison({}) == []


def test_comparison_by_the_weighted_mean_says_so(make_run):
    folder = make_run("a", [0.5, 0.7])
    record = folder.records()[-1]
    record["models"]["personal"]["test"]["accuracy"] = summarize([0.5, 0.7], [3, 1])
    folder.truncate(3)
    folder.append(record)
    (row,) = comparison({"A": folder}, statistic="weighted_mean")
    assert row["personal: weighted local test"] == row["best on test"] == pytest.approx(55)
    assert "personal: local test" not in row


def test_comparison_shows_new_clients_apart(make_run):
    folder = make_run("a", [0.5, 0.7])
    last = folder.records()[-1]
    late = {"personal": {"test": {"accuracy": summarize([0.1, 0.3])}}}
    folder.append({"round": 5, "stage": "personalized", "models": last["models"], "new_clients": late})
    row, other = comparison({"A": folder, "B": make_run("b", [0.5])})
    assert row["personal: new clients"] == pytest.approx(20)
    assert row["personal: local test"] == pytest.approx(60)
    assert other["personal: new clients"] is None
    assert "global: new clients" not in row


@pytest.mark.parametrize(("spent", "cell"), [([3.0, 5.0], Spread(4.0, 2**0.5)), ([math.inf, math.inf], math.inf)])
def test_comparison_shows_the_privacy_that_was_spent(make_run, spent, cell):
    runs = [make_run(f"s{seed}", [1.0]) for seed in range(2)]
    for folder, epsilon in zip(runs, spent, strict=True):
        folder.append({"round": 5, "stage": "personalized", "clients": [], "training": {"epsilon": epsilon}})
    (row,) = comparison({"A": runs})
    assert row["epsilon"] == (pytest.approx(cell) if isinstance(cell, Spread) else cell)


def test_tails_are_the_lowest_and_top_five_per_cent_of_each_model(make_run):
    clients = [k / 40 for k in range(1, 41)]  # 5 % are two
    runs = {
        "PLGU": [make_run("p", clients), make_run("q", [a / 2 for a in clients])],
        "FedSAM": make_run("f", clients, models=["global"]),
    }
    first, second = tails(runs)
    assert list(first) == [
        "method",
        *(f"{m}: {c}" for m in ("personal", "global") for c in ("mean", "lowest 5 %", "top 5 %")),
        "clients",
    ]
    assert first["clients"] == second["clients"] == 40
    assert first["personal: lowest 5 %"].mean == pytest.approx(100 * 0.75 * 1.5 / 40)
    assert first["global: top 5 %"].std == pytest.approx(100 * 39.5 / 40 / 2 / 2**0.5)
    assert second["personal: mean"] is None
    assert [second[f"global: {c}"] for c in ("mean", "lowest 5 %", "top 5 %")] == pytest.approx([51.25, 3.75, 98.75])


def test_per_user_is_persfls_table(make_run):
    # Table 2 of PersFL, DS-1, column PersFL: printed below it are 81.9 and 4.9.
    printed = [85.5, 78.2, 82.2, 82.1, 79.4, 77.1, 75.6, 79.7, 87.7, 91.0]
    (row,) = per_user({"PersFL": make_run("p", [a / 100 for a in printed])})
    assert list(row) == ["method", *(f"user {k}" for k in range(10)), "mean", "std", "variance"]
    assert [row[f"user {k}"] for k in range(10)] == pytest.approx(printed)
    assert (round(row["mean"], 1), round(row["std"], 1)) == (81.9, 4.9)
    assert row["variance"] == pytest.approx(row["std"] ** 2)


def test_per_user_averages_the_seeds_of_each_user(make_run):
    (row,) = per_user({"A": [make_run("a", [0.2, math.nan]), make_run("b", [0.4, 0.5])]})
    assert (row["user 0"], row["user 1"], row["mean"]) == pytest.approx((30, 50, 40))


def test_users_that_joined_late_stand_after_the_means_of_the_others(make_run):
    runs = {"A": [make_run("a", [0.2, 0.4, 0.9]), make_run("b", [0.4, 0.6, 0.7])]}
    for folder in runs["A"]:
        folder.write_clients([{**row, "new": row["client"] == 2} for row in folder.clients()])
    (row,) = per_user(runs)
    assert list(row) == ["method", "user 0", "user 1", "mean", "std", "variance", "new user 2"]
    assert (row["mean"], row["new user 2"]) == pytest.approx((40, 80))


def test_per_user_shows_fedavg_by_its_global_model_and_any_other_column(make_run):
    runs = {"FedAvg": make_run("f", [0.5], models=["global"]), "PersFL": make_run("p", [0.75, 1.0])}
    fedavg, persfl = per_user(runs)
    assert fedavg["user 0"] == 50
    assert math.isnan(fedavg["std"])
    assert list(persfl) == ["method", "user 0", "user 1", "mean", "std", "variance"]
    assert per_user(runs, "lambda")[1]["user 1"] == 0.5  # not in per cent
    with pytest.raises(ValueError, match=r"no column 'temperature'; it has client, global/test/accuracy, lambda"):
        per_user(runs, "temperature")


def test_the_deviation_is_of_a_sample_and_none_where_rounding_alone_tells_numbers_apart():
    assert deviation([1.0, 3.0]) == pytest.approx(2**0.5)
    third = 100 * 34 / 35
    assert np.std([third, third, np.nextafter(third, 0)], ddof=1) > 0
    assert deviation([third, third, np.nextafter(third, 0)]) == 0
    assert deviation([0.0, 0.0]) == 0
    assert math.isnan(deviation([5.0])) and math.isnan(deviation([5.0, math.nan]))


def test_a_table_that_is_too_wide_is_several_which_keep_the_first_column_and_pairs():
    columns = [name for k in range(6) for name in (f"DS-1 method {k}", f"DS-1 method {k}, paper")]
    rows = [{"": f"User {user}", **{name: 90.0 + place for place, name in enumerate(columns)}} for user in range(3)]
    parts = [part.splitlines() for part in in_parts(rows).split("\n\n")]
    assert len(parts) > 1 and max(len(line) for part in parts for line in part) <= 100
    headings = [[cell.strip() for cell in part[0].split("|")[1:-1]] for part in parts]
    assert all(names[0] == "" and len(names) % 2 == 1 for names in headings)
    assert [name for names in headings for name in names[1:]] == columns
    assert all(part[2].startswith("| User 0 ") and len(part) == 5 for part in parts)
    assert in_parts(rows[:1]) and in_parts([{"": "a", "b": 1.0}]) == table([{"": "a", "b": 1.0}])
