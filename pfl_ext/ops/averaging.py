r"""Averaging client models: batch, streaming and delta form.

With clients :math:`x_1 \dots x_C` and weights :math:`w_c` (divided by their sum unless ``normalize=False``):

* :func:`weighted_average`:   :math:`\sum_c w_c x_c`
* :func:`server_update`:      :math:`s + \eta \sum_c w_c (x_c - s)`
* :class:`StreamingAverage`:  the first, one client at a time, in the memory of one model.

All values of an element are added in the order of the clients, in float32 (float64 for float64), each product rounded
before it is added. The result therefore does not depend on the number of threads, on the instruction set, or on how a
model is cut into tensors: it is the same to the bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from ._arguments import (
    FLOATS,
    accumulate_type,
    check_dense,
    check_device,
    check_memory,
    check_places,
    describe,
    one_of,
    without_gradients,
)
from ._declare import declare
from .prepared import Prepared, handed, plain_eager, prepare, written

__all__ = ["StreamingAverage", "all_finite", "server_update", "weighted_average"]

Model: TypeAlias = nn.Module | Mapping[str, Tensor] | Sequence[Tensor]
Integers: TypeAlias = Literal["round", "server", "first"]
Nonfinite: TypeAlias = Literal["propagate", "raise", "skip"]


# ---- the ops -------------------------------------------------------------------------------------------------------


def _check(out: Sequence[Tensor], server: Sequence[Tensor], clients: Sequence[Tensor], weights: Tensor) -> None:
    """What the native kernels check too; ``out`` may be the first client's tensors."""
    count = weights.numel() if weights.dim() == 1 else 0
    if weights.device.type != "cpu" or weights.dtype != torch.float64 or weights.dim() != 1:
        raise ValueError(f"weights are {describe(weights)}; a float64 vector on the CPU is accepted")
    if count == 0 or len(clients) != count * len(out):
        raise ValueError(f"{len(clients)} client tensors for {count} weights and {len(out)} outputs")
    if server and len(server) != len(out):
        raise ValueError(f"{len(server)} server tensors for {len(out)} outputs")
    for t, reference in enumerate(out):
        if reference.dtype not in FLOATS:
            raise ValueError(f"tensor {t} is {describe(reference)}; floating types are accepted")
        check_dense(f"tensor {t}", reference)
        check_device("the model", out, t)
        others = [clients[c * len(out) + t] for c in range(count)] + ([server[t]] if server else [])
        for x in others:
            if (x.shape, x.dtype, x.device) != (reference.shape, reference.dtype, reference.device):
                raise ValueError(f"tensor {t} is {describe(x)} in one model and {describe(reference)} in another")
            check_dense(f"tensor {t}", x)


def _average_reference(clients: Sequence[Tensor], weights: Sequence[float], server: Tensor | None, lr: float) -> Tensor:
    dtype = clients[0].dtype
    accumulate = accumulate_type(dtype)
    total = torch.zeros_like(clients[0], dtype=accumulate)
    start = None if server is None else server.to(accumulate)
    for x, weight in zip(clients, weights, strict=True):
        value = x.to(accumulate)
        total = total + weight * (value if start is None else value - start)
    return (total if start is None else start + lr * total).to(dtype)


def _weighted_average_reference(clients: list[Tensor], weights: Tensor) -> list[Tensor]:
    tensors = len(clients) // max(weights.numel(), 1)
    _check(clients[:tensors], [], clients, weights)
    return [_average_reference(clients[t::tensors], weights.tolist(), None, 1.0) for t in range(tensors)]


def _weighted_average_fake(clients: list[Tensor], weights: Tensor) -> list[Tensor]:
    tensors = len(clients) // max(weights.numel(), 1)
    _check(clients[:tensors], [], clients, weights)
    return [torch.empty_like(x) for x in clients[:tensors]]


def _weighted_average_setup(ctx: Any, inputs: tuple[list[Tensor], Tensor], output: list[Tensor]) -> None:
    clients, weights = inputs
    ctx.count = len(clients)
    # The clients are needed for the gradient of the weights only; models are large.
    ctx.save_for_backward(weights, *(clients if weights.requires_grad else ()))


def _weighted_average_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], Tensor | None]:
    weights, *clients = ctx.saved_tensors
    tensors = ctx.count // weights.numel()
    scale = weights.tolist()
    for_clients: list[Tensor | None] = []
    for weight in scale:
        for_clients += [None if g is None else weight * g for g in grads]
    if not clients:
        return for_clients, None
    inner = [
        sum(
            (g.double() * x.double()).sum().cpu() for g, x in zip(grads, clients[first:], strict=False) if g is not None
        )
        for first in range(0, ctx.count, tensors)
    ]
    return for_clients, torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in inner])


_weighted_average = declare(
    "weighted_average(Tensor[] clients, Tensor weights) -> Tensor[]",
    reference=_weighted_average_reference,
    fake=_weighted_average_fake,
    setup_context=_weighted_average_setup,
    backward=_weighted_average_backward,
)


def _weighted_average_out_reference(out: list[Tensor], clients: list[Tensor], weights: Tensor) -> None:
    _check(out, [], clients, weights)
    check_memory({"out": out}, {})
    for old, new in zip(out, _weighted_average_reference(clients, weights), strict=True):
        old.copy_(new)


