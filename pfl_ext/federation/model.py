"""One working model for all clients, what training changes in it one vector."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pfl_ext.data import Inputs
from pfl_ext.nn import FrozenBatchNorm2d, row_of_layers
from pfl_ext.ops import layer_groups
from pfl_ext.tasks import outputs

__all__ = ["Each", "Layers", "Part", "Second", "WorkingModel"]

Each: TypeAlias = Literal["module", "tensor"]
"""What a layer is: a module's own parameters and buffers, weight and bias together, or a single parameter."""


class Layers(NamedTuple):
    """A network's layers, numbered in its order."""

    names: list[str]
    groups: list[int]
    """The layer of each trained parameter."""
    entries: Tensor
    """The layer of each number of a state; -1 for what is in none: modules that have nothing to train."""


@dataclass
class Second:
    """A second set of a working model's parameters and buffers; see :meth:`WorkingModel.exchange`."""

    vector: Tensor
    tensors: list[Tensor]


class Part:
    """Some modules of a working model: the numbers of its state that are theirs.

    For methods of which a part of the model stays with the client. With ``head = model.part("fc")``:

    - ``head.read()`` and ``head.write(vector)``: the part's numbers in the working model;
    - ``head.of(state)``: those of a state of the whole model;
    - ``~head``: all others;
    - ``model.whole((head, a), (~head, b))``: a state of both.

    Attributes:
        parameters: the trained parameters in it.
        size: how many numbers it has, buffers included.
    """

    def __init__(self, model: WorkingModel, chosen: frozenset[int]) -> None:
        """Made by :meth:`WorkingModel.part`: of these tensors of the model's state."""
        self._model, self._chosen = model, chosen
        self._places = sorted(chosen)
        trained = len(model.trained)
        self.parameters: list[Tensor] = [model.trained[i] for i in self._places if i < trained]
        self._sizes = [model.shapes[i].numel() for i in self._places]
        self.size = sum(self._sizes)

    def __invert__(self) -> Part:
        """The rest of the model: all tensors that are not in this part."""
        return self._model._part_of(frozenset(range(len(self._model.shapes))) - self._chosen)

    def of(self, state: Tensor) -> Tensor:
        """A copy of the part's numbers in a state of the whole model."""
        pieces = self._model.pieces(state)
        return torch.cat([pieces[i] for i in self._places]) if self._places else state.new_empty(0)

    def read(self) -> Tensor:
        """A copy of the part's numbers in the working model."""
        return self._model._joined(self._places)

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Set them; all others stay as they are."""
        if values.shape != (self.size,):
            raise ValueError(f"{list(values.shape)} values for a part of {self.size} numbers")
        self._model._copy_into(self._places, values.split_with_sizes(self._sizes))


class WorkingModel:
    """A module in which all that training changes can be set from one vector, and read as one: its state.

    The state holds the trained parameters in the module's order, then the buffers. What is frozen is not part of it:
    parameters that require no gradient, and the buffers of :class:`~pfl_ext.nn.FrozenBatchNorm2d`. So it is neither
    kept nor sent nor counted, by any method. Integer buffers, such as ``num_batches_tracked``, ride along as numbers of
    the vector's type and are rounded when they come back from an average; one too large to be exact in that type is
    refused.

    The tensors are parts of one vector in memory, in the order of a state: setting and reading all is one copy.

    On a CPU, networks with 2-D convolutions work in torch's channels-last memory format: a local step of the CNN on
    MNIST took 6.7 ms in place of 9.1 with it, an evaluation less than half. The vector's order does not depend on it.

    Args:
        module: the network; it is changed. All its tensors must be on one device, all floating ones of one type.
        local_buffers: names of the types of modules whose buffers never leave a client (see :attr:`local`).
        server_buffers: the same of those that stay what the server has (see :attr:`server`).
        network: which of the run's networks it is, where clients have different ones.

    Attributes:
        trained: the parameters that require gradients.
        size: how many numbers a state has.
        parameters: how many of them, the first ones, are parameters; buffers follow.
        local, server, stays: which of them are such buffers; ``stays`` is both together.
        network: as given.
        names, shapes: of the tensors that a state consists of.
        row: the network as a row of layers that are all trained, None if it is another one.
    """

    def __init__(
        self,
        module: nn.Module,
        local_buffers: tuple[str, ...] = (),
        server_buffers: tuple[str, ...] = (),
        network: int = 0,
    ) -> None:
        self.network = network
        everything = [*module.named_parameters(), *module.named_buffers()]
        _check(module, everything)
        first = everything[0][1]
        self.device, self.dtype = first.device, first.dtype
        self._channels_last = self.device.type == "cpu" and any(isinstance(m, nn.Conv2d) for m in module.modules())
        if self._channels_last:
            module.to(memory_format=torch.channels_last)
        self.module = module
        owners = dict(module.named_modules())
        self.trained = [p for p in module.parameters() if p.requires_grad]
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        buffers = [
            name
            for name, _ in module.named_buffers()
            if not isinstance(owners[name.rpartition(".")[0]], FrozenBatchNorm2d)
        ]
        # By owner and name: a module may replace a buffer.
        self._buffers = [(owners[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in buffers]
        self.names = [*trained, *buffers]
        self.shapes = [tensor.shape for tensor in self._tensors()]
        self._sizes = [shape.numel() for shape in self.shapes]
        self.size, self.parameters = sum(self._sizes), sum(self._sizes[: len(trained)])
        self._inexact = [i for i, tensor in enumerate(self._tensors()) if not tensor.is_floating_point()]
        self.local, self.server = (self._buffers_of(types) for types in (local_buffers, server_buffers))
        self.stays = self.local | self.server
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
        self.row = row_of_layers(module) if self.device.type == "cpu" and len(self.names) == len(everything) else None
        self._loaded: tuple[Tensor, list[int]] | None = None
        self._vector, views = self._side_by_side()
        for tensor, view in zip(self._tensors(), views, strict=True):
            tensor.data = view
        self._parts: dict[frozenset[int], Part] = {}
        self._named: dict[tuple[str | type[nn.Module], ...], Part] = {}

    def _tensors(self) -> list[Tensor]:
        """The tensors that a state consists of, as the module has them now."""
        return [*self.trained, *(owner._buffers[name] for owner, name in self._buffers)]

    def _side_by_side(self) -> tuple[Tensor, list[Tensor]]:
        """A copy of all tensors in one vector, as a state, and the copies as they lie in it; integers lie apart."""
        vector = self._joined(list(range(len(self.shapes))))
        views = []
        for i, (tensor, piece) in enumerate(zip(self._tensors(), self.pieces(vector), strict=True)):
            if i in self._inexact:
                views.append(tensor.detach().clone())
                continue
            dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
            # Of the same strides, also where several would do: layers choose their algorithm by them.
            view = piece.as_strided(tensor.shape, tensor.stride()) if dense else piece.view(tensor.shape)
            views.append(view.copy_(tensor.detach()))
        return vector, views

    def _apart(self) -> list[int]:
        """The tensors whose numbers are not in the vector where a state has them.

        Those in another order, as channels-last; integers; and what a module has put in the place of a tensor.
        """
        place, apart = self._vector.data_ptr(), []
        for i, (tensor, size) in enumerate(zip(self._tensors(), self._sizes, strict=True)):
            if i in self._inexact or tensor.data_ptr() != place or not tensor.is_contiguous():
                apart += [i] if size else []
            place += size * self._vector.element_size()
        return apart

    def _entries(self, chosen: list[bool]) -> Tensor:
        """Which numbers of a state are in the chosen tensors."""
        return torch.tensor(chosen).repeat_interleave(torch.tensor(self._sizes)).to(self.device)

    def _buffers_of(self, types: tuple[str, ...]) -> Tensor:
        """Which numbers of a state are buffers of modules of these types, or of types derived from them."""
        kinds = [{kind.__name__ for kind in type(owner).__mro__} for owner, _ in self._buffers]
        for name in types:
            if not any(name in known for known in kinds):
                there = sorted({type(owner).__name__ for owner, _ in self._buffers})
                raise ValueError(
                    f"no module of the type {name} has buffers that change; {', '.join(there) or 'none'} have"
                )
        return self._entries([False] * len(self.trained) + [not known.isdisjoint(types) for known in kinds])

    def layout(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of all parameters and buffers, the frozen ones too."""
        every = [*self.module.named_parameters(), *self.module.named_buffers()]
        return [(name, list(tensor.shape)) for name, tensor in every]

    def digest(self) -> str:
        """What tells all numbers of the module, the frozen ones too, from others."""
        found = hashlib.blake2b(digest_size=16)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    # ---- parts -------------------------------------------------------------------------------------------------------

    def last_layer(self) -> str:
        """The name of the last module with trained parameters of its own: the head of most networks."""
        return self.names[len(self.trained) - 1].rpartition(".")[0]

    def part(self, *modules: str | type[nn.Module]) -> Part:
        """The numbers of these modules and of those in them.

        Args:
            modules: modules by their names (several may stand in one, with commas between them; an empty one is the
                last layer), or by their types: names say nothing of what a module is.

        Raises:
            ValueError: one is not there, or nothing is trained in them, or in no others.
        """
        if modules in self._named:
            return self._named[modules]
        named = [name.strip() or self.last_layer() for m in modules if isinstance(m, str) for name in m.split(",")]
        types, known = tuple(m for m in modules if isinstance(m, type)), dict(self.module.named_modules())
        unknown = [name for name in named if name not in known]
        named += [name for name, m in known.items() if types and isinstance(m, types)]
        prefixes = tuple(f"{name}." for name in named)
        chosen = frozenset(i for i, name in enumerate(self.names) if name.startswith(prefixes))
        if unknown or not 0 < len(chosen) < len(self.names):
            layers = dict.fromkeys(name.rpartition(".")[0] for name in self.names)
            given = ", ".join(repr(m) if isinstance(m, str) else m.__name__ for m in unknown or modules)
            raise ValueError(f"module {given} does not part what is trained in two; that is in {', '.join(layers)}")
        return self._named.setdefault(modules, self._part_of(chosen))

    def _part_of(self, chosen: frozenset[int]) -> Part:
        if chosen not in self._parts:
            self._parts[chosen] = Part(self, chosen)
        return self._parts[chosen]

    def whole(self, *parts: tuple[Part, Tensor]) -> Tensor:
        """The state that these parts, each with its values, make up."""
        if sum(part.size for part, _ in parts) != self.size:
            raise ValueError(f"parts of {[part.size for part, _ in parts]} numbers for a model of {self.size}")
        state = parts[0][1].new_empty(self.size)
        pieces = self.pieces(state)
        for part, values in parts:
            for i, piece in zip(part._places, values.split_with_sizes(part._sizes), strict=True):
                pieces[i].copy_(piece)
        return state

    def layers(self, each: Each = "module") -> Layers:
        """The layers that have something to train."""
        trained = self.names[: len(self.trained)]
        groups = layer_groups(trained) if each == "module" else list(range(len(trained)))
        label = {name: name.rpartition(".")[0] if each == "module" else name for name in self.names}
        number = {label[name]: group for name, group in zip(trained, groups, strict=True)}
        of_tensors = torch.tensor([number.get(label[name], -1) for name in self.names])
        entries = of_tensors.repeat_interleave(torch.tensor(self._sizes)).to(self.device)
        return Layers(list(number), groups, entries)

    # ---- states ------------------------------------------------------------------------------------------------------

    def pieces(self, state: Tensor) -> tuple[Tensor, ...]:
        """A state's numbers, one vector for each tensor: views of it."""
        if state.shape != (self.size,):
            raise ValueError(f"a state of the shape {list(state.shape)} for a model of {self.size} numbers")
        return state.split_with_sizes(self._sizes)

    def _copy_into(self, places: list[int], values: tuple[Tensor, ...]) -> None:
        """Copy values into the model's tensors at these places."""
        tensors = self._tensors()
        for i, part in zip(places, values, strict=True):
            part = part.view(self.shapes[i])
            tensors[i].copy_(part.round() if i in self._inexact else part)

    def _check_exact(self, tensors: list[Tensor], places: list[int]) -> None:
        """Refuse integers that the state's type cannot hold. All are looked at together: a GPU is waited for once."""
        places = [i for i in self._inexact if i in places and tensors[i].numel()]
        if not places:
            return
        exact = 2 ** (53 if self.dtype == torch.float64 else 24)
        largest = torch.stack([tensors[i].abs().max().long() for i in places]).tolist()
        for i, value in zip(places, largest, strict=True):
            if value > exact:
                raise OverflowError(f"{self.names[i]} holds {value}; {self.dtype} is exact up to {exact}")

    @torch.no_grad()
    def _joined(self, places: list[int]) -> Tensor:
        """Copies of some of the tensors as one vector."""
        tensors = self._tensors()
        self._check_exact(tensors, places)
        flat = [tensors[i].reshape(-1).to(self.dtype) for i in places]
        return torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def load(self, state: Tensor) -> None:
        """Set parameters and buffers to those of ``state``, a vector as :meth:`state` gives."""
        pieces, apart = self.pieces(state), self._apart()
        self._vector.copy_(state)
        self._copy_into(apart, tuple(pieces[i] for i in apart))
        torch.autograd.graph.increment_version(self.trained)
        self._loaded = state, self._versions(state)

    def _versions(self, state: Tensor) -> list[int]:
        """What changes when a state or a tensor of the model is written to."""
        return [state._version, *(tensor._version for tensor in self._tensors())]

    def loaded(self, state: Tensor) -> bool:
        """Whether this state was loaded last, and nothing was written since: for whoever evaluates many clients."""
        return self._loaded is not None and self._loaded[0] is state and self._loaded[1] == self._versions(state)

    @torch.no_grad()
    def state(self) -> Tensor:
        """A copy of parameters and buffers as one vector."""
        tensors, apart = self._tensors(), self._apart()
        self._check_exact(tensors, apart)
        state = self._vector.clone()
        pieces = self.pieces(state)
        for i in apart:
            pieces[i].view(self.shapes[i]).copy_(tensors[i])
        return state

    def second(self) -> Second:
        """A copy of parameters and buffers, for :meth:`exchange`."""
        return Second(*self._side_by_side())

    def exchange(self, other: Second) -> None:
        """Swap parameters and buffers with ``other``, as :meth:`second` gives it, without copying a number.

        For methods that train two models, a step of each by turns.
        """
        for i, tensor in enumerate(self._tensors()):
            tensor.data, other.tensors[i] = other.tensors[i], tensor.data
        self._vector, other.vector = other.vector, self._vector
        self._loaded = None

    def tensors(self, state: Tensor) -> list[Tensor]:
        """The parts of ``state`` that belong to the trained parameters, laid out in memory as these are."""
        pieces = self.pieces(state)[: len(self.trained)]
        trained = [piece.view(p.shape) for piece, p in zip(pieces, self.trained, strict=True)]
        if not self._channels_last:
            return trained
        return [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in trained]

    def __call__(self, inputs: Inputs) -> Tensor:
        """The outputs of a batch, such as logits. Of a tuple each is an argument, of a dictionary each a named one."""
        if isinstance(inputs, Tensor):
            if self._channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            returned = self.module(inputs)
            return returned if isinstance(returned, Tensor) else outputs(returned)
        return outputs(self.module(**inputs) if isinstance(inputs, Mapping) else self.module(*inputs))


def _check(module: nn.Module, everything: list[tuple[str, Tensor]]) -> None:
    """Refuse a module that one vector cannot hold, or that has nothing to train."""
    if not any(p.requires_grad for p in module.parameters()):
        why = "all its parameters are frozen" if any(True for _ in module.parameters()) else "it has no parameters"
        raise ValueError(f"{type(module).__name__}: {why}; there is nothing to train")
    label, first = everything[0]
    for name, tensor in everything:
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, {label} on {first.device}; use one device")
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype != first.dtype):
            raise ValueError(f"{name} is {tensor.dtype}, {label} {first.dtype}; use one floating type")
