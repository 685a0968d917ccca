"""The round of the federation's race on ranks that torchrun starts: what ``pfl-ext bench federation --ranks N`` runs.

``python -m pfl_ext.benchmarks.ranks`` is what each rank is; :func:`round_on` starts them and takes their answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from pfl_ext.engines import Torchrun, lead
from pfl_ext.federation import Engine, Federation

__all__ = ["RankRound", "bytes_table", "main", "round_on", "torchrun"]

_LIMIT = 3600.0  # seconds


@dataclass(frozen=True)
class RankRound:
    """What came of a round."""

    record: Mapping[str, Any]
    model: Tensor
    sent: Sequence[Mapping[str, int]]
    """Bytes that each rank has sent in the round, by kind."""


def torchrun(ranks: int, *command: object) -> list[str]:
    """The command line that starts this number of ranks here."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*start, *map(str, command)]


def round_on(ranks: int, arguments: Sequence[str]) -> RankRound:
    """One round on this number of ranks; the arguments say on which data (:func:`.federation.setting_of`)."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        command = torchrun(ranks, "-m", "pfl_ext.benchmarks.ranks", folder, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False, env=_environment())
        if done.returncode:
            raise ChildProcessError(f"{ranks} ranks ended with status {done.returncode}: {done.stderr[-2000:]}")
        answer = json.loads((Path(folder) / "answer.json").read_text())
        return RankRound(answer["record"], load_file(Path(folder) / "model.safetensors")["model"], answer["sent"])


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def bytes_table(found: RankRound, clients: int) -> str:
    """What the ranks have sent in the round beside what no algorithm can do without."""
    ranks, model = len(found.sent), found.model.nbytes
    uploads, averages, vectors = (
        sum(sent.get(kind, 0) for sent in found.sent) for kind in ("uploads", "averages", "server's vectors")
    )
    rest = sum(sum(sent.values()) for sent in found.sent) - uploads - averages - vectors
    exchange, gathered = clients * model * (ranks - 1) / ranks, (ranks - 1) * model
    lines = [
        f"{ranks} ranks, {clients} uploads of {model:,} bytes; sent in the round by all ranks together:",
        f"  uploads, in slices: {uploads:,} (clients x model x (R - 1) / R: {exchange:,.0f})",
        f"  averaged slices: {averages:,} ((R - 1) x model: {gathered:,}; an all-reduce: 2 x that, and no uploads)",
        f"  the server's vectors: {vectors:,}; requests and replies: {rest:,}",
    ]
    return "\n".join(lines)


def main(folder: Path, make: Callable[[Engine], Federation]) -> int:
    """On rank 0: run the round, and leave what came of it in a folder."""
    engine = Torchrun()
    run = make(engine)
    before: list[dict[str, int]] = []
    rounds = run.rounds()
    run.engine.publish(run.server)  # so that only the round's own is counted
    before = engine.sent()
    record = next(rounds)
    after = engine.sent()
    rounds.close()  # type: ignore[attr-defined]
    sent = [{k: v - old.get(k, 0) for k, v in new.items()} for old, new in zip(before, after, strict=True)]
    for new in sent:
        new.pop("data", None)
    save_file({"model": run.server["model"].cpu().contiguous()}, folder / "model.safetensors")
    (folder / "answer.json").write_text(json.dumps({"record": record, "sent": sent}))
    return 0


def _command(arguments: Sequence[str]) -> int:
    from . import federation

    return main(Path(arguments[0]), partial(federation.on_engine, federation.setting_of(arguments[1:])[0]))


if __name__ == "__main__":
    sys.exit(lead(partial(_command, sys.argv[1:])))
