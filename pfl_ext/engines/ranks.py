"""The processes that torchrun has started, its ranks: how they find each other, speak, and notice that one is gone.

Messages between them are pickled, as those of torch's own object collectives are: all ranks are processes of one job
that run the same code for the same user. Nothing that comes from a file is ever unpickled. Tensors are not pickled.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["LostRank", "Ranks", "as_bytes", "leave_signals_to_rank_0", "under_torchrun"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = "PFL_EXT_RANK_TIMEOUT"
_BEAT = 1.0  # seconds between two signs of life
_POLLS = (0.02, 0.5)  # seconds between two looks for rank 0: at first, and at most
# A rank may train for hours between two messages: that it is alive is for the signs of life to say, not for a timeout.
_NO_TIMEOUT = timedelta(days=365)


class LostRank(ConnectionError):
    """A process of the job did not start, has ended, or does not answer."""


def under_torchrun() -> bool:
    """Whether this process is one that torchrun, or something like it, has started."""
    return all(name in os.environ for name in _VARIABLES)


def _patience() -> float:
    """Seconds without a sign of life after which a rank counts as lost."""
    return float(os.environ.get(_PATIENCE, "40"))


class _Packed(pickle.Pickler):
    """Pickles an object without its tensors, which are collected."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: dict[int, tuple[int, Tensor]] = {}

    def persistent_id(self, thing: Any) -> int | None:
        """A tensor's number; None for everything else."""
        if type(thing) is not Tensor:
            return None
        # The tensor stays in the table: its id must not become another's.
        return self.tensors.setdefault(id(thing), (len(self.tensors), thing))[0]


