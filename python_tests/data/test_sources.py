"""Reading datasets: tiny files in the official formats, and the real ones where PFL_EXT_DATA names them."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from pfl_ext.data import PARTITIONERS, SOURCES, load

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# ---- digits ---------------------------------------------------------------------------------------------------------


def test_digits_need_no_files_and_have_a_test_part_in_every_class():
    digits = load("digits")
    assert digits.input_shape == (1, 8, 8)
    assert len(digits) == 1797
    assert int(digits.inputs.max()) == 16
    parts = [torch.bincount(digits.targets[part]) for part in (digits.is_test, ~digits.is_test)]
    assert float((parts[0] / (parts[0] + parts[1]) - 0.2).abs().max()) < 0.01


def test_digits_are_those_of_every_earlier_result():
    """Partitions, checkpoints and published numbers name them by this fingerprint, from when scikit-learn had them."""
    digits = load("digits")
    assert digits.fingerprint == "e17fc5a74eb6526ff3b6d950f8071fbff280f5f82d3827bc639c34ada6150837"
    assert digits.inputs.dtype == torch.uint8 and digits.targets.dtype == torch.int64


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    bunch, digits = datasets.load_digits(), load("digits")

    def multiset(images: np.ndarray, labels: np.ndarray) -> list[bytes]:
        return sorted(
            bytes([label]) + image.astype(np.uint8).tobytes() for image, label in zip(images, labels, strict=True)
        )

    assert multiset(digits.inputs.numpy(), digits.targets.numpy()) == multiset(bunch.images, bunch.target)


# ---- MNIST ----------------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray, compress: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    if compress:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


def write_mnist(folder: Path, compress: bool = False) -> list[np.ndarray]:
    arrays = [pixels(7, 28, 28), np.arange(7, dtype=np.uint8), pixels(3, 28, 28, seed=1), np.arange(3, dtype=np.uint8)]
    for name, array in zip(IDX, arrays, strict=True):
        write_idx(folder / name, array, compress)
    return arrays


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "gz"])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")])
def test_idx_files_are_read_compressed_or_not(tmp_path, name, folder, compress):
    train_x, train_y, test_x, test_y = write_mnist(tmp_path / folder, compress)
    dataset = load(name, tmp_path)
    assert dataset.name == name
    assert len(dataset.classes) == 10
    assert dataset.is_test.tolist() == [False] * 7 + [True] * 3
    assert np.array_equal(dataset.inputs.numpy()[:, 0], np.concatenate([train_x, test_x]))
    assert dataset.targets.tolist() == [*train_y, *test_y]


def test_the_folder_may_come_from_the_environment(tmp_path, monkeypatch):
    write_mnist(tmp_path / "MNIST" / "raw")
    monkeypatch.setenv("PFL_EXT_DATA", str(tmp_path))
    assert len(load("mnist")) == 10


def test_damaged_idx_files_are_refused(tmp_path):
    write_mnist(tmp_path / "MNIST" / "raw")
    path = tmp_path / "MNIST" / "raw" / IDX[0]
    whole = path.read_bytes()
    for data, message in (
        (whole[:-1], "cut off"),
        (whole[:6], "cut off"),
        (whole + b"x", "cut off"),
        (b"", "no IDX file"),
        (b"\x89PNG" + whole, "no IDX file"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            load("mnist", tmp_path)
    path.unlink()
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(ValueError, match="cannot be read"):
        load("mnist", tmp_path)


def test_images_in_the_place_of_labels_are_refused(tmp_path):
    write_mnist(tmp_path / "MNIST" / "raw")
    write_idx(tmp_path / "MNIST" / "raw" / IDX[1], pixels(7, 28, 28))
    with pytest.raises(ValueError, match="swapped roles"):
        load("mnist", tmp_path)


# ---- CIFAR ----------------------------------------------------------------------------------------------------------


def cifar_batches(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    files = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if name == "cifar10" else ["train", "test"]
    classes = 10 if name == "cifar10" else 100
    return {file: (pixels(4, 3072, seed=i), pixels(4, seed=i + 50) % classes) for i, file in enumerate(files)}


def write_binary(root: Path, name: str) -> None:
    folder = root / {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}[name]
    folder.mkdir(parents=True)
    for file, (images, labels) in cifar_batches(name).items():
        columns = [labels[:, None], images]
        if name == "cifar100":
            columns.insert(0, labels[:, None] // 5)  # a coarse label
        (folder / f"{file}.bin").write_bytes(np.concatenate(columns, axis=1).tobytes())


def python2_pickle(items: dict[bytes, object]) -> bytes:
    """A pickle as Python 2 and its NumPy wrote CIFAR: byte strings, ``numpy.core``, protocol 2."""

    def string(text: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(text)) + text

    def encode(value: object) -> bytes:
        if isinstance(value, bytes):
            return string(value)
        if isinstance(value, list):
            return b"](" + b"".join(b"K" + bytes([v]) for v in value) + b"e"
        assert isinstance(value, np.ndarray)
        shape = b"(" + b"".join(b"J" + struct.pack("<i", size) for size in value.shape) + b"t"
        empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + string(b"b") + b"tR"
        dtype = b"cnumpy\ndtype\n(" + string(b"u1") + b"K\0K\x01tR"
        dtype += b"(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        return empty + b"(K\x01" + shape + dtype + b"\x89" + string(value.tobytes()) + b"tb"

    body = b"".join(string(key) + encode(value) for key, value in items.items())
    return b"\x80\x02}(" + body + b"u."


def write_python(root: Path, name: str, protocol: int) -> Path:
    """``protocol`` 2: as published; others: as a modern Python writes the same dictionary."""
    folder = root / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    folder.mkdir(parents=True)
    key = {"cifar10": b"labels", "cifar100": b"fine_labels"}[name]
    for file, (images, labels) in cifar_batches(name).items():
        items = {b"batch_label": b"a batch", key: labels.tolist(), b"data": images}
        data = python2_pickle(items) if protocol == 2 else pickle.dumps(items, protocol)
        (folder / file).write_bytes(data)
    return folder


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("version", ["binary", 2, 4])
def test_cifar_is_read_from_the_binary_and_the_python_version(tmp_path, name, version):
    if version == "binary":
        write_binary(tmp_path, name)
    else:
        write_python(tmp_path, name, version)
    dataset = load(name, tmp_path)
    batches = cifar_batches(name)
    assert np.array_equal(
        dataset.inputs.numpy().reshape(-1, 3072), np.concatenate([images for images, _ in batches.values()])
    )
    assert dataset.targets.tolist() == np.concatenate([labels for _, labels in batches.values()]).tolist()
    assert int(dataset.is_test.sum()) == 4
    assert bool(dataset.is_test[-4:].all())
    assert len(set(dataset.classes)) == {"cifar10": 10, "cifar100": 100}[name]


def test_the_hand_made_pickle_is_one():
    items = {b"labels": [1, 2], b"data": pixels(2, 5)}
    again = pickle.loads(python2_pickle(items), encoding="bytes")
    assert again[b"labels"] == [1, 2]
    assert np.array_equal(again[b"data"], items[b"data"])


class Evil:
    """Runs a command when unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_a_pickle_that_names_code_is_refused_and_not_run(tmp_path):
    folder = write_python(tmp_path, "cifar10", 4)
    trace = tmp_path / "was run"
    (folder / "data_batch_2").write_bytes(pickle.dumps({b"data": Evil(trace), b"labels": []}, 4))
    with pytest.raises(ValueError, match=r"asks for posix\.mkdir|asks for nt\.mkdir"):
        load("cifar10", tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x02}", b"no pickle", pickle.dumps([1, 2]), pickle.dumps({b"data": 3})])
