"""Pictures in panels: what stands below and above the axes can be read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pfl_ext.reports import lines, panels


@pytest.mark.parametrize("count", [1, 3])
def test_long_names_of_columns_stay_apart_and_a_long_title_in_the_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int
) -> None:
    pytest.importorskip("matplotlib")
    saved: list[Any] = []
    monkeypatch.setattr(panels, "_save", lambda figure, path: saved.append(figure))
    columns = ["D = 0", "D = 1", *(f"D = {d} (here {'layers' if count == 1 else 'D'} = 2)" for d in (5, 10, 23))]
    points = [(column, float(i)) for i, column in enumerate(columns)]
    lines({f"User {k}": {"mean": points} for k in range(count)}, tmp_path / "x.png", "a title of words " * 8)
    (figure,) = saved
    figure.draw_without_rendering()
    for axes in figure.axes:
        extents = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert len(extents) == len(columns) and all(a.x1 < b.x0 for a, b in pairwise(extents))
    assert figure._suptitle.get_window_extent().x1 <= figure.bbox.x1
