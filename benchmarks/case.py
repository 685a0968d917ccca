"""What a race is: contestants that compute one thing on the same data, and the answer they must give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Case", "Contestant", "Expected", "Family", "Grid", "Kind", "Skipped", "Spec", "WrongResult", "flatten"]

Kind: TypeAlias = Literal["ours", "naive", "skilled", "yardstick"]
"""A yardstick is no opponent: work of known size, timed to relate ours to."""


class WrongResult(Exception):
    """A contestant does not compute what it is timed for."""


@dataclass(frozen=True)
class Spec:
    """Which race: the coordinates of a case in the grid."""

    op: str
    shapes: str
    clients: int
    dtype: str
    threads: int

    def __str__(self) -> str:
        """As in ``average lenet C=20 float32, 2 threads``."""
        plural = "" if self.threads == 1 else "s"
        return f"{self.op} {self.shapes} C={self.clients} {self.dtype}, {self.threads} thread{plural}"


@dataclass(frozen=True)
class Grid:
    """What the user chose on the command line. ``None`` leaves the choice to the family, which may vary it by case."""

    shapes: tuple[str, ...] | None = None
    clients: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    threads: tuple[int, ...] | None = None
    all_threads: int = field(default_factory=torch.get_num_threads)
    quick: bool = False


@dataclass(frozen=True)
class Contestant:
    """One way to compute the result.

    ``adds_in`` is the least precise type of its intermediate sums; it decides which error is still a correct result.
    A yardstick may compute something else, and then has its own ``expected``.
    """

    name: str
    kind: Kind
    run: Callable[[], Any]
    adds_in: torch.dtype
    expected: Expected | None = None


def flatten(result: Any) -> Tensor:
    """A contestant's result, in whatever form it gives it, as one float64 vector."""
    if isinstance(result, nn.Module):
        result = list(result.parameters())
    if isinstance(result, np.ndarray):
        result = torch.from_numpy(result)
    if isinstance(result, Tensor):
        return result.detach().reshape(-1).double()
    return torch.cat([flatten(x) for x in result])


@dataclass(frozen=True)
class Expected:
    r"""The float64 answer and how far from it a correct result may be.

    A sum in floating point is within :math:`\gamma_n \sum |terms|` of the exact one, with
    :math:`\gamma_n = n u / (1 - n u)`, n the roundings that a term goes through and u the unit roundoff of the type
    that the sum is kept in (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Rounding the sum to
    the type of the result adds u of that type.
    """

    values: Tensor
    magnitude: Tensor
    """The sum of the absolute terms, element by element."""
    roundings: int

    def check(self, contestant: Contestant, result: Any, dtype: torch.dtype) -> None:
        """Raise :class:`WrongResult` where ``result``, of type ``dtype``, is further off than rounding explains."""
        given = flatten(result)
        if given.shape != self.values.shape:
            raise WrongResult(f"{contestant.name} gave {given.numel()} values, expected {self.values.numel()}")
        nu = self.roundings * torch.finfo(contestant.adds_in).eps / 2
        # Past nu = 1/2 the bound proves nothing; a sum that stagnates still loses no more than it was given.
        bound = self.magnitude * (nu / (1 - nu) if nu < 0.5 else 1.0)
        bound += torch.finfo(dtype).eps / 2 * (self.values.abs() + bound)
        wrong = ~((given - self.values).abs() <= bound)  # not "error > bound", which a NaN would pass
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise WrongResult(
                f"{contestant.name} is wrong in {int(wrong.sum())} of {wrong.numel()} values, first number {first}: "
                f"{given[first].item():.9g}, expected {self.values[first].item():.9g} within {bound[first].item():.3g}"
            )


@dataclass(frozen=True)
class Case:
    """A race that is ready to run. The first contestant is ours, the one that ratios refer to."""

    spec: Spec
    contestants: Sequence[Contestant]
    expected: Expected
    data_bytes: int
    """Bytes of the tensors that the op is given."""
    limit_bytes: int
    """What any implementation must read and write."""
    large_buffer: Tensor | None = None
    """Memory of the case that the bandwidth may be measured on, to save a second buffer of that size."""

    def check(self, contestant: Contestant, result: Any) -> None:
        """Raise :class:`WrongResult` unless it is the expected result."""
        expected = contestant.expected or self.expected
        expected.check(contestant, result, getattr(torch, self.spec.dtype))


@dataclass(frozen=True)
class Skipped:
    """A race that cannot be run here, or a contestant that cannot take part in it."""

    spec: Spec
    reason: str
    contestant: str | None = None


@dataclass(frozen=True)
class Family:
    """A family of ops with its races."""

    name: str
    summary: str
    ops: Mapping[str, str]
    """The ops and what each race is about, in a sentence for the table."""
    notes: Mapping[str, str]
    """What a reader must know of a contestant, by its name."""
    shapes: Sequence[str]
    clients: Sequence[int]
    dtypes: Sequence[str]
    plan: Callable[[Grid], list[Spec]]
    cases: Callable[[Iterable[Spec]], Iterator[Case | Skipped]]
    """Builds the cases one by one; those that share data must follow each other in the plan."""
    counted: str = "clients"
    """What the numbers of ``clients`` count, in the words of this family."""
