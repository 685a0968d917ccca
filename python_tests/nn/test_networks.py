from __future__ import annotations

import copy
import pickle

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


def test_an_mlp_has_as_many_hidden_layers_as_asked_for() -> None:
    network = nn.build("mlp", (4,), 3, torch.Generator().manual_seed(0), hidden=5, hidden_layers=4)
    assert [tuple(p.shape) for p in network.parameters() if p.dim() == 2] == [(5, 4), (5, 5), (5, 5), (5, 5), (3, 5)]
    assert sum(isinstance(layer, torch.nn.ReLU) for layer in network) == 4
    with pytest.raises(ValueError, match="hidden_layers is 0; accepted is 1 or more"):
        nn.build("mlp", (4,), 3, torch.Generator(), hidden_layers=0)


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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pooling_before_the_relu_gives_the_bits_of_the_papers_order(memory_format: torch.memory_format) -> None:
    ours = nn.build("lenet", (1, 28, 28), 10, torch.Generator().manual_seed(0)).to(memory_format=memory_format)
    conv, pool, relu, *rest = ours
    papers = torch.nn.Sequential(conv, relu, pool, rest[0], rest[2], rest[1], *rest[3:])
    assert isinstance(papers[2], torch.nn.MaxPool2d) and isinstance(papers[5], torch.nn.MaxPool2d)
    # Mostly constant images, so that many windows tie or have nothing above zero.
    x = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(1)).clamp(min=1)
    x = x.contiguous(memory_format=memory_format)
    a, b = ours(x), papers(x)
    assert torch.equal(torch.nn.Sequential(*ours)(x), b)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # run as one, the layers have their sums in another order
    params = list(ours.parameters())
    for p, q in zip(torch.autograd.grad(a.sum(), params), torch.autograd.grad(b.sum(), params), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)  # the sums behind a pooling are in another order


def test_the_smallest_accepted_image_works() -> None:
    assert nn.lenet((1, 16, 16), 4)(torch.zeros(1, 1, 16, 16)).shape == (1, 4)


def test_images_are_scaled_on_their_way_into_a_network() -> None:
    generator = torch.Generator().manual_seed(0)
    network = nn.build("resnet18", (1, 28, 28), 4, generator, input_size=32, input_channels=3)
    plain = nn.build("resnet18", (3, 32, 32), 4, torch.Generator().manual_seed(0))
    assert list(network.state_dict()) == list(plain.state_dict())
    x = torch.randn(2, 1, 28, 28)
    scaled = torch.nn.functional.interpolate(x, (32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    assert torch.equal(network.eval()(x), plain.eval()(scaled))
    assert torch.equal(copy.deepcopy(network)(x), network(x))
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))  # as workers get it
    each = torch.func.vmap(lambda one: network(one[None])[0])(x)  # as gradients of single samples need it
    torch.testing.assert_close(each, network(x))
    with pytest.raises(ValueError, match=r"images \[2, 28, 28\] to 3 channels"):
        nn.build("resnet18", (2, 28, 28), 4, generator, input_channels=3)
