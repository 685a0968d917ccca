"""Partitions: checked, counted, hashed, saved, drawn."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from pfl_ext.data import PARTITIONERS, Dataset, Partition
from pfl_ext.data.picture import draw_partition


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    x = torch.arange(120, dtype=torch.float32)[:, None]
    return Dataset.from_tensors(x[:90], torch.arange(90) % 3, x[90:], torch.arange(30) % 3, classes=["a", "b", "c"])


@pytest.fixture(scope="module")
def partition(dataset) -> Partition:
    generator = torch.Generator().manual_seed(5)
    return PARTITIONERS["dirichlet"](dataset, 4, generator=generator, alpha=0.5, minimum=5, validation=0.2, server=0.1)


def indices(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def by_hand(train=((0, 1), (2,)), validation=((3,), ()), test=((4,), (5,)), server=(6,), global_test=(4, 5)):
    def sets(parts):
        return tuple(indices(*part) for part in parts)

    return Partition(sets(train), sets(validation), sets(test), indices(*server), indices(*global_test))


def test_counts_are_those_of_a_loop(dataset, partition):
    for part in ("train", "validation", "test"):
        counts = partition.counts(dataset, part)
        for client, held in enumerate(getattr(partition, part)):
            assert counts[client].tolist() == [int((dataset.targets[held] == c).sum()) for c in range(3)]
    together = sum(partition.counts(dataset, part) for part in ("train", "validation", "test"))
    assert torch.equal(partition.counts(dataset, "all"), together)
    with pytest.raises(ValueError, match="part is 'server'"):
        partition.counts(dataset, "server")


def test_labels_of_multi_label_data_are_counted_each():
    targets = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0]], dtype=torch.uint8)
    data = Dataset.from_tensors(torch.zeros(7, 1), targets)
    assert by_hand().counts(data).tolist() == [[2, 1], [0, 0]]


def test_classes_that_a_client_holds_have_a_row_each(dataset, partition):
    rows = partition.classes(dataset)
    counts = partition.counts(dataset)
    assert {(row["client"], row["class"]): row["train"] for row in rows} == {
        (k, c): int(counts[k, c]) for k in range(4) for c in range(3) if counts[k, c]
    }
    assert {(row["class"], row["name"]) for row in rows} <= {(0, "a"), (1, "b"), (2, "c")}


def test_the_table_has_a_row_for_each_client_and_one_for_all(dataset, partition):
    lines = partition.table(dataset).splitlines()
    assert len(lines) == 2 + 4 + 1
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    sizes = [len(getattr(partition, part)[1]) for part in ("train", "validation", "test")]
    assert cells == ["1", *map(str, sizes), *map(str, partition.counts(dataset)[1].tolist())]
    assert "2 more clients" in partition.table(dataset, limit=2)


def test_the_table_of_many_classes_says_how_many_each_client_has():
    data = Dataset.from_tensors(torch.zeros(50, 1), torch.arange(50))
    lines = by_hand().table(data).splitlines()
    assert [line.split("|")[5].strip() for line in lines[2:]] == ["2", "1", "3"]
    assert "classes" in lines[0]


def test_a_saved_partition_comes_back_whole(partition, tmp_path):
    again = Partition.load(partition.save(tmp_path / "new" / "partition.safetensors"))
    assert again.fingerprint == partition.fingerprint
    assert again.description == partition.description
    for part in ("train", "validation", "test"):
        for a, b in zip(getattr(again, part), getattr(partition, part), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(again.server, partition.server)
    assert torch.equal(again.global_test, partition.global_test)
    assert os.listdir(tmp_path / "new") == ["partition.safetensors"]


def test_the_description_says_how_to_make_it_again(dataset, partition):
    made = partition.description
    assert made["partitioner"] == "dirichlet"
    assert made["seed"] == 5
    assert made["dataset_fingerprint"] == dataset.fingerprint
    names = ("alpha", "balance", "minimum", "per_class", "server", "validation", "test")
    options = {name: made[name] for name in names}
    generator = torch.Generator().manual_seed(made["seed"])
    again = PARTITIONERS[made["partitioner"]](dataset, made["clients"], generator=generator, **options)
    assert again.fingerprint == partition.fingerprint


def test_the_fingerprint_depends_on_who_has_what():
    base = by_hand()
    others = [
        by_hand(train=((0,), (1, 2))),
        by_hand(train=((0, 1), (3,)), validation=((2,), ())),
        by_hand(validation=((), (3,))),
        by_hand(server=(7,)),
        by_hand(global_test=(4,)),
        dataclasses.replace(base, description={"dataset_fingerprint": "another"}),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 7
    assert base.fingerprint == by_hand().fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": ((0, 1), (1,))}, "sample 1 is in two places"),
        ({"server": (4,)}, "sample 4 is in two places"),
        ({"train": ((1, 0), (2,))}, "not sorted"),
        ({"train": ((0, 0), (2,))}, "repeated"),
        ({"train": ((-1, 0), (2,))}, "negative"),
        ({"train": ((0, 1), ())}, "no training sample, the first is client 1"),
        ({"test": ((4,),)}, "2 training, 2 validation and 1 test"),
        ({"train": (), "validation": (), "test": ()}, "a client at least"),
    ],
)
def test_anything_but_sorted_disjoint_sets_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        by_hand(**change)


def test_a_partition_of_other_data_is_refused(dataset, partition):
    partition.check(dataset)
    other = dataclasses.replace(dataset, targets=dataset.targets.roll(1))
    with pytest.raises(ValueError, match="make a partition of this dataset"):
        partition.check(other)
    small = Dataset.from_tensors(torch.zeros(3, 1), torch.arange(3))
    with pytest.raises(ValueError, match="names sample 6"):
        by_hand().check(small)


# ---- files that are no partition ------------------------------------------------------------------------------------


def test_a_damaged_file_is_refused_wherever_the_damage_is(partition, tmp_path):
    path = partition.save(tmp_path / "partition.safetensors")
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a partition, or damaged"):
            Partition.load(path)
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            damaged = Partition.load(path)
        except ValueError as error:
            assert "not a partition, or damaged" in str(error)
        else:  # the description's text is not part of the hash; indices are
            assert damaged.fingerprint == partition.fingerprint


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other"
    with pytest.raises(FileNotFoundError, match="no partition"):
        Partition.load(path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="its format is None"):
        Partition.load(path)
    metadata = {"format": "pfl_ext.partition/1", "description": json.dumps({}), "fingerprint": "0"}
    save_file({"weight": torch.zeros(3)}, path, metadata)
    with pytest.raises(ValueError, match="not a partition, or damaged"):
        Partition.load(path)


def test_a_failed_save_leaves_the_old_file(partition, tmp_path, monkeypatch):
    path = partition.save(tmp_path / "partition.safetensors")
    before = path.read_bytes()

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        by_hand().save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["partition.safetensors"]


# ---- the picture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "classes"), [(4, 3), (300, 40)], ids=["circles", "shades"])
def test_a_picture_is_written(tmp_path, clients, classes):
    pytest.importorskip("matplotlib")
    data = Dataset.from_tensors(torch.zeros(3000, 1), torch.arange(3000) % classes)
    partition = PARTITIONERS["iid"](data, clients, generator=torch.Generator().manual_seed(0), validation=0.1)
    path = partition.draw(data, tmp_path / "new" / "partition.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    pixels = pytest.importorskip("matplotlib.image").imread(path)
    assert len({tuple(pixel) for row in pixels[::7, ::7, :3] for pixel in row.round(2).tolist()}) > 3


@pytest.mark.parametrize(("clients", "classes"), [(3, 2), (10, 10), (120, 40)])
def test_nothing_in_a_picture_overlaps_or_is_cut_off(monkeypatch, tmp_path, clients, classes):
    figures = pytest.importorskip("matplotlib.figure")
    saved, save = [], figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, path: (saved.append(figure), save(figure, path)))
    title = "speeches: dirichlet, alpha = 0.1, minimum = 10, balance = True, the last seed's, one of 3 partitions"
    counts = torch.arange(clients * classes).reshape(clients, classes)
    parts = {name: counts.sum(1).tolist() for name in ("train", "validation", "test")}
    draw_partition(title, parts, counts, [f"class {c}" for c in range(classes)], tmp_path / "x.png")
    (figure,) = saved
    legends = [found.get_window_extent() for axes in figure.axes if (found := axes.get_legend()) is not None]
    boxes = [figure._suptitle.get_window_extent(), *legends, *(axes.get_window_extent() for axes in figure.axes)]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    assert all(figure.bbox.containsx(x) for box in boxes for x in (box.x0, box.x1))
    assert all(figure.bbox.containsy(y) for box in boxes for y in (box.y0, box.y1))
