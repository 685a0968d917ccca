"""Every test of an optimiser runs on each device there is: new tensors are made there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def device(device_type: str) -> Iterator[str]:
    if device_type == "cpu":  # as it is: a default device is a mode, which sees every call
        yield device_type
        return
    with torch.device(device_type):
        yield device_type
