from __future__ import annotations

import sys

import pytest

from pfl_ext.reports import accuracy_curves, client_density, client_distribution, plots
from pfl_ext.reports import tails as table_of_tails

PNG = b"\x89PNG"


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the figures that were saved."""
    pytest.importorskip("matplotlib")
    saved = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (saved.append(figure.axes[0]), save(figure, path)))
    return saved


def legend(axes) -> list[str]:
    (found,) = axes.figure.legends
    return [text.get_text() for text in found.get_texts()]


def title(axes) -> str:
    return axes.figure.get_suptitle()


def test_curves_show_each_model_of_each_method_in_per_cent(make_run, drawn, tmp_path):
    runs = {"PersFL": make_run("p", [0.5, 0.7]), "$Fed_Avg$": make_run("f", [0.4], models=["global"])}
    accuracy_curves(runs, tmp_path / "curves.png")
    (axes,) = drawn
    assert legend(axes) == ["PersFL, personal", "PersFL, global", r"\$Fed_Avg\$, global", "best by validation"]
    line = axes.get_lines()[0]
    assert list(line.get_xdata()) == [1, 4]
    assert list(line.get_ydata()) == pytest.approx([30, 60])
    assert axes.get_xlabel() == "round"
    assert axes.get_ylabel() == "accuracy: mean over the clients' test sets (%)"
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)
    assert not list(tmp_path.glob(".tmp*"))


def test_several_seeds_are_a_mean_with_a_band(make_run, drawn, tmp_path):
    accuracy_curves({"A": [make_run("a", [0.4], ["global"]), make_run("b", [0.6], ["global"])]}, tmp_path / "x.svg")
    (axes,) = drawn
    (line,) = axes.get_lines()
    assert list(line.get_ydata()) == pytest.approx([25, 50])
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((25 - 50**0.5, 50 + 200**0.5))
    assert legend(axes) == ["A"] and title(axes).endswith("; mean of 2 seeds, band: one standard deviation")
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_the_density_counts_every_client_of_all_seeds(make_run, drawn, tmp_path):
    seeds = [make_run("a", [0.9, 0.5, float("nan"), 0.7]), make_run("b", [0.6, 0.6])]
    client_density({"PLGU": seeds, "FedAvg": make_run("f", [0.4, 0.4], models=["global"])}, tmp_path / "density.png")
    first, second = drawn[0].figure.axes
    assert first.get_ylabel() == "PLGU" and second.get_ylabel() == "FedAvg, global"
    (bars,) = first.patches
    assert bars.get_data().values.sum() == 5
    curve, mean, tails = first.get_lines()
    # The curve has the area of the bars but for what lies beyond the edges.
    width = bars.get_data().edges[1] - bars.get_data().edges[0]
    area = ((curve.get_ydata()[1:] + curve.get_ydata()[:-1]) / 2 * (curve.get_xdata()[1] - curve.get_xdata()[0])).sum()
    assert 0.7 * 5 * width < area <= 5 * width
    # Means over the seeds, not of all clients together: the same words are the same numbers in a table.
    assert mean.get_xdata()[0] == pytest.approx(65)
    assert list(tails.get_xdata()) == pytest.approx([55, 75])
    assert first.texts[0].get_text() == "lowest 5 % 55.0\nmean 65.0\ntop 5 % 75.0"
    (row,) = table_of_tails({"PLGU": seeds})
    cells = [row[f"personal: {column}"].mean for column in ("lowest 5 %", "mean", "top 5 %")]
    assert cells == pytest.approx([55, 65, 75])
    assert (tmp_path / "density.png").read_bytes().startswith(PNG)


def test_seeds_are_together_only_where_the_title_says_so(make_run, drawn, tmp_path):
    seeds = {"A": [make_run("a", [0.4, 0.5]), make_run("b", [0.6, 0.7])]}
    one = {"A": make_run("c", [0.4, 0.5])}
    for draw in (client_distribution, client_density):
        draw(seeds, tmp_path / "x.png")
        draw(one, tmp_path / "y.png")
    assert [title(axes) for axes in drawn] == [
        "Accuracy of the clients of 2 seeds together",
        "Accuracy of the clients",
    ] * 2
    accuracy_curves(one, tmp_path / "z.png")
    assert title(drawn[-1]) == "Accuracy over the rounds"


def test_thirty_methods_differ_in_two_ways_and_lie_on_nothing(make_run, drawn, tmp_path):
    styles = [plots._style(place) for place in range(30)]
    looks = [(style["color"], style["marker"], style["markerfacecolor"]) for style in styles]
    for i, one in enumerate(looks):
        assert all(one[0] != other[0] or (one[1] != other[1] and one[2] != other[2]) for other in looks[:i])
    runs = {f"method {k}": make_run(f"m{k}", [0.3 + k / 60, 0.4 + k / 60]) for k in range(30)}
    for draw in (accuracy_curves, client_distribution):
        draw(runs, tmp_path / "many.png")
        figure = drawn[-1].figure
        (shown,) = figure.legends
        assert len(shown.get_texts()) == 30
        boxes = [axes.get_tightbbox() for axes in figure.axes] + [
            shown.get_window_extent(),
            figure._suptitle.get_window_extent(),
        ]
        assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
        whole = figure.bbox.padded(1)
        assert all(whole.containsx(box.x0) and whole.containsx(box.x1) and whole.containsy(box.y1) for box in boxes)
    assert [axes.get_title("left") for axes in drawn[-2].figure.axes] == ["personal model", "global model"]


def test_a_curve_below_another_is_wider(make_run, drawn, tmp_path):
    same = {name: make_run(name, [0.4, 0.6], ["global"]) for name in ("A", "B", "C")}
    accuracy_curves({**same, "D": make_run("D", [0.1, 0.2], ["global"])}, tmp_path / "x.png")
    a, b, c, d = (line.get_linewidth() for line in drawn[-1].get_lines()[::2])
    assert a > b + 2 and b > c + 2 and abs(c - d) < 1
    client_distribution(same, tmp_path / "y.png")
    widths = [line.get_linewidth() for line in drawn[-1].get_lines()[::2]]
    assert widths[0] > widths[1] + 2 > widths[2] + 4


def test_what_clients_do_after_the_last_round_is_no_round(make_run, drawn, tmp_path):
    folder = make_run("p", [0.5, 0.7], ["global"])
    last = folder.records()[-1]
    models = {"personal": last["models"]["global"], "global": last["models"]["global"]}
    folder.append({**last, "round": 5, "stage": "personalized", "models": models})
    accuracy_curves({"PersFL": folder}, tmp_path / "x.png")
    (axes,) = drawn
    assert list(axes.get_xticks()) == [1, 2, 3, 4]
    assert [text.get_text() for text in axes.texts] == ["after the last round"]
    (curve,) = (line for line in axes.get_lines() if list(line.get_xdata()) == [1, 4])
    assert list(curve.get_ydata()) == pytest.approx([30, 60])
    marks = [line.get_xdata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 1 and line.get_xdata()[0] > 4]
    assert len(marks) == 1 and 4 < marks[0] < 5  # the global model is as it was in the last round
    assert legend(axes) == ["PersFL, personal", "PersFL, global", "best by validation"]


def test_equal_clients_have_a_density_too(make_run, drawn, tmp_path):
    client_density({"A": make_run("a", [0.5, 0.5])}, tmp_path / "density.png")
    (axes,) = drawn
    assert all(0 <= y < 10 for y in axes.get_lines()[0].get_ydata())


def test_a_density_of_nobody_is_refused(make_run, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no client of A has one"):
        client_density({"A": make_run("a", [float("nan")])}, tmp_path / "density.png")


def test_the_distribution_goes_from_the_lowest_to_the_highest_client(make_run, drawn, tmp_path):
    runs = {"PersFL": make_run("p", [0.9, 0.5, float("nan"), 0.7]), "FedAvg": make_run("f", [0.4], models=["global"])}
    client_distribution(runs, tmp_path / "clients.png")
    (axes,) = drawn
    steps, marks = axes.get_lines()[:2]
    assert list(steps.get_ydata()) == pytest.approx([50, 70, 90, 90])
    assert list(steps.get_xdata()) == pytest.approx([0, 100 / 3, 200 / 3, 100])
    assert list(marks.get_ydata()) == pytest.approx([50, 90])
    assert legend(axes) == ["PersFL\nmean 70.00, std 16.33", "FedAvg, global\nmean 40.00, std 0.00"]
    assert (tmp_path / "clients.png").read_bytes().startswith(PNG)


def test_clients_that_joined_late_are_in_no_picture_of_clients_as_in_no_mean(make_run, drawn, tmp_path):
    folder = make_run("a", [0.9, 0.5, 0.1])
    folder.write_clients([{**row, "new": row["client"] == 2} for row in folder.clients()])
    client_distribution({"A": folder}, tmp_path / "clients.png")
    (axes,) = drawn
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([50, 90, 90])
    assert legend(axes) == ["A\nmean 70.00, std 20.00"]


def test_nothing_to_draw_is_said_and_no_file_is_made(make_run, drawn, tmp_path):
    folder = make_run("a", [float("nan")])
    folder.truncate(0)
    with pytest.raises(ValueError, match="no round of A has one"):
        accuracy_curves({"A": folder}, tmp_path / "x.png")
    with pytest.raises(ValueError, match="no client of A has one"):
        client_distribution({"A": folder}, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_without_matplotlib_the_message_says_what_to_install(make_run, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'pfl_ext\[plots\]'"):
        accuracy_curves({"A": make_run("a", [1.0])}, tmp_path / "x.png")