def test_a_damaged_pickle_is_refused(tmp_path, data):
    folder = write_python(tmp_path, "cifar100", 4)
    (folder / "train").write_bytes(data)
    with pytest.raises(ValueError, match="train is no batch of CIFAR's Python version, or damaged"):
        load("cifar100", tmp_path)


def test_images_of_another_shape_are_refused(tmp_path):
    folder = write_python(tmp_path, "cifar100", 4)
    (folder / "train").write_bytes(pickle.dumps({b"data": pixels(4, 100), b"fine_labels": [0] * 4}))
    with pytest.raises(ValueError, match=r"\(4, 100\) images"):
        load("cifar100", tmp_path)


def test_a_cut_off_binary_file_is_refused(tmp_path):
    write_binary(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin has .* cut off"):
        load("cifar10", tmp_path)


# ---- STL-10 ---------------------------------------------------------------------------------------------------------


def write_stl10(root: Path) -> dict[str, np.ndarray]:
    """Images as they are seen, [n, 3, 96, 96]; the files have every channel column by column, and labels from 1."""
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    images = {part: pixels(n, 3, 96, 96, seed=n) for part, n in (("train", 12), ("test", 4), ("unlabeled", 7))}
    for part, seen in images.items():
        (folder / f"{part}_X.bin").write_bytes(seen.transpose(0, 1, 3, 2).tobytes())
        if part != "unlabeled":
            (folder / f"{part}_y.bin").write_bytes((np.arange(len(seen), dtype=np.uint8) % 10 + 1).tobytes())
    return images


def test_stl10_has_its_columns_as_rows_and_classes_from_nought(tmp_path):
    images = write_stl10(tmp_path)
    dataset = load("stl10", tmp_path)
    assert np.array_equal(dataset.inputs.numpy(), np.concatenate([images["train"], images["test"]]))
    assert dataset.targets.tolist() == [*range(10), 0, 1, *range(4)] and dataset.classes[1] == "bird"
    assert dataset.is_test.tolist() == [False] * 12 + [True] * 4


def test_the_unlabelled_part_of_stl10_holds_the_training_images_too_and_tells_no_label(tmp_path):
    images = write_stl10(tmp_path)
    dataset = load("stl10-unlabelled", tmp_path)
    assert np.array_equal(dataset.inputs.numpy(), np.concatenate([images["unlabeled"], images["train"]]))
    assert dataset.targets.unique().tolist() == [0] and not dataset.is_test.any()


def test_damaged_files_of_stl10_are_refused(tmp_path):
    write_stl10(tmp_path)
    folder = tmp_path / "stl10_binary"
    for file, data, message in (
        ("train_y.bin", b"\x00" * 12, "labels from 1 to 10"),
        ("train_y.bin", b"\x01" * 11, "12 train images and 11 labels"),
        ("test_X.bin", b"\x01" * 100, "cut off or damaged"),
    ):
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(data)
        with pytest.raises(ValueError, match=message):
            load("stl10", tmp_path)
        (folder / file).write_bytes(whole)


# ---- what is not there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("mnist", ["MNIST/raw", *IDX]),
        ("fashion-mnist", ["FashionMNIST/raw", *IDX]),
        ("cifar10", ["cifar-10-batches-bin", "data_batch_5.bin", "cifar-10-batches-py", "test_batch"]),
        ("cifar100", ["cifar-100-binary", "train.bin", "cifar-100-python"]),
        ("stl10", ["stl10_binary", "train_X.bin", "test_y.bin"]),
        ("stl10-unlabelled", ["stl10_binary", "unlabeled_X.bin", "train_X.bin"]),
    ],
)
def test_absent_files_are_named_with_what_a_download_does(tmp_path, name, files):
    with pytest.raises(FileNotFoundError) as error:
        load(name, tmp_path)
    for expected in (str(tmp_path), "download=True", "PFL_EXT_DATA", *files):
        assert expected in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_download_goes_through_torchvision_into_the_folder(tmp_path, monkeypatch):
    from pfl_ext.data import sources

    class Torchvision:
        """Downloads, as far as the reader can tell."""

        @staticmethod
        def MNIST(root, download):
            assert download
            write_mnist(Path(root) / "MNIST" / "raw")

        class CIFAR10:
            url, filename, tgz_md5 = "url", "file", "sum"

        CIFAR100 = CIFAR10

        class utils:
            @staticmethod
            def download_and_extract_archive(url, root, filename, md5):
                assert (url, filename, md5) == ("url", "file", "sum")
                write_python(Path(root), "cifar10", 2)

    monkeypatch.setattr(sources, "_torchvision", lambda: Torchvision)
    assert len(load("mnist", tmp_path, download=True)) == 10
    assert len(load("cifar10", tmp_path, download=True)) == 24
    # What is there is not fetched again.
    monkeypatch.setattr(sources, "_torchvision", lambda: None)
    assert len(load("mnist", tmp_path, download=True)) == 10


