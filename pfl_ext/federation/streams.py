"""Named random streams from one seed.

A stream is a function of the run's seed and of its name, such as ``("batches", round, client)``. Nothing is drawn from
a generator that others share, so two methods see the same clients and the same batches, the order in which clients are
trained and the number of workers do not matter, and a resumed run needs no saved generator to go on as the unbroken
one would have.
"""

from __future__ import annotations

import hashlib

import torch

__all__ = ["seed_of", "stream"]


def seed_of(seed: int, *name: str | int) -> int:
    """A 63-bit seed that depends on all of ``seed`` and ``name``."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *name))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *name: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator at the beginning of the stream ``name`` of the run with this seed."""
    return torch.Generator(device).manual_seed(seed_of(seed, *name))
