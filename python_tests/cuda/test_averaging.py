"""csrc/cuda/kernels/averaging.cuh, executed by the emulator: the bits of the plain-torch reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from emulated_memory import DTYPES, as_numpy, name, random_tensors, same_bits

from pfl_ext.ops.averaging import _average_reference

CHUNK = 8192
# Around a chunk, a block's pass with the widest and the narrowest vector, a vector, and nothing.
SIZES = [0, 1, 2, 7, 8, 9, 255, 256, 257, 1023, 1024, 1025, 2047, 2049, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 0]


def run_average(emulator, clients, weights, server=None, lr=1.0):
    out = [torch.full_like(x, 7) for x in clients[0]]
    emulator.average(
        name(out[0].dtype),
        [as_numpy(x) for x in out],
        [[as_numpy(x) for x in client] for client in clients],
        weights,
        [as_numpy(x) for x in server or []],
        lr,
    )
    return out


def test_the_chunk_size_tested_is_the_kernels(emulator):
    assert emulator.CHUNK_ELEMENTS == CHUNK


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("with_server", [False, True])
def test_average_equals_the_reference_over_chunk_boundaries(emulator, dtype, offset, with_server):
    clients = [random_tensors(SIZES, dtype, c, offset) for c in range(3)]
    server = random_tensors(SIZES, dtype, 9, offset) if with_server else None
    weights = [0.5, 0.2, 0.3]
    for t, x in enumerate(run_average(emulator, clients, weights, server, 0.7)):
        column = [c[t] for c in clients]
        assert same_bits([x], [_average_reference(column, weights, server[t] if server else None, 0.7)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_equals_the_reference(emulator, dtype):
    for offset, sum_offset in itertools.product((0, 1), (0, 1)):
        client = random_tensors(SIZES, dtype, 0, offset)
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        sums = random_tensors(SIZES, accumulate, 1, sum_offset)
        expected = [s + 0.3 * x.to(accumulate) for s, x in zip(sums, client, strict=True)]
        emulator.accumulate(name(dtype), [as_numpy(s) for s in sums], [as_numpy(x) for x in client], 0.3)
        assert same_bits(sums, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_flags_exactly_the_tensors_that_hold_one(emulator, dtype, bad):
    for place in (0, 255, CHUNK - 1, CHUNK):
        for offset in (0, 1):
            tensors = random_tensors([CHUNK + 1, 0, CHUNK + 1, 5], dtype, 0, offset)
            tensors[2][place] = bad
            tensors[3][0] = torch.finfo(dtype).max
            assert emulator.nonfinite(name(dtype), [as_numpy(x) for x in tensors]) == [False, False, True, False]


def test_order_of_threads_and_blocks_does_not_change_the_bits(emulator):
    clients = [random_tensors([CHUNK + 3, 5], torch.float32, c) for c in range(5)]
    results = []
    for seed in range(3):
        emulator.set_seed(seed)
        results.append(run_average(emulator, clients, [0.1, 0.2, 0.3, 0.2, 0.2]))
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_clients_than_a_launch_takes_are_carried_over_exactly(emulator, dtype):
    count = 2 * emulator.MAX_CLIENTS_PER_LAUNCH + 7
    clients = [random_tensors([5, 0, 17], dtype, c) for c in range(count)]
    weights = [1.0 / count] * count
    server = random_tensors([5, 0, 17], dtype, 9999)
    for start in (None, server):
        emulator.reset_launch_count()
        result = run_average(emulator, clients, weights, start, 0.5)
        assert emulator.launch_count() == 3
        for t, x in enumerate(result):
            column = [c[t] for c in clients]
            assert same_bits([x], [_average_reference(column, weights, start[t] if start else None, 0.5)])


@pytest.mark.parametrize(
    ("tensors", "clients", "launches"),
    [
        (62, 20, 1),  # ResNet-18, 20 clients
        (84, 20, 1),  # the adapter set of PerAda
        (163, 20, 1),  # the most tensors that fit beside 20 weights: (4091 - 20) // 25 = 162, and an empty one
        (164, 20, 2),
        (62, 100, 2),  # (4091 - 100) // 105 = 38 tensors a launch
    ],
)
def test_one_launch_for_each_32_kilobytes_of_arguments(emulator, tensors, clients, launches):
    models = [[torch.full((1,), float(c)) for _ in range(tensors - 1)] + [torch.empty(0)] for c in range(clients)]
    emulator.reset_launch_count()
    result = run_average(emulator, models, [1.0 / clients] * clients)
    assert emulator.launch_count() == launches
    assert all(abs(x.item() - (clients - 1) / 2) < 1e-3 for x in result[:-1])


def test_streaming_and_the_check_for_infinities_take_one_launch_for_a_thousand_tensors(emulator):
    tensors = [np.ones(1, np.float32) for _ in range(1022)]
    emulator.reset_launch_count()
    emulator.accumulate("float32", [t.copy() for t in tensors], tensors, 1.0)
    emulator.nonfinite("float32", tensors)
    assert emulator.launch_count() == 2
