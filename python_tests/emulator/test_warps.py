"""Shuffles and votes of a warp, and what is reported when its lanes do not meet."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

FULL_MASK = 0xFFFFFFFF
TYPES = [np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64]
WIDTHS = [1, 2, 4, 8, 16, 32]


def shuffle_source(kind: str, lane: int, argument: int, width: int) -> int:
    """The lane that a shuffle reads, after the pseudocode of shfl.sync in the PTX manual."""
    clamp = 0 if kind == "up" else 31
    segment_mask = 32 - width
    limit = (lane & segment_mask) | (clamp & ~segment_mask & 31)
    argument &= 31
    if kind == "up":
        source = lane - argument
        legal = source >= limit
    elif kind == "down":
        source = lane + argument
        legal = source <= limit
    elif kind == "xor":
        source = lane ^ argument
        legal = source <= limit
    else:
        source = (lane & segment_mask) | (argument & ~segment_mask & 31)
        legal = source <= limit
    return source if legal else lane


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["index", "up", "down", "xor"])
def test_a_shuffle_reads_the_lane_that_ptx_says(emulator: ModuleType, kind: str, width: int) -> None:
    x = np.arange(100, 132, dtype=np.int32)
    for argument in range(32):
        arguments = np.full(32, argument, dtype=np.int32)
        expected = [x[shuffle_source(kind, lane, argument, width)] for lane in range(32)]
        np.testing.assert_array_equal(emulator.selftest.shuffle(kind, FULL_MASK, x, arguments, width), expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_shuffle_moves_every_bit_of_its_type(reordered_emulator: ModuleType, dtype: type) -> None:
    rng = np.random.default_rng(2)
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        x = rng.integers(info.min, info.max, 64, dtype=dtype, endpoint=True)
    else:
        x = rng.normal(size=64).astype(dtype)
    arguments = rng.integers(-5, 40, 64).astype(np.int32)  # each lane may name another source
    lanes = np.arange(64)
    result = reordered_emulator.selftest.shuffle("index", FULL_MASK, x, arguments, 32)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, x[lanes // 32 * 32 + arguments % 32])


def test_shuffles_move_half_types(emulator: ModuleType) -> None:
    bits = np.arange(256, dtype=np.uint16) * 257
    swapped = bits.reshape(-1, 2)[:, ::-1].ravel()
    np.testing.assert_array_equal(emulator.numerics.half_of_neighbouring_lane(bits), swapped)
    np.testing.assert_array_equal(emulator.numerics.bfloat16_of_neighbouring_lane(bits), swapped)


@pytest.mark.parametrize("values", [np.zeros(32), np.ones(32), np.arange(-16, 16), np.arange(32) % 3])
def test_votes_and_reductions_see_all_lanes(reordered_emulator: ModuleType, values: npt.NDArray[np.float64]) -> None:
    x = values.astype(np.int32)
    result = reordered_emulator.selftest.vote_in_warp(x)
    lanes = np.uint64(1) << np.arange(32, dtype=np.uint64)
    all_equal = bool((x == x[0]).all())
    unsigned = x.view(np.uint32)
    for lane in range(32):
        expected = [
            lanes[x != 0].sum(),
            (x != 0).any(),
            (x != 0).all(),
            lanes[x == x[lane]].sum(),
            FULL_MASK if all_equal else 0,
            all_equal,
            np.uint32(x.sum() & FULL_MASK),
            np.int32(x.min()).view(np.uint32),
            np.int32(x.max()).view(np.uint32),
            np.bitwise_and.reduce(unsigned),
            np.bitwise_or.reduce(unsigned),
            np.bitwise_xor.reduce(unsigned),
        ]
        np.testing.assert_array_equal(result[lane], np.array(expected, dtype=np.uint32))


def test_activemask_promises_the_calling_lane_only(emulator: ModuleType) -> None:
    np.testing.assert_array_equal(emulator.selftest.activemask(), 1 << np.arange(32, dtype=np.uint32))


def test_lanes_outside_the_mask_need_not_take_part(reordered_emulator: ModuleType) -> None:
    x = np.arange(32, dtype=np.int32)
    result = reordered_emulator.selftest.shuffle("xor", 0x0000FFFF, x, np.full(32, 3, dtype=np.int32))
    np.testing.assert_array_equal(result[:16], x[:16] ^ 3)
    np.testing.assert_array_equal(result[16:], 0)


def test_two_halves_of_a_warp_may_synchronise_apart(reordered_emulator: ModuleType) -> None:
    masks = np.repeat(np.array([0x0000FFFF, 0xFFFF0000], dtype=np.uint32), 16)
    np.testing.assert_array_equal(reordered_emulator.selftest.ballot_with_masks(masks), masks)
    reordered_emulator.selftest.syncwarp_with_masks(masks)


def test_a_warp_that_is_not_full_may_name_the_lanes_it_has(reordered_emulator: ModuleType) -> None:
    masks = np.repeat(np.array([FULL_MASK, 0x0000FFFF], dtype=np.uint32), [32, 16])
    np.testing.assert_array_equal(reordered_emulator.selftest.ballot_with_masks(masks), masks)


def test_a_mask_that_names_a_lane_the_block_does_not_have_is_reported(reordered_emulator: ModuleType) -> None:
    with pytest.raises(reordered_emulator.EmulatorError, match=r"names lane 16, which does not exist.* has 16 threads"):
        reordered_emulator.selftest.ballot_with_masks(np.full(48, FULL_MASK, dtype=np.uint32))


def test_a_mask_that_names_an_exited_lane_is_reported(reordered_emulator: ModuleType) -> None:
    with pytest.raises(reordered_emulator.EmulatorError) as caught:
        reordered_emulator.selftest.exit_before_shuffle(2, 32)
    message = str(caught.value)
    assert "divergent warp: the mask 0xffffffff names lane 0, which has exited" in message
    assert "__shfl_xor_sync at csrc/emulator/selftest.cpp:" in message
    assert "2 threads exited: (0,0,0) (1,0,0)" in message
    assert "30 threads waiting at __shfl_xor_sync" in message


def test_a_shuffle_before_which_no_lane_exits_passes(reordered_emulator: ModuleType) -> None:
    result = reordered_emulator.selftest.exit_before_shuffle(0, 32)
    np.testing.assert_array_equal(result, np.arange(32) ^ 1)


def test_lanes_at_shuffles_in_different_branches_are_reported(reordered_emulator: ModuleType) -> None:
    with pytest.raises(reordered_emulator.EmulatorError, match="names lane 1, which is at __shfl_sync at csrc"):
        reordered_emulator.selftest.shuffle_in_two_branches(True)


def test_lanes_at_a_shuffle_in_the_same_branch_pass(reordered_emulator: ModuleType) -> None:
    np.testing.assert_array_equal(reordered_emulator.selftest.shuffle_in_two_branches(False), 0)


def test_a_lane_at_a_block_barrier_that_others_wait_for_in_the_warp_is_reported(reordered_emulator: ModuleType) -> None:
    with pytest.raises(reordered_emulator.EmulatorError, match="names lane 1, which waits at __syncthreads at csrc"):
        reordered_emulator.selftest.warp_and_block_barrier(True)


def test_a_warp_barrier_before_a_block_barrier_passes(reordered_emulator: ModuleType) -> None:
    reordered_emulator.selftest.warp_and_block_barrier(False)


def test_a_lane_outside_its_own_mask_is_reported(reordered_emulator: ModuleType) -> None:
    masks = np.full(32, 0x0000FFFF, dtype=np.uint32)
    with pytest.raises(reordered_emulator.EmulatorError, match=r"lane (1[6-9]|2.|3.) is not in its own mask 0xffff"):
        reordered_emulator.selftest.ballot_with_masks(masks)


def test_lanes_that_give_different_masks_are_reported(reordered_emulator: ModuleType) -> None:
    masks = np.full(32, FULL_MASK, dtype=np.uint32)
    masks[5] = 0x0000FFFF
    with pytest.raises(reordered_emulator.EmulatorError, match="lane 5, which is there with another mask, 0xffff"):
        reordered_emulator.selftest.ballot_with_masks(masks)


def test_lanes_that_wait_for_one_another_in_a_circle_are_reported(reordered_emulator: ModuleType) -> None:
    masks = np.array([0b011, 0b110, 0b101], dtype=np.uint32)
    with pytest.raises(reordered_emulator.EmulatorError, match="divergent warp") as caught:
        reordered_emulator.selftest.syncwarp_with_masks(masks)
    for mask, thread in (("0x3", "(0,0,0)"), ("0x6", "(1,0,0)"), ("0x5", "(2,0,0)")):
        lines = [line for line in str(caught.value).splitlines() if line.endswith(f"with mask {mask}: {thread}")]
        assert len(lines) == 1, "the message lists where every thread waits"


def test_a_shuffle_from_a_lane_outside_the_mask_is_reported(reordered_emulator: ModuleType) -> None:
    x = np.arange(32, dtype=np.int32)
    with pytest.raises(reordered_emulator.EmulatorError, match="lane 0 reads from lane 16, which is not in the mask"):
        reordered_emulator.selftest.shuffle("xor", 0x0000FFFF, x, np.full(32, 16, dtype=np.int32))


@pytest.mark.parametrize("width", [0, 3, 33, 64, -1])
def test_a_width_that_is_no_power_of_two_up_to_32_is_reported(emulator: ModuleType, width: int) -> None:
    x = np.arange(32, dtype=np.int32)
    with pytest.raises(emulator.EmulatorError, match=f"width {width} is not"):
        emulator.selftest.shuffle("down", FULL_MASK, x, np.ones(32, dtype=np.int32), width)
