"""A model's weights to and from Flower's Parameters. The other Flower examples share it."""

from __future__ import annotations

from typing import TypeVar

import torch
from flwr.common import NDArrays, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def state_of(model: nn.Module, weights: NDArrays | Parameters) -> dict[str, Tensor]:
    """The weights that a client or the server sent, by the names of the model's state dict."""
    arrays = parameters_to_ndarrays(weights) if isinstance(weights, Parameters) else weights
    # Copies: arrays out of Parameters are read-only, and Flower may look at those of a client again.
    return dict(zip(model.state_dict(), [torch.from_numpy(array.copy()) for array in arrays], strict=True))


def load(model: Model, weights: NDArrays | Parameters) -> Model:
    """Give the model these weights, and return it."""
    model.load_state_dict(state_of(model, weights))
    return model


def arrays_of(model: nn.Module) -> NDArrays:
    """What a client's fit returns."""
    return [x.detach().cpu().numpy().copy() for x in model.state_dict().values()]


def parameters_of(model: nn.Module) -> Parameters:
    """What a strategy's aggregate_fit returns."""
    return ndarrays_to_parameters(arrays_of(model))
