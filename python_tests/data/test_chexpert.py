"""CheXpert: its table, the policy for uncertain labels, the authors' sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pfl_ext.data import PARTITIONERS, Dataset, load
from pfl_ext.data.chexpert import LABELS

# The real header, and columns of values: uncertain, positive, negative, not mentioned, then an all-negative row.
HEADER = (
    "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Enlarged Cardiomediastinum,Cardiomegaly,Lung Opacity,Lung Lesion,"
    "Edema,Consolidation,Pneumonia,Atelectasis,Pneumothorax,Pleural Effusion,Pleural Other,Fracture,Support Devices"
)
ROWS = (
    ("patient00001/study1/view1_frontal.jpg", "Female,68,Frontal,AP,1.0,,-1.0,,,1.0,0.0,,,0.0,,,,1.0"),
    ("patient00002/study2/view1_frontal.jpg", "Male,87,Frontal,AP,,,0.0,-1.0,1.0,,1.0,,-1.0,,-1.0,,1.0,"),
    ("patient00002/study1/view2_lateral.jpg", "Male,83,Lateral,,,1.0,,1.0,,,,-1.0,,1.0,,-1.0,,"),
)
EXPECTED = [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]


def write(folder: Path, rows: tuple[tuple[str, str], ...] = ROWS) -> None:
    image = pytest.importorskip("PIL.Image")
    lines = [HEADER]
    for i, (path, values) in enumerate(rows):
        lines.append(f"CheXpert-v1.0-small/train/{path},{values}")
        (folder / "train" / path).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((39, 32 + i), 60 * i, np.uint8)).save(folder / "train" / path)
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    (folder / "valid.csv").write_text(HEADER + "\n")


def test_uncertain_labels_are_positive_and_what_is_not_mentioned_is_negative(tmp_path):
    write(tmp_path / "CheXpert-v1.0-small")
    dataset = load("chexpert", tmp_path)
    assert dataset.classes == LABELS
    assert dataset.targets.tolist() == EXPECTED
    assert dataset.multilabel
    assert not bool(dataset.is_test.any())
    assert dataset.input_shape == (3, 64, 64)
    assert dataset.inputs.flatten(1).float().mean(1).tolist() == [0, 60, 120]
    torch.testing.assert_close(dataset.mean / 255, torch.tensor([0.485, 0.456, 0.406]))
    torch.testing.assert_close(dataset.std / 255, torch.tensor([0.229, 0.224, 0.225]))


def test_the_folder_and_the_size_can_be_named(tmp_path):
    write(tmp_path / "rays")  # the table names the official folder all the same
    for name, shape in (("chexpert:rays", (3, 64, 64)), ("chexpert:rays@16", (3, 16, 16))):
        assert load(name, tmp_path).input_shape == shape
    assert load(f"chexpert:{tmp_path}/rays@16").name == "chexpert@16"
    (tmp_path / "rays").rename(tmp_path / "CheXpert-v1.0")
    assert load("chexpert@8", tmp_path).input_shape == (3, 8, 8)


def test_the_sizes_are_the_papers_but_for_rounding_in_each_client():
    # 223,414 rows, 32 combinations of labels in unequal numbers.
    bits = torch.arange(223_414) ** 2 % 10_007 % 32
    targets = torch.stack([(bits >> label) & 1 for label in range(5)], 1).to(torch.uint8)
    dataset = Dataset("chexpert", torch.zeros(len(bits), 1), targets, LABELS, torch.zeros(len(bits), dtype=torch.bool))
    partition = PARTITIONERS["dirichlet_meta"](
        dataset, 20, generator=torch.Generator().manual_seed(0), server=0.1, test_fraction=0.1
    )
    train, test = (sum(map(len, sets)) for sets in (partition.train, partition.test))
    assert abs(len(partition.server) - 22_342) <= 1
    assert abs(test - 20_099) <= 20
    assert train + test + len(partition.server) == 223_414
    assert torch.equal(partition.global_test, torch.cat(partition.test).sort().values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column Path, Cardiomegaly"),
        (HEADER.replace("Edema", "Oedema") + "\n", "no column Edema"),
        (HEADER + "\n", "has no row"),
        (f"{HEADER}\nCheXpert-v1.0-small/train/a.jpg,,,,,,,2.0,,,,,,,,,,,\n", "line 2 has '2.0' for Cardiomegaly"),
        (f"{HEADER}\nCheXpert-v1.0-small/train/a.jpg,,\n", "line 2 has None for Cardiomegaly"),
        (f"{HEADER}\nCheXpert-v1.0-small/../../a.jpg{',' * 18}\n", "line 2 has the path"),
        (f"{HEADER}\n{',' * 18}\n", "line 2 has the path ''"),
        (f"{HEADER}\nCheXpert-v1.0-small/train/a.jpg{',' * 18}\n", r"a\.jpg cannot be read"),
        ("\udcff", "damaged"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, text, message):
    pytest.importorskip("PIL.Image")
    (tmp_path / "CheXpert-v1.0-small").mkdir()
    (tmp_path / "CheXpert-v1.0-small" / "train.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load("chexpert", tmp_path)


def test_an_absent_set_is_answered_with_what_is_expected_where(tmp_path):
    for name in ("chexpert", "chexpert@224"):
        with pytest.raises(FileNotFoundError) as error:
            load(name, tmp_path)
        for expected in (str(tmp_path), "CheXpert-v1.0-small", "train.csv", "chexpert:PATH"):
            assert expected in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"no train\.csv"):
        load(f"chexpert:{tmp_path}")
