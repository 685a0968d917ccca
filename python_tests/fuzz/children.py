"""Runs cases in child processes, which may die or hang, and keeps what was found."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Report", "read_corpus", "run"]

FOLDER = Path(__file__).resolve().parent
SECONDS = 60.0  # of one case; a machine under load takes long to start a thread
# Cases until a child is replaced, which takes as long as 700 cases: what one leaves behind must not hide for ever.
BATCH = 5000


@dataclass
class Report:
    """What a run of many cases came to."""

    cases: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.cases:,} cases, {len(self.findings):,} findings"]
        lines += [f"left out as known: {count:,} of {name}" for name, count in sorted(self.left_out.items())]
        seen: Counter[str] = Counter()
        for found in self.findings:
            family = str(found["case"].get("family"))
            seen[family] += 1
            if seen[family] <= 5:
                lines.append(f"{family}: {found['finding']}\n  {json.dumps(found['case'])[:600]}")
        return "\n".join(lines)


class _Child:
    def __init__(self, judge: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(FOLDER / "child.py"), judge],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "3", **environment},
            cwd=FOLDER,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.selector.register(self.process.stderr, selectors.EVENT_READ)
        self.said = b""
        self.answer = b""

    def ask(self, case: dict[str, Any], seconds: float) -> dict[str, Any] | str:
        """The answer, or how the child died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(case).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._death()
        until = time.monotonic() + seconds
        while b"\n" not in self.answer:
            left = until - time.monotonic()
            ready = self.selector.select(left) if left > 0 else []
            if not ready:
                self.process.kill()
                return f"a hang: no answer in {seconds:.0f} s"
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if key.fileobj is self.process.stdout:
                    if not data:
                        return self._death()
                    self.answer += data
                elif data:
                    self.said = (self.said + data)[-4000:]
                else:
                    self.selector.unregister(key.fileobj)
        line, self.answer = self.answer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self) -> str:
        status = self.process.wait()
        assert self.process.stderr is not None
        self.said = (self.said + (self.process.stderr.read() or b""))[-4000:]
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"the process died: {how}: {self.said.decode(errors='replace')[-1500:]}"

    def close(self) -> None:
        """Let it end, and clear up after itself; kill it if it does not."""
        self.selector.close()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def run(
    judge: str, cases: Iterable[dict[str, Any]], environment: Mapping[str, str], seconds: float = SECONDS
) -> Report:
    """Judge each case in a child by the function ``judge`` of that module; a new child where one died."""
    report = Report()
    child: _Child | None = None
    try:
        for case in cases:
            if child is not None and report.cases % BATCH == 0:
                child.close()
                child = None
            if child is None:
                child = _Child(judge, environment)
            report.cases += 1
            answer = child.ask(case, seconds)
            if isinstance(answer, str):
                child.close()
                child = None
                report.findings.append({"finding": answer, "case": case})
            elif str(answer["finding"]).startswith("known: "):
                report.left_out[str(answer["finding"]).removeprefix("known: ")] += 1
            elif answer["finding"] is not None:
                report.findings.append(answer)
    finally:
        if child is not None:
            child.close()
    return report


def read_corpus(name: str) -> list[dict[str, Any]]:
    """The cases that once failed, by what they are."""
    content = json.loads((FOLDER / "corpus" / f"{name}.json").read_text(encoding="utf-8"))
    return [entry["case"] for entry in content]
