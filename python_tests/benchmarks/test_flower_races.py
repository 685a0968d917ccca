"""The race of strategies needs Flower, and says so where it is not installed."""

from __future__ import annotations

import importlib.util

import pytest

from pfl_ext.benchmarks import flower
from pfl_ext.benchmarks.case import Case, Grid


def test_both_strategies_give_the_average() -> None:
    if importlib.util.find_spec("flwr") is None:
        with pytest.raises(ImportError, match="Flower is not installed here"):
            next(flower.FAMILY.cases(flower.FAMILY.plan(Grid(quick=True))))
        return
    (case,) = flower.FAMILY.cases(flower.FAMILY.plan(Grid(shapes=("lenet",), clients=(3,), threads=(1,))))
    assert isinstance(case, Case)
    assert [contestant.kind for contestant in case.contestants] == ["ours", "naive"]
    for contestant in case.contestants:
        case.check(contestant, contestant.run())
