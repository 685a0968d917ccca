"""Adapters: where they are, how many numbers they have, what stays frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn as tnn

from pfl_ext import nn
from pfl_ext.nn.adapters import AdaptedConv2d, FrozenBatchNorm2d, ResidualAdapter, TokenAdapter

X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def _build(name: str = "resnet18", classes: int = 10, **options: Any) -> tnn.Module:
    return nn.build(name, (3, 32, 32), classes, torch.Generator().manual_seed(0), **options)


def _trained(network: tnn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


@pytest.mark.parametrize(("classes", "trained"), [(10, 1_413_258), (65, 1_441_473), (5, 1_410_693)])
def test_perada_trains_as_many_numbers_as_the_paper_says(classes: int, trained: int) -> None:
    network = _build(classes=classes, adapters=True, freeze="backbone")
    assert _trained(network) == trained
    plain = sum(p.numel() for p in _build(classes=classes).parameters())
    adapters = sum(p.numel() for m in network.modules() if isinstance(m, ResidualAdapter) for p in m.parameters())
    assert adapters == 1_400_320 and sum(p.numel() for p in network.parameters()) == plain + adapters
    if classes == 10:
        assert plain == 11_181_642 and round(100 * trained / plain, 2) == 12.64
        assert sum(p.numel() for p in network.fc.parameters()) == 5_130
        norms = [m for n, m in network.named_modules() if n.rpartition(".")[2] in ("bn1", "bn2")]
        assert sum(p.numel() for m in norms for p in m.parameters()) == 7_808 == trained - adapters - 5_130


def test_resnet34_trains_the_papers_2_57_million() -> None:
    assert _trained(_build("resnet34", 65, adapters=True, freeze="backbone")) == 2_578_625  # Table 7: 2.57 M


def test_an_adapter_is_the_papers_residual_layer() -> None:
    adapter = ResidualAdapter(6, 0.3, tnn.BatchNorm2d(6)).double().eval()
    tnn.init.normal_(adapter.conv.weight)
    x = torch.randn(2, 6, 3, 3, dtype=torch.float64)
    expected = x + torch.einsum("oi,nihw->nohw", adapter.conv.weight[:, :, 0, 0], x / (1 + 1e-5) ** 0.5)
    torch.testing.assert_close(adapter(x), expected)
    assert adapter.conv.bias is None and adapter.dropout.p == 0.3
    small = ResidualAdapter(64, 0.3, tnn.BatchNorm2d(64)).conv.weight
    assert 0.9e-4 < float(small.detach().std()) < 1.1e-4


def test_adapters_stand_after_both_convolutions_of_every_block_and_nowhere_else() -> None:
    network = _build(adapters=True)
    adapted = {name for name, m in network.named_modules() if isinstance(m, AdaptedConv2d)}
    assert adapted == {f"layer{i}.{j}.conv{k}" for i in (1, 2, 3, 4) for j in (0, 1) for k in (1, 2)}


@pytest.mark.parametrize("name", ["resnet18", "wide-resnet", "vit"])
def test_adapters_leave_names_and_weights_and_nearly_the_function(name: str) -> None:
    options: dict[str, Any] = {"wide-resnet": {"depth": 10, "width": 1}, "vit": {"depth": 2}}.get(name, {})
    plain, adapted = _build(name, **options).eval(), _build(name, adapters=True, **options).eval()
    for key, tensor in plain.state_dict().items():
        assert torch.equal(tensor, adapted.state_dict()[key]), key
    assert 0 < (plain(X) - adapted(X)).abs().max() < 0.1 * plain(X).abs().max()
    assert adapted(X[:1]).shape == (1, 10)


def test_adapters_go_into_torchvisions_networks_too() -> None:
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    for theirs, count in (
        (models.resnet18(num_classes=10), 16),
        (models.resnet50(num_classes=10), 32),
        (models.VisionTransformer(32, 16, 2, 4, 64, 128, num_classes=10), 4),
    ):
        before = set(theirs.state_dict())
        nn.add_adapters(theirs)
        nn.freeze_backbone(theirs)
        found = [m for m in theirs.modules() if isinstance(m, (ResidualAdapter, TokenAdapter))]
        assert len(found) == count and before < set(theirs.state_dict())
        head = theirs.get_submodule(nn.head_of(theirs))
        tnn.init.normal_(head.weight)  # the ViT's begins at zero
        theirs(X).square().sum().backward()
        for adapter in found:
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapter.parameters())
    ours = _build(adapters=True, freeze="backbone")
    theirs = nn.freeze_backbone(nn.add_adapters(models.resnet18(num_classes=10)))
    assert nn.adapter_parameters(theirs) == nn.adapter_parameters(ours) and _trained(theirs) == 1_413_258


def test_a_vits_adapters_and_norms_and_head_are_trained_alone() -> None:
    network = _build("vit", adapters=True, freeze="backbone", adapter_width=8, depth=2)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert all("adapter" in name or ".ln" in name or name.startswith("heads.") for name in trained)
    assert {"encoder.ln.weight", "encoder.layers.encoder_layer_0.mlp.adapter.down.weight"} <= trained
    assert "encoder.layers.encoder_layer_0.dropout.adapter.up.weight" in trained


def test_group_normalisation_goes_into_the_adapters_too() -> None:
    network = _build(norm="group", adapters=True)
    assert not any(isinstance(m, tnn.modules.batchnorm._BatchNorm) for m in network.modules())


def test_frozen_batch_normalisation_keeps_its_statistics_in_training() -> None:
    network = _build(adapters=True, freeze="backbone").train()
    frozen = [m for m in network.modules() if isinstance(m, FrozenBatchNorm2d)]
    assert len(frozen) == 3 and all(not m.training for m in frozen)
    before = {name: t.clone() for name, t in network.state_dict().items()}
    network(X)
    for name, tensor in network.state_dict().items():
        changes = "running" in name or "num_batches" in name
        assert torch.equal(tensor, before[name]) == (not changes or "downsample" in name), name
    official = _build(adapters=True, freeze="backbone", frozen_statistics=False).train()
    official(X)
    assert int(official.layer2[0].downsample[1].num_batches_tracked) == 1


def test_what_cannot_have_adapters_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for adapters in a FusedSequential"):
        _build("lenet", adapters=True)
    with pytest.raises(ValueError, match="has adapters already"):
        nn.add_adapters(_build(adapters=True))
    with pytest.raises(ValueError, match="dropout 1"):
        nn.add_adapters(_build(), dropout=1.0)


def test_a_frozen_backbone_of_random_weights_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="frozen with random weights"):
        _build(adapters=True, freeze="backbone")