class _Unpacked(pickle.Unpickler):
    """Unpickles a message whose tensors came apart from it."""

    def __init__(self, content: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor that is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class Ranks:
    """All ranks of the job, seen from one of them.

    Args:
        of_job: the store where they meet; it outlives restarts.
        rank, size: which this is, and how many there are.

    Attributes:
        start: how often the processes of the job have been started, with this time.
        sent: bytes that this rank has sent, by kind of message.
        uplink: the connections of the uploads.
        gpus: whether each rank of this machine can have a GPU of its own.
        together: whether all ranks are on this machine.
        busy: whether rank 0 waits for an answer.
        broken: whether a rank was lost, or the job is over.
    """

    def __init__(self, of_job: dist.Store, rank: int, size: int) -> None:
        """Not called by users: :meth:`join` makes it."""
        self._of_job = self._store = of_job
        self.rank, self.size, self.start = rank, size, 0
        self.sent: dict[str, int] = {}
        self._over = threading.Event()
        self.uplink: Any = None
        self.gpus = self.busy = self.broken = False
        self.together = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == size

    @classmethod
    def join(cls) -> Ranks:
        """Meet all others.

        Raises:
            LostRank: one of them did not come.
        """
        rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        host, limit = os.environ["MASTER_ADDR"], timedelta(seconds=_patience())
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            meeting = dist.TCPStore(host, port, None, rank == 0 and not of_agent, timeout=limit, wait_for_workers=False)
            ranks = cls(dist.PrefixStore("pfl_ext", meeting), rank, size)
            ranks._meet(limit)
        except RuntimeError as error:
            raise LostRank(f"rank {rank} does not reach rank 0 at {host}:{port} ({_first_line(error)})") from None
        # Before they connect, which waits for as long as it takes: one of them may end in that moment.
        threading.Thread(target=ranks._watch, args=(ranks._store.clone(),), daemon=True).start()
        ranks._connect()
        return ranks

    def _meet(self, limit: timedelta) -> None:
        """Say who this is, and wait until all others have.

        Rank 0 counts the starts, and all come to the newest. torchrun's own count does not tell them apart: each node
        counts those for which its own ranks were the cause, and the others' go on with the number that they had.
        """
        if self.rank == 0:
            self._come_to(self._of_job.add("starts", 1))
            with contextlib.suppress(RuntimeError):
                self._store.wait([f"name/{r}" for r in range(self.size)], limit)
                self._store.set("all", "here")
                return
        elif self._find_rank_0(time.monotonic() + limit.total_seconds()):
            return
        absent = [r for r in range(self.size) if not self._store.check([f"name/{r}"])] if self.start else [0]
        raise LostRank(
            f"{_named(absent or [0])} of {self.size} did not start within {limit.seconds} seconds: see what it has "
            "printed, and whether its machine reaches this one"
        )

    def _find_rank_0(self, end: float) -> bool:
        """Come to the newest start until all are there; whether they are before the time is over."""
        pause, came = _POLLS[0], False
        while not (came and self._store.check(["all"])):
            if time.monotonic() > end:
                return False
            newest = self._of_job.add("starts", 0)
            if newest > self.start:
                came = self._come_to(newest)
            time.sleep(pause)
            pause = min(_POLLS[1], 1.3 * pause)
        return True

    def _come_to(self, start: int) -> bool:
        """Whether this is the first process of its rank there: else that start is over, and another will follow."""
        self.start, self._store = start, dist.PrefixStore(f"start {start}", self._of_job)
        first: bool = self._store.add(f"came/{self.rank}", 1) == 1
        if first:
            self._store.set(f"beat/{self.rank}", "0")
            self._store.set(f"name/{self.rank}", f"process {os.getpid()} on {socket.gethostname()}")
        return first

    def _connect(self) -> None:
        """Connections for what is said, and others for uploads, which are under way at the same time."""
        backend = "gloo"
        if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend, self.gpus = "cpu:gloo,cuda:nccl", True
        with self._answered():
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.size, timeout=_NO_TIMEOUT
            )
            self.uplink = dist.new_group(backend=backend, timeout=_NO_TIMEOUT)

    # ---- speaking ----------------------------------------------------------------------------------------------------

    def send(self, to: int, thing: object, kind: str = "messages") -> None:
        """Send anything to a rank; it receives tensors on the cpu."""
        content = io.BytesIO()
        packer = _Packed(content)
        packer.dump(thing)
        tensors = [tensor.detach().cpu().contiguous() for _, tensor in packer.tensors.values()]
        about = pickle.dumps((content.getvalue(), [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
        parts = [torch.frombuffer(bytearray(about), dtype=torch.uint8), *map(as_bytes, tensors)]
        with self._answered():
            dist.send(torch.tensor([len(about)]), to)
            for part in parts:
                if len(part):
                    dist.send(part, to)
        self.count(kind, 8 + sum(map(len, parts)))

    def receive(self, source: int) -> Any:
        """Receive what another rank has sent."""
        size = torch.empty(1, dtype=torch.int64)
        with self._answered():
            dist.recv(size, source)
            about = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(about, source)
            content, kinds = pickle.loads(about.numpy().tobytes())
            tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
            for tensor in tensors:
                if tensor.nbytes:
                    dist.recv(as_bytes(tensor), source)
        return _Unpacked(content, tensors).load()

    def broadcast(self, vector: Tensor) -> None:
        """Send rank 0's numbers to every rank."""
        if vector.numel() and self.size > 1:
            with self._answered():
                dist.broadcast(as_bytes(vector), 0)
            if self.rank == 0:
                self.count("server's vectors", vector.nbytes)

    def gather_all(self, vector: Tensor) -> Tensor:
        """Everybody's vectors, of one size, one after the other."""
        found = torch.empty(self.size * vector.numel(), dtype=vector.dtype, device=vector.device)
        places, own = as_bytes(found).view(self.size, -1), as_bytes(vector)
        with self._answered():
            self._all_to_all(list(places), [own] * self.size, None)
        self.count("averages", (self.size - 1) * vector.nbytes)
        return found

    def add_all(self, vector: Tensor) -> None:
        """The sum of everybody's vectors, in their place; in which order is not said."""
        with self._answered():
            dist.all_reduce(vector)
        self.count("averages", 2 * (self.size - 1) * vector.nbytes // self.size)

    def gather_heads(self, head: Sequence[int], device: torch.device) -> list[list[int]]:
        """A few numbers of everybody, on the connections of the uploads."""
        own = torch.tensor(head, device=device)
        every = torch.empty(self.size * len(head), dtype=torch.int64, device=device)
        with self._answered():
            dist.all_gather(list(every.view(self.size, -1)), own, group=self.uplink)
        found: list[list[int]] = every.view(self.size, -1).tolist()
        return found

    def exchange(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """A part for each rank, on the connections of the uploads; ``into`` takes what each rank has for this one."""
        with self._answered():
            self._all_to_all([as_bytes(x) for x in into], [as_bytes(x) for x in parts], self.uplink)
        self.count("uploads", sum(part.nbytes for part in parts) - parts[self.rank].nbytes)

    def _all_to_all(self, into: list[Tensor], parts: list[Tensor], group: Any) -> None:
        """Part r to rank r, for all at once."""
        if into[0].device.type != "cpu":
            dist.all_to_all(into, parts, group=group)
            return
        if len(into[self.rank]):
            into[self.rank].copy_(parts[self.rank])
        others = [r for r in range(self.size) if r != self.rank]
        # All that is received is asked for before anything is sent. Gloo's own all-to-all sends first, and what tells
        # the other side that it may send waits behind that: over a link of 20 Mbit/s it took twice as long.
        under_way = [dist.irecv(into[r], r, group=group) for r in others if len(into[r])]
        under_way += [dist.isend(parts[r], r, group=group) for r in others if len(parts[r])]
        for work in under_way:
            assert work is not None
            work.wait()

    def count(self, kind: str, size: int) -> None:
        """Count bytes as sent: of a collective those that no algorithm can do without."""
        self.sent[kind] = self.sent.get(kind, 0) + size

    def note(self, what: str) -> None:
        """Note something for the processes that may be started again after these."""
        self._of_job.set(f"noted/{what}", str(self.start))

    def noted_before(self, what: str) -> bool:
        """Whether processes before these have noted it."""
        key = f"noted/{what}"
        return bool(self._of_job.check([key])) and int(self._of_job.get(key)) < self.start

    # ---- who is gone -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        """What torch.distributed raises in the block is an error that names the rank that is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.broken:
                raise LostRank("a rank was lost before, or the job is over") from error
            self._lost(error)

    def _lost(self, error: Exception) -> NoReturn:
        gone = self._silent()
        self.broken = True
        who = "; ".join(f"rank {r} ({self._store.get(f'name/{r}').decode()})" for r in gone) or "a rank"
        raise LostRank(f"{who} has ended or cannot be reached any more ({_first_line(error)})") from None

    def _silent(self) -> list[int]:
        """Ranks that give no sign of life."""
        others = [r for r in range(self.size) if r != self.rank]
        keys = [f"beat/{r}" for r in others]
        try:
            before = self._store.multi_get(keys)
            time.sleep(2.5 * _BEAT)
            return [r for r, a, b in zip(others, before, self._store.multi_get(keys), strict=True) if a == b]
        except RuntimeError:  # rank 0 has the store, where torchrun's agent has not
            return [0] if self.rank else []

    def _watch(self, store: dist.Store) -> None:
        """Give signs of life; end the process when another's, that this one depends on, are missing for too long."""
        others = [r for r in range(self.size) if r] if self.rank == 0 else [0]
        heard: dict[int, tuple[bytes, float]] = {}
        beat, patience = 0, _patience()
        while not self._over.wait(_BEAT):
            beat += 1
            try:
                store.set(f"beat/{self.rank}", str(beat))
                beats = store.multi_get([f"beat/{r}" for r in others]) if others else []
            except RuntimeError as error:
                self._end(f"rank 0 cannot be reached any more ({_first_line(error)})")
                return
            now = time.monotonic()
            for r, last in zip(others, beats, strict=True):
                if r not in heard or heard[r][0] != last:
                    heard[r] = (last, now)
                elif now - heard[r][1] > patience:
                    who = store.get(f"name/{r}").decode()
                    self._end(f"rank {r} ({who}) has given no sign of life for {patience:.0f} seconds")

    def _end(self, why: str) -> None:
        """The main thread may wait for that rank forever: end the process."""
        if not self._over.is_set():
            print(f"pfl-ext: rank {self.rank} ends: {why}", file=sys.stderr, flush=True)
            os._exit(1)

    def leave(self) -> None:
        """The job is over: nobody is missed any more."""
        self.broken = True
        self._over.set()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def leave_signals_to_rank_0() -> None:
    """A signal to the whole group (Ctrl-C, systemd, Slurm) is rank 0's to answer: it ends the run after the round."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
