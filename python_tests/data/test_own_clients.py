"""Data that bring their own clients: LEAF's users, PFLlib's folders; and the reader of the latter's pickles."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pfl_ext.data import PARTITIONERS, Dataset, Partition, load
from pfl_ext.data.pickled import PickledArray, read_pickle
from pfl_ext.experiment import Experiment


def own(dataset: Dataset, **options: Any) -> Partition:
    return PARTITIONERS["by_domain"](dataset, generator=torch.Generator().manual_seed(0), **options)


# ---- LEAF -----------------------------------------------------------------------------------------------------------


def write_leaf(path: Path, users: dict[str, tuple[list, list]], changes: dict[str, Any] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "hierarchies": [],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content | (changes or {})))


def images(*labels: int) -> tuple[list, list]:
    """FEMNIST's form: 784 numbers, all of them the label's hundredth."""
    return [[label / 100] * 784 for label in labels], list(labels)


def write_femnist(folder: Path) -> None:
    """Two training files, as LEAF shards them; one user more in the test than in training."""
    write_leaf(folder / "train" / "all_data_0_keep_0_train_9.json", {"f01": images(1, 2, 3), "f02": images(4, 5)})
    write_leaf(folder / "train" / "all_data_1_keep_0_train_9.json", {"f03": images(61)})
    write_leaf(
        folder / "test" / "all_data_0_keep_0_test_9.json", {"f02": images(6), "f09": images(7), "f01": images(8)}
    )


@pytest.mark.parametrize("where", ["femnist", "femnist/data"])
def test_users_are_the_clients(tmp_path, where):
    write_femnist(tmp_path / where)
    dataset = load("leaf:femnist", tmp_path)
    assert dataset.name == "femnist"
    assert dataset.input_shape == (1, 28, 28)
    assert dataset.targets.tolist() == [1, 2, 3, 4, 5, 61, 6, 7, 8]
    assert len(dataset.classes) == 62
    torch.testing.assert_close(dataset.batch(range(9))[0].mean((1, 2, 3)), dataset.targets / 100)
    assert dataset.domains == ("f01", "f02", "f03", "f09")
    partition = own(dataset)
    assert [dataset.targets[part].tolist() for part in partition.train] == [[1, 2, 3], [4, 5], [61]]
    assert [dataset.targets[part].tolist() for part in partition.test] == [[8], [6], []]
    assert partition.global_test.tolist() == [6, 7, 8]


def test_an_experiment_takes_the_clients_of_the_data(tmp_path):
    write_femnist(tmp_path / "femnist")
    sections = {
        "method": {"name": "fedavg"},
        "data": {"name": "leaf:femnist", "root": str(tmp_path)},
        "partition": {"name": "by_domain"},
    }
    experiment = Experiment.from_sections(sections)
    assert experiment.make_data()[1].clients == 3
    assert Experiment.from_sections(experiment.sections()).make_data()[1].clients == 3
    with pytest.raises(ValueError, match="10 clients for 4 domains"):
        sections["partition"]["clients"] = 10
        Experiment.from_sections(sections).make_data()
    assert Experiment("fedavg").clients == 10
    assert Experiment.from_sections({"method": {"name": "fedavg"}}).sections()["partition"]["clients"] == 10


def test_users_can_be_given_a_validation_part_or_be_mixed(tmp_path):
    write_leaf(tmp_path / "train" / "a.json", {"a": images(*range(10)), "b": images(*range(20))})
    dataset = load(f"leaf:{tmp_path}")
    assert [len(part) for part in own(dataset, validation=0.2, test_fraction=0.1).validation] == [2, 4]
    assert PARTITIONERS["iid"](dataset, 5, generator=torch.Generator()).clients == 5


def test_characters_are_numbered_alike_in_texts_and_targets(tmp_path):
    write_leaf(tmp_path / "train" / "a.json", {"THE_KING": (["ab c", "b ca"], ["a", "\n"]), "FOOL": (["aaaa"], ["é"])})
    write_leaf(tmp_path / "test" / "a.json", {"FOOL": (["bbbb"], ["z"])})
    dataset = load(f"leaf:{tmp_path}")
    assert dataset.classes == ("\n", " ", "a", "b", "c", "z", "é")
    assert dataset.inputs.dtype == torch.int16
    texts = ["".join(dataset.classes[i] for i in row) for row in dataset.inputs.tolist()]
    assert texts == ["ab c", "b ca", "aaaa", "bbbb"]
    assert [dataset.classes[i] for i in dataset.targets.tolist()] == ["a", "\n", "é", "z"]
    assert dataset.batch([0])[0].tolist() == [[2, 3, 1, 4]]  # not normalised: they are no intensities
    assert [len(part) for part in own(dataset).train] == [2, 1]


def test_numbers_that_are_no_square_are_features_and_users_without_samples_are_left_out(tmp_path):
    write_leaf(tmp_path / "train" / "a.json", {"a": ([[0.5] * 60, [1] * 60], [0, 3]), "nobody": ([], [])})
    dataset = load(f"leaf:{tmp_path}")
    assert dataset.input_shape == (60,)
    assert dataset.domains == ("a",)


@pytest.mark.parametrize(
    ("users", "changes", "message"),
    [
        ({"a": images(1)}, {"num_samples": [2]}, "num_samples says 2"),
        ({"a": images(1)}, {"num_samples": []}, "damaged"),
        ({"a": images(1)}, {"user_data": {}}, "damaged: KeyError"),
        ({"a": images(1)}, {"users": 3}, "damaged"),
        ({"a": ([[1.0] * 9, [1.0] * 8], [0, 1])}, {}, "damaged"),
        ({"a": ([["1"] * 9], [0])}, {}, "equally long lists of numbers"),
        ({"a": ([[1.0] * 9], [0.5])}, {}, "class numbers"),
        ({"a": ([[1.0] * 9], [10**400])}, {}, "class numbers"),
        ({"a": ([[1.0] * 9], [2**40])}, {}, "largest target is 1099511627776"),
        ({"a": (["1.jpg", "12.jpg"], ["0", "1"])}, {}, "texts are accepted that have one length"),
        ({"a": (["a\u0416"], ["b"])}, {}, "can't encode character .{,90}$"),
        ({"a": images(1), "b": ([[1.0] * 9], [0])}, {}, "samples of 'b' have another form"),
    ],
)
def test_files_of_leaf_that_cannot_be_used_are_refused(tmp_path, users, changes, message):
    write_leaf(tmp_path / "train" / "a.json", users, changes)
    with pytest.raises(ValueError, match=message):
        load(f"leaf:{tmp_path}")


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "{", "[" * 100_000, "\udcff" * 1000], ids=["empty", "list", "cut", "deep", "bytes"]
)
def test_what_is_no_file_of_leaf_is_refused(tmp_path, text):
    (tmp_path / "train").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no samples in train/\*\.json"):
        load(f"leaf:{tmp_path}")
    (tmp_path / "train" / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match="no file of LEAF") as error:
        load(f"leaf:{tmp_path}")
    assert len(str(error.value)) < 300 + len(str(tmp_path))


# ---- PFLlib ---------------------------------------------------------------------------------------------------------


def samples(*labels: int) -> dict[str, np.ndarray]:
    return {"x": np.full((len(labels), 1, 4, 4), labels[0], np.float32), "y": np.array(labels)}


def write_pfllib(folder: Path) -> None:
    """As PFLlib does: one array of one object, a dictionary, in each archive."""
    for part, clients in (("train", [(0, 1, 1), (2, 2)]), ("test", [(1,), (2, 0)])):
        (folder / part).mkdir(parents=True)
        for client, labels in enumerate(clients):
            np.savez_compressed(folder / part / f"{client}.npz", data=samples(*labels))
    config = {"num_clients": 2, "num_classes": 3, "non_iid": True, "balance": False, "partition": "dir", "alpha": 0.1}
    (folder / "config.json").write_text(json.dumps(config))


def write_member(path: Path, pickled: bytes, shape: str = "()", descr: str = "'|O'") -> None:
    """An archive with these bytes in the place of the pickle."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + pickled)


