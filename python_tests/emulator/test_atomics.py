"""Atomics: no update is lost, whatever the order."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

INTEGERS = [np.int32, np.uint32, np.uint64]
ALL = [*INTEGERS, np.float32, np.float64]

# Operations whose outcome does not depend on the order.
FOLDS: list[tuple[str, type, Callable[[Any, Any], Any]]] = [
    *(("add", dtype, operator.add) for dtype in ALL),
    *(("sub", dtype, operator.sub) for dtype in (np.int32,)),
    *(("min", dtype, min) for dtype in INTEGERS),
    *(("max", dtype, max) for dtype in INTEGERS),
    *(("and", dtype, operator.and_) for dtype in INTEGERS),
    *(("or", dtype, operator.or_) for dtype in INTEGERS),
    *(("xor", dtype, operator.xor) for dtype in INTEGERS),
]


@pytest.mark.parametrize(("name", "dtype", "fold"), FOLDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_update_is_lost(
    reordered_emulator: ModuleType, name: str, dtype: type, fold: Callable[[Any, Any], Any]
) -> None:
    operands: npt.NDArray[Any] = np.random.default_rng(3).integers(1, 1000, 96).astype(dtype)
    result, before = reordered_emulator.selftest.atomics(name, dtype(500).item(), operands)
    assert result == functools.reduce(fold, operands.tolist(), dtype(500).item())
    assert dtype(500) in before


@pytest.mark.parametrize("dtype", ALL[:-1])
def test_an_exchange_returns_what_another_thread_left(reordered_emulator: ModuleType, dtype: type) -> None:
    operands: npt.NDArray[Any] = np.arange(1, 65).astype(dtype)
    last, before = reordered_emulator.selftest.atomics("exch", dtype(0).item(), operands)
    assert sorted([*before.tolist(), last]) == list(range(65))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_one_thread_wins_a_compare_and_swap(reordered_emulator: ModuleType, dtype: type) -> None:
    operands: npt.NDArray[Any] = np.arange(1, 65).astype(dtype)
    winner, before = reordered_emulator.selftest.atomics("cas", 0, operands)
    assert winner in operands
    assert np.count_nonzero(before == 0) == 1
    assert before[winner - 1] == 0


def test_signed_addition_wraps_around_as_on_the_device(emulator: ModuleType) -> None:
    result, _ = emulator.selftest.atomics("add", 2**31 - 1, np.ones(1, dtype=np.int32), block=1)
    assert result == -(2**31)


def test_increment_and_decrement_turn_over_at_their_limit(emulator: ModuleType) -> None:
    result, before = emulator.selftest.atomics("inc", 0, np.full(32, 9, dtype=np.uint32))
    assert result == 32 % 10
    assert sorted(before.tolist()) == sorted(i % 10 for i in range(32))
    result, before = emulator.selftest.atomics("dec", 9, np.full(32, 9, dtype=np.uint32))
    assert result == 9 - 32 % 10
    assert sorted(before.tolist()) == sorted(i % 10 for i in range(9, -23, -1))


def test_atomics_on_shared_memory_count_all_threads(reordered_emulator: ModuleType) -> None:
    values = np.random.default_rng(4).integers(0, 8, 500).astype(np.int32)
    np.testing.assert_array_equal(reordered_emulator.selftest.histogram(values), np.bincount(values, minlength=8))


def test_an_update_made_of_two_atomics_loses_counts_for_some_seed(emulator: ModuleType) -> None:
    counts = []
    for seed in range(10):
        emulator.set_seed(seed)
        counts.append(emulator.selftest.count_with_two_atomics(64))
    assert min(counts) < 64