def _weighted_average_out_fake(out: list[Tensor], clients: list[Tensor], weights: Tensor) -> None:
    _check(out, [], clients, weights)


_weighted_average_out = declare(
    "weighted_average_(Tensor(a!)[] out, Tensor[] clients, Tensor weights) -> ()",
    reference=_weighted_average_out_reference,
    fake=_weighted_average_out_fake,
)


def _average_rows_check(out: Tensor, matrix: Tensor, weights: Tensor) -> None:
    if matrix.dim() != 2:
        raise ValueError(f"the clients are {describe(matrix)}; a matrix with a row each is accepted")
    _check([out], [], list(matrix.unbind(0)), weights)
    if not out.is_contiguous():
        raise ValueError(f"out is {describe(out)} and not contiguous")


def _average_rows_reference(out: Tensor, matrix: Tensor, weights: Tensor) -> None:
    _average_rows_check(out, matrix, weights)
    check_memory({"out": [out]}, {"the clients": [matrix]})
    out.copy_(_average_reference(matrix.unbind(0), weights.tolist(), None, 1.0))


def _average_rows_composed(out: Tensor, matrix: Tensor, weights: Tensor) -> None:
    _average_rows_check(out, matrix, weights)
    check_memory({"out": [out]}, {"the clients": [matrix]})
    _weighted_average_out([out], list(matrix.unbind(0)), weights)


_average_rows = declare(
    "average_rows_(Tensor(a!) out, Tensor matrix, Tensor weights) -> ()",
    reference=_average_rows_reference,
    fake=_average_rows_check,
    composed=_average_rows_composed,
    plain_on={"cuda": "the rows are handed over as a list"},
)


def _server_update_reference(
    out: list[Tensor], server: list[Tensor], clients: list[Tensor], weights: Tensor, lr: float
) -> None:
    _server_update_fake(out, server, clients, weights, lr)
    check_memory({"out": out}, {})
    scale = weights.tolist()
    updated = [_average_reference(clients[t :: len(out)], scale, s, lr) for t, s in enumerate(server)]
    for old, new in zip(out, updated, strict=True):
        old.copy_(new)


def _server_update_fake(
    out: list[Tensor], server: list[Tensor], clients: list[Tensor], weights: Tensor, lr: float
) -> None:
    if len(server) != len(out):
        raise ValueError(f"{len(server)} server tensors for {len(out)} outputs")
    _check(out, server, clients, weights)


_server_update = declare(
    "server_update_(Tensor(a!)[] out, Tensor[] server, Tensor[] clients, Tensor weights, float lr) -> ()",
    reference=_server_update_reference,
    fake=_server_update_fake,
)


def _accumulate_check(sums: list[Tensor], client: list[Tensor], weight: float, type: int = -1) -> None:
    if len(sums) != len(client):
        raise ValueError(f"{len(client)} client tensors for {len(sums)} sums")
    for t, (total, x) in enumerate(zip(sums, client, strict=True)):
        expected = (x.shape, accumulate_type(x.dtype), x.device)
        check_device("sums", sums, t)
        if type >= 0 and x.dtype != FLOATS[type]:
            raise ValueError(f"tensor {t} of the client is {describe(x)}; {FLOATS[type]} is expected")
        if x.dtype not in FLOATS or (total.shape, total.dtype, total.device) != expected or not total.is_contiguous():
            raise ValueError(f"sum {t} is {describe(total)}, the client's tensor is {describe(x)}")
        check_dense(f"tensor {t} of the client", x)


def _accumulate_reference(sums: list[Tensor], client: list[Tensor], weight: float, type: int = -1) -> None:
    _accumulate_check(sums, client, weight, type)
    for total, x in zip(sums, client, strict=True):
        total += weight * x.to(total.dtype)


# The type is the place in FLOATS: a dtype takes longer to hand over than ten tensors.
_accumulate = declare(
    "accumulate_(Tensor(a!)[] sums, Tensor[] client, float weight, int type=-1) -> ()",
    reference=_accumulate_reference,
    fake=_accumulate_check,
)
_accumulate_at_once = _accumulate.at_once


def _nonfinite_check(tensors: list[Tensor]) -> None:
    for t, x in enumerate(tensors):
        if x.dtype not in FLOATS:
            raise ValueError(f"tensor {t} is {describe(x)}; float32, float64, float16 and bfloat16 are accepted")
        check_dense(f"tensor {t}", x)
        check_device("the list", tensors, t)


