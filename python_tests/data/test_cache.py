"""Data larger than memory: samples in files, read as they are needed."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfl_ext.algorithms import FedAvg
from pfl_ext.data import PARTITIONERS, Dataset, load
from pfl_ext.data import images as image_files
from pfl_ext.data.stored import StoredTensor
from pfl_ext.engines import Workers
from pfl_ext.federation import Federation, Settings, stream


class Items:
    """A torch dataset that counts how often it is read."""

    classes = ("a", "b")

    def __init__(self, count: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randint(0, 256, (count, 3, 4, 4), dtype=torch.uint8, generator=draw)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return {"image": self.x[i], "age": float(i)}, i % 2


class Images(Items):
    """Images alone."""

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return self.x[i], i % 2


@pytest.mark.parametrize("kind", [Images, Items])
def test_a_cached_dataset_is_the_one_in_memory(kind: type[Items], tmp_path: Path) -> None:
    stored = Dataset.from_torch(kind(40), kind(10, 1), cache=tmp_path)
    memory = Dataset.from_torch(kind(40), kind(10, 1))
    assert stored.fingerprint == memory.fingerprint and stored.nbytes < memory.nbytes
    rows = torch.tensor([49, 0, 7, 7])
    for (x, y), (u, v) in [
        (stored.batch(rows), memory.batch(rows)),
        (stored.subset(rows).batch([1]), memory.batch([0])),
    ]:
        pairs = zip(x.values(), u.values(), strict=True) if isinstance(x, dict) else [(x, u)]
        assert all(torch.equal(a, b) for a, b in pairs) and torch.equal(y, v)
    assert "in " + str(tmp_path) in str(stored) and len(str(stored).splitlines()) == 5


def test_samples_are_decoded_once(tmp_path: Path) -> None:
    first, second = Images(40), Images(40)
    Dataset.from_torch(first, cache=tmp_path)
    Dataset.from_torch(second, cache=tmp_path)
    assert first.reads >= 40 and second.reads <= 4  # the few that tell it from others
    assert len([entry for entry in tmp_path.iterdir() if entry.is_dir()]) == 1
    Dataset.from_torch(Images(40, seed=5), cache=tmp_path)
    assert len([entry for entry in tmp_path.iterdir() if entry.is_dir()]) == 2


class Broken(Images):
    """The last but one cannot be read."""

    def __getitem__(self, i: int) -> Any:
        if i == 38:
            raise OSError("no such image")
        return super().__getitem__(i)


def test_a_cache_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such image"):
        Dataset.from_torch(Broken(40), cache=tmp_path)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    assert len(Dataset.from_torch(Images(40), cache=tmp_path, name="Broken")) == 40


def test_a_cache_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    Dataset.from_torch(Images(40), cache=tmp_path)
    (file,) = tmp_path.glob("*/0.bin")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged \(.* has 1,919 bytes, not 1,920\): remove it"):
        Dataset.from_torch(Images(40), cache=tmp_path)
    about = tmp_path / file.parent.name / "about.json"
    for wrong in (json.dumps({"leaves": "none"}), json.dumps({"leaves": [], "form": 3}), "[" * 200_000):
        about.write_text(wrong)
        with pytest.raises(ValueError, match="is damaged"):
            Dataset.from_torch(Images(40), cache=tmp_path)


def test_a_stored_tensor_travels_as_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(np.arange(12, dtype=np.float32).tobytes())
    stored = StoredTensor(tmp_path / "x", (4, 3), torch.float32)
    assert stored.index_select(0, torch.tensor([2])).tolist() == [[6, 7, 8]]
    sent = pickle.dumps(stored[torch.tensor([3, 1])])
    assert len(sent) < 2000
    arrived = pickle.loads(sent)
    assert arrived.shape == (2, 3) and torch.cat(list(arrived.parts())).tolist() == [[9, 10, 11], [3, 4, 5]]
    with pytest.raises(IndexError, match="sample 4 of 4"):
        stored.index_select(0, torch.tensor([4]))


def test_images_of_a_folder_that_do_not_fit_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pil = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "pets" / label).mkdir(parents=True)
        for i in range(6):
            image = pil.fromarray(draw.integers(0, 256, (9, 9, 3), dtype=np.uint8))
            image.save(tmp_path / "pets" / label / f"{i}.png")
    memory = load(f"folder:{tmp_path / 'pets'}@8")
    monkeypatch.setattr(image_files, "too_large", lambda size: True)
    monkeypatch.setenv("PFL_EXT_CACHE", str(tmp_path / "cache"))
    stored = load(f"folder:{tmp_path / 'pets'}@8")
    assert isinstance(stored.inputs, StoredTensor) and isinstance(memory.inputs, torch.Tensor)
    assert stored.fingerprint == memory.fingerprint
    assert torch.equal(stored.batch([3, 11])[0], memory.batch([3, 11])[0])  # the same statistics too


def test_workers_read_the_same_files_and_train_to_the_same_bits(tmp_path: Path) -> None:
    models = []
    for cache, engine in ((None, None), (tmp_path, Workers(2))):
        data = Dataset.from_torch(Images(60), cache=cache)
        partition = PARTITIONERS["iid"](data, 3, generator=stream(0, "partition"))
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
        run = Federation(FedAvg(lr=0.1), network, data, partition, Settings(rounds=1), engine=engine)
        run.run()
        models.append(run.server["model"].clone())
        run.engine.close()
    assert torch.equal(*models)


SCRIPT = """
    import sys, torch, numpy as np
    from torch import nn
    from pfl_ext.algorithms import FedAvg
    from pfl_ext.data import PARTITIONERS, Dataset
    from pfl_ext.federation import Federation, Settings, stream

    class Large:
        def __init__(self, count): self.count = count
        def __len__(self): return self.count
        def __getitem__(self, i):
            return np.random.default_rng(i).integers(0, 256, (3, 64, 64), dtype=np.uint8), i % 10

    def resident(what):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(what))

    def run(count, clients):
        data = Dataset.from_torch(Large(count), cache=sys.argv[1], threads=2)
        partition = PARTITIONERS["iid"](data, clients, generator=stream(0, "partition"), test_fraction=0.02)
        network = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(192, 10))
        method = FedAvg(batch_size=64)
        return data, Federation(method, network, data, partition, Settings(rounds=1, threads=1)).run()[-1]

    run(200, 2)  # what the libraries take is there before
    before = resident("VmRSS")
    data, record = run(20_000, 4)
    size = sum(leaf.nbytes for leaf in [data.inputs]) // 2**20
    print(size, resident("VmHWM") - before, record["models"]["global"]["test"]["accuracy"]["mean"])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_training_on_a_cache_takes_little_memory(tmp_path: Path) -> None:
    """234 MiB of images: one tensor of them, or a mapping, would be resident at once or in the end."""
    script = textwrap.dedent(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    size, grown, accuracy = map(float, done.stdout.split())
    assert size == 234 and grown < 0.5 * size, f"{grown} MiB more were resident"
    assert 0 <= accuracy <= 1
