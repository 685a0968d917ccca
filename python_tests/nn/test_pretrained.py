"""Weights from files: what is loaded, what is left, what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pfl_ext import nn


def _build(seed: int = 0, classes: int = 10, **options: Any) -> torch.nn.Module:
    return nn.build("resnet18", (3, 32, 32), classes, torch.Generator().manual_seed(seed), **options)


@pytest.fixture(scope="module")
def source() -> dict[str, torch.Tensor]:
    network = _build(seed=9).train()
    network(torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)))  # statistics other than 0 and 1
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_a_file_are_loaded_with_their_statistics(
    source: dict[str, torch.Tensor], tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": source, "epoch": 3}, path)
    else:
        save_file(source, path)
    network = _build(pretrained=str(path))
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, source[name]), name


def test_half_precision_without_a_head_fits_any_number_of_classes(
    source: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    floats = {n: t.half() if t.is_floating_point() else t for n, t in source.items() if not n.startswith("fc.")}
    save_file(floats, path)
    network = _build(classes=7, pretrained=str(path), adapters=True)
    assert network.conv1.weight.dtype == torch.float32
    assert torch.equal(network.layer1[0].conv1.weight, source["layer1.0.conv1.weight"].half().float())
    assert torch.equal(network.fc.weight, _build(classes=7).fc.weight)


def test_the_head_of_other_classes_is_left_out(source: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(source, tmp_path / "w.safetensors")
    network = _build(classes=3)
    left = nn.load_pretrained(network, tmp_path / "w.safetensors")
    assert left == ["fc.weight", "fc.bias"] and torch.equal(network.fc.weight, _build(classes=3).fc.weight)


def test_statistics_can_be_left_out_as_in_the_official_code(source: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = str(tmp_path / "w.safetensors")
    save_file(source, path)
    network = _build(pretrained=path, pretrained_statistics=False)
    assert torch.equal(network.bn1.weight, source["bn1.weight"])
    assert torch.equal(network.bn1.running_mean, torch.zeros(64)) and int(network.bn1.num_batches_tracked) == 0
    with pytest.raises(ValueError, match="frozen_statistics=false with pretrained_statistics=false"):
        _build(pretrained=path, pretrained_statistics=False, freeze="backbone")


def test_what_does_not_fit_is_named_and_changes_nothing(source: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    wrong = {name: tensor for name, tensor in source.items() if name != "layer1.0.conv1.weight"}
    wrong["conv1.weight"] = torch.zeros(64, 3, 3, 3)
    wrong["surplus"] = torch.zeros(1)
    save_file(wrong, path)
    network = _build()
    with pytest.raises(
        ValueError, match=r"missing layer1.0.conv1.weight; unexpected surplus; other shapes: conv1"
    ) as e:
        nn.load_pretrained(network, path)
    assert "[64, 3, 3, 3] in place of [64, 3, 7, 7]" in str(e.value)
    for a, b in zip(network.state_dict().values(), _build().state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_statistics_for_a_network_without_are_explained(source: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(source, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="keeps no running statistics: leave them out"):
        _build(norm="group", pretrained=str(tmp_path / "w.safetensors"))
    loaded = _build(norm="group", pretrained=str(tmp_path / "w.safetensors"), pretrained_statistics=False)
    assert torch.equal(loaded.conv1.weight, source["conv1.weight"])


class Harmful:
    """Pickled code: it must not run when the file is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of the file ran",))


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    torch.save({"weight": Harmful()}, tmp_path / "w.pth", pickle_module=pickle)
    with pytest.raises(ValueError, match="cannot be read as tensors alone"):
        nn.read_weights(tmp_path / "w.pth")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no weights at"):
        nn.read_weights(tmp_path / "none.pth")
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no safetensors file"):
        nn.read_weights(tmp_path / "w.safetensors")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds list"):
        nn.read_weights(tmp_path / "list.pth")


def test_a_vit_for_larger_images_in_timms_names_is_loaded_with_interpolated_positions(tmp_path: Path) -> None:
    options = {"patch": 8, "width": 16, "depth": 1, "heads": 2}
    large = nn.vit((3, 64, 64), 10, **options)
    timm = {}
    for name, tensor in large.state_dict().items():
        for ours, theirs in (
            ("encoder.layers.encoder_layer_", "blocks."),
            ("self_attention.in_proj_", "attn.qkv."),
            ("self_attention.out_proj", "attn.proj"),
            ("ln_", "norm"),
            ("mlp.0", "mlp.fc1"),
            ("mlp.3", "mlp.fc2"),
            ("encoder.ln", "norm"),
            ("encoder.pos_embedding", "pos_embed"),
            ("class_token", "cls_token"),
            ("conv_proj", "patch_embed.proj"),
            ("heads.head", "head"),
        ):
            name = name.replace(ours, theirs)
        timm[name] = tensor
    save_file(timm, tmp_path / "vit.safetensors")
    small = nn.vit((3, 32, 32), 10, **options)
    assert nn.load_pretrained(small, tmp_path / "vit.safetensors") == []
    theirs, ours = large.encoder.pos_embedding, small.encoder.pos_embedding
    assert ours.shape == (1, 17, 16) and torch.equal(ours[:, 0], theirs[:, 0])
    torch.testing.assert_close(ours[0, 1], theirs[0, 1])  # corners stay
    torch.testing.assert_close(ours[0, -1], theirs[0, -1])
    assert torch.equal(small.encoder.layers[0].mlp[2].weight, large.encoder.layers[0].mlp[2].weight)


def test_torchvisions_weights_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    weights = models.resnet18(num_classes=1000).state_dict()
    asked = []

    def fetched(self: Any, *arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        asked.append((self.name, options))
        return weights

    monkeypatch.setattr(models.WeightsEnum, "get_state_dict", fetched)
    network = _build(pretrained="torchvision:ResNet18_Weights.IMAGENET1K_V1")
    assert asked == [("IMAGENET1K_V1", {"progress": False, "check_hash": True})]
    assert torch.equal(network.layer4[1].conv2.weight, weights["layer4.1.conv2.weight"])
