"""LoRA by peft: what is trained is all that is kept and sent."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from pfl_ext.algorithms import Ditto
from pfl_ext.data import PARTITIONERS, Dataset
from pfl_ext.federation import Federation, Settings, WorkingModel

peft = pytest.importorskip("peft")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _wrapped() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
        wrapped: nn.Module = peft.get_peft_model(network, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    return wrapped


def test_a_state_holds_the_small_matrices_and_nothing_else() -> None:
    model = WorkingModel(_wrapped())
    assert model.size == 2 * (6 + 20) + 2 * (20 + 3)
    assert all("lora_" in name for name in model.names)


def test_a_run_trains_keeps_and_sends_only_them() -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(60, 6, generator=draw)
    data = Dataset.from_tensors(x, x[:, :3].argmax(1))
    partition = PARTITIONERS["iid"](data, 2, generator=draw)
    module = _wrapped()
    frozen = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    run = Federation(Ditto(lr=0.5), module, data, partition, Settings(rounds=2))
    last = run.run()[-1]
    size = 2 * (6 + 20) + 2 * (20 + 3)
    assert last["communication"]["up_parameters"] == 2 * size and last["communication"]["up_bytes"] == 8 * size
    assert last["training"]["trained_parameters"] == 2 * size  # the copy of the global model and the personal one
    kept = run.engine.state()
    assert kept["personal/rows"].shape == (2, size)
    model = WorkingModel(module)
    before = model(x)
    model.load(run.server["model"])
    assert not torch.equal(before, model(x))
    assert all(torch.equal(p, frozen[name]) for name, p in module.named_parameters() if name in frozen)


def test_the_example_measures_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = runpy.run_path(str(EXAMPLES / "lora.py"))["main"](rounds=1, public_rounds=1, length=48, width=32, rank=2)
    assert found["lora"]["sent_bytes"] == 4 * found["lora"]["sent_parameters"]
    assert found["lora"]["sent_parameters"] < 0.1 * found["whole"]["sent_parameters"]
    assert found["lora"]["accuracy"] > 0.1
