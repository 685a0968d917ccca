"""Commands in processes of their own that may be killed: started in a moment, because all is imported already."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pfl_ext.commands.run", "pfl_ext.algorithms", "pfl_ext.data"])


def _serve() -> None:
    """Start the process that others are forked off: elsewhere, as it imports what is where it starts before all."""
    here = os.getcwd()
    os.chdir(os.sep)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)


def _run(arguments: Sequence[str], log: Path | None, file_size: int | None) -> None:
    from pfl_ext.cli import main

    os.setsid()  # a group of its own, to which signals can be sent
    if log is not None:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(handle, stream)
    if file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    try:
        os._exit(main(arguments))
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(99)


def start(arguments: Sequence[str], log: Path | None = None, file_size: int | None = None) -> BaseProcess:
    """Start ``pfl-ext`` with these arguments.

    Args:
        arguments: the command line.
        log: where its output goes.
        file_size: bytes that no file may exceed.
    """
    _serve()
    process = _context.Process(target=_run, args=(list(arguments), log, file_size))
    process.start()
    return process


def options(values: Mapping[str, object]) -> list[str]:
    """Options as a command line has them."""
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def workers(pid: int) -> list[int]:
    """The worker processes of a run: those that were spawned, not what keeps account of shared memory."""
    found = []
    for child in children(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"spawn_main" in command:
            found.append(child)
    return found
