"""A results folder is one process's at a time, and nobody's as soon as that is gone."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from pfl_ext.reports import LOCK, ResultsError, lock, results


def test_what_a_killed_process_leaves_locked_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        release = threading.Timer(0.3, fcntl.flock, (file, fcntl.LOCK_UN))
        release.start()
        with lock(tmp_path):
            pass
        release.join()


def test_a_folder_that_stays_locked_is_refused_by_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_PATIENCE", 0.1)
    with lock(tmp_path), pytest.raises(ResultsError, match=r"a run is writing to .*\(process \d+\)"), lock(tmp_path):
        pass
