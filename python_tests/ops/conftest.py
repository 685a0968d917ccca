"""Every op test runs on each device there is and, on the CPU, with each instruction set the machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pfl_ext import _native

BACKENDS = [("cpu", isa) for isa in _native.available_isas() or (None,)]
if torch.cuda.is_available():
    BACKENDS.append(("cuda", None))


@pytest.fixture(params=BACKENDS, ids=lambda backend: "-".join(filter(None, backend)))
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    name, isa = request.param
    before = _native.isa()
    if isa is not None:
        _native.set_isa(isa)
    yield name
    if before is not None:
        _native.set_isa(before)


@pytest.fixture
def on_every_isa() -> Callable[[Callable[[], Any]], dict[tuple[str | None, int], Any]]:
    """What a function gives, by instruction set and number of threads; by None without the library."""

    def run(function: Callable[[], Any]) -> dict[tuple[str | None, int], Any]:
        isa, threads, found = _native.isa(), torch.get_num_threads(), {}
        try:
            for name in _native.available_isas() or (None,):
                for count in (1, 3):
                    if name is not None:
                        _native.set_isa(name)
                    torch.set_num_threads(count)
                    found[name, count] = function()
        finally:
            torch.set_num_threads(threads)
            if isa is not None:
                _native.set_isa(isa)
        return found

    return run
