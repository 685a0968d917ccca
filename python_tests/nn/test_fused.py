"""Layers that are run as one give what they give one by one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pfl_ext.nn import FusedSequential, fused, lenet, mlp, row_of_layers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the weights that the fused ops were called with."""
    seen: list[torch.Size] = []

    def noted(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            seen.append(weight.shape)
            return original(x, weight, bias)

        return op

    for name in ("conv_pool_relu", "linear_relu"):
        monkeypatch.setattr(fused, name, noted(getattr(fused, name)))
    return seen


def layers(*middle: nn.Module) -> list[nn.Module]:
    torch.manual_seed(0)
    return [*middle, nn.Flatten(), nn.LazyLinear(3)]


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def block(**options: object) -> list[nn.Module]:
    return [nn.Conv2d(2, 4, 3, **options), nn.MaxPool2d(2), nn.ReLU()]  # type: ignore[arg-type]


def test_blocks_are_run_as_one_and_the_results_are_those_of_sequential(calls):
    plain = nn.Sequential(
        *layers(nn.Tanh(), *block(), nn.Conv2d(4, 5, 2), nn.MaxPool2d(2), nn.ReLU()), nn.ReLU(), nn.Linear(3, 2)
    )
    x = torch.randn(3, 2, 14, 12)
    plain(x)
    ours = FusedSequential(*copy.deepcopy(list(plain)))
    assert list(ours.state_dict()) == list(plain.state_dict())
    y, expected = ours(x), plain(x)
    assert [tuple(shape) for shape in calls] == [(4, 2, 3, 3), (5, 4, 2, 2), (3, 20)]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(y.shape)
    for a, b in zip(
        torch.autograd.grad(y, list(ours.parameters()), upstream),
        torch.autograd.grad(expected, list(plain.parameters()), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "middle",
    [
        block(stride=2),
        block(padding=1),
        block(dilation=2),
        block(groups=2),
        block(bias=False),
        [nn.Conv2d(2, 4, 3), nn.MaxPool2d(3), nn.ReLU()],
        [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, stride=1), nn.ReLU()],
        [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()],
        [nn.Conv2d(2, 4, 3), nn.AvgPool2d(2), nn.ReLU()],
        [nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Tanh()],
        [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Linear(12, 4, bias=False), nn.ReLU()],
        [nn.Linear(12, 4), nn.Tanh()],
        [Doubled(12, 4), nn.ReLU()],
    ],
    ids=lambda middle: ", ".join(map(str, middle)),
)
def test_other_layers_are_run_one_by_one(calls, middle):
    ours = FusedSequential(*layers(*middle))
    x = torch.randn(3, 2, 13, 12)
    y = ours(x)
    assert calls == []
    assert torch.equal(y, nn.Sequential(*ours)(x))


def test_a_layer_that_is_replaced_counts(calls):
    ours = FusedSequential(*layers(*block()))
    x = torch.randn(1, 2, 8, 8)
    ours(x)
    assert len(calls) == 1
    ours[2] = nn.Tanh()
    assert torch.equal(ours(x), nn.Sequential(*ours)(x)) and len(calls) == 1


def test_copies_find_their_own_layers(calls):
    ours = FusedSequential(*layers(*block()))
    x = torch.randn(1, 2, 8, 8)
    expected = ours(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x), expected)
    assert len(calls) == 3


ROWS = {
    "mlp": (lambda: mlp((1, 8, 8), 10), ["linear_relu", "linear"], True),
    "lenet": (lambda: lenet((3, 32, 32), 10), ["conv_pool_relu"] * 2 + ["linear_relu"] * 2 + ["linear"], True),
    "a linear layer": (lambda: nn.Linear(3, 2), ["linear"], False),
    "vectors": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), ["linear_relu", "linear"], False),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_network_that_is_a_row_of_layers_is_known_as_one(name):
    make, layers, flattens = ROWS[name]
    row = row_of_layers(make())
    assert row is not None
    assert (row.layers, row.flattens, row.is_plain()) == (layers, flattens, True)


TIED = nn.Linear(4, 4)
OTHERS = {
    "no linear layer at the end": lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU()),
    "no bias": lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)),
    "another activation": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2)),
    "tied weights": lambda: nn.Sequential(TIED, nn.ReLU(), TIED, nn.ReLU(), nn.Linear(4, 2)),
    "images that are not flattened": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Linear(3, 2)
    ),
    "a part of it flattened": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(9, 2)),
    "a padded convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)
    ),
    "parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "layers of its own": lambda: type("Own", (nn.Sequential,), {})(nn.Linear(3, 2)),
    "nothing": nn.Sequential,
}


@pytest.mark.parametrize("what", OTHERS)
def test_any_other_network_is_none(what):
    assert row_of_layers(OTHERS[what]()) is None


def test_a_row_with_a_hook_is_not_plain():
    network = mlp((1, 8, 8), 10)
    row = row_of_layers(network)
    assert row is not None and row.is_plain()
    hook = network[1].register_forward_hook(lambda *_: None)
    assert not row.is_plain()
    hook.remove()
    assert row.is_plain()