def test_torchvision_has_what_a_download_uses():
    datasets = pytest.importorskip("torchvision.datasets", exc_type=(ImportError, RuntimeError))
    for source in (datasets.CIFAR10, datasets.CIFAR100, datasets.STL10):
        assert source.url.startswith("http") and source.filename and source.tgz_md5
    assert callable(datasets.utils.download_and_extract_archive)
    assert datasets.MNIST and datasets.FashionMNIST


def test_an_unknown_name_is_answered_with_the_known_ones():
    for name in ("cifar", "folder:", "npz:", "digits:x"):
        with pytest.raises(ValueError) as error:
            load(name)
        assert all(known in str(error.value) for known in SOURCES)


# ---- archives -------------------------------------------------------------------------------------------------------


def test_an_archive_by_domain_keeps_the_order_of_the_domains(tmp_path):
    photo, sketch = pixels(4, 8, 6, 3), pixels(5, 8, 6, 3, seed=1)
    np.savez(
        tmp_path / "pets.npz",
        x_sketch=sketch,
        y_sketch=np.array([0, 1, 0, 1, 1], np.uint8),
        x_photo=photo,
        y_photo=np.array([1, 0, 0, 1], np.uint8),
        classes=np.array(["cat", "dog"]),
        domains=np.array(["photo", "sketch"]),
    )
    dataset = load(f"npz:{tmp_path / 'pets.npz'}")
    assert dataset.name == "pets"
    assert dataset.classes == ("cat", "dog")
    assert dataset.domains == ("photo", "sketch")
    assert dataset.domain.tolist() == [0] * 4 + [1] * 5
    assert dataset.input_shape == (3, 8, 6)
    assert np.array_equal(dataset.inputs.numpy()[:4], photo.transpose(0, 3, 1, 2))
    assert not bool(dataset.is_test.any())
    partition = PARTITIONERS["by_domain"](dataset, generator=torch.Generator().manual_seed(0))
    assert partition.clients == 2