def in_an_array(content: object, protocol: int) -> bytes:
    array = np.empty((), dtype=object)
    array[()] = content
    return pickle.dumps(array, protocol)


def test_the_clients_are_pfllibs(tmp_path):
    write_pfllib(tmp_path / "MNIST")
    dataset = load("pfllib:MNIST", tmp_path)
    assert dataset.name == "MNIST"
    assert dataset.classes == ("0", "1", "2")
    assert dataset.inputs.dtype == torch.float32
    assert dataset.inputs[:, 0, 0, 0].tolist() == [0, 0, 0, 2, 2, 1, 2, 2]
    partition = own(dataset)
    assert [dataset.targets[part].tolist() for part in partition.train] == [[0, 1, 1], [2, 2]]
    assert [dataset.targets[part].tolist() for part in partition.test] == [[1], [2, 0]]
    assert partition.description["test"] == "proportional"


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "|u1"])
def test_pickled_arrays_are_those_that_were_saved(tmp_path, protocol, order, dtype):
    write_pfllib(tmp_path)
    x = np.asarray(np.arange(120).reshape(2, 3, 4, 5), dtype=dtype, order=order)
    pickled = in_an_array({"x": x, "y": np.array([1, 2], "<i8")}, protocol)
    old = pickled.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")  # before NumPy 2
    assert (old != pickled) == (protocol < 4)
    for client in range(2):
        for part in ("train", "test"):
            write_member(tmp_path / part / f"{client}.npz", old)
    dataset = load(f"pfllib:{tmp_path}")
    assert np.array_equal(dataset.inputs[:2].numpy(), x)
    assert dataset.targets[:2].tolist() == [1, 2]


