"""The methods of spectral co-distillation's tables with the ops in plain torch, against the native ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pfl_ext import _native

# Two rounds of three clients with eight samples each, in float64; what everybody has then goes into the file.
SCRIPT = """
import sys, torch
from safetensors.torch import save_file
from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings

x = torch.randn(36, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
no = torch.zeros(36, dtype=torch.bool)
dataset = Dataset("points", x, torch.arange(36) % 3, ("a", "b", "c"), no, dtype=torch.float64)
parts = [tuple(torch.arange(12 * k + a, 12 * k + b) for k in range(3)) for a, b in ((0, 8), (8, 8), (8, 12))]
partition = Partition(*parts, torch.empty(0, dtype=torch.int64), torch.cat(parts[2]))
torch.manual_seed(1)
network = torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3)).double()
found = {}
for name, options in (
    ("scd", {"form_g": "normalized", "form_p": "normalized", "lam_g": 5.0, "lam_p": 5.0}),
    ("scd", {"form_g": "generalized", "form_p": "generalized", "lam_g": 1e-4, "lam_p": 1e-4}),
    ("scd", {"form_g": "paper", "form_p": "paper", "lam_g": 1e-4, "lam_p": 1e-4}),
    ("ditto", {}), ("fedrod", {}), ("fedasync", {}), ("fedbuff", {"buffer": 2}),
):
    method = METHODS[name](lr=0.05, batch_size=4, momentum=0.5, **options)
    run = Federation(method, network, dataset, partition, Settings(rounds=2))
    run.run()
    label = "-".join([name, *map(str, options.values())])
    found[f"{label}/server"] = run.server["model"]
    found |= {f"{label}/{k}": run.engine.store.read(k, "personal") for k in range(3)}
save_file(found, sys.argv[1])
"""


def test_both_backends_give_the_same_models_to_within_rounding(tmp_path: Path) -> None:
    if not all(library.loaded for name, library in _native.status().items() if name == "cpu"):
        pytest.skip("the native library is not there")
    found = []
    for native in ("0", "1"):
        environment = {**os.environ, "PFL_EXT_NATIVE": native, "PYTHONPATH": os.pathsep.join(sys.path)}
        path = tmp_path / f"{native}.safetensors"
        # Elsewhere than in the repository: there "-c" would import the tree, which has no library in it.
        subprocess.run([sys.executable, "-c", SCRIPT, str(path)], check=True, env=environment, cwd=tmp_path)
        found.append(load_file(path))
    assert found[0].keys() == found[1].keys() and len(found[0]) == 7 * 4
    # Four steps a round on numbers around 1. Sums of up to 403 terms are rounded in another order: 403 eps in each of
    # forward, backward and average, and the FFT's log2(403) eps is amplified by the smallest of its 202 bins, which
    # are Rayleigh distributed: about sqrt(403).
    eps = torch.finfo(torch.float64).eps
    bound = 8 * (3 * 403 + 9 * 403**0.5) * eps
    for name, plain in found[0].items():
        torch.testing.assert_close(plain, found[1][name], rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")
    assert any(not torch.equal(plain, found[1][name]) for name, plain in found[0].items())  # two backends, not one
