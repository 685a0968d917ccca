from __future__ import annotations

import pytest
import torch
from torch import nn

from pfl_ext.federation import WorkingModel, joined


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 3))


def test_the_order_of_a_state_is_the_modules_whatever_its_memory_format() -> None:
    network = _network()
    expected = torch.cat([tensor.flatten().float() for tensor in [*network.parameters(), *network.buffers()]])
    network[0].weight.data = network[0].weight.data.contiguous(memory_format=torch.channels_last)
    model = WorkingModel(network)
    assert not model.module[0].weight.is_contiguous()
    assert torch.equal(model.state(), expected) and model.size == len(expected)


def test_a_state_brings_back_parameters_buffers_and_counters() -> None:
    model = WorkingModel(_network())
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    saved = model.state()
    model.module.train()
    model(torch.rand(5, 2, 4, 4)).sum().backward()
    with torch.no_grad():
        for p in model.trained:
            p.add_(1.0)
    assert model.module[1].num_batches_tracked == 1
    assert not torch.equal(model.state(), saved)
    model.load(saved)
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_state_is_a_copy() -> None:
    model = WorkingModel(_network())
    state = model.state()
    state.zero_()
    assert model.state().abs().sum() > 0


def test_integers_come_back_from_an_average_rounded() -> None:
    model = WorkingModel(_network())
    state = model.state()
    state[-1] = 2.6  # num_batches_tracked is the last buffer
    model.load(state)
    assert model.module[1].num_batches_tracked == 3


def test_an_integer_that_float32_cannot_hold_is_refused() -> None:
    model = WorkingModel(_network())
    model.module[1].num_batches_tracked.fill_(2**24 + 1)
    with pytest.raises(OverflowError, match="16777217"):
        model.state()


def test_tensors_are_the_trained_parameters_parts() -> None:
    network = _network()
    network[0].weight.requires_grad_(False)
    model = WorkingModel(network)
    parts = model.tensors(model.state())
    assert len(parts) == len(model.trained) == 5
    for part, p in zip(parts, model.trained, strict=True):
        assert torch.equal(part, p) and part.stride() == p.stride()


def test_buffers_are_found_by_module_type_not_by_name() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.downsample = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.register_buffer("bn", torch.ones(3))

    model = WorkingModel(Block(), local_buffers=(nn.BatchNorm1d,))
    assert int(model.local.sum()) == 2 + 2 + 1  # mean, variance, counter of downsample.1, not the buffer called bn
    assert int(model.server.sum()) == 0


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "no parameters"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "one floating type"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "one device"),
    ],
)
def test_modules_that_are_no_one_vector_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkingModel(module)


def test_a_state_of_another_size_is_refused() -> None:
    model = WorkingModel(_network())
    with pytest.raises(ValueError, match=rf"\[3\] for a model of {model.size} numbers"):
        model.load(torch.zeros(3))


class _Block(nn.Module):
    """A block whose second batch normalisation has no name that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm1d(2)
        self.downsample = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.bnb = nn.Linear(2, 2)


def test_entries_of_a_type_are_parameters_and_buffers_of_all_its_modules_whatever_they_are_called() -> None:
    model = WorkingModel(_Block())
    found = model.entries(nn.BatchNorm1d)
    assert torch.equal(found, model.entries("bn1", "downsample.1"))
    assert int(found.sum()) == 2 * (2 + 2 + 2 + 2 + 1)  # weight, bias, mean, variance, counter
    with pytest.raises(ValueError, match=r"module Conv2d does not part the network in two; it has bn1, downsample.0"):
        model.entries(nn.Conv2d)


def test_parameters_in_entries_are_the_trained_ones_there() -> None:
    block = _Block()
    block.bn1.bias.requires_grad_(False)
    model = WorkingModel(block)
    norms = model.entries(nn.BatchNorm1d)
    inside, outside = model.parameters_in(norms), model.parameters_in(~norms)
    assert [id(p) for p in inside] == [id(p) for p in (block.bn1.weight, *block.downsample[1].parameters())]
    assert {id(p) for p in inside + outside} == {id(p) for p in model.trained}


def test_a_state_is_joined_from_its_two_parts() -> None:
    model = WorkingModel(_Block())
    state, norms = torch.randn(model.size), model.entries(nn.BatchNorm1d)
    assert torch.equal(joined(norms, state[norms], state[~norms]), state)


def test_a_layer_is_a_module_with_its_buffers_or_a_tensor() -> None:
    network = _network()
    network[3].weight.requires_grad_(False)
    model = WorkingModel(network)
    layers = model.layers()
    assert layers.names == ["0", "1", "3"] and layers.groups == [0, 0, 1, 1, 2]
    sizes = [shape.numel() for shape in model.shapes]
    owners = dict(zip(model.names, (int(part.unique()) for part in layers.entries.split(sizes)), strict=True))
    assert owners["0.weight"] == owners["0.bias"] == 0
    assert owners["1.weight"] == owners["1.running_var"] == owners["1.num_batches_tracked"] == 1
    tensors = model.layers("tensor")
    assert tensors.names == ["0.weight", "0.bias", "1.weight", "1.bias", "3.bias"]
    assert tensors.groups == list(range(5))
    parts = tensors.entries.split(sizes)
    assert [int(part.unique()) for part in parts] == [0, 1, 2, 3, -1, 4, -1, -1, -1]
    assert int(model.trained_entries().sum()) == sum(p.numel() for p in model.trained)


def test_two_models_change_places_without_a_copy() -> None:
    model = WorkingModel(_network())
    first = model.state()
    other = model.copies()
    model.load(first + 1)
    second, memory = model.state(), [p.data_ptr() for p in model.trained]
    model.exchange(other)
    assert torch.equal(model.state(), first)
    assert [p.data_ptr() for p in model.trained] != memory
    assert model.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    model.exchange(other)
    assert torch.equal(model.state(), second) and [p.data_ptr() for p in model.trained] == memory


def test_parts_are_read_written_and_made_whole_as_through_the_whole_state() -> None:
    from pfl_ext.nn import FrozenBatchNorm2d

    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), FrozenBatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    module[0].requires_grad_(False)
    model = WorkingModel(module)
    part = model.changing
    # The second normalisation trains its parameters here, and keeps its statistics.
    assert int(part.sum()) == 8 + 9 + 8 + 34 and not part[: 4 * 27 + 4].any()
    start = model.state()
    assert torch.equal(model.read(part), start[part])
    values = torch.arange(59.0)
    expected = start.clone()
    expected[part] = values
    assert torch.equal(model.whole((part, values)), expected)
    model.write(part, values)
    assert torch.equal(model.state(), expected)
    head = model.entries("4")
    assert torch.equal(model.whole((head, values[:34]), (part & ~head, values[34:]))[head], values[:34])
    with pytest.raises(ValueError, match="values for 59 entries"):
        model.write(part, values[:3])