def test_an_archive_with_training_and_test_part(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=pixels(6, 5, 5), y_train=np.arange(6), x_test=pixels(2, 5, 5), y_test=[0, 1])
    dataset = load(f"npz:{tmp_path / 'a.npz'}")
    assert dataset.is_test.tolist() == [False] * 6 + [True] * 2
    assert dataset.input_shape == (1, 5, 5)
    assert dataset.domain is None
    # Statistics are of the training part.
    torch.testing.assert_close(dataset.mean.item(), float(dataset.inputs[:6].double().mean()), rtol=1e-6, atol=0)


def test_an_archive_of_medmnist_has_its_validation_part_among_the_training_samples(tmp_path):
    arrays = {f"{part}_images": pixels(n, 5, 5) for part, n in (("train", 4), ("val", 2), ("test", 3))}
    arrays |= {f"{part}_labels": np.zeros((n, 1), np.uint8) for part, n in (("train", 4), ("val", 2), ("test", 3))}
    np.savez(tmp_path / "m.npz", **arrays)
    dataset = load(f"npz:{tmp_path / 'm.npz'}")
    assert dataset.is_test.tolist() == [False] * 6 + [True] * 3
    assert not dataset.multilabel


def test_an_archive_of_features_with_several_labels(tmp_path):
    np.savez(tmp_path / "f.npz", x_train=np.ones((4, 7), np.float32), y_train=np.eye(4, 3, dtype=np.uint8))
    dataset = load(f"npz:{tmp_path / 'f.npz'}")
    assert dataset.multilabel
    assert dataset.input_shape == (7,)
    assert dataset.mean is None


