"""Barriers of a block, and what is reported when its threads do not meet."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest


@pytest.mark.parametrize("block", [1, 32, 50])
def test_voting_barriers_count_the_predicates_of_the_block(reordered_emulator: ModuleType, block: int) -> None:
    predicates = np.random.default_rng(block).integers(0, 3, (6, block)).astype(np.int32)
    predicates[0], predicates[1] = 0, 2  # no thread, and all of them
    votes = reordered_emulator.selftest.vote_in_block(predicates.ravel(), block).reshape(6, block, 3)
    holds = predicates != 0
    for place in range(6):
        expected = [holds[place].sum(), holds[place].all(), holds[place].any()]
        np.testing.assert_array_equal(votes[place], np.tile(expected, (block, 1)))


def test_a_thread_that_exits_before_a_barrier_is_reported(reordered_emulator: ModuleType) -> None:
    with pytest.raises(reordered_emulator.EmulatorError) as caught:
        reordered_emulator.selftest.exit_before_barrier(3, 64)
    message = str(caught.value)
    assert "__syncthreads at csrc/emulator/selftest.cpp:" in message
    assert "divergent barrier: thread (0,0,0) exited without reaching it" in message
    assert "3 threads exited: (0,0,0) (1,0,0) (2,0,0)\n" in message
    assert "61 threads waiting at __syncthreads" in message
    assert "thread (3,0,0) of block" in message


def test_threads_that_all_reach_the_barrier_pass(reordered_emulator: ModuleType) -> None:
    reordered_emulator.selftest.exit_before_barrier(0, 64)


def test_a_block_that_exits_as_a_whole_before_a_barrier_passes(reordered_emulator: ModuleType) -> None:
    reordered_emulator.selftest.exit_before_barrier(64, 64)


def test_threads_at_barriers_in_different_branches_are_reported(reordered_emulator: ModuleType) -> None:
    with pytest.raises(
        reordered_emulator.EmulatorError, match="divergent barrier: another thread of the block"
    ) as caught:
        reordered_emulator.selftest.barrier_in_two_branches(True)
    assert str(caught.value).count("32 threads waiting at __syncthreads at csrc/emulator/selftest.cpp:") == 2


def test_threads_at_a_barrier_in_the_same_branch_pass(reordered_emulator: ModuleType) -> None:
    reordered_emulator.selftest.barrier_in_two_branches(False)


def test_a_thread_that_polls_for_what_never_comes_is_reported(emulator: ModuleType) -> None:
    with pytest.raises(emulator.EmulatorError, match="livelock") as caught:
        emulator.selftest.poll_flag(False)
    assert "selftest.cpp" in str(caught.value)


def test_a_thread_that_polls_for_another_thread_of_its_block_continues(reordered_emulator: ModuleType) -> None:
    reordered_emulator.selftest.poll_flag(True)
