"""Several clients' turns side by side on one GPU, each on a CUDA stream of its own."""

from __future__ import annotations

import copy
import dataclasses
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pfl_ext.federation import ClientRuntime, InProcess, Plan, Reply, Request

__all__ = ["Streams"]


class _Lane(NamedTuple):
    """A runtime with a network of its own, and the stream that its turns are on."""

    runtime: ClientRuntime
    stream: torch.cuda.Stream


class Streams(InProcess):
    """As :class:`~pfl_ext.federation.InProcess`, with several turns at a time, for networks too small to fill a GPU.

    The results are the same to the bit. Networks with dropout are refused: it draws from one generator of the device,
    in the order in which the turns come to it. So are recorded steps: torch records one graph at a time in a process.

    Args:
        streams: how many turns at a time.
    """

    def __init__(self, streams: int) -> None:
        self.streams = streams

    def start(self, plan: Plan) -> None:
        """A runtime for each stream; all clients' vectors are in one store.

        Raises:
            ValueError: the data is not on a GPU, the network has dropout, or steps are to be recorded.
        """
        device = plan.dataset.device
        if device.type != "cuda":
            raise ValueError(f"streams is {self.streams} on {device}; streams are a GPU's: use workers")
        if plan.settings.graphs:
            raise ValueError(
                f"streams is {self.streams}, and graphs is true: torch records one graph at a time in a process; use "
                "streams=1 or graphs=false"
            )
        dropout = [name for name, m in plan.module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        if dropout:
            raise ValueError(
                f"streams is {self.streams}, and the network has dropout ({dropout[0]}), whose numbers would depend on "
                "the order of the turns: use streams=1"
            )
        super().start(plan)
        plans = [
            dataclasses.replace(plan, module=copy.deepcopy(plan.module), method=copy.deepcopy(plan.method))
            for _ in range(self.streams)
        ]
        self._lanes = [_Lane(ClientRuntime(own, self.store, self._deliver), torch.cuda.Stream(device)) for own in plans]

    def publish(self, server: Mapping[str, Tensor]) -> None:
        """Let all runtimes see them."""
        super().publish(server)
        for lane in self._lanes:
            lane.runtime.server = server

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        """The replies in the order of the requests."""
        random_state, free = torch.get_rng_state(), queue.SimpleQueue[_Lane]()
        self.turns.begin(requests)
        for lane in self._lanes:
            free.put(lane)
        before = torch.cuda.current_stream(self._device)
        try:
            with ThreadPoolExecutor(self.streams, "turn", torch.set_num_threads, (self._threads,)) as pool:
                turns = [pool.submit(self._turn, free, before, request) for request in requests]
                for turn in turns:
                    reply = turn.result()
                    self.turns.end()
                    yield reply
        finally:
            torch.set_rng_state(random_state)

    def _turn(self, free: queue.SimpleQueue[_Lane], before: torch.cuda.Stream, request: Request) -> Reply:
        lane = free.get()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
                lane.stream.wait_stream(before)  # on which the server's vectors were made
                reply = lane.runtime(request)
                lane.stream.synchronize()  # the end of the turn: other streams read what it left
        finally:
            free.put(lane)
        given = [*reply.sent.values(), *reply.kept.values(), *(reply.outputs or ())]
        for vector in given:
            # Memory that was made on this stream is read on the other, and must not be given away before that.
            if isinstance(vector, Tensor) and vector.is_cuda:
                vector.record_stream(before)
        return reply
