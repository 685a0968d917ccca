from __future__ import annotations

import pytest
import torch

from pfl_ext import nn


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [("lenet", (3, 32, 32), 62_006), ("mlp", (1, 28, 28), 79_510), ("cnn", (1, 28, 28), 582_026)],
)
def test_networks_have_the_papers_sizes(name: str, shape: tuple[int, ...], parameters: int) -> None:
    network = nn.build(name, shape, 10, torch.Generator().manual_seed(0))
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert network(torch.zeros(2, *shape)).shape == (2, 10)


def test_weights_depend_on_the_generator_alone_and_leave_torchs_random_state() -> None:
    before = torch.get_rng_state()
    first = nn.build("mlp", (4,), 3, torch.Generator().manual_seed(1))
    torch.rand(5)
    second = nn.build("mlp", (4,), 3, torch.Generator().manual_seed(1))
    other = nn.build("mlp", (4,), 3, torch.Generator().manual_seed(2))
    torch.set_rng_state(before)
    nn.build("mlp", (4,), 3, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(first[1].weight, other[1].weight)


@pytest.mark.parametrize("name", ["lenet", "cnn"])
def test_images_too_small_or_no_images_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 16x16; use the network mlp"):
        nn.NETWORKS[name]((1, 8, 8), 10)
    with pytest.raises(ValueError, match=r"images \[channels, height, width\]"):
        nn.NETWORKS[name]((64,), 10)


def test_the_smallest_accepted_image_works() -> None:
    assert nn.lenet((1, 16, 16), 4)(torch.zeros(1, 1, 16, 16)).shape == (1, 4)