X, Y = pixels(4, 5, 5), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"weights": np.zeros(3)}, "has weights; accepted are"),
        ({}, "has nothing in it"),
        ({"x_art": X}, "lacks y_art"),
        ({"x_art": X, "y_art": Y, "y_ink": Y}, "lacks x_ink"),
        ({"x_train": X, "y_train": Y, "y_test": Y}, "lacks x_test"),
        ({"x_art": X, "y_art": Y, "x_ink": pixels(4, 6, 6), "y_ink": Y}, "x_ink is uint8"),
        ({"x_train": X, "y_train": Y[:3]}, "with 3 entries in y_train"),
        ({"x_train": np.array([object()] * 4), "y_train": Y}, "x_train is no plain array.*pickle"),
        ({"x_train": np.array([["a"]] * 4), "y_train": Y}, "x_train is <U1"),
        ({"x_train": np.zeros((4, 2), [("a", "f4")]), "y_train": Y}, "x_train is .*'a'"),
        ({"x_train": np.zeros((4, 2), complex), "y_train": Y}, "x_train is complex128"),
        ({"x_train": np.zeros((4, 2), np.int32), "y_train": Y}, "uint8 or floating samples"),
        ({"x_train": np.float32(3), "y_train": Y}, r"x_train is float32 \(\)"),
        ({"x_train": np.zeros((0, 5, 5), np.uint8), "y_train": np.zeros(0, int)}, r"x_train is uint8 \(0, 5, 5\)"),
        ({"x_train": np.zeros((4, 0), np.float32), "y_train": Y}, "something in it"),
        ({"x_train": X, "y_train": np.array(["cat", "dog", "cat", "dog"])}, "y_train is <U3"),
        ({"x_train": X, "y_train": Y.astype([("a", "i8")])}, "y_train is "),
        ({"x_train": X, "y_train": Y + 0.5}, "class numbers"),
        ({"x_train": X, "y_train": np.array([0, 1, np.nan, 1])}, "class numbers"),
        ({"x_train": X, "y_train": np.zeros((4, 2, 2))}, "class numbers"),
        ({"x_train": X, "y_train": Y - 1}, "targets ranges from -1 to 0"),
        ({"x_train": X, "y_train": Y * 2**40}, "largest target is 1099511627776; class numbers below 100,000"),
        ({"x_train": X, "y_train": Y, "classes": np.array("cat")}, "classes is <U3"),
        ({"x_train": X, "y_train": Y, "classes": np.array(["cat"])}, "for 1 classes"),
        ({"x_train": X, "y_train": Y, "classes": np.array([{}])}, "classes is no plain array"),
        ({"x_art": X, "y_art": Y, "domains": np.array(["art", "ink"])}, "lacks x_ink"),
    ],
)
def test_archives_that_cannot_be_used_are_refused_in_one_line(tmp_path, arrays, message):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message) as error:
        load(f"npz:{path}")
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_what_is_no_archive_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(f"npz:{tmp_path / 'absent.npz'}")
    with pytest.raises(FileNotFoundError, match="no archive"):
        load(f"npz:{tmp_path}")
    path = tmp_path / "bad.npz"
    np.save(tmp_path / "array.npy", X)
    for content in (b"", b"no archive", (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"no \.npz archive"):
            load(f"npz:{path}")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_archive_is_refused_wherever_the_damage_is_or_reads_the_same(tmp_path, save):
    path = tmp_path / "a.npz"
    save(path, x_train=np.arange(200, dtype=np.uint8).reshape(8, 5, 5), y_train=np.arange(8))
    whole, expected = path.read_bytes(), load(f"npz:{path}").fingerprint
    refused = 0
    for place in range(0, len(whole), 3):
        for change in (1, 255):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            try:
                assert load(f"npz:{path}").fingerprint == expected  # a date, say
            except ValueError as error:
                refused += 1
                assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert refused > len(whole) / 6
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="damaged"):
        load(f"npz:{path}")


def test_arrays_of_other_byte_orders_and_whole_floating_labels_are_read(tmp_path):
    x = np.arange(8.0).reshape(4, 2)
    np.savez(tmp_path / "a.npz", x_train=x.astype(">f4"), y_train=Y.astype(">f8"))
    dataset = load(f"npz:{tmp_path / 'a.npz'}")
    assert np.array_equal(dataset.inputs.numpy(), x)
    assert dataset.targets.tolist() == Y.tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_archive_with_nan_or_infinity_in_its_test_part_is_refused_with_count_and_place(tmp_path, value):
    x = np.zeros((4, 3), np.float32)
    bad = x.copy()
    bad[1:3, 2] = value
    np.savez(tmp_path / "a.npz", x_train=x, y_train=Y, x_test=bad, y_test=Y)
    with pytest.raises(ValueError, match="NaN or infinity in the inputs of 2 of 8 samples, the first is sample 5"):
        load(f"npz:{tmp_path / 'a.npz'}")