class Evil:
    """Runs a command when unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def addresses() -> bytes:
    """An array of objects whose dtype says that they are plain bytes: NumPy takes the bytes for addresses."""
    text = b"T\x02\0\0\0O8"
    dtype = b"cnumpy\ndtype\n(" + text + b"\x89\x88tR(K\x03T\x01\0\0\0|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tT\x01\0\0\0btR"
    return b"\x80\x02" + empty + b"(K\x01(K\x01t" + dtype + b"\x89T\x08\0\0\0AAAAAAAAtb."


def test_no_code_and_no_address_is_taken_from_a_file(tmp_path):
    write_pfllib(tmp_path)
    trace = tmp_path / "was run"
    for protocol in (2, 3, 4):
        write_member(tmp_path / "train" / "0.npz", in_an_array({"x": Evil(trace), "y": Evil(trace)}, protocol))
        with pytest.raises(ValueError, match=r"asks for (posix|nt)\.mkdir"):
            load(f"pfllib:{tmp_path}")
    assert not trace.exists()
    found = read_pickle(addresses(), encoding="bytes")
    assert isinstance(found, PickledArray) and found.objects is None and found.numbers.size == 0
    write_member(tmp_path / "train" / "0.npz", addresses())
    with pytest.raises(ValueError, match="holds no dictionary"):
        load(f"pfllib:{tmp_path}")


def test_a_pickle_cannot_change_the_reader():
    with pytest.raises(pickle.UnpicklingError, match="no array"):
        read_pickle(b"\x80\x02c_codecs\nencode\n}X\x07\0\0\0visitedK\x01sb.")
    with pytest.raises(pickle.UnpicklingError, match="no array"):
        read_pickle(b"\x80\x02cnumpy\ndtype\n}X\x07\0\0\0visitedK\x01sb.")


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_damaged_pickle_raises_or_holds_plain_things(protocol):
    whole = in_an_array({"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array([0, 1])}, protocol)
    for place in range(len(whole)):
        for change in (1, 8, 255):
            with contextlib.suppress(Exception):
                read_pickle(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
    assert read_pickle(whole).objects[0]["y"].numbers.tolist() == [0, 1]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(b"\x80\x05\x96" + (300 << 20).to_bytes(8, "little") + b".", id="bytearray"),
        pytest.param(b"\x80\x02]r" + (40 << 20).to_bytes(4, "little") + b".", id="memo"),
        pytest.param(b"\x80\x04\x8e" + (300 << 20).to_bytes(8, "little") + b".", id="bytes"),
        pytest.param(b"\x80\x02Pname\n.", id="persistent"),
        pytest.param(b"\x80\x02\x82\x01.", id="extension"),
    ],
)
def test_a_pickle_cannot_ask_for_memory_or_for_anything_else(tmp_path, code):
    write_pfllib(tmp_path)
    write_member(tmp_path / "train" / "0.npz", code)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="no file of PFLlib"):
            load(f"pfllib:{tmp_path}")
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.zeros((2, 3), np.float32)}, "KeyError"),
        ({"x": [[1, 2]], "y": np.zeros(1, int)}, "x is no array of numbers"),
        ({"x": np.array([[1], [1, 2]], object), "y": np.zeros(2, int)}, "x is no array of numbers"),
        ({"x": np.array(["ab"]), "y": np.zeros(1, int)}, "not of numbers"),
        ({"x": np.zeros(1, [("a", "f4")]), "y": np.zeros(1, int)}, "records|not of numbers"),
        ({"x": np.zeros((2, 3), np.int64), "y": np.zeros(2, int)}, "uint8 or floating samples"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.zeros(3, int)}, "with a class number each"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.zeros(2)}, "with a class number each"),
        ({"x": np.zeros((2, 3), np.float32), "y": np.array([0, 9])}, r"samples float32 \(1, 4, 4\), the first"),
        ([1, 2], r"int64 \(2,\), not a dictionary"),
    ],
)
def test_files_of_pfllib_that_cannot_be_used_are_refused(tmp_path, content, message):
    write_pfllib(tmp_path)
    np.savez_compressed(tmp_path / "train" / "0.npz", data=content)
    with pytest.raises(ValueError, match=message):
        load(f"pfllib:{tmp_path}")


def test_folders_of_pfllib_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(f"pfllib:{tmp_path}")
    write_pfllib(tmp_path)
    (tmp_path / "test" / "1.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"test/1\.npz; config.json says 2 clients"):
        load(f"pfllib:{tmp_path}")
    write_member(tmp_path / "test" / "1.npz", b"", shape="(3,)", descr="'<f4'")
    with pytest.raises(ValueError, match="not a dictionary"):
        load(f"pfllib:{tmp_path}")
    whole = (tmp_path / "train" / "1.npz").read_bytes()
    (tmp_path / "train" / "1.npz").write_bytes(whole[:60] + bytes([whole[60] ^ 255]) + whole[61:])
    with pytest.raises(ValueError, match=r"train/1\.npz is no file of PFLlib"):
        load(f"pfllib:{tmp_path}")
    for text in (
        "",
        "[]",
        '{"num_clients": 2}',
        '{"num_clients": -1, "num_classes": 3}',
        '{"num_clients": 1, "num_classes": 1e9}',
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="num_clients and num_classes"):
            load(f"pfllib:{tmp_path}")
