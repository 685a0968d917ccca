"""Residual networks and the ViT: sizes, torchvision's form, options."""

from __future__ import annotations

import pytest
import torch

from pfl_ext import nn


def _size(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def _build(name: str, classes: int = 10, **options: object) -> torch.nn.Module:
    return nn.build(name, (3, 32, 32), classes, torch.Generator().manual_seed(0), **options)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet18", 11_181_642), ("resnet34", 21_289_802), ("resnet50", 23_528_522), ("wide-resnet", 36_479_194)],
)
def test_residual_networks_have_their_published_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        network = nn.NETWORKS[name]((3, 32, 32), 10)
    assert _size(network) == parameters


def test_vit_s16_has_its_published_size_and_runs_at_32_pixels() -> None:
    with torch.device("meta"):
        assert _size(nn.vit((3, 224, 224), 1000)) == 22_050_664
        assert _size(nn.vit((3, 224, 224), 10)) == 21_669_514
    assert nn.vit((3, 32, 32), 7, depth=2)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_tensors_and_outputs_are_torchvisions(name: str) -> None:
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    theirs, ours = getattr(models, name)(num_classes=10).eval(), nn.NETWORKS[name]((3, 64, 64), 10).eval()
    assert [(n, t.shape) for n, t in theirs.state_dict().items()] == [
        (n, t.shape) for n, t in ours.state_dict().items()
    ]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(x), theirs(x))


def test_the_vits_tensors_and_outputs_are_torchvisions() -> None:
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    theirs = models.VisionTransformer(32, 8, 2, 4, 32, 128, num_classes=5).eval().double()
    torch.nn.init.normal_(theirs.heads.head.weight)
    ours = nn.vit((3, 32, 32), 5, patch=8, width=32, depth=2, heads=4).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_stem_and_norm_are_options_under_the_same_names(stem: str, norm: str) -> None:
    network = _build("resnet18", stem=stem, norm=norm)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert tuple(network.conv1.kernel_size) == ((7, 7) if stem == "imagenet" else (3, 3))
    kinds = {type(m) for name, m in network.named_modules() if name.endswith(("bn1", "bn2", "downsample.1"))}
    assert kinds == {torch.nn.BatchNorm2d if norm == "batch" else torch.nn.GroupNorm}
    features = network.layer1(network.maxpool(network.relu(network.bn1(network.conv1(torch.zeros(1, 3, 32, 32))))))
    assert features.shape[2:] == ((8, 8) if stem == "imagenet" else (32, 32))


def test_a_wide_resnet_of_another_depth_and_norm_works() -> None:
    network = _build("wide-resnet", depth=10, width=1, norm="group")
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(ValueError, match="depth 11"):
        nn.wide_resnet((3, 32, 32), 10, depth=11)


def test_what_does_not_fit_a_network_is_refused() -> None:
    for name in ("resnet18", "wide-resnet", "vit"):
        with pytest.raises(ValueError, match=r"images \[channels, height, width\]"):
            nn.NETWORKS[name]((64,), 10)
    with pytest.raises(ValueError, match="patch is 5; accepted is a number that divides the images' 32x32"):
        nn.vit((3, 32, 32), 10, patch=5)
    with pytest.raises(ValueError, match="heads is 7; accepted is a number that divides the width, 384"):
        nn.vit((3, 32, 32), 10, heads=7)
