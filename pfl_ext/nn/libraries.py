"""Networks of torchvision and timm by name: ``torchvision:resnet18``, ``timm:vit_tiny_patch16_224``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pfl_ext.options import nearest

__all__ = ["LIBRARIES", "library_network"]


def _torchvision(name: str, input_shape: Sequence[int], classes: int) -> nn.Module:
    models = _imported("torchvision", f"torchvision:{name}").models
    if name not in models.list_models():
        raise ValueError(f"torchvision has no network {name!r}{_some(models.list_models(), name)}")
    made: nn.Module = models.get_model(name, weights=None, num_classes=classes)
    return made


def _timm(name: str, input_shape: Sequence[int], classes: int) -> nn.Module:
    timm = _imported("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise ValueError(f"timm has no network {name!r}{_some(timm.list_models(), name)}")
    made: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=input_shape[0])
    return made


LIBRARIES: dict[str, Callable[[str, Sequence[int], int], nn.Module]] = {"torchvision": _torchvision, "timm": _timm}
"""The libraries that have networks by name, each with the function that makes one, its weights drawn anew."""


def library_network(name: str) -> Callable[..., nn.Module] | None:
    """The builder of ``torchvision:NAME`` or ``timm:NAME``; None for any other name."""
    library, colon, own = name.partition(":")
    if not (colon and library in LIBRARIES):
        return None

    def build(input_shape: Sequence[int], classes: int) -> nn.Module:
        return LIBRARIES[library](own, input_shape, classes)

    build.__doc__ = f"{own} of {library}."
    return build


def _imported(library: str, name: str) -> Any:
    try:
        return importlib.import_module(library)
    except (ImportError, RuntimeError) as error:  # RuntimeError: beside a torch that it was not built for
        raise ImportError(
            f"{name} needs a {library} that works with this torch: pip install {library} ({error})"
        ) from error


def _some(every: Sequence[str], name: str) -> str:
    return nearest(name, every) or f"; it has {', '.join(every[:5])} and {len(every) - 5} more"
