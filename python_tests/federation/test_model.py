from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pfl_ext.federation import WorkingModel
from pfl_ext.nn import FrozenBatchNorm2d


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

    model = WorkingModel(Block(), local_buffers=("BatchNorm1d",))
    assert int(model.local.sum()) == 2 + 2 + 1  # mean, variance, counter of downsample.1, not the buffer called bn
    assert model.local.tolist() == [False] * (model.size - 5) + [True] * 5
    assert int(model.server.sum()) == 0
    derived = WorkingModel(Block(), server_buffers=("_BatchNorm",))  # a type has the buffers of those derived from it
    assert torch.equal(derived.server, model.local) and int(derived.local.sum()) == 0
    with pytest.raises(ValueError, match="type BatchNorm2d has buffers that change; BatchNorm1d, Block have"):
        WorkingModel(Block(), local_buffers=("BatchNorm2d",))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "no parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "all its parameters are frozen; there is nothing to train"),
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


def test_the_part_of_a_type_has_parameters_and_buffers_of_all_its_modules_whatever_they_are_called() -> None:
    model = WorkingModel(_Block())
    found, state = model.part(nn.BatchNorm1d), torch.randn(model.size)
    for named in (model.part("bn1", "downsample.1"), model.part("downsample.1, bn1")):
        assert torch.equal(found.of(state), named.of(state)) and torch.equal(found.read(), named.read())
    assert found.size == len(found.read()) == 2 * (2 + 2 + 2 + 2 + 1)  # weight, bias, mean, variance, counter
    message = r"module Conv2d does not part what is trained in two; that is in bn1, downsample.0"
    with pytest.raises(ValueError, match=message):
        model.part(nn.Conv2d)
    with pytest.raises(ValueError, match="module 'bn' does not part"):
        model.part("bn")  # a name, not the beginning of one
    with pytest.raises(ValueError, match="module Module does not part"):
        model.part(nn.Module)  # there are no others


def test_a_part_without_a_name_is_the_last_layer_that_is_trained() -> None:
    block = _Block()
    assert WorkingModel(block).part("").parameters == [*block.bnb.parameters()]
    block.bnb.requires_grad_(False)
    assert WorkingModel(block).part("").parameters == [*block.downsample[1].parameters()]


def test_the_parameters_of_a_part_are_the_trained_ones_there() -> None:
    block = _Block()
    block.bn1.bias.requires_grad_(False)
    model = WorkingModel(block)
    norms = model.part(nn.BatchNorm1d)
    inside, outside = norms.parameters, (~norms).parameters
    assert [id(p) for p in inside] == [id(p) for p in (block.bn1.weight, *block.downsample[1].parameters())]
    assert {id(p) for p in inside + outside} == {id(p) for p in model.trained}
    assert norms.size == 2 * 9 - 2 and norms.size + (~norms).size == model.size


def test_a_state_is_made_whole_of_its_two_parts() -> None:
    model = WorkingModel(_Block())
    state, norms = torch.randn(model.size), model.part(nn.BatchNorm1d)
    first, second = (norms, norms.of(state)), (~norms, (~norms).of(state))
    assert torch.equal(model.whole(first, second), state) and torch.equal(model.whole(second, first), state)
    with pytest.raises(ValueError, match=rf"parts of \[18\] numbers for a model of {model.size}"):
        model.whole(first)


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
    assert owners["3.bias"] == 2 and "3.weight" not in owners
    tensors = model.layers("tensor")
    assert tensors.names == ["0.weight", "0.bias", "1.weight", "1.bias", "3.bias"]
    assert tensors.groups == list(range(5))
    parts = tensors.entries.split(sizes)
    assert [int(part.unique()) for part in parts] == [0, 1, 2, 3, 4, -1, -1, -1]
    assert model.parameters == sum(p.numel() for p in model.trained)


def test_two_models_change_places_without_a_copy() -> None:
    model = WorkingModel(_network())
    first = model.state()
    other = model.second()
    model.load(first + 1)
    second, memory = model.state(), [p.data_ptr() for p in model.trained]
    model.exchange(other)
    assert torch.equal(model.state(), first)
    assert [p.data_ptr() for p in model.trained] != memory
    assert model.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    model.exchange(other)
    assert torch.equal(model.state(), second) and [p.data_ptr() for p in model.trained] == memory


