"""One argument of a call replaced by something that it should not be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["damaged", "draw_damage"]

_TENSOR: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "text": lambda x: "text",
    "number": lambda x: 3,
    "complex": lambda x: x.to(torch.complex64) if not x.is_complex() else x.real.clone(),
    "integer": lambda x: torch.zeros(x.shape, dtype=torch.int32),
    "boolean": lambda x: torch.zeros(x.shape, dtype=torch.bool),
    "other float": lambda x: torch.zeros(x.shape, dtype=torch.float64 if x.dtype != torch.float64 else torch.float32),
    "float8": lambda x: torch.zeros(x.shape, dtype=torch.float8_e4m3fn),
    "more dimensions": lambda x: torch.zeros([1, *x.shape], dtype=x.dtype),
    "longer": lambda x: torch.zeros([*x.shape[:-1], x.shape[-1] + 1] if x.dim() else [2], dtype=x.dtype),
    "flat": lambda x: x.reshape(-1).clone(),
    "empty": lambda x: torch.zeros([0], dtype=x.dtype),
    "expanded": lambda x: torch.zeros([], dtype=x.dtype).expand(x.shape),
    "elsewhere": lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"),
    "sparse": lambda x: torch.zeros(x.shape, dtype=x.dtype).to_sparse(),
    "list": lambda x: [x, x],
}
_NUMBER: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: None,
    "text": lambda x: "text",
    "not a number": lambda x: math.nan,
    "infinite": lambda x: math.inf,
    "negative": lambda x: -1,
    "large": lambda x: 2**33,
    "beyond": lambda x: 2**70,
    "lowest": lambda x: -(2**63),
    "zero": lambda x: 0,
    "tiny": lambda x: 1e-300,
    "vector": lambda x: torch.zeros(2),
    "list": lambda x: [x],
}
_LIST: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: None,
    "text": lambda x: "text",
    "number": lambda x: 3,
    "nothing": lambda x: [],
    "longer": lambda x: [*x, x[-1]] if len(x) else [3],
    "shorter": lambda x: list(x)[:-1],
    "nested": lambda x: [list(x)],
    "none inside": lambda x: [*list(x)[:-1], None],
    "turned": lambda x: list(x)[::-1],
    "set": lambda x: {1, 2},
}
_TEXT: dict[str, Callable[[Any], Any]] = {
    "unknown": lambda x: "unknown",
    "none": lambda x: None,
    "number": lambda x: 3,
    "list": lambda x: [x],
}


def _kinds(value: Any) -> dict[str, Callable[[Any], Any]]:
    if isinstance(value, Tensor):
        return _TENSOR
    if isinstance(value, list | tuple):
        return _LIST
    if isinstance(value, str):
        return _TEXT
    return _NUMBER


def _places(value: Any, path: list[Any]) -> list[list[Any]]:
    found = [path] if path else []
    if isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            found += _places(inner, [*path, i])
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, [*path, key])
    return found


def _at(value: Any, path: list[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


def draw_damage(seed: int, arguments: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Where, and what: ``{"path": [...], "kind": "..."}``. Options are below the key of their name."""
    choice = random.Random(seed)
    everything = {"arguments": arguments, "options": options}
    places = [path for path in _places(everything, []) if len(path) > 1 and not isinstance(_at(everything, path), dict)]
    if not places:
        return {"path": [], "kind": ""}
    path = choice.choice(places)
    return {"path": path, "kind": choice.choice(list(_kinds(_at(everything, path))))}


def damaged(damage: dict[str, Any], arguments: list[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The same arguments but for one."""

    def rebuilt(value: Any, path: list[Any]) -> Any:
        if not path:
            return _kinds(value)[damage["kind"]](value)
        key, rest = path[0], path[1:]
        if isinstance(value, dict):
            return {name: rebuilt(inner, rest) if name == key else inner for name, inner in value.items()}
        return type(value)(rebuilt(inner, rest) if i == key else inner for i, inner in enumerate(value))

    if not damage["path"]:
        return arguments, options
    everything = rebuilt({"arguments": arguments, "options": options}, damage["path"])
    return everything["arguments"], everything["options"]
