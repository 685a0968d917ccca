"""The sharpness and proximal families: every contestant computes the same, and a wrong one is found out."""

from __future__ import annotations

import pytest
import torch

from pfl_ext.benchmarks import proximal, sharpness
from pfl_ext.benchmarks.case import Grid, WrongResult

FAMILIES = [sharpness.FAMILY, proximal.FAMILY]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_every_contestant_gives_the_expected_result(family, dtype):
    specs = family.plan(Grid(shapes=("lenet",), dtypes=(dtype,), threads=(1,)))
    assert {spec.op for spec in specs} == set(family.ops)
    for case in family.cases(specs):
        with torch.no_grad():
            for contestant in case.contestants:
                case.check(contestant, contestant.run())
        assert case.contestants[0].kind == "ours"
        assert {"naive", "skilled"} <= {c.kind for c in case.contestants}


def test_a_contestant_that_perturbs_by_something_else_is_found_out(monkeypatch):
    monkeypatch.setattr(sharpness.opponents, "foreach_perturb", lambda params, *_: [w.clone() for w in params])
    with pytest.raises(WrongResult, match="_foreach"):
        list(sharpness.FAMILY.cases(sharpness.FAMILY.plan(Grid(shapes=("lenet",), threads=(1,)))))


def test_a_contestant_that_steps_elsewhere_is_found_out(monkeypatch):
    monkeypatch.setattr(proximal.opponents, "foreach_step", lambda params, *_: params)
    with pytest.raises(WrongResult, match="_foreach"):
        list(proximal.FAMILY.cases(proximal.FAMILY.plan(Grid(shapes=("lenet",), threads=(1,)))))
