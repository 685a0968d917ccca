"""How a launch is laid out, ordered, limited and counted."""

from __future__ import annotations

import itertools
import time
from types import ModuleType

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("grid", "block"),
    [((1, 1, 1), (1, 1, 1)), ((3, 1, 1), (70, 1, 1)), ((2, 3, 4), (5, 3, 2)), ((1, 2, 1), (1, 1, 64))],
)
def test_every_thread_sees_its_own_indices(
    emulator: ModuleType, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    rows = emulator.selftest.record_indices(grid, block)
    expected = [
        [*reversed(thread), *reversed(place), *block, *grid, 32]
        for place in itertools.product(*map(range, reversed(grid)))
        for thread in itertools.product(*map(range, reversed(block)))
    ]
    np.testing.assert_array_equal(rows, expected)


def test_arguments_are_copied_for_each_thread(emulator: ModuleType) -> None:
    np.testing.assert_array_equal(emulator.selftest.count_in_argument(41, 3, 33), np.full(99, 42))


def test_order_of_execution_depends_on_the_seed_alone(emulator: ModuleType) -> None:
    def order(seed: int) -> list[list[int]]:
        emulator.set_seed(seed)
        return [emulator.selftest.record_order(5, 40).tolist() for _ in range(2)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    first, second = order(1)
    assert first != second, "launches after one set_seed differ from one another"
    assert sorted(first) == list(range(200))


def test_blocks_and_threads_run_out_of_order(emulator: ModuleType) -> None:
    emulator.set_seed(0)
    order = emulator.selftest.record_order(16, 64)
    blocks = order // 64
    assert list(dict.fromkeys(blocks.tolist())) != sorted(set(blocks.tolist()))
    assert any(np.any(np.diff(order[blocks == block].astype(int)) < 0) for block in range(16))


def test_launches_are_counted(emulator: ModuleType) -> None:
    emulator.reset_launch_count()
    assert emulator.launch_count() == 0
    for _ in range(3):
        emulator.selftest.launch_nothing((2, 1, 1), (32, 1, 1))
    assert emulator.launch_count() == 3
    emulator.reset_launch_count()
    assert emulator.launch_count() == 0


def test_a_refused_launch_is_not_counted(emulator: ModuleType) -> None:
    emulator.reset_launch_count()
    with pytest.raises(emulator.EmulatorError):
        emulator.selftest.launch_nothing((0, 1, 1), (32, 1, 1))
    assert emulator.launch_count() == 0


@pytest.mark.parametrize("block", [(1024, 1, 1), (1, 1024, 1), (16, 1, 64), (8, 16, 8)])
def test_largest_blocks_are_accepted(emulator: ModuleType, block: tuple[int, int, int]) -> None:
    emulator.selftest.launch_nothing((1, 1, 1), block)


@pytest.mark.parametrize(
    ("grid", "block", "reason"),
    [
        ((0, 1, 1), (1, 1, 1), "no dimension may be 0"),
        ((1, 1, 1), (32, 0, 1), "no dimension may be 0"),
        ((1, 1, 1), (1025, 1, 1), "a block is at most"),
        ((1, 1, 1), (1, 1, 65), "a block is at most"),
        ((1, 1, 1), (32, 33, 1), "at most 1024 threads, not 1056"),
        ((2**31, 1, 1), (1, 1, 1), "a grid is at most"),
        ((1, 65536, 1), (1, 1, 1), "a grid is at most"),
        ((1, 1, 65536), (1, 1, 1), "a grid is at most"),
    ],
)
def test_a_configuration_that_cuda_refuses_is_refused(
    emulator: ModuleType, grid: tuple[int, int, int], block: tuple[int, int, int], reason: str
) -> None:
    with pytest.raises(emulator.EmulatorError, match=reason):
        emulator.selftest.launch_nothing(grid, block)


def test_kernel_arguments_are_limited_to_32764_bytes(emulator: ModuleType) -> None:
    emulator.selftest.launch_with_largest_arguments()
    with pytest.raises(emulator.EmulatorError, match="32765 bytes of kernel arguments exceed the limit of 32764"):
        emulator.selftest.launch_with_too_large_arguments()


def test_intrinsics_do_not_work_outside_a_kernel(emulator: ModuleType) -> None:
    with pytest.raises(emulator.EmulatorError, match="__syncthreads was called outside a kernel"):
        emulator.selftest.synchronize_outside_a_kernel()


def test_a_kernel_cannot_launch_a_kernel(emulator: ModuleType) -> None:
    with pytest.raises(emulator.EmulatorError, match="cannot launch"):
        emulator.selftest.launch_within_kernel()


def test_a_failing_thread_unwinds_all_threads_of_its_block(emulator: ModuleType) -> None:
    for seed in range(5):
        emulator.set_seed(seed)
        with pytest.raises(emulator.EmulatorError, match="__trap"):
            emulator.selftest.fail_with_live_objects(True)
        assert emulator.selftest.live_objects() == 0
    emulator.selftest.fail_with_live_objects(False)
    assert emulator.selftest.live_objects() == 0


def test_an_error_names_the_line_and_the_place_in_the_launch(emulator: ModuleType) -> None:
    emulator.set_seed(7)
    with pytest.raises(emulator.EmulatorError) as caught:
        emulator.selftest.fail_with_live_objects(True)
    message = str(caught.value)
    assert "__trap at csrc/emulator/selftest.cpp:" in message
    assert "fail_with_live_objects" in message
    assert "thread (5,0,0) of block (1,0,0), launched as grid (3,1,1) x block (64,1,1)" in message
    assert "launch 1 after set_seed(7)" in message


def test_half_a_million_threads_pass_five_barriers_in_seconds(emulator: ModuleType) -> None:
    start = time.perf_counter()
    emulator.selftest.wait_at_barriers(2000, 256, 5)
    # Measured on one core: 0.25 s optimised, 1 s sanitized. The bound leaves room for a busy machine, not for a
    # scheduler that is quadratic in the threads.
    assert time.perf_counter() - start < 15
