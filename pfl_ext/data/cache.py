"""A cache of samples in files: made once, in parallel, whole or not at all; read sample by sample afterwards."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .nests import Inputs, filled, leaves
from .stacking import check_alike
from .stored import StoredTensor

__all__ = ["cached", "too_large"]

_FORMAT = "pfl_ext.cache/1"
_AHEAD = 1024  # samples that are read together: what a cache being made has in memory

Item = tuple[Inputs, Tensor | None]
"""A sample and, where it comes with the sample, its target."""


def too_large(size: int) -> bool:
    """Whether this number of bytes is more than a quarter of this machine's memory."""
    return size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def cached(
    folder: Path, key: Sequence[Any], count: int, read: Callable[[int], Item], *, name: str, threads: int | None = None
) -> tuple[Inputs, Tensor | None]:
    """All samples, and their targets, as files of a cache that is made where there is none for that key.

    Two processes that want the same cache make it once: the second waits. One that is killed leaves nothing that is
    used.

    Args:
        folder: with the caches.
        key: what tells these samples from others, as JSON has it: files with their sizes and times, say.
        count: how many samples there are.
        read: the i-th of them; several at a time are asked for, by threads.
        name: for people, on the progress bar and in the folder's name.
        threads: how many; None: as many as there are processors.
    """
    digest = hashlib.sha256(json.dumps([_FORMAT, *key]).encode()).hexdigest()[:16]
    plain = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    place = folder / f"{plain}-{digest}"
    if not place.is_dir():
        with _locked(folder / f".{place.name}.lock"):
            if not place.is_dir():
                making = folder / f".{place.name}.making"
                shutil.rmtree(making, ignore_errors=True)  # of a process that was killed
                making.mkdir()
                _make(making, count, read, name, threads)
                making.rename(place)
    return _open(place)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, count: int, read: Callable[[int], Item], name: str, threads: int | None) -> None:
    first, _ = read(0)
    files = [(folder / f"{i}.bin").open("wb") for i, _ in enumerate(leaves(first))]
    targets: list[Tensor] = []
    begin = time.monotonic()
    try:
        with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
            for start in range(0, count, _AHEAD):
                some = range(start, min(start + _AHEAD, count))
                for i, (sample, target) in zip(some, pool.map(read, some), strict=True):
                    check_alike(i, sample, first)
                    for file, leaf in zip(files, leaves(sample), strict=True):
                        _check_finite(name, i, leaf)
                        file.write(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                    targets += [] if target is None else [target]
                _show(name, some.stop, count, time.monotonic() - begin)
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files:
            file.close()
    every = [{"shape": [count, *leaf.shape], "dtype": str(leaf.dtype)} for leaf in leaves(first)]
    form = filled(first, itertools.count())
    (folder / "about.json").write_text(json.dumps({"format": _FORMAT, "form": _plain(form), "leaves": every}))
    if targets:
        from safetensors.torch import save_file

        save_file({"targets": torch.stack(targets)}, folder / "targets.safetensors")


def _check_finite(name: str, i: int, leaf: Tensor) -> None:
    if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
        raise ValueError(f"{name!r} has NaN or infinity in sample {i}; leave it out or give it numbers")


def _open(folder: Path) -> tuple[Inputs, Tensor | None]:
    try:
        about = json.loads((folder / "about.json").read_text())
        every = []
        for i, leaf in enumerate(about["leaves"]):
            dtype = getattr(torch, leaf["dtype"].removeprefix("torch."))
            stored = StoredTensor(folder / f"{i}.bin", tuple(leaf["shape"]), dtype)
            if stored.path.stat().st_size != stored.nbytes:
                raise ValueError(f"{stored.path} has {stored.path.stat().st_size:,} bytes, not {stored.nbytes:,}")
            every.append(stored)
        inputs = _nest(about["form"], every)
        targets = None
        if (folder / "targets.safetensors").is_file():
            from safetensors.torch import load_file

            targets = load_file(folder / "targets.safetensors")["targets"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the cache {folder} is damaged ({error}): remove it, so that it is made anew") from error
    return inputs, targets


def _plain(form: Any) -> Any:
    """A nest of numbers as JSON has it: a tuple is a list."""
    if isinstance(form, tuple):
        return [_plain(part) for part in form]
    return {key: _plain(part) for key, part in form.items()} if isinstance(form, dict) else form


def _nest(form: Any, every: Sequence[Any]) -> Any:
    if isinstance(form, list):
        return tuple(_nest(part, every) for part in form)
    return {key: _nest(part, every) for key, part in form.items()} if isinstance(form, dict) else every[form]


def _show(name: str, done: int, count: int, seconds: float) -> None:
    """A line of progress, on a terminal."""
    if not sys.stderr.isatty():
        return
    left = seconds / done * (count - done)
    bar = "#" * (30 * done // count)
    end = "\n" if done == count else ""
    text = f"\r{name}: [{bar:30}] {done:,} of {count:,} samples, {left:,.0f} s left "
    print(text, end=end, file=sys.stderr, flush=True)
