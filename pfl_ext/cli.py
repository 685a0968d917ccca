"""The command line, also as ``python -m pfl_ext``: which command it is, and how it ends."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial

from . import __version__
from .commands.parser import UsageError

__all__ = ["main"]

# Each is a module of its own, imported when it is called (pfl_ext.commands).
_COMMANDS = {
    "run": "train one method on clients' data",
    "compare": "run several methods on the same clients' data; one table, one picture",
    "sweep": "compare methods for every combination of options' values; one table",
    "paper": "repeat a table or figure of a paper: our numbers beside the printed ones",
    "resume": "go on with an interrupted run, comparison or sweep: resume FOLDER",
    "report": "one HTML page about runs: curves, clients, costs, differences; --watch keeps it live",
    "export": "write a run's global model or a client's personal one as safetensors",
    "virtual-time": "how long finished runs would take on simulated devices and links",
    "data": "divide a data set among clients and show who has what, without training",
    "landscape": "draw the loss around the models of finished runs",
    "flower": "write a Flower app that runs a method: flower new FOLDER METHOD",
    "bench": "time the fused ops against their alternatives on this machine",
    "methods": "list all methods: paper, what each keeps, sends, trains and evaluates, options",
    "info": "show versions, build, and which kernel computes each op on CPU and CUDA",
}
_RESUMED = ("run", "compare", "sweep", "resume", "paper")

_HELP = "\n".join(
    [
        "usage: pfl-ext COMMAND [options]",
        "",
        "Personalised federated learning: methods and fused ops.",
        "",
        *(f"  {name:13} {text}" for name, text in _COMMANDS.items()),
        "",
        "pfl-ext COMMAND --help explains a command, pfl-ext --version prints the version. A first run:",
        "  pfl-ext run persfl --rounds 20 --lr 0.1",
    ]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    What users can cause ends in one line and a status, not in a traceback. Of the processes that torchrun starts, the
    first runs the command, and the others train clients for it.
    """
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if "TORCHELASTIC_RUN_ID" not in os.environ and "RANK" not in os.environ:  # nothing is imported for them
        return _run(command, rest)
    from .engines import LostRank, lead

    try:
        return lead(partial(_run, command, rest))
    except LostRank as error:
        print(f"pfl-ext {command}: {error}", file=sys.stderr)
        return 1


def _run(command: str, rest: list[str]) -> int:
    if command in ("-h", "--help"):
        print(_HELP)
        return 0
    if command == "--version":
        print(f"pfl_ext {__version__}")
        return 0
    if command not in _COMMANDS:
        print(f"pfl-ext: unknown command {command!r}; known are {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f".commands.{command.replace('-', '_')}", __package__)
    try:
        status: int = module.execute(module.parse(rest))
    except UsageError as error:
        print(f"pfl-ext {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:  # one with a message tells when it stopped
        more = "; pfl-ext resume FOLDER goes on from the last checkpoint" if command in _RESUMED else ""
        print(f"pfl-ext {command}: {str(error) or 'aborted'}{more}", file=sys.stderr)
        return 130
    except Exception as error:
        from .commands.flags import with_flags
        from .federation import DamagedCheckpoint, Diverged, ForeignCheckpoint

        if not isinstance(error, ValueError | OSError | ImportError | Diverged | DamagedCheckpoint | ForeignCheckpoint):
            raise
        flags: dict[str, str] = getattr(module, "flags", dict)()
        print(f"pfl-ext {command}: {with_flags(str(error), flags)}", file=sys.stderr)
        return 1
    return status
