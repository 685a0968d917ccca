"""Ways to average client models.

All take the clients' numbers of samples and turn them into weights themselves, as ours does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

__all__ = [
    "fl_bench",
    "flower_copies",
    "flower_running_sum",
    "foreach_add",
    "matrix_product",
    "naive_server_update",
    "naive_streaming",
    "per_client_add",
    "per_tensor_add",
    "pfllib",
    "scaled_rows_sum",
    "server_update_foreach_deltas",
    "server_update_foreach_mix",
    "streaming_foreach",
]

Tensors: TypeAlias = list[Tensor]
Arrays: TypeAlias = Sequence[npt.NDArray[Any]]
Samples: TypeAlias = Sequence[int]


def _shares(samples: Samples) -> list[float]:
    total = sum(samples)
    return [n / total for n in samples]


def _share_tensor(samples: Samples, dtype: torch.dtype) -> Tensor:
    return torch.tensor(_shares(samples), dtype=dtype)


# ---- lists of tensors: the peers -----------------------------------------------------------------------------------


def pfllib(clients: Sequence[nn.Module], samples: Samples) -> nn.Module:
    """PFLlib: a zeroed copy of a model; then, parameter by parameter, a weighted clone of each client is added."""
    server = copy.deepcopy(clients[0])
    for parameter in server.parameters():
        parameter.data.zero_()
    for client, share in zip(clients, _shares(samples), strict=True):
        for total, parameter in zip(server.parameters(), client.parameters(), strict=True):
            total.data += parameter.data.clone() * share
    return server


def flower_copies(clients: Sequence[Arrays], samples: Samples) -> list[npt.NDArray[Any]]:
    """Flower with ``inplace=False``: NumPy, a weighted copy of every client, the sum of the copies, one division."""
    weighted = [[array * count for array in client] for client, count in zip(clients, samples, strict=True)]
    total = sum(samples)
    return [reduce(np.add, arrays) / total for arrays in zip(*weighted, strict=True)]


def flower_running_sum(clients: Sequence[Arrays], samples: Samples) -> list[npt.NDArray[Any]]:
    """Flower's default, ``inplace=True``: NumPy, one weighted client at a time added to the sum of those before."""
    first, *others = _shares(samples)
    total = [array * first for array in clients[0]]
    for client, share in zip(clients[1:], others, strict=True):
        total = [np.add(sum_so_far, array * share) for sum_so_far, array in zip(total, client, strict=True)]
    return total


def fl_bench(clients: Sequence[Tensors], samples: Samples) -> Tensors:
    """FL-bench and FedLab: the clients' tensors stacked on a new last dimension, multiplied, summed."""
    dtype = clients[0][0].dtype
    # Float32 weights lift half types to float32, as there.
    shares = _share_tensor(samples, torch.promote_types(dtype, torch.float32))
    return [(torch.stack(tensors, dim=-1) * shares).sum(-1).to(dtype) for tensors in zip(*clients, strict=True)]


# ---- lists of tensors: a skilled user ------------------------------------------------------------------------------


def per_client_add(clients: Sequence[Tensors], samples: Samples) -> Tensors:
    """``add_`` with ``alpha`` into zeros, client by client: no temporary tensors."""
    total = [torch.zeros_like(x) for x in clients[0]]
    for client, share in zip(clients, _shares(samples), strict=True):
        for sum_so_far, x in zip(total, client, strict=True):
            sum_so_far.add_(x, alpha=share)
    return total


def per_tensor_add(clients: Sequence[Tensors], samples: Samples) -> Tensors:
    """The same in the other order, tensor by tensor, which keeps the sum of a small tensor in the cache."""
    shares = _shares(samples)
    averages = []
    for tensors in zip(*clients, strict=True):
        total = torch.zeros_like(tensors[0])
        for x, share in zip(tensors, shares, strict=True):
            total.add_(x, alpha=share)
        averages.append(total)
    return averages


def foreach_add(clients: Sequence[Tensors], samples: Samples) -> Tensors:
    """``torch._foreach_add_``: one call for each client."""
    total = [torch.zeros_like(x) for x in clients[0]]
    for client, share in zip(clients, _shares(samples), strict=True):
        torch._foreach_add_(total, client, alpha=share)
    return total


# ---- one matrix with a row for each client -------------------------------------------------------------------------


def matrix_product(matrix: Tensor, samples: Samples) -> Tensor:
    """``w @ M``: one call of the BLAS."""
    return _share_tensor(samples, matrix.dtype) @ matrix


def scaled_rows_sum(matrix: Tensor, samples: Samples) -> Tensor:
    """``(w[:, None] * M).sum(0)``."""
    return (_share_tensor(samples, matrix.dtype)[:, None] * matrix).sum(0)


# ---- the delta form ------------------------------------------------------------------------------------------------


def naive_server_update(server: Tensors, clients: Sequence[Tensors], samples: Samples, lr: float) -> Tensors:
    """The formula as it stands: parameter by parameter, the sum of weighted differences, then the step."""
    steps = [torch.zeros_like(s) for s in server]
    for client, share in zip(clients, _shares(samples), strict=True):
        for t, (x, s) in enumerate(zip(client, server, strict=True)):
            steps[t] = steps[t] + share * (x - s)
    return [s + lr * step for s, step in zip(server, steps, strict=True)]


def server_update_foreach_deltas(server: Tensors, clients: Sequence[Tensors], samples: Samples, lr: float) -> Tensors:
    """The same with ``torch._foreach``: two calls for each client, one model of temporary differences."""
    steps = [torch.zeros_like(s) for s in server]
    for client, share in zip(clients, _shares(samples), strict=True):
        torch._foreach_add_(steps, torch._foreach_sub(client, server), alpha=share)
    return list(torch._foreach_add(server, steps, alpha=lr))


def server_update_foreach_mix(server: Tensors, clients: Sequence[Tensors], samples: Samples, lr: float) -> Tensors:
    """The same rewritten, for weights that add up to 1, as (1 - lr) s + lr (average): one call for each client.

    Faster, but a client that did not move no longer leaves the server exactly where it was.
    """
    total = list(torch._foreach_mul(server, 1.0 - lr))
    for client, share in zip(clients, _shares(samples), strict=True):
        torch._foreach_add_(total, client, alpha=lr * share)
    return total


# ---- one client at a time ------------------------------------------------------------------------------------------


def naive_streaming(clients: Sequence[Tensors], samples: Samples) -> Tensors:
    """A running sum, parameter by parameter, divided at the end."""
    total = [torch.zeros_like(x) for x in clients[0]]
    for client, count in zip(clients, samples, strict=True):
        for t, x in enumerate(client):
            total[t] = total[t] + count * x
    return [x / sum(samples) for x in total]


def streaming_foreach(clients: Sequence[Tensors], samples: Samples) -> Tensors:
    """A running sum by ``torch._foreach_add_``, divided in place at the end."""
    total = [torch.zeros_like(x) for x in clients[0]]
    for client, count in zip(clients, samples, strict=True):
        torch._foreach_add_(total, client, alpha=count)
    torch._foreach_div_(total, sum(samples))
    return total
