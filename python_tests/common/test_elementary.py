"""csrc/common/elementary.h, reached through the emulator's module: errors in units in the last place."""

from __future__ import annotations

import numpy as np
import pytest

# What the header states.
LIMIT = 1.5


def units(actual, exact, dtype):
    return np.max(
        np.abs(actual.astype(np.longdouble) - exact) / np.spacing(np.abs(exact).astype(dtype)).astype(np.longdouble)
    )


def samples(low, high, dtype, count=400_000):
    generator = np.random.default_rng(0)
    return np.concatenate([generator.uniform(low, high, count), np.linspace(low, high, 10_001)]).astype(dtype)


@pytest.mark.parametrize(("dtype", "smallest"), [(np.float32, -87.0), (np.float64, -708.0)])
def test_exp_is_within_its_stated_error(emulator, dtype, smallest):
    for low in (smallest, -1.0, -1e-3):
        x = samples(low, 0, dtype)
        assert units(emulator.exp_nonpositive(x), np.exp(x.astype(np.longdouble)), dtype) <= LIMIT


def test_exp_of_every_float_in_four_octaves(emulator):
    for octave in (-64.0, -8.0, -1.0, -0.25):
        first = np.float32(octave).view(np.uint32)
        x = np.arange(first, first + 2**23, 7, dtype=np.uint32).view(np.float32)
        x = x[x >= -87]
        assert units(emulator.exp_nonpositive(x), np.exp(x.astype(np.longdouble)), np.float32) <= LIMIT


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_at_the_ends(emulator, dtype):
    x = np.array([0.0, -0.0, -np.inf, np.nan, -1e30, -1000.0], dtype)
    assert np.array_equal(emulator.exp_nonpositive(x), np.array([1, 1, 0, np.nan, 0, 0], dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_is_within_its_stated_error(emulator, dtype):
    limits = np.finfo(dtype)
    x = np.concatenate([samples(0.5, 2, dtype), samples(1, 1e5, dtype), np.exp(samples(-80, 80, dtype))])
    x = np.append(x, [limits.smallest_normal, limits.max, 1 - limits.epsneg, 1 + limits.eps]).astype(dtype)
    x = x[x != 1]
    assert units(emulator.log_positive(x), np.log(x.astype(np.longdouble)), dtype) <= LIMIT
    ends = np.array([1, np.inf, np.nan], dtype)
    assert np.array_equal(emulator.log_positive(ends), np.array([0, np.inf, np.nan], dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_of_one_plus_a_small_number_keeps_it(emulator, dtype):
    x = np.concatenate([samples(0, 1, dtype), np.exp(samples(-80, 0, dtype))]).astype(dtype)
    x = x[x > 0]
    assert units(emulator.log_one_plus(x), np.log1p(x.astype(np.longdouble)), dtype) <= 2.5
    assert emulator.log_one_plus(np.zeros(1, dtype))[0] == 0
