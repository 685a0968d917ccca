from __future__ import annotations

import torch

from pfl_ext import nn


def test_the_hypernetwork_has_the_shape_of_pfedhns() -> None:
    hypernetwork = nn.HyperNetwork(inputs=13, outputs=62_006)
    linear = [(m.in_features, m.out_features) for m in hypernetwork.modules() if isinstance(m, torch.nn.Linear)]
    assert linear == [(13, 100), (100, 100), (100, 100), (100, 100), (100, 62_006)]
    assert sum(isinstance(m, torch.nn.ReLU) for m in hypernetwork.modules()) == 3
    assert hypernetwork(torch.zeros(4, 13)).shape == (4, 62_006)


def test_clients_of_different_embeddings_get_different_weights_and_each_a_gradient() -> None:
    torch.manual_seed(0)
    hypernetwork = nn.HyperNetwork(2, 5, width=7, hidden=1)
    embeddings = torch.randn(2, 2, requires_grad=True)
    weights = hypernetwork(embeddings)
    assert not torch.equal(weights[0], weights[1])
    weights.square().sum().backward()
    assert embeddings.grad is not None and bool((embeddings.grad != 0).any(1).all())
