"""Optimisers under torch.compile and in a CUDA graph step to the bits of a plain step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_ext.optim import LWSAM, SAM, ProximalSGD

Step = Callable[[Callable[[], Any]], Any]

_MADE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "proximal": lambda net: ProximalSGD(net.parameters(), lr=0.1, lam=0.5, momentum=0.5),
    "sam": lambda net: SAM(net.parameters(), ProximalSGD, lr=0.1, lam=0.5, rho=0.1),
    "lwsam": lambda net: LWSAM(net.named_parameters(), ProximalSGD, lr=0.1, lam=0.5, momentum=0.5, rho=0.1),
}


def _network() -> nn.Module:
    generator = torch.Generator("cpu").manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, device="cpu"))
            p.grad = torch.empty_like(p)
    return net


def _new_gradients(net: nn.Module, seed: int) -> None:
    """Into the tensors that the parameters have: a graph knows no others."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for p in net.parameters():
        assert p.grad is not None
        p.grad.copy_(torch.randn(p.shape, generator=generator, device="cpu"))


def _parts(optimizer: Optimizer) -> list[Callable[[], Any]]:
    """What a step of the optimiser consists of, each after gradients of its own."""
    if isinstance(optimizer, SAM):
        return [lambda: optimizer.first_step(), lambda: optimizer.second_step()]
    return [lambda: optimizer.step()]


def _take(net: nn.Module, parts: Iterable[Callable[[], Any]], steps: range) -> list[Tensor]:
    for step in steps:
        for i, part in enumerate(parts):
            _new_gradients(net, 10 * step + i)
            part()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("name", _MADE)
def test_a_compiled_step_is_a_plain_step(name: str) -> None:
    net, other = _network(), _network()
    compiled = [torch.compile(part, backend="aot_eager", fullgraph=True) for part in _parts(_MADE[name](other))]
    expected = _take(net, _parts(_MADE[name](net)), range(3))
    assert all(torch.equal(a, b) for a, b in zip(_take(other, compiled, range(3)), expected, strict=True))


def test_sam_around_an_optimiser_of_torchs_compiles_with_torchs_own_graph_break() -> None:
    net, other = _network(), _network()
    plain, wrapped = (SAM(n.parameters(), torch.optim.SGD, lr=0.1, rho=0.1) for n in (net, other))
    compiled = [torch.compile(part, backend="aot_eager") for part in _parts(wrapped)]
    expected = _take(net, _parts(plain), range(3))
    assert all(torch.equal(a, b) for a, b in zip(_take(other, compiled, range(3)), expected, strict=True))


@pytest.mark.parametrize("name", _MADE)
def test_a_step_in_a_graph_is_a_plain_step(name: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        pytest.skip("a graph needs torch's caching allocator")
    net, other = _network(), _network()
    optimizer = _MADE[name](other)
    # One step first: momentum begins with it, and a recorded beginning would begin at every replay.
    _take(other, _parts(optimizer), range(1))
    graphs = []
    for part in _parts(optimizer):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records; nothing is computed
            part()
        graphs.append(graph)
    found = _take(other, [graph.replay for graph in graphs], range(1, 4))
    expected = _take(net, _parts(_MADE[name](net)), range(4))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
