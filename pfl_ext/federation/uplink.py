"""How uploads travel while a client trains its own model: in a thread, or on a GPU on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from .messages import Request, Vector

__all__ = ["Arrived", "Deliver", "InThread", "ToHost", "Uplink"]

Deliver: TypeAlias = Callable[[Request, str, Mapping[str, Tensor]], Mapping[str, Vector]]
"""Brings vectors on their way to the server's side, in a file or in memory that processes share: ``"sent"`` ones, or
``"kept"`` ones of an asynchronous turn."""


Arrived: TypeAlias = Callable[[], Mapping[str, Vector]]
"""Waits for an upload, and gives what the server's side has of it."""


class Uplink(Protocol):
    """Sends a client's upload while the client goes on training."""

    def begin(self, deliver: Deliver, request: Request, sent: Mapping[str, Tensor], wait: bool = False) -> Arrived:
        """Send vectors, which stay as they are until they have arrived; ``wait``: nothing is done meanwhile."""


class InThread:
    """Delivers in a thread beside the training, which begins with the first upload that is not waited for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "upload")

    def begin(self, deliver: Deliver, request: Request, sent: Mapping[str, Tensor], wait: bool = False) -> Arrived:
        """Send the vectors from a thread of its own; see :class:`Uplink`."""
        if wait:
            return lambda: deliver(request, "sent", sent)
        return self._thread.submit(deliver, request, "sent", sent).result


class ToHost:
    """Copies vectors of a GPU to pinned memory of the host, on a stream of its own, and delivers them there."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self, deliver: Deliver, request: Request, sent: Mapping[str, Tensor], wait: bool = False) -> Arrived:
        """Copy the vectors from the GPU first, beside its computing; see :class:`Uplink`."""
        # The kernels that write the vectors may still be on their way: the copies begin after them.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = {
                name: torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True).copy_(vector, non_blocking=True)
                for name, vector in sent.items()
            }
            copied = self._stream.record_event()

        def arrived(held: Mapping[str, Tensor] = sent) -> Mapping[str, Vector]:
            # `held`: memory that is freed belongs to the training's stream again, which does not know of the copies.
            copied.synchronize()  # before that, the host must not read what is copied to
            return deliver(request, "sent", copies)

        return arrived
