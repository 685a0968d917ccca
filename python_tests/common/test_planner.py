"""csrc/common/planner.h, reached through the emulator's module."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.lists(st.integers(0, 50), max_size=30)


@given(sizes=SIZES, room=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_bundles_cover_every_element_once_in_order_and_all_but_the_last_are_full(emulator, sizes, room):
    bundles = emulator.plan_bundles(sizes, room)
    covered = [(t, i) for bundle in bundles for t, offset, length in bundle for i in range(offset, offset + length)]
    assert covered == [(t, i) for t, size in enumerate(sizes) for i in range(size)]
    filled = [sum(length for _, _, length in bundle) for bundle in bundles]
    assert all(n == room for n in filled[:-1])
    assert all(0 < n <= room for n in filled[-1:])
    assert all(length > 0 for bundle in bundles for _, _, length in bundle)


@given(sizes=SIZES, chunk=st.integers(1, 20), slots=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_launches_give_every_non_empty_tensor_one_slot_and_all_its_chunks(emulator, sizes, chunk, slots):
    launches = emulator.plan_launches(sizes, chunk, slots)
    assert [t for launch in launches for t, _ in launch] == [t for t, size in enumerate(sizes) if size]
    for launch in launches:
        assert 0 < len(launch) <= slots
        before = 0
        for tensor, end in launch:
            assert end - before == -(-sizes[tensor] // chunk)
            before = end
    assert all(len(launch) == slots for launch in launches[:-1])


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_nothing_to_do_takes_no_bundle_and_no_launch(emulator, sizes):
    assert emulator.plan_bundles(sizes, 8) == []
    assert emulator.plan_launches(sizes, 8, 4) == []


def test_sizes_beyond_32_bits_are_planned_exactly(emulator):
    size = 3 * 2**32 + 5
    ((_, end),) = emulator.plan_launches([size], 2**20, 4)[0]
    assert end == 3 * 2**12 + 1


def test_a_launch_is_cut_before_its_grid_is_too_large(emulator):
    assert emulator.plan_launches([30, 30, 30], 10, 8, max_chunks=6) == [[(0, 3), (1, 6)], [(2, 3)]]
