"""Averages of vectors that are on several ranks: the bits are those of one process, for any number of ranks.

A vector on its way is cut into as many slices as there are ranks, and rank r is sent slice r of every client's. It
averages these in the order of the clients, by the fused op. The averaged slices of all ranks are the average.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pfl_ext.federation import Here
from pfl_ext.federation.mapped import RemoteTensor, opened
from pfl_ext.federation.messages import Vector

from .ranks import LostRank, Ranks

__all__ = ["Exchange"]

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_TYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_NOTHING = (-1, 0, 0)


class Exchange:
    """A rank's part in the averages.

    Over a link, uploads go on their way in a thread, one after the other, while the rank goes on training: a collective
    for each in which every rank has an upload of its own, or none if it has no more. Between ranks of one machine there
    is no link to wait for, and what such a thread takes is taken from the training: they go when they are averaged.

    Args:
        ranks: all of them.
        device: where vectors are.
        keep: what becomes of a slice that has arrived: itself, or a file with it.
    """

    def __init__(self, ranks: Ranks, device: torch.device, keep: Callable[[Tensor, str], Vector]) -> None:
        self._ranks, self._device, self._keep = ranks, device, keep
        self._slices: dict[tuple[int, int], Vector] = {}
        self._waiting: queue.SimpleQueue[tuple[int, Tensor] | None] = queue.SimpleQueue()
        self._under_way: threading.Thread | None = None
        self._error: Exception | None = None

    # ---- on the way --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the exchange of uploads; every rank calls it."""
        self.wait()
        # A daemon: a process that gives up must not wait at its end for a rank that never answers.
        self._under_way = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._under_way.start()

    def put(self, number: int, vector: Tensor) -> None:
        """An upload of this rank goes on its way; the number is the rank's own for it."""
        if vector.device.type == "cuda":
            torch.cuda.current_stream(vector.device).synchronize()  # the thread has a stream of its own
        self._waiting.put((number, vector))

    def end(self) -> None:
        """Say that this rank has no more uploads."""
        self._waiting.put(None)

    def wait(self) -> None:
        """Wait until the uploads of every rank have arrived."""
        if self._under_way is not None:
            self._under_way.join()
            self._under_way = None
            if self._error is not None:
                me = self._ranks.rank
                raise LostRank(f"rank {me} cannot go on, nor can the others without it: {self._error}") from self._error

    def _run(self) -> None:
        try:
            self._exchange()
        except Exception as error:
            self._error = error

    def _exchange(self) -> None:
        """Send and receive until no rank has more to send."""
        if self._device.type != "cuda":
            self._steps()
            return
        # On the stream of the training, kernels of the next steps would wait for what is on its way.
        side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(side):
            self._steps()
        side.synchronize()

    def _steps(self) -> None:
        more = True
        while True:
            item = self._waiting.get() if more else None
            more = item is not None
            head = _NOTHING if item is None else (item[0], item[1].numel(), _TYPES.index(item[1].dtype))
            heads = self._ranks.gather_heads(head, self._device)
            if all(number < 0 for number, _, _ in heads):
                return
            self._step(None if item is None else item[1], heads)

    def bring(self, vectors: Sequence[RemoteTensor], own: Callable[[int], Tensor]) -> None:
        """Exchange vectors that all ranks know to be next, now.

        Args:
            vectors: of all ranks.
            own: gives one of this rank's by its number.
        """
        by_rank = [[vector for vector in vectors if vector.rank == rank] for rank in range(self._ranks.size)]
        for step in itertools.zip_longest(*by_rank):
            mine = step[self._ranks.rank]
            heads = [_NOTHING if v is None else (v.number, v.numel(), _TYPES.index(v.dtype)) for v in step]
            self._step(None if mine is None else own(mine.number), heads)

    def _step(self, vector: Tensor | None, heads: Sequence[Sequence[int]]) -> None:
        """One upload of each rank, or none of some."""
        me = self._ranks.rank
        own = torch.empty(0, device=self._device) if vector is None else vector.contiguous().view(-1)
        parts = [own[begin:end] for begin, end in self._bounds(own.numel())]
        into = []
        for rank, (_, numel, code) in enumerate(heads):
            begin, end = self._bounds(0 if rank == me else numel)[me]
            into.append(torch.empty(end - begin, dtype=_TYPES[code], device=self._device))
        slice_here, parts[me] = parts[me], parts[me][:0]
        self._ranks.exchange(parts, into)
        into[me] = slice_here  # the upload itself is here for as long
        for rank, (number, _, _) in enumerate(heads):
            if number >= 0:
                if into[rank].is_cuda:  # it is read on another stream than it was made on
                    into[rank].record_stream(torch.cuda.default_stream(self._device))
                self._slices[rank, number] = self._keep(into[rank], f"slice-{rank}-{number}")

    def _bounds(self, size: int) -> list[tuple[int, int]]:
        """Where each rank's slice of this many numbers begins and ends."""
        step = -(-size // self._ranks.size)
        return [(min(r * step, size), min((r + 1) * step, size)) for r in range(self._ranks.size)]

    # ---- averages ----------------------------------------------------------------------------------------------------

    def arrived(self, vector: RemoteTensor) -> bool:
        """Whether the slices of a vector are where they belong; the same on all ranks."""
        return (vector.rank, vector.number) in self._slices

    def average(self, vectors: Sequence[RemoteTensor], weights: Sequence[float], normalize: bool) -> Tensor:
        """The average of vectors whose slices have arrived."""
        size, shape = vectors[0].numel(), vectors[0].shape
        begin, end = self._bounds(size)[self._ranks.rank]
        step = -(-size // self._ranks.size)
        own = torch.zeros(step, dtype=vectors[0].dtype, device=self._device)
        if end > begin:
            slices = [self._slices[vector.rank, vector.number] for vector in vectors]
            own[: end - begin] = Here().average(slices, weights, normalize)
        return self._ranks.gather_all(own)[:size].view(shape) if size else own.view(shape)

    def fast_average(self, own: Sequence[Vector], weights: Sequence[float], like: RemoteTensor) -> Tensor:
        """The weighted sum of all ranks' vectors by an all-reduce: its order of sums depends on how many they are."""
        total = torch.zeros(like.shape, dtype=like.dtype, device=self._device)
        if own:
            total = Here().average([opened(vector) for vector in own], weights, normalize=False).clone()
        self._ranks.add_all(total)
        return total

    def forget(self, rank: int, number: int) -> Vector | None:
        """The slice of a vector that is not needed any more, None where there is none."""
        return self._slices.pop((rank, number), None)

    def forget_all(self) -> list[Vector]:
        """All slices; none is needed any more."""
        self.wait()
        slices, self._slices = self._slices, {}
        return list(slices.values())
