"""What the virtual clock predicts of a round over a limited link, and that the link is removed."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import pytest
import torch

from pfl_ext.benchmarks import limited_link, ranks


def test_wait_free_hides_the_upload_under_personal_training_by_the_clock() -> None:
    # 100 samples for what is sent and 50 for the personal model, of 10 ms each; 2 MB up and 1 MB down at 4 MB/s.
    found: dict[str, Any] = {
        "work": [[k, 100, 50, 8, 8, 0.0] for k in range(2)],
        "sent": [{"uploads": 2_000_000, "averages": 1_000_000}] * 2,
    }
    clock = limited_link.Prediction(compute=0.01, bandwidth=4e6)
    assert clock.seconds(found, "compute-and-wait") == pytest.approx(1.0 + 0.5 + 0.5 + 0.25)
    assert clock.seconds(found, "wait-free") == pytest.approx(1.0 + 0.5 + 0.25)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_the_namespaces_are_gone_whatever_happens() -> None:
    def there() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    try:
        with limited_link._namespaces() as names:
            assert all(name in there() for name in names)
            limited_link._limit(names, 20)
            raise KeyError
    except KeyError:
        assert not any(name in there() for name in names)
    except OSError:
        pytest.skip("namespaces are not allowed here")


def test_the_bytes_of_a_round_are_told_beside_the_ideal() -> None:
    sent = [{"uploads": 6, "averages": 6, "messages": 5}, {"uploads": 12, "averages": 6, "messages": 3}]
    text = ranks.bytes_table(ranks.RankRound({}, torch.zeros(3), sent), clients=3)
    assert "uploads, in slices: 18 (clients x model x (R - 1) / R: 18)" in text
    assert "averaged slices: 12 ((R - 1) x model: 12" in text and "requests and replies: 8" in text
