"""A trained model as a safetensors file, which needs nothing of this package."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

import pfl_ext

from .experiment import Experiment
from .federation import Federation

__all__ = ["save_model"]


def save_model(
    module: nn.Module, path: Path, federation: Federation, experiment: Experiment, client: int | None = None
) -> None:
    """Write all tensors of a module by its own names, and in the header what it is. Written whole or not at all.

    Args:
        module: of the run.
        path: the file.
        federation, experiment: the run.
        client: whose model it is; None: the global one.
    """
    # Copies: tensors that share memory, as tied weights do, are written each under its own name.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    dataset, sections = federation.dataset, experiment.resolved(federation.dataset).sections()
    statistics = {"mean": dataset.mean, "std": dataset.std}
    about = {
        "pfl_ext": pfl_ext.__version__,
        "model": "global" if client is None else f"client {client}",
        "round": federation.round,
        "method": sections["method"],
        "network": sections["network"],
        "task": sections["task"],
        "data": dataset.name,
        "classes": list(dataset.classes),
        **{name: _plain(numbers) for name, numbers in statistics.items()},
    }
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        save_file(tensors, temporary, {"format": "pt", **{key: json.dumps(value) for key, value in about.items()}})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(numbers: Tensor | Mapping[str, Tensor] | None) -> Any:
    """Tensors, by their names where there are several, as JSON has them."""
    if isinstance(numbers, Mapping):
        return {name: tensor.tolist() for name, tensor in numbers.items()}
    return None if numbers is None else numbers.tolist()
