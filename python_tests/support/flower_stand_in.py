"""The few names of Flower (flwr 1.42) that the examples use, as plain Python.

Flower brings 50 packages, 200 MB of them beside numpy, and needs Python 3.11; the tests do not install it. Where it is
installed they use it. The stand-in does what Flower's documentation says of these names and no more.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np


@dataclass
class Parameters:
    """Each array as the bytes of a .npy file."""

    tensors: list[bytes]
    tensor_type: str


@dataclass
class FitIns:
    parameters: Parameters
    config: dict[str, Any]


@dataclass
class FitRes:
    status: Any
    parameters: Parameters
    num_examples: int
    metrics: dict[str, Any] = field(default_factory=dict)


def ndarrays_to_parameters(arrays: list[np.ndarray]) -> Parameters:
    files = []
    for array in arrays:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        files.append(file.getvalue())
    return Parameters(files, "numpy.ndarray")


def parameters_to_ndarrays(parameters: Parameters) -> list[np.ndarray]:
    return [np.load(io.BytesIO(x), allow_pickle=False) for x in parameters.tensors]


class FedAvg:
    def __init__(self, *, initial_parameters: Parameters | None = None, accept_failures: bool = True) -> None:
        self.initial_parameters = initial_parameters
        self.accept_failures = accept_failures

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> list[tuple[Any, FitIns]]:
        return [(client, FitIns(parameters, {})) for client in client_manager.sample(1)]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        if not results or (failures and not self.accept_failures):
            return None, {}
        samples = sum(fit.num_examples for _, fit in results)
        lists = [parameters_to_ndarrays(fit.parameters) for _, fit in results]
        shares = [fit.num_examples / samples for _, fit in results]
        average = [sum(s * x for s, x in zip(shares, arrays, strict=True)) for arrays in zip(*lists, strict=True)]
        return ndarrays_to_parameters([x.astype(lists[0][t].dtype) for t, x in enumerate(average)]), {}


class NumPyClient:
    pass


_NAMES = {
    "flwr": {},
    "flwr.client": {"NumPyClient": NumPyClient},
    "flwr.common": {
        **{"FitIns": FitIns, "FitRes": FitRes, "NDArrays": list, "Parameters": Parameters, "Scalar": object},
        **{"ndarrays_to_parameters": ndarrays_to_parameters, "parameters_to_ndarrays": parameters_to_ndarrays},
    },
    "flwr.server": {},
    "flwr.server.client_manager": {"ClientManager": object},
    "flwr.server.client_proxy": {"ClientProxy": object},
    "flwr.server.strategy": {"FedAvg": FedAvg},
}


def use_unless_installed() -> None:
    """Make ``import flwr`` work."""
    if "flwr" in sys.modules or importlib.util.find_spec("flwr") is not None:
        return
    for name, contents in _NAMES.items():
        module = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
