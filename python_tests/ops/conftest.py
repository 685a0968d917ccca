"""Every op test runs on each device there is and, on the CPU, with each instruction set the machine has."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(params=dict.fromkeys(name for name, _ in BACKENDS))
def device_type(request: pytest.FixtureRequest) -> str:
    """Each device once, for what does not depend on the kernels: schemas, fake kernels, compilation."""
    name: str = request.param
    return name
