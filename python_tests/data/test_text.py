"""Texts: windows, what follows each place, speakers as domains; and the network that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pfl_ext import nn
from pfl_ext.data import PARTITIONERS, load
from pfl_ext.data.text import of_texts
from pfl_ext.federation import stream
from pfl_ext.tasks import NextToken, task_of


def test_a_window_has_the_next_character_of_every_place() -> None:
    data = of_texts({"a": "abcabcabcd" * 3, "b": "cba" * 9}, length=4)
    x, y = data.batch([0, 1])
    said = ["".join(data.classes[i] for i in row) for row in (*x.tolist(), *y.tolist())]
    assert said == ["abca", "bcab", "bcab", "cabc"] and x.dtype == y.dtype == torch.int64
    assert data.domains == ("a", "b") and isinstance(task_of(data), NextToken)


def test_the_end_of_each_text_is_its_test() -> None:
    data = of_texts({"a": "ab" * 50, "b": "ba" * 30}, length=5)
    assert data.domain is not None
    for d in (0, 1):
        own = data.is_test[data.domain == d]
        assert own.sum() == round(0.2 * len(own)) and bool(own[-int(own.sum()) :].all())


def test_speakers_are_the_clients_of_by_domain() -> None:
    data = load("speeches")
    assert len(data.domains) == 12 and data.input_shape == (64,)
    partition = PARTITIONERS["by_domain"](data, generator=stream(0, "partition"))
    assert partition.clients == 12 and all(len(test) > 20 for test in partition.test)
    assert load("speeches@32").input_shape == (32,)
    assert load("speeches").fingerprint == data.fingerprint


def test_texts_of_a_folder(tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.txt").write_text(f"{name} says this and that, again and again. " * 9)
    data = load(f"text:{tmp_path}@16")
    assert data.domains == ("ann", "bob") and data.input_shape == (16,)
    with pytest.raises(FileNotFoundError, match=r"with <speaker>.txt files"):
        (tmp_path / "empty").mkdir()
        load(f"text:{tmp_path / 'empty'}")
    (tmp_path / "cat.txt").write_text("miaow")
    with pytest.raises(ValueError, match=r"3 texts, of which 1 are too short \(cat\)"):
        load(f"text:{tmp_path}")


def test_characters_of_leaf_enter_an_embedding(tmp_path: Path) -> None:
    users = {"u": {"x": ["abca", "bcab"], "y": ["b", "c"]}, "v": {"x": ["cabc"], "y": ["a"]}}
    (tmp_path / "train").mkdir()
    content = {"users": list(users), "num_samples": [2, 1], "user_data": users}
    (tmp_path / "train" / "all.json").write_text(json.dumps(content))
    data = load(f"leaf:{tmp_path}")
    network = nn.build("char-transformer", data.input_shape, 3, stream(0, "network"), width=8, heads=2, last=True)
    assert network(data.batch([0, 1, 2])[0]).shape == (3, 3)


def test_no_place_sees_what_follows() -> None:
    network = nn.build("char-transformer", (9,), 5, stream(0, "network"), width=8, heads=2).double()
    x = torch.randint(0, 5, (2, 9), generator=torch.Generator().manual_seed(1))
    changed = x.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 5
    before, after = network(x), network(changed)
    assert torch.equal(before[:, :6], after[:, :6]) and not torch.equal(before[:, 6:], after[:, 6:])
    alone = nn.build("char-transformer", (9,), 5, stream(0, "network"), width=8, heads=2, last=True).double()
    torch.testing.assert_close(alone(x), before[:, -1])


def test_a_network_for_tokens_refuses_images() -> None:
    with pytest.raises(ValueError, match=r"char-transformer takes tokens \[length\]; the inputs are \[1, 8, 8\]"):
        nn.build("char-transformer", (1, 8, 8), 5, stream(0, "network"))


def test_adapters_of_a_char_transformer_are_all_that_is_trained_beside_norms_and_head() -> None:
    network = nn.build(
        "char-transformer",
        (9,),
        5,
        stream(0, "network"),
        width=8,
        heads=2,
        adapters=True,
        adapter_width=3,
        freeze="backbone",
    )
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert sum("adapter" in name for name in trained) == 2 * 2 * 6  # blocks, adapters in each, tensors of one
    assert not {name for name in trained if "embedding" in name or "attention" in name or "positions" in name}
    assert "head.weight" in trained
