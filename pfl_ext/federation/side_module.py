"""A module of a method's own beside the network, its numbers one vector: a generator, a hypernetwork."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .model import WorkingModel

__all__ = ["SideModule"]


class SideModule:
    """What a module computes as a function of its numbers, which are a vector like any other of a method.

    >>> generator = SideModule(lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5)))  # doctest: +SKIP
    >>> server["generator"] = generator.drawn(server.stream("generator"), server.model)               # doctest: +SKIP
    >>> z = generator(received["generator"], noise)                                                   # doctest: +SKIP

    So it can be kept, sent, averaged and saved, and is built nowhere. To train it, take its numbers as
    :meth:`leaves` and give these to :class:`~.steps.Steps` or an optimiser: they are views, and the vector changes.

    Args:
        build: makes the module. What it draws when it is made are the first numbers.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build

    @cached_property
    def _module(self) -> nn.Module:
        with torch.device("meta"):  # a form without numbers
            module = self._build()
        if any(True for _ in module.buffers()):
            raise ValueError(f"{type(module).__name__} has buffers; accepted beside the network are parameters alone")
        return module

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self._module.named_parameters()}

    @property
    def size(self) -> int:
        """How many numbers the module has."""
        return sum(shape.numel() for shape in self._shapes.values())

    def drawn(self, stream: torch.Generator, like: WorkingModel) -> Tensor:
        """First numbers, by a random stream, of the type and on the device of the working model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=stream)))
            module = self._build()
        numbers = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        return numbers.to(like.device, like.dtype)

    def pieces(self, vector: Tensor) -> dict[str, Tensor]:
        """The parameters by name: views of the vector."""
        if vector.shape != (self.size,):
            raise ValueError(f"{list(vector.shape)} numbers for a module of {self.size}")
        parts = vector.split_with_sizes([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}

    def leaves(self, vector: Tensor) -> dict[str, Tensor]:
        """The same to be trained: a step of one of them is a step of the vector."""
        return {name: piece.detach().requires_grad_() for name, piece in self.pieces(vector.detach()).items()}

    def __call__(self, numbers: Tensor | Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        """What the module makes of these inputs with these numbers: a vector, or parameters by name."""
        own = self.pieces(numbers) if isinstance(numbers, Tensor) else dict(numbers)
        found = functional_call(self._module, own, inputs)
        assert isinstance(found, Tensor)
        return found
