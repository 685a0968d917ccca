"""Inputs of any form: a tensor, or tuples and dictionaries of tensors, in each other if need be.

Tensors in a nest have names for messages and for normalisation: their keys and places, with dots between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["Inputs", "arguments", "filled", "joined", "leaves", "mapped", "named", "shapes", "split"]

Inputs: TypeAlias = Tensor | tuple["Inputs", ...] | Mapping[str, "Inputs"]
"""What a network takes: a tensor, a tuple of its arguments, or a dictionary of them by their names."""


def named(inputs: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors with their names, in their order; one that is no nest has the name ""."""
    if isinstance(inputs, (tuple, Mapping)):
        parts = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
        for key, part in parts:
            yield from named(part, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, inputs


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments by which a network takes them."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def leaves(inputs: Any) -> list[Any]:
    """All tensors of some inputs, in a fixed order."""
    return [inputs] if isinstance(inputs, Tensor) else [leaf for _, leaf in named(inputs)]


def mapped(function: Callable[[Any], Any], inputs: Any) -> Any:
    """The same nest of what the function makes of each tensor."""
    if isinstance(inputs, tuple):
        return tuple(mapped(function, part) for part in inputs)
    if isinstance(inputs, Mapping):
        return {key: mapped(function, part) for key, part in inputs.items()}
    return function(inputs)


def filled(form: Any, parts: Iterable[Any]) -> Any:
    """A nest of that form with these tensors in it, in their order."""
    given = iter(parts)
    return mapped(lambda _: next(given), form)


def joined(function: Callable[[list[Any]], Any], nests: list[Any]) -> Any:
    """One nest of what the function makes of the tensors at each place of several nests of one form."""
    first = nests[0]
    if isinstance(first, tuple):
        return tuple(joined(function, [nest[i] for nest in nests]) for i in range(len(first)))
    if isinstance(first, Mapping):
        return {key: joined(function, [nest[key] for nest in nests]) for key in first}
    return function(nests)


def shapes(inputs: Any) -> Any:
    """The same nest of the shape of one sample of each."""
    return mapped(lambda leaf: tuple(leaf.shape[1:]), inputs)


def split(inputs: Inputs, size: int) -> list[Inputs]:
    """Nests of ``size`` samples each, of which the last may have fewer."""
    every = [leaf.split(size) for leaf in leaves(inputs)]
    return [filled(inputs, parts) for parts in zip(*every, strict=True)]
