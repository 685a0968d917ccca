"""The paper-scale files of configs/: their data are found in --data-root, in the layout of the real files, and cut."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pfl_ext.comparison import Comparison, points

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = sorted(path for path in CONFIGS.rglob("*.toml") if not path.stem.endswith("-small"))
# Of one sample: the real data's shape, where images are scaled that of the file.
SHAPES = {
    "mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "folder:tiny-imagenet-200": (3, 64, 64),
    "folder:inaturalist-2017@64": (3, 64, 64),
    "folder:OfficeHome@224": (3, 224, 224),
    "chexpert": (3, 64, 64),
}


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _mnist(root: Path) -> None:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, n in (("train", 900), ("t10k", 100)):
        for kind, array in (("images-idx3", _random(n, 28, 28)), ("labels-idx1", np.arange(n, dtype=np.uint8) % 10)):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def _cifar(root: Path) -> None:
    """Enough for 100 clients of ten samples."""
    layouts = {
        "cifar-10-batches-bin": [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"],
        "cifar-100-binary": ["train", "test"],
    }
    for name, files in layouts.items():
        (root / name).mkdir()
        classes = 100 if name == "cifar-100-binary" else 10
        for file in files:
            n = 2000 if file == "train" else 500 if file == "test_batch" else 300
            fine = np.arange(n, dtype=np.uint8)[:, None] % classes
            labels = [fine // 5, fine] if classes == 100 else [fine]
            (root / name / f"{file}.bin").write_bytes(np.concatenate([*labels, _random(n, 3072)], 1).tobytes())
    (root / "CIFAR-10.1").mkdir()
    np.save(root / "CIFAR-10.1" / "cifar10.1_v6_data.npy", _random(20, 32, 32, 3))
    np.save(root / "CIFAR-10.1" / "cifar10.1_v6_labels.npy", np.arange(20, dtype=np.int32) % 10)
    (root / "CIFAR-10-C").mkdir()
    np.save(root / "CIFAR-10-C" / "labels.npy", np.arange(50, dtype=np.uint8) % 10)
    for corruption in ("fog", "snow"):
        np.save(root / "CIFAR-10-C" / f"{corruption}.npy", _random(50, 32, 32, 3))


def _save(path: Path, height: int, width: int) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(_random(height, width, 3)).save(path)


def _tiny_imagenet(root: Path) -> None:
    """200 classes, each of which 20 clients with 30 labels give to three."""
    folder = root / "tiny-imagenet-200"
    wnids = [f"n{i:08d}" for i in range(200)]
    for wnid in wnids:
        for i in range(3):
            _save(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 64, 64)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("no image\n")
    for i in range(2):
        _save(folder / "val" / "images" / f"val_{i}.JPEG", 64, 64)
        _save(folder / "test" / "images" / f"test_{i}.JPEG", 64, 64)
    (folder / "wnids.txt").write_text("\n".join(wnids))
    (folder / "words.txt").write_text("".join(f"{wnid}\tthing {wnid}, other\n" for wnid in wnids))
    (folder / "val" / "val_annotations.txt").write_text(
        f"val_0.JPEG\t{wnids[3]}\t0\t0\t9\t9\nval_1.JPEG\t{wnids[0]}\t0\n"
    )


def _photographs(root: Path) -> None:
    """Of different sizes, as real photographs."""
    for part, each in (("train", 40), ("test", 4)):
        for i in range(5):
            for j in range(each):
                _save(root / "inaturalist-2017" / part / f"Species {i}" / f"{j}.jpg", 60 + i, 80 + j)
    for domain in ("Art", "Clipart", "Product", "Real World"):
        for label in ("Alarm Clock", "Bike"):
            for i in range(6):
                _save(root / "OfficeHome" / domain / label / f"{i:05d}.jpg", 200 + i, 300)


def _chexpert(root: Path) -> None:
    """Grey X-rays of different sizes, and their table, of which only the used columns have values."""
    labels = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
    names = ["Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", "No Finding", *labels, "Support Devices"]
    rows = [",".join(names)]
    for i in range(300):
        place = f"train/patient{i:05d}/study1/view1_frontal.jpg"
        values = [("1.0", "0.0", "-1.0", "")[(i >> label) % 4] for label in range(5)]
        rows.append(f"CheXpert-v1.0-small/{place},Female,68,Frontal,AP,1.0,{','.join(values)},")
        image = pytest.importorskip("PIL.Image")
        path = root / "CheXpert-v1.0-small" / place
        path.parent.mkdir(parents=True)
        image.fromarray(_random(70 + i % 5, 80)).save(path)
    (root / "CheXpert-v1.0-small" / "train.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    for write in (_mnist, _cifar, _tiny_imagenet, _photographs, _chexpert):
        write(made)
    return made


@pytest.mark.parametrize("path", PAPER, ids=lambda path: str(path.relative_to(CONFIGS).with_suffix("")))
def test_every_paper_file_reads_data_of_the_real_layout_from_the_root(
    path: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PFL_EXT_DATA", raising=False)
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    sections = {name: table for name, table in config.items() if isinstance(table, dict)}
    sweep = {name: values for name, values in sections.pop("sweep", {}).items() if name != "data.auxiliary_samples"}
    sections["data"] = {**sections["data"], "root": str(root), "auxiliary_samples": 20}  # root as --data-root sets it
    seen = set()
    for point in points(Comparison(sections, tuple(config["methods"]), (0,)), sweep):
        _, experiment = point.comparison.experiments()[0]
        cut = experiment.partition, tuple(experiment.partition_options.items())
        if cut in seen:
            continue
        seen.add(cut)
        dataset, partition = experiment.make_data()
        assert dataset.input_shape == SHAPES[experiment.data]
        assert partition.clients == experiment.clients
        assert sum(map(len, partition.test)) > 0
        auxiliary = experiment.make_auxiliary(dataset, partition)
        assert (auxiliary is None) == ("auxiliary" not in sections["data"])
        assert list(experiment.make_extra_tests(dataset)) == list(sections["data"].get("extra_tests", {}))
