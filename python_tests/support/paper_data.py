"""Tiny data in the layout of the real files, for all configuration files of the papers: what --data-root may name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

__all__ = ["write_data"]


def write_data(root: Path) -> None:
    """Write all of them into a folder."""
    for write in (_mnist, _cifar, _stl10, _tiny_imagenet, _photographs, _pacs, _chexpert):
        write(root)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _mnist(root: Path) -> None:
    for folder in (root / "MNIST" / "raw", root / "FashionMNIST" / "raw"):
        folder.mkdir(parents=True)
        for part, n in (("train", 900), ("t10k", 100)):
            labels = np.arange(n, dtype=np.uint8) % 10
            for kind, array in (("images-idx3", _random(n, 28, 28)), ("labels-idx1", labels)):
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


def _stl10(root: Path) -> None:
    (root / "stl10_binary").mkdir()
    for part, n in (("unlabeled", 20), ("train", 10)):
        (root / "stl10_binary" / f"{part}_X.bin").write_bytes(_random(n, 3, 96, 96).tobytes())


def _pacs(root: Path) -> None:
    """Four domains of one archive, seven classes."""
    arrays = {}
    for domain in ("photo", "art", "cartoon", "sketch"):
        arrays |= {f"x_{domain}": _random(70, 64, 64, 3), f"y_{domain}": np.arange(70) % 7}
    np.savez(root / "pacs64.npz", **arrays)


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
