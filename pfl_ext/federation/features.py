"""The features of a network: what enters its head, of any network and without a change of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .model import WorkingModel

__all__ = ["Features"]


class Features:
    """Watches what enters a network's head, for methods whose loss or prediction is of features.

    Within the context every forward pass of the working model leaves its features, [samples, features], in
    :attr:`last`; gradients flow through them:

    >>> with Features(client.model) as features:                      # doctest: +SKIP
    ...     Steps(client, method).train(lambda outputs, batch: ... features.last ...)

    Args:
        model: the working model.
        head: the module that takes the features; empty: the last layer.

    Raises:
        ValueError: there is no such module, or what enters it is not a row of numbers for each sample.
    """

    def __init__(self, model: WorkingModel, head: str = "") -> None:
        self.name = head or model.last_layer()
        modules = dict(model.module.named_modules())
        if self.name not in modules:
            raise ValueError(f"the network has no module {self.name!r} to be the head; it has {', '.join(modules)}")
        self._module, self._model, self._last = modules[self.name], model, None

    def __enter__(self) -> Features:
        self._hook = self._module.register_forward_pre_hook(self._watch)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        self._last = None

    def _watch(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self._last = inputs[0] if inputs else None

    @property
    def last(self) -> Tensor:
        """The features of the last forward pass."""
        found = self._last
        if not isinstance(found, Tensor) or found.dim() != 2:
            what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else "no tensor"
            raise ValueError(f"{what} entered the head {self.name!r}; accepted are features [samples, features]")
        return found

    def __call__(self, inputs: Any) -> Tensor:
        """The features of a batch, by the working model as it is."""
        self._model(inputs)
        return self.last
