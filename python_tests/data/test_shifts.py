"""CIFAR-10.1 and CIFAR-10-C, from small files of the official layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pfl_ext.data import load_test

EACH = 6  # images of a severity


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Both sets in their folders; the first pixel of a corrupted image tells its corruption and severity."""
    random = np.random.default_rng(0)
    (tmp_path / "CIFAR-10.1").mkdir()
    np.save(tmp_path / "CIFAR-10.1/cifar10.1_v6_data.npy", random.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8))
    np.save(tmp_path / "CIFAR-10.1/cifar10.1_v6_labels.npy", np.array([3, 9, 0, 1, 2, 5, 5, 4], np.int32))
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(np.arange(EACH, dtype=np.uint8), 5))
    for number, name in enumerate(["snow", "fog"]):
        images = random.integers(0, 256, (5 * EACH, 32, 32, 3), dtype=np.uint8)
        images[:, 0, 0, 0] = 10 * number + np.repeat(np.arange(1, 6), EACH)
        np.save(folder / f"{name}.npy", images)
    return tmp_path


def test_cifar10_1_is_one_test_set(root: Path) -> None:
    (part,) = load_test("cifar10.1", root)
    images = np.load(root / "CIFAR-10.1/cifar10.1_v6_data.npy")
    assert part.input_shape == (3, 32, 32) and part.is_test.all() and part.classes[3] == "cat"
    assert part.targets.tolist() == [3, 9, 0, 1, 2, 5, 5, 4] and part.targets.dtype == torch.int64
    x, _ = part.batch([2, 0])
    assert torch.equal(x, torch.from_numpy(images[[2, 0]].transpose(0, 3, 1, 2)).float()) and x.is_contiguous()
    (named,) = load_test(f"cifar10.1:{root / 'CIFAR-10.1'}")
    assert named.fingerprint == part.fingerprint


def test_cifar10_c_is_a_part_for_each_corruption_of_all_severities_or_of_one(root: Path) -> None:
    parts = load_test("cifar10-c", root)
    assert [part.name for part in parts] == ["cifar10-c/fog", "cifar10-c/snow"] and len(parts[0]) == 5 * EACH
    fog, snow = load_test("cifar10-c@4", root)
    assert fog.inputs[:, 0, 0, 0].tolist() == [14] * EACH and snow.inputs[:, 0, 0, 0].tolist() == [4] * EACH
    assert fog.targets.tolist() == list(range(EACH))
    again = load_test(f"cifar10-c:{root / 'CIFAR-10-C'}@4")
    assert [part.fingerprint for part in again] == [fog.fingerprint, snow.fingerprint]


def test_images_stay_in_their_files_and_what_is_done_to_them_does_not_reach_these(root: Path) -> None:
    path = root / "CIFAR-10-C/fog.npy"
    before = path.read_bytes()
    fog = load_test("cifar10-c@1", root)[0]
    with Path("/proc/self/maps").open() as maps:
        assert str(path) in maps.read()
    fog.inputs.zero_()
    assert path.read_bytes() == before


def test_any_other_source_gives_its_test_part_or_all_of_it_where_it_has_none(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype=np.uint8).reshape(10, 2, 2), np.arange(10)
    np.savez(tmp_path / "a.npz", x_train=x[:7], y_train=y[:7], x_test=x[7:], y_test=y[7:])
    np.savez(tmp_path / "b.npz", x_photo=x[:5], y_photo=y[:5], x_sketch=x[5:], y_sketch=y[5:])
    ((with_test,), (without,)) = (load_test(f"npz:{tmp_path / name}.npz") for name in "ab")
    assert with_test.targets.tolist() == [7, 8, 9] and len(without) == 10
    assert with_test.is_test.all() and without.is_test.all()


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("cifar10.1", "CIFAR-10.1/cifar10.1_v6_labels.npy", None, r"cifar10\.1_v6_labels\.npy is not there"),
        ("cifar10-c", "CIFAR-10-C/labels.npy", None, r"labels\.npy is not there"),
        (
            "cifar10-c",
            "CIFAR-10-C/fog.npy",
            np.zeros((30, 3, 32, 32), np.uint8),
            r"fog\.npy is uint8 \(30, 3, 32, 32\)",
        ),
        ("cifar10-c", "CIFAR-10-C/fog.npy", np.zeros((30, 32, 32, 3)), r"fog\.npy is float64 .*uint8 \(n, 32, 32, 3\)"),
        ("cifar10-c@1", "CIFAR-10-C/fog.npy", np.zeros((20, 32, 32, 3), np.uint8), r"\(30,\) for the 20 images of fog"),
        ("cifar10-c", "CIFAR-10-C/labels.npy", np.arange(30), r"numbers from 0 to 29; .*0 to 9, are accepted"),
        ("cifar10-c", "CIFAR-10-C/labels.npy", np.zeros(29, int), r"29 labels, which are not 5 equal parts"),
        ("cifar10.1", "CIFAR-10.1/cifar10.1_v6_labels.npy", np.zeros((8, 1), int), r"\(8, 1\) for the 8 images"),
        ("cifar10.1", "CIFAR-10.1/cifar10.1_v6_labels.npy", np.zeros(8), r"float64 \(8,\) .*class numbers"),
        ("cifar10.1", "CIFAR-10.1/cifar10.1_v6_labels.npy", np.array([{}]), r"no \.npy file of a plain array"),
        ("cifar10.1", "CIFAR-10.1/cifar10.1_v6_data.npy", b"", r"no \.npy file of a plain array, or damaged"),
        ("cifar10.1", "CIFAR-10.1/cifar10.1_v6_data.npy", b"\x93NUMPY", r"no \.npy file of a plain array, or damaged"),
        ("cifar10.1@3", "note", b"", r"CIFAR-10\.1 has no severities"),
        ("cifar10-c@6", "note", b"", r"severity 6 of CIFAR-10-C; 1 to 5 is accepted"),
        ("cifar10-c:nowhere", "note", b"", r"there is no .*/nowhere"),
        ("cifar10-d", "note", b"", r"there is no dataset 'cifar10-d'"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_file(
    root: Path, name: str, file: str, content: np.ndarray | bytes | None, message: str
) -> None:
    path = root / file
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_test(name, root)


@pytest.mark.parametrize("name", ["cifar10.1", "cifar10-c"])
def test_what_is_not_there_is_said_with_what_is_expected(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{name} is not in .*Expected there: CIFAR-10.*{name}:PATH"):
        load_test(name, tmp_path)


def test_a_folder_without_corruptions_is_refused(root: Path) -> None:
    for file in ("fog.npy", "snow.npy"):
        (root / "CIFAR-10-C" / file).unlink()
    with pytest.raises(FileNotFoundError, match="has no corruption"):
        load_test("cifar10-c", root)
