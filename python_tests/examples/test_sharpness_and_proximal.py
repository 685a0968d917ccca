"""The examples run, and show what they say."""

from __future__ import annotations

import pytest
from example_files import load_example


def test_lwsam_example_learns():
    assert all(accuracy > 0.9 for accuracy in load_example("sharpness_lwsam").main())


def test_ditto_example_holds_the_personal_models_near_the_global_one():
    example = load_example("proximal_ditto")
    near, far = example.main(lam=2.0), example.main(lam=0.0)
    # The middle client's line is the average: it has nowhere to go.
    assert near[0] < 0.5 * far[0] and near[2] < 0.5 * far[2]
    assert far[0] == pytest.approx(1.0, abs=0.2)