def _nonfinite_reference(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        raise ValueError("no tensors given")
    _nonfinite_check(tensors)
    return torch.stack([~torch.isfinite(x).all() for x in tensors])


def _nonfinite_fake(tensors: list[Tensor]) -> Tensor:
    _nonfinite_check(tensors)
    return tensors[0].new_empty((len(tensors),), dtype=torch.bool)


_nonfinite = declare(
    "nonfinite(Tensor[] tensors) -> Tensor",
    reference=_nonfinite_reference,
    fake=_nonfinite_fake,
)


# ---- what users call -----------------------------------------------------------------------------------------------


@dataclass
class _Model:
    """A model in any accepted form: its tensors, and their names if it has any."""

    names: list[str] | None
    tensors: list[Tensor]

    @staticmethod
    def of(model: Any, what: str) -> _Model:
        names: list[str] | None = None
        if isinstance(model, nn.Module):
            model = model.state_dict()
        if type(model) is list:  # by far the most frequent form; the tests below are slow ones
            tensors = model
        elif type(model) is Prepared:
            return _Model(None, model.tensors)
        elif isinstance(model, Mapping):
            names, tensors = list(model.keys()), list(model.values())
        elif isinstance(model, Tensor):
            return _Model(None, [model])
        elif isinstance(model, Iterable):
            tensors = list(model)
        else:
            raise TypeError(
                f"{what} is a {type(model).__name__}; a module, a state dict or a list of tensors is accepted"
            )
        # By type first: models have many tensors, and this is most of the time spent in Python.
        if not set(map(type, tensors)) <= {Tensor, nn.Parameter}:
            for t, x in enumerate(tensors):
                if not isinstance(x, Tensor):
                    raise TypeError(f"{what}: {names[t] if names else t!r} is a {type(x).__name__}, not a tensor")
        return _Model(names, tensors)

    def name(self, tensor: int) -> str:
        return repr(self.names[tensor]) if self.names else str(tensor)

    def like(self, other: _Model, what: str) -> _Model:
        """Its tensors in the order of ``other``, client 0, whose names it must have."""
        if self.names == other.names:
            if len(self.tensors) != len(other.tensors):
                raise ValueError(f"{what} has {len(self.tensors)} tensors, client 0 has {len(other.tensors)}")
            return self
        if self.names is None or other.names is None:
            raise ValueError(f"{what} and client 0 must both have names for their tensors, or both have none")
        by_name = dict(zip(self.names, self.tensors, strict=True))
        missing = [n for n in other.names if n not in by_name]
        extra = sorted(set(self.names) - set(other.names))
        if missing or extra:
            raise ValueError(
                f"{what} has not the tensors of client 0: missing {missing or 'none'}, unexpected {extra or 'none'}"
            )
        return _Model(other.names, [by_name[n] for n in other.names])


def _restorer(model: Any) -> Callable[[list[Tensor]], Any]:
    """How a result is given back in the form of the clients."""
    if isinstance(model, nn.Module):
        model = model.state_dict()
    if isinstance(model, Mapping):
        names = list(model.keys())
        return lambda tensors: dict(zip(names, tensors, strict=True))
    if isinstance(model, Tensor):
        return lambda tensors: tensors[0]
    return lambda tensors: tensors


def _gather(clients: Any) -> tuple[list[_Model], Callable[[list[Tensor]], Any]]:
    """The clients, and how a result is given back in their form."""
    if isinstance(clients, Tensor):
        if clients.dim() != 2 or clients.shape[0] == 0:
            raise ValueError(
                f"clients is {describe(clients)}; a matrix with a row for each client is accepted, "
                "or a sequence of modules, state dicts or lists of tensors"
            )
        check_dense("clients", clients)
        return [_Model(None, [row]) for row in clients.unbind(0)], _restorer(clients)
    if isinstance(clients, (nn.Module, Mapping)):
        raise TypeError(f"clients is a single {type(clients).__name__}; a sequence of models is accepted")
    clients = list(clients)
    if not clients:
        raise ValueError("no clients given; at least one is needed")
    first = _Model.of(clients[0], "client 0")
    others = [_Model.of(client, f"client {c}").like(first, f"client {c}") for c, client in enumerate(clients[1:], 1)]
    return [first, *others], _restorer(clients[0])


def _check_weight(client: int, weight: float, normalize: bool) -> None:
    if not math.isfinite(weight) or (normalize and weight < 0):
        kind = "not negative" if math.isfinite(weight) else "finite"
        raise ValueError(f"the weight of client {client} is {weight}; it must be {kind}")


_TINY = 2.0**-64
"""Brings the sum of any weights of any number of clients below infinity."""


def _weigh(weights: Sequence[float] | Tensor | None, count: int, normalize: bool) -> Tensor:
    """The weights as the ops take them: float64 on the CPU."""
    if weights is None:
        values = [1.0] * count
    elif isinstance(weights, Tensor):
        if weights.dim() != 1:
            raise ValueError(f"weights of shape {list(weights.shape)}; a vector with one weight per client is accepted")
        values = weights.tolist()
    else:
        values = list(map(float, weights))
    if len(values) != count:
        raise ValueError(f"{len(values)} weights for {count} clients; one weight per client is expected")
    total = sum(values)
    if not (0 < total < math.inf and min(values) >= 0):  # of NaN neither is true
        for c, value in enumerate(values):
            _check_weight(c, value, normalize)
    if normalize and math.isinf(total):  # of finite weights: only what they are to each other counts
        values = [v * _TINY for v in values]
        weights = weights * _TINY if isinstance(weights, Tensor) else weights
        total = sum(values)
    if normalize and total <= 0:
        raise ValueError(f"the weights of all {count} clients add up to {total}; a positive sum is needed")
    if isinstance(weights, Tensor) and weights.requires_grad:
        vector = weights.to("cpu", torch.float64)
        return vector / vector.sum() if normalize else vector
    return torch.tensor([v / total for v in values] if normalize else values, dtype=torch.float64)


def _not_averaged(model: _Model, t: int) -> str:
    return f"tensor {model.name(t)} is {describe(model.tensors[t])}; floats and integers are accepted"


def _explain(models: list[_Model], targets: list[tuple[str, _Model]]) -> None:
    """Raise an error that names model and tensor where two do not fit. Called when an op has refused its arguments."""
    first = models[0]
    for t, reference in enumerate(first.tensors):
        for what, model in [(f"client {c}", m) for c, m in enumerate(models)] + targets:
            x = model.tensors[t]
            if (x.shape, x.dtype, x.device) != (reference.shape, reference.dtype, reference.device):
                raise ValueError(
                    f"tensor {first.name(t)} of {what} is {describe(x)}, of client 0 {describe(reference)}"
                ) from None
            check_dense(f"tensor {first.name(t)} of {what}", x)
    floating = [t for t, x in enumerate(first.tensors) if x.is_floating_point()]
    for t in floating:
        if first.tensors[t].dtype not in FLOATS:
            raise TypeError(_not_averaged(first, t)) from None
        if first.tensors[t].device != first.tensors[floating[0]].device:
            raise ValueError(
                f"tensor {first.name(t)} is {describe(first.tensors[t])}, tensor {first.name(floating[0])} is "
                f"{describe(first.tensors[floating[0]])}; all tensors of a model must be on one device"
            ) from None


def _screen(models: list[_Model], weights: Tensor, policy: Nonfinite, normalize: bool) -> tuple[list[_Model], Tensor]:
    """Apply the policy on infinities and NaNs in the clients."""
    if policy == "propagate":
        return models, weights
    floating = [t for t, x in enumerate(models[0].tensors) if x.is_floating_point()]
    if not floating:
        return models, weights
    flags = _nonfinite([m.tensors[t] for m in models for t in floating]).view(len(models), -1)
    bad = flags.nonzero().tolist()
    if not bad:
        return models, weights
    if policy == "raise":
        client, tensor = bad[0]
        raise ValueError(
            f"tensor {models[client].name(floating[tensor])} of client {client} holds infinity or NaN "
            f"({len({c for c, _ in bad})} of {len(models)} clients do); nonfinite='skip' leaves such clients out"
        )
    skipped = {c for c, _ in bad}
    kept = [c for c in range(len(models)) if c not in skipped]
    remaining = weights[kept]
    if not kept or (normalize and float(remaining.sum()) <= 0):
        raise ValueError(
            f"all {len(models)} clients with a positive weight hold infinity or NaN; nothing is left to average"
        )
    if float(remaining.sum()) == 0:
        raise ValueError(
            f"the weights of the {len(kept)} clients without infinity or NaN add up to 0: they cannot share the weight "
            "of those left out; other weights or nonfinite='propagate' are accepted"
        )
    # The clients that stay share the weight of those that do not.
    return [models[c] for c in kept], remaining * (weights.sum() / remaining.sum())


def _average_of_lists(
    clients: Any, weights: Sequence[float] | Tensor | None, normalize: bool
) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]] | None:
    """The average of lists of floating tensors; None where anything asks for a closer look.

    The closer look takes 1 us per client and 0.2 us per tensor, a third of the time of averaging twenty LeNets.
    """
    if type(clients) is list and clients:
        count, flat = len(clients), list[Tensor]()
        for client in clients:
            if (type(client) is not list and type(client) is not Prepared) or len(client) != len(clients[0]):
                return None
            flat += client
        if not set(map(type, flat)) <= {Tensor, nn.Parameter}:
            return None
    else:
        return None
    given, first = flat, flat[: len(flat) // count]
    if type(clients) is list and all(type(client) is Prepared and client.ticket is not None for client in clients):
        given = [client.ticket for client in clients]
    if not first or not all(map(Tensor.is_floating_point, first)):
        return None
    vector = _weigh(weights, count, normalize)
    if torch.is_grad_enabled() and (vector.requires_grad or any(x.requires_grad for x in flat)):
        return None
    try:
        with without_gradients():
            new = list(map(torch.empty_like, first))
            _weighted_average_out.overload(new, given, vector)
    except (RuntimeError, TypeError, ValueError):
        return None
    return new, _restorer(clients[0])


def _average_of_rows(matrix: Tensor, weights: Sequence[float] | Tensor | None, normalize: bool) -> Tensor | None:
    """The average of the rows of a matrix of floating type; None where anything asks for a closer look."""
    if matrix.dim() != 2 or matrix.shape[0] == 0 or not matrix.is_floating_point():
        return None
    vector = _weigh(weights, matrix.shape[0], normalize)
    if torch.is_grad_enabled() and (vector.requires_grad or matrix.requires_grad):
        return None
    try:
        with without_gradients():
            new = matrix.new_empty(matrix.shape[1])
            _average_rows.overload(new, matrix, vector)
    except (RuntimeError, TypeError, ValueError):
        return None
    return new


def _check_target(target: _Model, what: str) -> list[int]:
    """The tensors of ``target`` to write: all but those that are another name of an earlier one (tied weights)."""
    tensors = target.tensors
    if torch.compiler.is_compiling():  # no addresses there
        return list(range(len(tensors)))
    spans: list[tuple[int, int, int]] = []
    for t, x in enumerate(tensors):
        extent = x.numel()
        if x.layout != torch.strided or not x.is_contiguous():
            check_dense(f"tensor {target.name(t)} of {what}", x)
            check_places(what, target.name(t), x)
            extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if extent:
            begin = x.data_ptr()
            spans.append((begin, t, begin + extent * x.element_size()))
    spans.sort()
    tied: set[int] = set()
    for (begin_a, a, end_a), (begin_b, b, _) in itertools.pairwise(spans):
        x, y = tensors[a], tensors[b]
        if begin_b >= end_a or x.device != y.device:
            continue
        if (begin_a, x.shape, x.stride(), x.dtype) != (begin_b, y.shape, y.stride(), y.dtype):
            raise ValueError(f"tensors {target.name(a)} and {target.name(b)} of {what} overlap in memory")
        tied.add(b)
    return [t for t in range(len(tensors)) if t not in tied]


def _round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest value that the integer or bool ``dtype`` can hold; halves go to the even one."""
    rounded = value.round()
    if dtype == torch.bool:
        return rounded > 0
    limits = torch.iinfo(dtype)
    # As a float64 the largest int64 is one more than itself, which no int64 can hold.
    inside = rounded.clamp(limits.min, math.nextafter(float(limits.max), 0.0)).to(dtype)
    return torch.where(rounded >= limits.max, torch.full_like(inside, limits.max), inside)


def _integer_average(
    clients: Sequence[Tensor], weights: Sequence[float], server: Tensor | None, lr: float, policy: Integers
) -> Tensor:
    """Buffers such as BatchNorm's ``num_batches_tracked``. A handful of elements, so plain torch."""
    first = clients[0]
    if policy == "first":
        return first.clone()
    total = torch.zeros_like(first, dtype=torch.float64)
    start = None if server is None else server.double()
    for x, weight in zip(clients, weights, strict=True):
        total += weight * (x.double() if start is None else x.double() - start)
    return _round_to(total if start is None else start + lr * total, first.dtype)


def _combine(
    clients: Any,
    weights: Sequence[float] | Tensor | None,
    server: Any,
    lr: float,
    normalize: bool,
    out: Any,
    integers: Integers,
    nonfinite: Nonfinite,
) -> Any:
    """Both public functions: everything is checked first, then written."""
    one_of("integers", integers, ("round", "server", "first"))
    one_of("nonfinite", nonfinite, ("propagate", "raise", "skip"))
    if server is None and out is None and nonfinite == "propagate" and plain_eager():
        if isinstance(clients, Tensor):
            average = _average_of_rows(clients, weights, normalize)
            if average is not None:
                return average
        averaged = _average_of_lists(clients, weights, normalize)
        if averaged is not None:
            return averaged[1](averaged[0])
    models, restore = _gather(clients)
    vector = _weigh(weights, len(models), normalize)
    first = models[0]
    start = None if server is None else _Model.of(server, "server").like(first, "server")
    target = None if out is None else _Model.of(out, "out").like(first, "out")
    writable = list(range(len(first.tensors))) if target is None else _check_target(target, "out")
    floating = [t for t in writable if first.tensors[t].is_floating_point()]
    integral = [t for t in writable if not first.tensors[t].is_floating_point()]
    targets = [(what, m) for what, m in (("server", start), ("out", target)) if m is not None]
    for t in integral:
        if first.tensors[t].is_complex() or first.tensors[t].is_quantized:
            raise TypeError(_not_averaged(first, t))
    if integral:
        _explain(models, targets)
        if integers == "server" and target is None and start is None:
            raise ValueError(
                f"integers='server' keeps the server's {first.name(integral[0])}: give the server's model as out="
            )
    models, vector = _screen(models, vector, nonfinite, normalize)

    flat = [m.tensors[t] for m in models for t in floating]
    graph = torch.is_grad_enabled() and (vector.requires_grad or any(x.requires_grad for x in flat))
    results: dict[int, Tensor] = {}
    try:
        if graph and target is None and start is None:
            results = dict(zip(floating, _weighted_average(flat, vector), strict=True))
        else:
            with without_gradients():
                begin = [] if start is None else [start.tensors[t] for t in floating]
                if target is not None:
                    new = [target.tensors[t] for t in floating]
                else:
                    new = [torch.empty_like(first.tensors[t]) for t in floating]
                if start is None:
                    _weighted_average_out(new, flat, vector)
                else:
                    _server_update(new, begin, flat, vector, lr)
                if target is not None:
                    written(new)
            results = dict(zip(floating, new, strict=True))
    except (RuntimeError, ValueError):
        _explain(models, targets)
        raise

    scale = vector.tolist() if integral else []
    for t in integral:
        old = start.tensors[t] if start is not None else target.tensors[t] if target is not None else None
        if integers == "server":
            assert old is not None
            new_value = old.clone()
        else:
            begin_value = None if start is None else start.tensors[t]
            new_value = _integer_average([m.tensors[t] for m in models], scale, begin_value, lr, integers)
        results[t] = new_value if target is None else target.tensors[t].copy_(new_value)
    if target is not None:
        return out
    return restore([results[t] for t in range(len(first.tensors))])


def all_finite(*tensors: Tensor) -> bool:
    """Whether no number of these tensors is infinity or NaN: one pass, and nothing allocated in their size."""
    floating: list[Tensor] = []
    try:
        for x in tensors:
            if x.is_floating_point():
                floating.append(x)
            elif x.is_complex():
                floating.append(torch.view_as_real(x.resolve_conj()))
        return not floating or not bool(_nonfinite(floating).any())
    except (RuntimeError, AttributeError):
        for t, x in enumerate(tensors):
            if not isinstance(x, Tensor):
                raise TypeError(f"tensor {t} is {describe(x)}, not a tensor") from None
            check_dense(f"tensor {t}", x)
        _nonfinite_check(floating)
        raise


def weighted_average(
    clients: Sequence[Model] | Tensor,
    weights: Sequence[float] | Tensor | None = None,
    *,
    normalize: bool = True,
    out: Model | Tensor | None = None,
    integers: Integers = "round",
    nonfinite: Nonfinite = "propagate",
) -> Any:
    r"""The weighted average :math:`\sum_c w_c x_c` of client models, as FedAvg's server takes it.

    Args:
        clients: one model per client, all in the same form: modules (parameters and buffers), state dicts, lists of
            tensors; or one matrix with a row for each client. Tensors may differ in type within a model, be empty,
            non-contiguous or views.
        weights: one number for each client, such as its number of samples; by default all equal.
        normalize: divide the weights by their sum. Otherwise they are used as they are, and may be negative.
        out: a model whose tensors are overwritten with the result (and that is returned). It may be one of the
            clients. Tied weights are written once.
        integers: what becomes of integer and bool tensors such as ``num_batches_tracked``: ``"round"`` averages in
            float64 and rounds to the nearest (halves to even), ``"first"`` takes the first client's, ``"server"``
            leaves those of ``out`` as they are.
        nonfinite: what becomes of a client that holds infinity or NaN: ``"propagate"`` computes with it, ``"raise"``
            raises an error that names client and tensor, ``"skip"`` leaves the client out and gives its weight to the
            others. The last two read the models once more, and wait for a GPU's answer.

    Returns:
        ``out`` if given; otherwise new tensors: a dict for modules and state dicts, a list for lists, a vector for a
        matrix. Without ``out`` it is differentiable in the clients and in ``weights``, as long as these are tensors
        that require gradients.

    Raises:
        ValueError, TypeError: tensors that do not fit each other (client and tensor are named), no clients, weights
            that are not finite, negative or without a positive sum. Nothing has been written then.

    >>> weighted_average([[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 6.0])]], weights=[3, 1])
    [tensor([1.5000, 3.0000])]
    """
    return _combine(clients, weights, None, 1.0, normalize, out, integers, nonfinite)


def server_update(
    server: Model | Tensor,
    clients: Sequence[Model] | Tensor,
    weights: Sequence[float] | Tensor | None = None,
    *,
    lr: float = 1.0,
    normalize: bool = True,
    out: Model | Tensor | None = None,
    integers: Integers = "round",
    nonfinite: Nonfinite = "propagate",
) -> Any:
    r"""The delta form :math:`s + \eta \sum_c w_c (x_c - s)`: a server step of length ``lr`` towards its clients.

    With ``lr=1`` and normalised weights it is the average; a client that did not move changes nothing, to the bit.
    ``out=server`` updates in place. Not differentiable. Everything else is as in :func:`weighted_average`;
    ``integers="server"`` keeps the server's.
    """
    if server is None:
        raise TypeError("server is None; a model like the clients' is accepted")
    if not math.isfinite(lr):
        raise ValueError(f"lr is {lr}; a finite number is accepted")
    return _combine(clients, weights, server, lr, normalize, out, integers, nonfinite)


_NOTHING = prepare([])

_MOST_UNITS = 1024.0
"""What the weights of a :class:`StreamingAverage` add up to at most, in its units: room for large values."""


class StreamingAverage:
    r"""The weighted average of clients that arrive one by one, in the memory of one model.

    Keeps :math:`\sum_c w_c x_c` in the accumulate type (float32, or float64 for float64 and integers) and divides by
    :math:`W = \sum_c w_c` at the end, both in units of a power of two near the first weight: only what the weights are
    to each other counts. It differs from :func:`weighted_average` of the same C clients by at most

    .. math:: 2 (C + 4)\, u \sum_c |w_c x_c| / W

    an element, with u = 2**-24 (float32 and half types) or 2**-53, plus one rounding to the half type where that is the
    type of the model.

    >>> average = StreamingAverage()
    >>> for samples, value in [(3, 1.0), (1, 5.0)]:
    ...     _ = average.add([torch.tensor([value])], weight=samples)
    >>> average.result()
    [tensor([2.])]
    """

    def __init__(
        self, *, normalize: bool = True, integers: Integers = "round", nonfinite: Nonfinite = "propagate"
    ) -> None:
        """The options are those of :func:`weighted_average`."""
        one_of("integers", integers, ("round", "server", "first"))
        one_of("nonfinite", nonfinite, ("propagate", "raise", "skip"))
        self.normalize = normalize
        self.integers = integers
        self.nonfinite = nonfinite
        self.clients = 0
        """Clients added so far, without those skipped."""
        self.skipped = 0
        """Clients left out because of infinity or NaN."""
        # Weights are kept times this scale, a power of two, and add up to this many at most before it is changed.
        self._scale = 1.0
        self._most = -1.0 if normalize else math.inf
        self._weight = 0.0
        self._skipped_weight = 0.0
        self._first: _Model | None = None
        self._restore = _restorer(())
        self._dtypes: list[torch.dtype] = []
        self._floating: list[int] = []
        self._integral: list[int] = []
        # The sums of the floating tensors are views of one vector a type; those of integers stand alone.
        self._sums: list[Tensor] = []
        self._vectors: list[Tensor] = []
        self._floating_sums: Prepared = _NOTHING
        self._type = -1  # the number in FLOATS of the type of all tensors, if they have one
        self._given = False
        self._plain = False  # clients are lists of tensors of one floating type, and infinity is theirs to have

    def add(self, client: Model | Tensor, weight: float = 1.0) -> bool:
        """Add one client; False if it was skipped. An error leaves the average as it was."""
        if self._plain and self._added(client, weight):
            return True
        if self._given:
            raise RuntimeError(
                "the result was given, in the memory of the sums: add() comes before result(), or after "
                "result(out=...), which leaves the sums as they are"
            )
        weight = float(weight)
        number = self.clients + self.skipped
        what = f"client {number}"
        _check_weight(number, weight, self.normalize)
        model = _Model.of(client, what)
        first = self._first
        if first is None:
            floating = self._check_first(model, what)
        else:
            model, floating = self._like_first(model, what), self._floating
        values = model.tensors if len(floating) == len(model.tensors) else [model.tensors[t] for t in floating]
        if self.nonfinite != "propagate" and self._has_nonfinite(model, floating, values, what):
            self.skipped += 1
            self._skipped_weight += 0.0 if self.normalize else weight
            return False
        with without_gradients():
            if first is None:
                self._begin(client, model, floating, values)
            try:
                scaled = weight * self._scale
                if scaled + self._weight > self._most:
                    scaled = self._in_other_units(weight, values)
                _accumulate(*handed(self._floating_sums, values), scaled, self._type)
            except (RuntimeError, ValueError):
                like = model if first is None else self._template()
                self._first = first  # none again if this was the first client
                if self.normalize and self._weight == 0:
                    self._most = -1.0
                _explain([like, model], [])
                raise
            for t in self._integral:
                self._sums[t] += scaled * model.tensors[t].double()
        self.clients += 1
        self._weight += scaled
        self._plain = self._type >= 0 and model.names is None and self.nonfinite == "propagate"
        return True

    def _added(self, client: Any, weight: float) -> bool:
        """Add what needs no look but the op's; False, and nothing done, where something is out of the ordinary."""
        kind = type(client)  # each word here counts: the sums of a LeNet take 3 us, and this as long
        if not (kind is list or kind is Prepared) or not plain_eager():
            return False
        scaled = weight * self._scale
        total = self._weight + scaled
        if not (weight >= 0 and total <= self._most):
            return False
        values = client if kind is list else client.handed
        try:
            if torch.is_grad_enabled():
                with without_gradients():
                    _accumulate_at_once(self._floating_sums.handed, values, scaled, self._type)
            else:
                _accumulate_at_once(self._floating_sums.handed, values, scaled, self._type)
        except (RuntimeError, TypeError, ValueError):
            return False
        self.clients += 1
        self._weight = total
        return True

    @staticmethod
    def _check_first(model: _Model, what: str) -> list[int]:
        """Which tensors of the first client are of floating types."""
        floating = []
        for t, x in enumerate(model.tensors):
            if x.dtype in FLOATS:
                floating.append(t)
            elif x.is_floating_point() or x.is_complex() or x.is_quantized:
                raise TypeError(_not_averaged(model, t))
            if x.layout != torch.strided:
                check_dense(f"tensor {model.name(t)} of {what}", x)
        return floating

    def _like_first(self, model: _Model, what: str) -> _Model:
        """The model in the order of the first one. What floating tensors are like is for the op to check."""
        assert self._first is not None
        model = model.like(self._first, what)
        if self._type >= 0:
            return model
        # Of tensors of several types the op cannot tell float16 from float32: both are added up in float32.
        if [x.dtype for x in model.tensors] != self._dtypes or any(
            (model.tensors[t].shape, model.tensors[t].device) != (self._sums[t].shape, self._sums[t].device)
            for t in self._integral
        ):
            _explain([self._template(), model], [])
        return model

    def _has_nonfinite(self, model: _Model, floating: list[int], values: list[Tensor], what: str) -> bool:
        bad = _nonfinite(values).nonzero().flatten().tolist() if values else []
        if bad and self.nonfinite == "raise":
            raise ValueError(
                f"tensor {model.name(floating[bad[0]])} of {what} holds infinity or NaN; nonfinite='skip' skips it"
            )
        return bool(bad)

    def _in_other_units(self, weight: float, values: list[Tensor]) -> float:
        """The weight in units in which the weights have room again; the sums are brought to them."""
        if weight == 0:
            return 0.0
        # Not below -1000, so that the scale is finite for the smallest weights too.
        scale = 2.0 ** -max(math.frexp(weight)[1], -1000)
        if self._weight > 0:
            # First: what is refused must not cost the sums their last bits.
            _accumulate_check(self._floating_sums.tensors, values, weight, self._type)
            scale = min(scale, self._scale * 2.0 ** -math.frexp(self._weight)[1])
            shift = scale / self._scale
            for total in (*self._vectors, *(self._sums[t] for t in self._integral)):
                total *= shift
            self._weight *= shift
        self._scale, self._most = scale, _MOST_UNITS
        return weight * scale

    def _begin(self, client: Any, model: _Model, floating: list[int], values: list[Tensor]) -> None:
        """Sums like the first client, and what the others are compared with."""
        self._restore = _restorer(client)
        self._dtypes = [x.dtype for x in model.tensors]
        self._floating = floating
        self._vectors, sums = _flat_zeros(values)
        self._floating_sums = prepare(sums)
        self._sums, first = sums, sums
        if len(values) == len(model.tensors):
            self._type = FLOATS.index(self._dtypes[0]) if values and len(set(self._dtypes)) == 1 else -1
        else:
            self._integral = sorted(set(range(len(model.tensors))) - set(floating))
            own = dict(zip(floating, sums, strict=True))
            self._sums = [
                own[t] if t in own else torch.zeros(x.shape, dtype=torch.float64, device=x.device)
                for t, x in enumerate(model.tensors)
            ]
            # Integers by value, where they are the result.
            kept = {t: model.tensors[t].clone() for t in self._integral if self.integers == "first"}
            first = [kept.get(t, total) for t, total in enumerate(self._sums)]
        self._first = _Model(model.names, first)

    def _template(self) -> _Model:
        """A model with the shapes and types of the first client, and without its memory."""
        assert self._first is not None
        like = zip(self._first.tensors, self._dtypes, strict=True)
        return _Model(self._first.names, [x.new_empty((), dtype=dtype).expand(x.shape) for x, dtype in like])

    def result(self, out: Model | Tensor | None = None) -> Any:
        """The average, in the form of the first client or written into ``out``.

        With ``out`` more clients may follow. Without it the sums become the result, parts of one vector in memory: the
        average is then complete, and takes no more clients.
        """
        first = self._checked_first(out)
        target = None if out is None else _Model.of(out, "out").like(first, "out")
        if target is not None:
            _explain([self._template()], [("out", target)])
        writable = range(len(first.tensors)) if target is None else _check_target(target, "out")
        divisor = self._divisor()
        kept = [] if self.integers == "round" else self._integral
        with without_gradients():
            if target is None:
                self._given, plain, self._plain = True, self._plain, False
                for total in (*self._vectors, *(self._sums[t] for t in self._integral)):
                    total /= divisor
                if plain and self._dtypes[0] == self._sums[0].dtype:
                    return self._restore(list(self._sums))
            averaged = [t for t in writable if t not in kept]
            means = [self._sums[t] for t in averaged]
            if target is not None and means:
                means = list(torch._foreach_div(means, divisor))
            values = dict(zip(averaged, _cast(means, [self._dtypes[t] for t in averaged]), strict=True))
            if self.integers == "first":
                values |= {t: first.tensors[t].clone() for t in kept if t in writable}
            if target is None:
                return self._restore([values[t] for t in range(len(first.tensors))])
            if values:
                torch._foreach_copy_([target.tensors[t] for t in values], list(values.values()))
        return out

    def _checked_first(self, out: Model | Tensor | None) -> _Model:
        """What the first client was like, if there is a result to give."""
        if self._given:
            raise RuntimeError("the result was given already; result(out=...) can be called again and again")
        if self._first is None:
            raise ValueError(f"no clients were added ({self.skipped} were skipped for infinity or NaN)")
        if (self.normalize or self.skipped) and self._weight == 0:
            raise ValueError(f"the weights of all {self.clients} clients add up to 0; a positive sum is needed")
        if self.integers == "server" and out is None and self._integral:
            raise ValueError("integers='server' keeps the server's integer tensors: give the server's model as out=")
        return self._first

    def _divisor(self) -> float:
        if self.normalize:
            return self._weight
        if not self.skipped:
            return 1.0
        total = self._weight + self._skipped_weight
        return self._weight / total if total else math.inf  # weights that add up to 0: so does the average


def _flat_zeros(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Sums like these tensors: a vector for each accumulate type, and the sums as views of them."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) == 1:
        (dtype,) = dtypes
        total = sum(map(Tensor.numel, tensors))
        vector = torch.zeros(total, dtype=accumulate_type(dtype), device=tensors[0].device)
        return [vector], list(_unflatten_dense_tensors(vector, tensors))
    places: dict[torch.dtype, list[int]] = {}
    for t, x in enumerate(tensors):
        places.setdefault(accumulate_type(x.dtype), []).append(t)
    vectors, sums = [], list(tensors)
    for dtype, chosen in places.items():
        like = [tensors[t] for t in chosen]
        vectors.append(torch.zeros(sum(x.numel() for x in like), dtype=dtype, device=like[0].device))
        for t, part in zip(chosen, _unflatten_dense_tensors(vectors[-1], like), strict=True):
            sums[t] = part
    return vectors, sums


def _cast(means: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """Means in the clients' types. In lists: on a GPU, one op per tensor means one launch per tensor."""
    found = list(means)
    narrow = [i for i, dtype in enumerate(dtypes) if dtype != means[i].dtype and dtype.is_floating_point]
    if narrow:
        cast = [torch.empty_like(means[i], dtype=dtypes[i]) for i in narrow]
        torch._foreach_copy_(cast, [means[i] for i in narrow])
        for i, value in zip(narrow, cast, strict=True):
            found[i] = value
    return [x if dtype.is_floating_point else _round_to(x, dtype) for x, dtype in zip(found, dtypes, strict=True)]
