"""csrc/cuda/kernels/proximal.cuh, executed by the emulator and compared with the plain-torch reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulated_memory import DTYPES, arrays, clones, name, random_tensors, same_bits

from pfl_ext.ops._declare import OPS

CHUNK = 8192
SIZES = [0, 1, 7, 8, 9, 255, 257, 1025, 2047, CHUNK - 1, CHUNK, CHUNK + 1, 0]
# momentum, dampening, weight decay, nesterov, maximize, first
OPTIONS = {
    "plain": (0.0, 0.0, 0.0, False, False, False),
    "weight decay": (0.0, 0.0, 0.01, False, True, False),
    "momentum": (0.9, 0.3, 0.0, False, False, False),
    "first": (0.9, 0.0, 0.01, False, False, True),
    "nesterov": (0.9, 0.0, 0.01, True, False, False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "lam"), [(0, 0.5), (1, 0.5), (0, 0.0)])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_step_has_the_bits_of_the_reference_over_chunk_boundaries(emulator, dtype, offset, options, lam):
    params, grads, anchors, buffers = (random_tensors(SIZES, dtype, seed, offset) for seed in range(4))
    if not OPTIONS[options][0]:
        buffers = []
    other, other_buffers = clones(params), clones(buffers)
    emulator.reset_launch_count()
    emulator.proximal_step(
        name(dtype), arrays(params), arrays(grads), arrays(anchors), arrays(buffers), 0.1, lam, *OPTIONS[options]
    )
    assert emulator.launch_count() == 1
    OPS["proximal_sgd_step_"].reference(other, other_buffers, grads, anchors, 0.1, lam, *OPTIONS[options])
    assert same_bits(params, other)
    assert same_bits(buffers, other_buffers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_the_distance_and_its_gradient_agree_with_the_reference(emulator, dtype, offset):
    a, b = random_tensors(SIZES, dtype, 0, offset), random_tensors(SIZES, dtype, 1, offset)
    emulator.reset_launch_count()
    distance = emulator.squared_distance(name(dtype), arrays(a), arrays(b))
    assert emulator.launch_count() == 2
    # Sums of up to 2**15 float64 terms in another order, then rounded to the result's type.
    expected = OPS["squared_distance"].reference(a, b).double().item()
    assert distance == pytest.approx(expected, rel=2.0**-37 if dtype == torch.float64 else 2.0**-23)
    upstream = torch.tensor(0.7, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    to_a, to_b = ([torch.full_like(x, 7) for x in a] for _ in range(2))
    emulator.reset_launch_count()
    emulator.distance_gradient(name(dtype), upstream.item(), arrays(a), arrays(b), arrays(to_a), arrays(to_b))
    assert emulator.launch_count() == 1
    assert same_bits(to_a + to_b, OPS["squared_distance_backward"].reference(upstream, a, b, True, True))
    only = [torch.full_like(x, 7) for x in a]
    emulator.distance_gradient(name(dtype), upstream.item(), arrays(a), arrays(b), [], arrays(only))
    assert same_bits(only, to_b)


def test_order_of_threads_and_blocks_does_not_change_the_bits(emulator):
    a, b = random_tensors([3 * CHUNK + 3, 5], torch.float64, 0), random_tensors([3 * CHUNK + 3, 5], torch.float64, 1)
    results = []
    for seed in range(3):
        emulator.set_seed(seed)
        results.append(emulator.squared_distance("float64", arrays(a), arrays(b)))
    assert len(set(results)) == 1


def test_launches_for_many_tensors(emulator):
    # (4091 - 4) // 6 = 681 tensors fit into the arguments of one launch.
    for tensors, launches in ((681, 1), (682, 2)):
        lists = [[np.ones(1, np.float32) for _ in range(tensors)] for _ in range(3)]
        emulator.reset_launch_count()
        emulator.proximal_step("float32", *lists, [], 0.5, 1.0)
        assert emulator.launch_count() == launches
        assert all(x[0] == 0.5 for x in lists[0])
