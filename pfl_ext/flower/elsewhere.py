"""Data that are at the nodes: what each says of its own, and at the server a dataset of as many samples without any."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfl_ext.data import Dataset, Partition
from pfl_ext.data.nests import mapped
from pfl_ext.data.statistics import Statistics, by_name
from pfl_ext.data.stored import StoredTensor
from pfl_ext.federation import Settings

from .records import told

__all__ = ["Introduction", "dataset_of", "described"]

_MOST_SAMPLES = 1 << 27  # that a node may say it has: the server makes an index of eight bytes for each
_LEAF = re.compile(r"(\w{1,10})\[((?:\d{1,15}(?:, \d{1,15}){0,15})?)\]")
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}


# ---- at a node -------------------------------------------------------------------------------------------------------


def described(dataset: Dataset) -> dict[str, Any]:
    """What a node says of its data: the forms of samples and targets, and how they are normalised; no sample."""
    return {
        "inputs": _plain(mapped(_form, dataset.inputs)),
        "targets": _form(dataset.targets),
        "classes": list(dataset.classes),
        "mean": _numbers(dataset.mean),
        "std": _numbers(dataset.std),
        "data": dataset.fingerprint,
    }


def _form(leaf: Any) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}"


def _plain(nest: Any) -> Any:
    """A nest as JSON has it: a tuple is a list."""
    if isinstance(nest, tuple):
        return [_plain(part) for part in nest]
    return {key: _plain(part) for key, part in nest.items()} if isinstance(nest, Mapping) else nest


def _numbers(given: Statistics | None) -> dict[str, list[float]]:
    return {name: numbers.tolist() for name, numbers in by_name(given).items()}


# ---- at the server ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Introduction:
    """What a node says of itself."""

    node: int
    client: int
    own: bool
    """Whether it has data of its own, which the server does not have."""
    run: str
    sizes: dict[str, int]
    inputs: Any
    """A nest of what each tensor is of one sample: ``uint8[3, 32, 32]``."""
    targets: str
    classes: tuple[str, ...]
    mean: dict[str, tuple[float, ...]]
    std: dict[str, tuple[float, ...]]
    data: str
    network: str

    @classmethod
    def read(cls, node: int, plain: Mapping[str, Any]) -> Introduction:
        """The introduction of an answer.

        Raises:
            ValueError: it is none; the message says what is wrong.
        """
        try:
            inputs = _nest(plain["inputs"])
            mapped(_leaf, inputs)
            _leaf(plain["targets"])
            return cls(
                node,
                int(plain["client"]),
                bool(plain["own"]),
                str(plain["run"]),
                {part: _samples(plain["sizes"][part]) for part in ("train", "validation", "test")},
                inputs,
                plain["targets"],
                tuple(str(name) for name in plain["classes"]),
                _read_numbers(plain["mean"]),
                _read_numbers(plain["std"]),
                str(plain["data"]),
                str(plain["network"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"it does not say what it is: {type(error).__name__} {error}") from None


def _nest(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_nest(part) for part in plain)
    return {key: _nest(part) for key, part in plain.items()} if isinstance(plain, Mapping) else plain


def _leaf(form: str) -> tuple[torch.dtype, tuple[int, ...]]:
    found = _LEAF.fullmatch(form)
    if found is None or found[1] not in _TYPES:
        raise ValueError(f"{form[:40]!r} is no type and shape; uint8[3, 32, 32] is one")
    return _TYPES[found[1]], tuple(int(size) for size in found[2].split(", ") if size)


def _samples(value: Any) -> int:
    if not 0 <= (count := int(value)) <= _MOST_SAMPLES:
        raise ValueError(f"{str(value)[:40]} samples; 0 to {_MOST_SAMPLES} are accepted")
    return count


def _read_numbers(plain: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    return {str(name): tuple(float(number) for number in numbers) for name, numbers in plain.items()}


class _Absent(StoredTensor):
    """Samples that are at the nodes: the loop counts them, and no test set of the server's is among them."""

    def index_select(self, dim: int, indices: Tensor) -> Tensor:
        """Zeros of their type and shape."""
        return torch.zeros((len(indices), *self.whole[1:]), dtype=self.dtype, device=self.device)


def dataset_of(nodes: Sequence[Introduction], settings: Settings, *, tested: bool) -> tuple[Dataset, Partition]:
    """A dataset with as many samples as the nodes have, and none of them: the loop counts by it.

    Args:
        nodes: all of them, each with data of its own.
        settings: the run's.
        tested: whether the server has samples of its own, labelled or not, which are normalised as the nodes' are.

    Raises:
        ValueError: the nodes' data do not fit together, or with the settings.
    """
    for what in ("own", "inputs", "targets", "classes"):
        _check_same(nodes, what, "the same are accepted (an archive can name its classes)")
    alike = len({repr((node.mean, node.std)) for node in nodes}) == 1
    if tested and not alike:
        _check_same(nodes, "mean", "the server's samples are normalised as theirs: data.mean and data.std say how")
        _check_same(nodes, "std", "the server's samples are normalised as theirs: data.mean and data.std say how")
    if settings.personal_global_test:
        raise ValueError("personal_global_test is set; nodes with data of their own have no global test set")
    count, parts = 0, dict[str, list[Tensor]](train=[], validation=[], test=[])
    for node in nodes:
        for name, indices in parts.items():
            indices.append(torch.arange(count, count + node.sizes[name]))
            count += node.sizes[name]
    dataset = _without_samples(nodes[0], count, normalised=alike)
    digest = hashlib.sha256("".join(node.data for node in nodes).encode()).hexdigest()
    object.__setattr__(dataset, "_fingerprint", digest)
    nothing = torch.empty(0, dtype=torch.int64)
    cut = Partition(
        tuple(parts["train"]),
        tuple(parts["validation"]),
        tuple(parts["test"]),
        nothing,
        nothing,
        {"partitioner": "nodes", "dataset": dataset.name, "dataset_fingerprint": digest},
    )
    return dataset, cut


def _check_same(nodes: Sequence[Introduction], what: str, more: str) -> None:
    for node in nodes:
        ours, theirs = getattr(nodes[0], what), getattr(node, what)
        if ours != theirs:
            said = f"client {node.client} has data with the {what} {theirs}, client {nodes[0].client} with {ours}"
            raise ValueError(f"{told(said)}; {more}")


def _without_samples(node: Introduction, count: int, normalised: bool) -> Dataset:
    """A dataset that seems to have so many samples of a node's form."""

    def absent(form: str) -> _Absent:
        dtype, shape = _leaf(form)
        return _Absent(Path("the nodes'"), (count, *shape), dtype)

    dtype, shape = _leaf(node.targets)
    mean, std = (_statistics(given) if normalised else None for given in (node.mean, node.std))
    return Dataset(
        "the nodes'",
        mapped(absent, node.inputs),
        torch.zeros(1, dtype=dtype).expand(count, *shape),  # one number, however many
        node.classes,
        torch.zeros(1, dtype=torch.bool).expand(count),
        mean=mean,
        std=std,
    )


def _statistics(given: Mapping[str, Sequence[float]]) -> Statistics | None:
    found = {name: torch.tensor(numbers) for name, numbers in given.items()}
    return found.get("", found or None)
