"""Static and dynamic shared memory: one copy a block, poisoned before each."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

SEEDS = range(20)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_a_block_sum_over_static_shared_memory_is_right_in_every_order(
    reordered_emulator: ModuleType, dtype: type
) -> None:
    x: npt.NDArray[Any] = np.random.default_rng(0).integers(-100, 100, 64 * 9).astype(dtype)
    sums = reordered_emulator.selftest.sum_blocks(x)
    assert sums.dtype == dtype
    np.testing.assert_array_equal(sums, x.reshape(9, 64).sum(axis=1))


def test_a_missing_block_barrier_gives_a_wrong_sum_for_some_seed(emulator: ModuleType) -> None:
    x = np.arange(64 * 4, dtype=np.float32)
    expected = x.reshape(4, 64).sum(axis=1)
    outcomes: dict[bool, list[bool]] = {True: [], False: []}
    for seed in SEEDS:
        for barriers, results in outcomes.items():
            emulator.set_seed(seed)
            results.append(np.array_equal(emulator.selftest.sum_blocks(x, barriers=barriers), expected))
    assert all(outcomes[True])
    assert not all(outcomes[False])


def test_a_missing_warp_barrier_gives_a_wrong_result_for_some_seed(emulator: ModuleType) -> None:
    x = np.arange(32, dtype=np.int32)
    outcomes: dict[bool, list[bool]] = {True: [], False: []}
    for seed in SEEDS:
        for barriers, results in outcomes.items():
            emulator.set_seed(seed)
            results.append(np.array_equal(emulator.selftest.reverse_warp(x, barriers), x[::-1]))
    assert all(outcomes[True])
    assert not all(outcomes[False])


def test_dynamic_shared_memory_is_one_copy_for_each_block(reordered_emulator: ModuleType) -> None:
    x = np.random.default_rng(1).normal(size=48 * 5)
    reversed_blocks = reordered_emulator.selftest.reverse_blocks(x, 48, 48 * 8)
    np.testing.assert_array_equal(reversed_blocks, x.reshape(5, 48)[:, ::-1].ravel())


def test_shared_memory_is_poisoned_before_every_block(reordered_emulator: ModuleType) -> None:
    # Each block writes 7 after it has read, so that a block which inherited memory from another would see it.
    for _ in range(2):
        floats, doubles, integers = reordered_emulator.selftest.read_shared_before_writing(3)
        assert np.isnan(floats).all()
        assert np.isnan(doubles).all()
        np.testing.assert_array_equal(integers, -1)


def test_shared_memory_up_to_the_limits_is_accepted(emulator: ModuleType) -> None:
    emulator.selftest.launch_nothing((1, 1, 1), (1, 1, 1), dynamic_shared_bytes=227 * 1024)
    assert emulator.selftest.write_static_shared(48 * 1024, 100 * 1024) == 1


def test_too_much_shared_memory_is_refused(emulator: ModuleType) -> None:
    with pytest.raises(
        emulator.EmulatorError, match="232449 bytes of dynamic shared memory exceed the limit of 232448"
    ):
        emulator.selftest.launch_nothing((1, 1, 1), (1, 1, 1), dynamic_shared_bytes=227 * 1024 + 1)
    with pytest.raises(emulator.EmulatorError, match="51200 bytes of static shared memory"):
        emulator.selftest.write_static_shared(50 * 1024, 0)
    with pytest.raises(emulator.EmulatorError, match=r"40960 bytes of static .* 204800 dynamic"):
        emulator.selftest.write_static_shared(40 * 1024, 200 * 1024)
