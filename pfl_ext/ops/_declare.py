"""How an op is declared: schema, plain-torch reference, fake kernel and gradient, in one call.

The schema lives here, in Python, and the reference is the op's default kernel on every device. A native library adds
kernels for its dispatch key, and those win; the autograd formula is the same for both. ``csrc/README.md`` explains it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["OPS", "Op", "declare", "raise_out_of_memory"]

_library = torch.library.Library("pfl_ext", "DEF")


@dataclass(frozen=True)
class Op:
    """A declared op. Calling it goes through the dispatcher, so through the best kernel there is."""

    name: str
    schema: str
    reference: Callable[..., Any]
    overload: torch._ops.OpOverload
    plain_on: Mapping[str, str] = field(default_factory=dict)
    """Devices for which there is no native kernel by design, with the reason."""

    def __call__(self, *args: Any) -> Any:
        """Run the kernel that the dispatcher chooses."""
        try:
            return self.overload(*args)
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise

    @property
    def at_once(self) -> Callable[..., Any]:
        """The overload without its Python part, which takes 0.2 us: for small calls where nothing traces."""
        return self.overload._op

    def has_kernel(self, key: str) -> bool:
        """Whether a native kernel serves this dispatch key (``"CPU"`` or ``"CUDA"``)."""
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"pfl_ext::{self.name}", key)


def raise_out_of_memory(error: RuntimeError) -> None:
    """Raise torch's own error if ``error`` is that: the stable ABI hands on an exception's words, not its class."""
    words, _, _ = str(error).partition(" (originally from torch_call_dispatcher")
    if words.startswith("CUDA out of memory") and not isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(words) from None


OPS: dict[str, Op] = {}


def _without_none(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with an error for None where a tensor is needed: the dispatcher takes that for a tensor too."""

    @functools.wraps(kernel)
    def checked(*args: Any) -> Any:
        try:
            return kernel(*args)
        except AttributeError:
            for argument, x in zip(OPS[name].overload._schema.arguments, args, strict=False):
                if x is None and str(argument.type) == "Tensor":
                    raise TypeError(f"{argument.name} is None; a tensor is accepted") from None
            raise

    return checked


def declare(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    composed: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    plain_on: Mapping[str, str] | None = None,
) -> Op:
    """Declare ``pfl_ext::<schema>`` and return it.

    ``reference`` computes the op in plain torch and is its default kernel; ``fake`` gives shapes and types to
    ``torch.compile``; ``backward`` and ``setup_context`` are as in :func:`torch.library.register_autograd`.
    ``composed`` is the default kernel of an op that is made of other ops, so that their native kernels serve it too;
    the reference stays plain torch, or comparing with it would compare a kernel with itself.
    ``plain_on`` says for which devices (``"cpu"``, ``"cuda"``) the reference is all there is meant to be, and why.
    """
    name = schema.split("(", 1)[0]
    qualified = f"pfl_ext::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, _without_none(name, composed or reference), "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    OPS[name] = Op(name, schema, reference, getattr(torch.ops.pfl_ext, name).default, plain_on or {})
    return OPS[name]
