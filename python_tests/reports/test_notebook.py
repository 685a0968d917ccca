"""The progress display in a notebook's kernel, where Jupyter is installed."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install ipykernel jupyter_client")
manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")

CELL = """
import time
import pfl_ext
from pfl_ext.algorithms import FedAvg


class Slow(FedAvg):
    "FedAvg whose clients take their time."

    name = "slow"

    def train(self, client, received):
        time.sleep(0.05)
        return super().train(client, received)


run = pfl_ext.compare([Slow, "fedavg"], rounds=3, clients=10, lr=0.1, plots=False, output="out")
"""


def test_a_cell_has_one_output_that_is_updated_and_ends_with_the_results(tmp_path: Path) -> None:
    kernel, client = manager.start_new_kernel(cwd=str(tmp_path), extra_arguments=[], kernel_name="python3")
    seen: list[tuple[str, Any]] = []
    try:
        client.execute(f"import sys; sys.path[:0] = {sys.path!r}\n" + CELL)
        while True:
            message = client.get_iopub_msg(timeout=60)
            seen.append((message["msg_type"], message["content"]))
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle" and len(seen) > 2:
                break
    except queue.Empty:
        pytest.fail(f"the kernel went quiet after {seen}")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    kinds = [kind for kind, _ in seen]
    assert "error" not in kinds and "stream" not in kinds, seen
    assert kinds.count("display_data") == 1
    texts = [content["data"]["text/plain"] for kind, content in seen if kind == "update_display_data"]
    assert any("rounds" in text and "left" in text and "of 10" in text for text in texts)
    slow, fedavg = texts[-1].splitlines()
    assert slow.startswith("slow, 1 of 2: 3 rounds in ") and fedavg.startswith("fedavg, 2 of 2: 3 rounds in ")
    assert "global accuracy" in slow and all("<pre" in c["data"]["text/html"] for k, c in seen if "display" in k)
