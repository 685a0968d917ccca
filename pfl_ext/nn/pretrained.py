"""Weights from a file or from torchvision into a network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .adapters import head_of

__all__ = ["load_pretrained", "read_weights"]

_POSITIONS = "encoder.pos_embedding"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# timm's names of a vision transformer's tensors (as ViT-S/16 is published in), and torchvision's.
_FROM_TIMM = (
    (r"cls_token", "class_token"),
    (r"pos_embed", _POSITIONS),
    (r"patch_embed\.proj\.(.*)", r"conv_proj.\1"),
    (r"blocks\.(\d+)\.norm([12])\.(.*)", r"encoder.layers.encoder_layer_\1.ln_\2.\3"),
    (r"blocks\.(\d+)\.attn\.qkv\.(.*)", r"encoder.layers.encoder_layer_\1.self_attention.in_proj_\2"),
    (r"blocks\.(\d+)\.attn\.proj\.(.*)", r"encoder.layers.encoder_layer_\1.self_attention.out_proj.\2"),
    (r"blocks\.(\d+)\.mlp\.fc1\.(.*)", r"encoder.layers.encoder_layer_\1.mlp.0.\2"),
    (r"blocks\.(\d+)\.mlp\.fc2\.(.*)", r"encoder.layers.encoder_layer_\1.mlp.3.\2"),
    (r"norm\.(.*)", r"encoder.ln.\1"),
    (r"head\.(.*)", r"heads.head.\1"),
)


def read_weights(source: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors or torch file by their names, or of torchvision.

    Args:
        source: a path, or ``torchvision:`` and a name of its weights, such as
            ``torchvision:ResNet18_Weights.IMAGENET1K_V1``, which it downloads where they are not in its cache. A torch
            file is read as tensors alone: no code of it runs. One with a ``"state_dict"`` in it stands for that.

    Raises:
        ValueError: the file holds something else.
    """
    kind, colon, name = str(source).partition(":")
    if colon and kind == "torchvision":
        try:
            from torchvision.models import get_weight
        except (ImportError, RuntimeError) as error:  # RuntimeError: beside a torch that it was not built for
            raise ImportError(f"{source} needs a torchvision that works with this torch ({error})") from error
        return dict(get_weight(name).get_state_dict(progress=False, check_hash=True))
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there are no weights at {path}")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file, or damaged: {error}") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise ValueError(f"{path} cannot be read as tensors alone: {str(error).splitlines()[0]}") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds {type(content).__name__}; a mapping of names to tensors is accepted")
    return dict(content)


def load_pretrained(
    network: nn.Module, source: str | Path | Mapping[str, Tensor], statistics: bool = True, name: str = ""
) -> list[str]:
    """Set a network's weights to those of a file or of torchvision, converted to its type; it is changed.

    The head stays as it is where the file has none or one for other classes. A position embedding for images of another
    size is interpolated. A vision transformer's tensors may also have timm's names.

    Args:
        network: before it gets adapters.
        source: see :func:`read_weights`; or the tensors by their names.
        statistics: load running statistics too. Without (as in PerAda's official code) they begin at 0 and 1.
        name: what messages call the source; by default itself.

    Returns:
        The names of the tensors that were not loaded.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape, no real numbers or not finite; nothing is changed
            then.
    """
    given = dict(source) if isinstance(source, Mapping) else read_weights(source)
    label = name or ("what was given" if isinstance(source, Mapping) else str(source))
    ours = network.state_dict()
    if _POSITIONS in ours and "pos_embed" in given:
        given = {_torchvision_name(name): tensor for name, tensor in given.items()}
    if _POSITIONS in ours and _POSITIONS in given:
        given[_POSITIONS] = _interpolated(given[_POSITIONS], ours[_POSITIONS].shape)
    if not statistics:
        given = {name: tensor for name, tensor in given.items() if not name.endswith(_STATISTICS)}
    head = f"{head_of(network)}."
    other_head = any(name.startswith(head) and t.shape != ours[name].shape for name, t in given.items() if name in ours)
    if other_head:
        given = {name: tensor for name, tensor in given.items() if not name.startswith(head)}
    optional = {name for name in ours if name.startswith(head) or name.endswith("num_batches_tracked")}
    if not statistics:
        optional |= {name for name in ours if name.endswith(_STATISTICS)}
    missing = [name for name in ours if name not in given and name not in optional]
    unexpected = [name for name in given if name not in ours]
    shapes = [
        f"{name} is {list(given[name].shape)} in place of {list(ours[name].shape)}"
        for name in ours
        if name in given and given[name].shape != ours[name].shape
    ]
    kinds = [problem for name in ours if name in given and (problem := _unfit(name, given[name], ours[name].dtype))]
    problems = [
        f"{what} {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("other shapes:", shapes), ("", kinds))
        if names
    ]
    if problems:
        hint = ""
        if unexpected and all(name.endswith(_STATISTICS) for name in unexpected):
            hint = ". The network keeps no running statistics: leave them out (pretrained_statistics=false)"
        raise ValueError(f"{label} does not fit this {type(network).__name__}: {'; '.join(problems)}{hint}")
    network.load_state_dict(given, strict=False)
    return [name for name in ours if name not in given]


def _unfit(name: str, given: Tensor, ours: torch.dtype) -> str:
    """Why these numbers cannot stand for weights, or for a count where ours is one; else nothing."""
    if given.layout != torch.strided:
        return f"{name} is {given.layout} in place of dense"
    if given.is_floating_point() != ours.is_floating_point or given.is_complex() or given.dtype == torch.bool:
        return f"{name} is {given.dtype} in place of {ours}"
    if given.is_floating_point() and not given.double().isfinite().all():
        return f"{name} has numbers that are not finite"
    return ""


def _torchvision_name(name: str) -> str:
    for pattern, replacement in _FROM_TIMM:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def _interpolated(positions: Tensor, shape: torch.Size) -> Tensor:
    """A position embedding [1, 1 + side * side, width] for another number of patches; the class token's stays."""
    old, new = (int((tokens - 1) ** 0.5) for tokens in (positions.shape[1], shape[1]))
    square = (old * old + 1, new * new + 1) == (positions.shape[1], shape[1])
    if positions.shape == shape or not square or positions.shape[2] != shape[2]:
        return positions
    grid = positions[:, 1:].float().transpose(1, 2).reshape(1, shape[2], old, old)
    grid = F.interpolate(grid, (new, new), mode="bicubic", align_corners=True)
    return torch.cat([positions[:, :1].float(), grid.flatten(2).transpose(1, 2)], 1)
