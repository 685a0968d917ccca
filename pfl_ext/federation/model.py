"""One working model for all clients, its whole state one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["WorkingModel"]


class WorkingModel:
    """A module whose parameters and buffers are views of one vector: a client is loaded by one copy.

    The vector holds the parameters in the module's order, then its buffers. Integer buffers, such as
    ``num_batches_tracked``, ride along as numbers of the vector's type and are rounded when they come back from an
    average; one too large to be exact in that type is refused.

    Args:
        module: the network; its tensors become views of the vector. All must be on one device, all floating ones of
            one type. Parameters that require no gradient are part of the state and are not trained.
        local_buffers: module types whose buffers never leave a client (see :attr:`local`).
        server_buffers: module types whose buffers stay what the server has (see :attr:`server`).
    """

    def __init__(
        self,
        module: nn.Module,
        local_buffers: tuple[type[nn.Module], ...] = (),
        server_buffers: tuple[type[nn.Module], ...] = (),
    ) -> None:
        """See the class."""
        named = [*module.named_parameters(), *module.named_buffers()]
        if not any(True for _ in module.parameters()):
            raise ValueError(f"{type(module).__name__} has no parameters: there is nothing to train")
        first = named[0][1]
        for name, tensor in named:
            if tensor.device != first.device:
                raise ValueError(f"{name} is on {tensor.device}, {named[0][0]} on {first.device}; use one device")
            if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype != first.dtype):
                raise ValueError(f"{name} is {tensor.dtype}, {named[0][0]} {first.dtype}; use one floating type")
        self.module = module
        self.names = [name for name, _ in named]
        self.shapes = [tuple(tensor.shape) for _, tensor in named]
        self.vector = torch.cat([tensor.detach().reshape(-1).to(first.dtype) for _, tensor in named])
        self._largest = 2 ** (53 if first.dtype == torch.float64 else 24)
        self._integers: list[tuple[Tensor, Tensor]] = []  # (the module's buffer, its place in the vector)
        self._place(named)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in module.parameters())
        self.local = self._mask(local_buffers)
        self.server = self._mask(server_buffers)
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())

    def _place(self, named: list[tuple[str, Tensor]]) -> None:
        start = 0
        for name, tensor in named:
            view = self.vector[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
            if isinstance(tensor, nn.Parameter):
                tensor.data = view
            elif tensor.is_floating_point():
                owner, _, leaf = name.rpartition(".")
                self.module.get_submodule(owner)._buffers[leaf] = view
            else:
                self._integers.append((tensor, view))

    def _mask(self, types: tuple[type[nn.Module], ...]) -> Tensor:
        """Which entries of the vector are buffers of modules of these types (by type: names say nothing)."""
        mask = torch.zeros(self.vector.numel(), dtype=torch.bool)
        if not types:
            return mask
        owners = dict(self.module.named_modules())
        start = 0
        buffers = {name for name, _ in self.module.named_buffers()}
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = torch.Size(shape).numel()
            mask[start : start + size] = name in buffers and isinstance(owners[name.rpartition(".")[0]], types)
            start += size
        return mask

    def load(self, state: Tensor) -> None:
        """Set parameters and buffers to those of ``state``, a vector as :meth:`state` gives."""
        if state.shape != self.vector.shape:
            raise ValueError(f"a state of {state.numel()} numbers for a model of {self.vector.numel()}")
        with torch.no_grad():
            self.vector.copy_(state)
            for buffer, place in self._integers:
                buffer.copy_(place.round())

    def state(self) -> Tensor:
        """A copy of parameters and buffers as one vector."""
        for buffer, place in self._integers:
            if buffer.numel() and int(buffer.abs().max()) > self._largest:
                raise OverflowError(
                    f"an integer buffer holds {int(buffer.abs().max())}, which {self.vector.dtype} cannot hold exactly"
                )
            place.copy_(buffer)
        return self.vector.clone()

    def tensors(self, state: Tensor) -> list[Tensor]:
        """The parts of ``state`` that belong to the trained parameters, as views of their shapes."""
        found, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = torch.Size(shape).numel()
            found[name] = state[start : start + size].view(shape)
            start += size
        return [found[name] for name, p in self.module.named_parameters() if p.requires_grad]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The logits of a batch."""
        result = self.module(inputs)
        assert isinstance(result, Tensor)
        return result
