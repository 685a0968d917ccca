"""Lists of tensors that ops are given again and again, as in a training loop: prepared once, handed over in no time."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ._arguments import describe, without_gradients
from ._declare import declare

__all__ = ["Prepared", "Repeated", "handed", "plain_eager", "prepare", "written"]

_IN_THE_CPU_LIBRARY = {"cuda": "prepared lists are kept by the CPU library; lists on a GPU are handed over as they are"}


def _no_ticket(tensors: list[Tensor]) -> Tensor:
    return torch.empty(0, dtype=torch.int64)


# A ticket stands for a list of tensors that the CPU library keeps. The ops on lists take [ticket] for the list.
_prepare = declare(
    "prepare(Tensor[] tensors) -> Tensor", reference=_no_ticket, fake=_no_ticket, plain_on=_IN_THE_CPU_LIBRARY
)


def _nothing_kept(ticket: Tensor) -> None:
    pass


_end = declare(
    "end_prepared_(Tensor ticket) -> ()", reference=_nothing_kept, fake=_nothing_kept, plain_on=_IN_THE_CPU_LIBRARY
)


class Prepared(Sequence[Tensor]):
    """A list of tensors as :func:`prepare` gives it. It is read like a tuple."""

    __slots__ = ("again", "handed", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.again: tuple[Any, ...] | None = None
        """The arguments of the last step of this list, and at the end the tensor that stands for all of them."""
        self.handed = tensors
        """What an op is given for the list, where nothing traces it: a ticket, or the list itself."""
        if not tensors or not plain_eager():
            return
        with without_gradients():
            ticket = _prepare(tensors)
        if ticket.numel():
            self.handed = [ticket]

    def __del__(self) -> None:
        # Not when the program ends: the memory ends with it, and torch may be gone by then.
        if self.ticket is not None and not sys.is_finalizing():
            _end.overload(self.ticket)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is prepared anew: the ticket of this one stands for these tensors."""
        return prepare, (self.tensors,)

    @property
    def ticket(self) -> Tensor | None:
        """What stands for the list in a call of an op; None where the list itself is handed over."""
        return None if self.handed is self.tensors else self.handed[0]

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        """The tensor at this index, or those of a slice."""
        return self.tensors[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def plain_eager() -> bool:
    """Whether nothing looks at what an op is given: no compiler, no mode that traces or fakes tensors."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def handed(*lists: list[Tensor] | Prepared) -> list[list[Tensor]]:
    """What an op is given for these lists."""
    if plain_eager():
        return [x if type(x) is list else x.handed for x in lists]  # type: ignore[union-attr]
    return [x if type(x) is list else x.tensors for x in lists]  # type: ignore[union-attr]


def written(*lists: list[Tensor] | Prepared) -> None:
    """Tell autograd that these were changed, so that it refuses a graph that needs them as they were.

    As ``torch.autograd.graph.increment_version`` does, which takes 1 us to look at what it was given.
    """
    for x in lists:
        if x:
            torch._C._increment_version(x if type(x) is list else x.tensors)  # type: ignore[union-attr]


def prepare(tensors: Iterable[Tensor]) -> Prepared:
    """Make a list ready to be given to ops many times: its tensors are looked at once, not in every call.

    :func:`~pfl_ext.ops.proximal_sgd_step_`, :func:`~pfl_ext.ops.lwsam_perturb_`, :func:`~pfl_ext.ops.restore_`,
    :func:`~pfl_ext.ops.weighted_average` and :meth:`StreamingAverage.add <pfl_ext.ops.StreamingAverage.add>` take less
    time for a prepared list, in particular where it has many small tensors; any function that takes a list takes a
    prepared one. What they compute is the same to the bit. Best if all lists of a call are prepared.

    The tensors stay what they are: they may be written, and ``x.data = ...`` and ``x.resize_`` are noticed at the next
    call. The list cannot be changed, and its tensors live as long as it does.

    On GPUs, without the CPU library and in ``torch.compile`` the list is handed over as it is.

    >>> weights = [torch.zeros(2), torch.zeros(3)]
    >>> gradients = [torch.ones(2), torch.ones(3)]
    >>> weights, gradients = prepare(weights), prepare(gradients)
    >>> for _ in range(10):
    ...     proximal_sgd_step_(weights, gradients, [], lr=0.5, lam=0.0)
    >>> weights[1]
    tensor([-5., -5., -5.])
    """
    if type(tensors) is Prepared:
        return tensors
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors is {describe(tensors)}; a list of tensors is accepted")
    found: list[Any] = list(tensors)
    for t, x in enumerate(found):
        if not isinstance(x, Tensor):
            raise TypeError(f"tensor {t} is {describe(x)}, not a tensor")
    return Prepared(found)


class Repeated:
    """The lists that a loop makes anew in every pass: prepared as soon as one has the same tensors twice in a row."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Sequence[Tensor], Prepared | None]] = {}

    def __call__(self, role: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The list as an op is best given it; ``role`` tells the lists of a pass from each other."""
        if not plain_eager():
            return tensors
        last, prepared = self._last.get(role, ((), None))
        if not tensors or len(tensors) != len(last) or any(a is not b for a, b in zip(tensors, last, strict=True)):
            self._last[role] = tensors, None
            return tensors
        if prepared is None:
            prepared = prepare(tensors)
            self._last[role] = tensors, prepared
        return prepared