def test_what_is_frozen_is_not_in_a_state() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), FrozenBatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    module[0].requires_grad_(False)
    model = WorkingModel(module)
    # The second normalisation trains its parameters here, and keeps its statistics.
    assert model.size == 8 + 9 + 8 + 34 and model.parameters == 8 + 8 + 34
    trained = torch.cat(
        [p.flatten() for p in (*module[1].parameters(), *module[2].parameters(), *module[4].parameters())]
    )
    buffers = torch.cat([b.flatten().float() for b in module[1].buffers()])
    assert torch.equal(model.state(), torch.cat([trained, buffers]))
    frozen = [tensor.clone() for tensor in (*module[0].parameters(), *module[2].buffers())]
    model.load(torch.arange(59.0))
    assert torch.equal(model.state(), torch.arange(59.0))
    for before, after in zip(frozen, (*module[0].parameters(), *module[2].buffers()), strict=True):
        assert torch.equal(before, after)


def test_parts_are_read_written_and_made_whole_as_through_the_whole_state() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), FrozenBatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    module[0].requires_grad_(False)
    model = WorkingModel(module)
    start, head = model.state(), model.part("4")
    entries = torch.zeros(59, dtype=torch.bool)
    entries[16 : 16 + 34] = True  # behind the parameters of both normalisations, before the buffers
    assert head.size == 34
    assert torch.equal(head.read(), start[entries]) and torch.equal(head.of(start), start[entries])
    assert torch.equal((~head).read(), start[~entries])
    values = torch.arange(34.0)
    expected = start.clone()
    expected[entries] = values
    assert torch.equal(model.whole((head, values), (~head, start[~entries])), expected)
    head.write(values)
    assert torch.equal(model.state(), expected)
    head.read().zero_()  # a copy
    assert torch.equal(model.state(), expected)
    with pytest.raises(ValueError, match=r"\[3\] values for a part of 34 numbers"):
        head.write(values[:3])
    assert torch.equal(model.state(), expected)


def test_a_digest_and_a_layout_tell_frozen_numbers_too() -> None:
    network = _network()
    network[0].requires_grad_(False)
    model = WorkingModel(network)
    before, state = model.digest(), model.state()
    assert ("0.weight", [4, 2, 3, 3]) in model.layout()
    network[0].weight.data[0] += 1
    assert model.digest() != before and torch.equal(model.state(), state)


def test_all_tensors_lie_side_by_side_in_the_order_of_a_state() -> None:
    model = WorkingModel(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    first, offset = model.trained[0], 0
    tensors = dict([*model.module.named_parameters(), *model.module.named_buffers()])
    for name in model.names:
        tensor = tensors[name]
        if tensor.is_floating_point():
            assert tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr(), name
            assert tensor.storage_offset() == offset, name
        offset += tensor.numel()
    assert offset == model.size


def test_a_buffer_that_a_module_replaced_is_still_set_and_read() -> None:
    model = WorkingModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    norm = model.module[1]
    norm.running_mean = torch.tensor([5.0, 6.0])
    state = model.state()
    place = model.names.index("1.running_mean")
    assert model.pieces(state)[place].tolist() == [5.0, 6.0]
    model.load(state + 1)
    assert norm.running_mean.tolist() == [6.0, 7.0]
    assert torch.equal(model.state(), state + 1)


def test_a_parameter_with_other_memory_is_still_set_and_read() -> None:
    model = WorkingModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    model.trained[0].data = torch.full((2, 2), 9.0)
    state = model.state()
    assert model.pieces(state)[0].tolist() == [9.0] * 4
    model.load(state + 1)
    assert model.trained[0].tolist() == [[10.0, 10.0]] * 2
    assert torch.equal(model.state(), state + 1)


def test_autograd_learns_that_a_state_was_loaded() -> None:
    model = WorkingModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    loss = model(torch.ones(1, 2)).sum()
    model.load(model.state() + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("inputs", [1, 3])
def test_weights_keep_the_strides_that_layers_choose_by(inputs: int) -> None:
    plain = nn.Sequential(nn.Conv2d(inputs, 4, 3), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)
    model = WorkingModel(copy.deepcopy(plain))
    for mine, given in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert mine.stride() == given.stride()
        assert torch.equal(mine, given)
    other = model.second()
    model.exchange(other)
    for mine, given in zip(model.module.parameters(), plain.parameters(), strict=True):
        assert mine.stride() == given.stride()
