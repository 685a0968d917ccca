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
    return [text.get_text() for text in axes.get_legend().get_texts()]


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
    assert legend(axes) == ["A"]
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
    assert first.texts[0].get_text() == "lowest 5 % 55.0   mean 65.0   top 5 % 75.0"
    (row,) = table_of_tails({"PLGU": seeds})
    cells = [row[f"personal: {column}"].mean for column in ("lowest 5 %", "mean", "top 5 %")]
    assert cells == pytest.approx([55, 65, 75])
    assert (tmp_path / "density.png").read_bytes().startswith(PNG)


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