# ---- folders --------------------------------------------------------------------------------------------------------


@pytest.fixture
def save_image():
    image = pytest.importorskip("PIL.Image")

    def save(path: Path, array: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(array).save(path)

    return save


def test_class_folders(tmp_path, save_image):
    dog, cat = pixels(6, 5, 3), pixels(6, 5, seed=1)
    save_image(tmp_path / "dog" / "1.png", dog)
    save_image(tmp_path / "cat" / "1.png", cat)  # grey becomes RGB
    (tmp_path / "cat" / "readme.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    dataset = load(f"folder:{tmp_path}")
    assert dataset.classes == ("cat", "dog")
    assert dataset.targets.tolist() == [0, 1]
    assert np.array_equal(dataset.inputs[1].numpy(), dog.transpose(2, 0, 1))
    assert np.array_equal(dataset.inputs[0].numpy(), np.stack([cat] * 3))
    assert dataset.domain is None
    assert not bool(dataset.is_test.any())


def test_training_and_test_folders(tmp_path, save_image):
    for part, n in (("train", 3), ("test", 2)):
        for i in range(n):
            save_image(tmp_path / part / "a" / f"{i}.png", pixels(4, 4, 3))
            save_image(tmp_path / part / "b" / f"{i}.png", pixels(4, 4, 3))
    dataset = load(f"folder:{tmp_path}")
    assert dataset.classes == ("a", "b")
    assert dataset.is_test.tolist() == [False] * 6 + [True] * 4


def test_domain_folders_as_in_office_home(tmp_path, save_image):
    for domain in ("Art", "Real World"):
        for label in ("Bike", "Mug"):
            save_image(tmp_path / domain / label / "00001.jpg", pixels(9, 7, 3))
    dataset = load(f"folder:{tmp_path}")
    assert dataset.domains == ("Art", "Real World")
    assert dataset.domain.tolist() == [0, 0, 1, 1]
    assert dataset.targets.tolist() == [0, 1, 0, 1]


def test_tiny_imagenet(tmp_path, save_image):
    (tmp_path / "wnids.txt").write_text("n02\nn01\n")
    (tmp_path / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tbullfrog\nn03\tother\n")
    for wnid in ("n01", "n02"):
        for i in range(2):
            save_image(tmp_path / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pixels(8, 8, 3))
    save_image(tmp_path / "val" / "images" / "val_0.JPEG", pixels(8, 8, 3))
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t7\t7\n")
    save_image(tmp_path / "test" / "images" / "test_0.JPEG", pixels(8, 8, 3))  # has no label, is not read
    dataset = load(f"folder:{tmp_path}")
    assert dataset.classes == ("goldfish", "bullfrog")
    assert dataset.targets.tolist() == [1, 1, 0, 0, 1]
    assert dataset.is_test.tolist() == [False] * 4 + [True]


def test_different_sizes_need_a_common_one(tmp_path, save_image):
    save_image(tmp_path / "a" / "1.png", np.full((20, 10, 3), 50, np.uint8))
    save_image(tmp_path / "b" / "1.png", np.full((10, 30, 3), 90, np.uint8))
    with pytest.raises(ValueError, match=r"30x10 pixels.* 10x20.*folder:PATH@64"):
        load(f"folder:{tmp_path}")
    dataset = load(f"folder:{tmp_path}@8")
    assert dataset.input_shape == (3, 8, 8)
    assert dataset.inputs.flatten(1).float().mean(1).tolist() == [50, 90]


def test_folders_that_cannot_be_used_are_refused(tmp_path, save_image):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="no folder"):
        load(f"folder:{tmp_path / 'file'}")
    (tmp_path / "file").unlink()
    with pytest.raises(ValueError, match="has no images"):
        load(f"folder:{tmp_path}")
    save_image(tmp_path / "a" / "1.png", pixels(4, 4, 3))
    (tmp_path / "a" / "2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"2\.png cannot be read"):
        load(f"folder:{tmp_path}")


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be so large and ends."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (10_000, 10_000), (2**31 - 1, 2**31 - 1)])
def test_an_image_that_would_fill_the_memory_is_refused(tmp_path, save_image, width, height):
    save_image(tmp_path / "a" / "1.png", pixels(4, 4, 3))
    (tmp_path / "a" / "2.png").write_bytes(png_header(width, height))
    for name in (f"folder:{tmp_path}", f"folder:{tmp_path}@4"):
        with pytest.raises(ValueError, match=r"2\.png cannot be read as an image: .*(pixels|size)"):
            load(name)


def test_damaged_images_are_refused_wherever_the_damage_is_or_decoded(tmp_path, save_image):
    save_image(tmp_path / "a" / "1.png", pixels(4, 4, 3))
    path = tmp_path / "a" / "1.png"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        with contextlib.suppress(ValueError):
            assert len(load(f"folder:{tmp_path}")) == 1


@pytest.mark.parametrize("row", ["val_1.JPEG", "val_1.JPEG\t", "val_1.JPEG n02 0 0 7 7"])
def test_a_row_of_tiny_imagenet_without_a_label_is_refused(tmp_path, save_image, row):
    (tmp_path / "wnids.txt").write_text("n02\n")
    for place in ("train/n02/images/1.JPEG", "val/images/val_0.JPEG", "val/images/val_1.JPEG"):
        save_image(tmp_path / place, pixels(8, 8, 3))
    annotations = tmp_path / "val" / "val_annotations.txt"
    annotations.write_text(f"val_0.JPEG\tn02\t0\t0\t7\t7\n{row}\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt has no label in row 2"):
        load(f"folder:{tmp_path}")
    annotations.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"val_annotations\.txt is no text"):
        load(f"folder:{tmp_path}")


# ---- where they are looked for --------------------------------------------------------------------------------------


def test_a_relative_path_is_taken_as_it_stands_and_then_from_the_root(tmp_path, save_image, monkeypatch):
    here, root = tmp_path / "here", tmp_path / "root"
    here.mkdir()
    monkeypatch.chdir(here)
    save_image(root / "pets" / "cat" / "1.png", np.full((4, 4, 3), 1, np.uint8))
    np.savez(root / "a.npz", x_train=pixels(6, 5, 5), y_train=np.arange(6))
    assert load("folder:pets", root).inputs.unique().tolist() == [1]
    assert load("folder:pets@2", root).input_shape == (3, 2, 2)
    assert load("folder:pets@2", root).name == "pets@2"
    assert len(load("npz:a.npz", root)) == 6
    monkeypatch.setenv("PFL_EXT_DATA", str(root))
    assert len(load("folder:pets")) == 1
    save_image(here / "pets" / "cat" / "1.png", np.full((4, 4, 3), 2, np.uint8))
    assert load("folder:pets", root).inputs.unique().tolist() == [2]
    assert load(f"folder:{root}/pets").inputs.unique().tolist() == [1]


@pytest.mark.parametrize("name", ["folder:pets", "npz:pets", "folder:pets@8"])
def test_what_is_in_neither_place_is_answered_with_both(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        load(name, "root")
    for expected in (tmp_path / "pets", tmp_path / "root" / "pets", "--data-root", "PFL_EXT_DATA"):
        assert str(expected) in str(error.value)


# ---- the real files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mean", "std", "first"),
    [  # the constants in common use, and the first labels
        ("mnist", [0.1307], [0.3081], [5, 0, 4, 1, 9]),
        ("fashion-mnist", [0.2860], [0.3530], [9, 0, 0, 3, 0]),
        ("cifar10", [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616], [6, 9, 9, 4, 1]),
    ],
)
def test_the_real_files_have_the_published_statistics(name, mean, std, first):
    if not os.environ.get("PFL_EXT_DATA"):
        pytest.skip("PFL_EXT_DATA names no folder with the real files")
    try:
        dataset = load(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert dataset.targets[:5].tolist() == first
    assert int(dataset.is_test.sum()) == 10_000
    torch.testing.assert_close(dataset.mean / 255, torch.tensor(mean), rtol=0, atol=6e-5)
    torch.testing.assert_close(dataset.std / 255, torch.tensor(std), rtol=0, atol=6e-5)
