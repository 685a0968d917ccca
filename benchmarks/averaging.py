"""Races of the averaging ops: lists of tensors, rows of a matrix, the delta form, and one client at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.ops import StreamingAverage, prepare, server_update, weighted_average

from .case import Case, Contestant, Expected, Family, Grid, Kind, Skipped, Spec
from .machine import available_memory
from .opponents import averaging as opponents
from .shapes import SHAPE_SETS, parameter_count

__all__ = ["FAMILY", "ClientModels"]

_DETAILED = 20
"""The number of clients with which the grid goes into detail: one thread, other dtypes, other ops."""

_LR = 0.5
_FLAT = "w @ M (flat input)"


class ClientModels:
    """Random models of C clients, as lists of tensors and as rows of one matrix; the same numbers in both."""

    def __init__(self, shapes: str, clients: int, dtype: str) -> None:
        """Draw them; the same values for the same arguments."""
        self.dtype: torch.dtype = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(clients)
        sizes = [math.prod(shape) for shape in SHAPE_SETS[shapes]]
        self.matrix = torch.empty(clients, sum(sizes), dtype=self.dtype).uniform_(-1, 1, generator=generator)
        # Tensors of their own, not views of the matrix: clients' models lie apart in memory.
        self.clients = [
            [x.clone().view(shape) for x, shape in zip(row.split(sizes), SHAPE_SETS[shapes], strict=True)]
            for row in self.matrix
        ]
        self.server = [x.roll(1).view(x.shape) for x in self.clients[0]]
        self.samples: list[int] = torch.randint(50, 500, (clients,), generator=generator).tolist()

    @property
    def bytes(self) -> int:
        """Size of all clients in one form."""
        return self.matrix.numel() * self.matrix.element_size()

    @staticmethod
    def bytes_needed(shapes: str, clients: int, dtype: str) -> int:
        """Memory that the races take: both forms, one more copy of all clients, and the stacked largest tensor."""
        itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        largest = max(math.prod(shape) for shape in SHAPE_SETS[shapes])
        return clients * (3 * parameter_count(SHAPE_SETS[shapes]) * itemsize + 2 * largest * max(4, itemsize)) + 2**30

    @cached_property
    def average(self) -> Expected:
        """The average in float64."""
        values = torch.zeros(self.matrix.shape[1], dtype=torch.float64)
        magnitude = torch.zeros_like(values)
        for row, count in zip(self.matrix, self.samples, strict=True):
            exact = row.double()
            values.add_(exact, alpha=count / sum(self.samples))
            magnitude.add_(exact.abs(), alpha=count / sum(self.samples))
        # A term goes through: its weight (rounded twice), the product, the additions, a division.
        return Expected(values, magnitude, roundings=len(self.samples) + 4)

    @cached_property
    def updated_server(self) -> Expected:
        """The server after its step in float64, from the average: the weights add up to 1."""
        start = torch.cat([s.reshape(-1) for s in self.server]).double()
        values = start + _LR * (self.average.values - start)
        magnitude = start.abs() + _LR * (self.average.magnitude + start.abs())
        # Beyond the average's: the difference, the product with lr (itself rounded), the last addition.
        return Expected(values, magnitude, roundings=self.average.roundings + 4)


# ---- the grid ------------------------------------------------------------------------------------------------------


def _plan(grid: Grid) -> list[Spec]:
    """Everything the user named; else what shows the most: all sizes with all threads, and more of 20 clients."""
    shape_sets = grid.shapes or (("lenet", "adapters") if grid.quick else tuple(SHAPE_SETS))
    clients = grid.clients or ((8, _DETAILED) if grid.quick else FAMILY.clients)
    specs = []
    for shapes in shape_sets:
        for count in clients:
            detailed = count == _DETAILED and not grid.quick
            dtypes = grid.dtypes or (FAMILY.dtypes if detailed and shapes == "resnet18" else ("float32",))
            few_or_all = (1, grid.all_threads) if detailed else (grid.all_threads,)
            for dtype in dtypes:
                for op in FAMILY.ops:
                    other_op = op in ("server_update", "streaming")
                    if other_op and grid.clients is None and count != _DETAILED:
                        continue
                    if other_op and grid.dtypes is None and dtype != "float32":
                        continue
                    of_op = (grid.all_threads,) if op == "server_update" else few_or_all
                    for threads in dict.fromkeys(grid.threads or of_op):
                        specs.append(Spec(op, shapes, count, dtype, threads))
    return specs


def _cases(specs: Iterable[Spec]) -> Iterator[Case | Skipped]:
    for (shapes, clients, dtype), group in groupby(specs, key=lambda spec: (spec.shapes, spec.clients, spec.dtype)):
        needed = ClientModels.bytes_needed(shapes, clients, dtype)
        available = available_memory()
        if available is not None and needed > available:
            for spec in group:
                yield Skipped(
                    spec, f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available"
                )
            continue
        models = ClientModels(shapes, clients, dtype)
        for spec in group:
            if spec.op == "average" and models.dtype == torch.bfloat16:
                for name in ("Flower (copies)", "Flower (running sum)"):
                    yield Skipped(spec, "NumPy has no bfloat16", contestant=name)
            yield _BUILDERS[spec.op](spec, models)
        del models  # before the next ones are made: they may be several GB


# ---- the contestants -----------------------------------------------------------------------------------------------


def _average(spec: Spec, models: ClientModels) -> Case:
    clients, samples, dtype = models.clients, models.samples, models.dtype
    wide = torch.promote_types(dtype, torch.float32)
    # Real models are trees of modules, which only makes copying and walking them slower.
    modules = [nn.ParameterList([nn.Parameter(x) for x in client]) for client in clients]
    entries: list[tuple[str, Kind, Callable[[], Any], torch.dtype]] = [
        ("pfl_ext", "ours", partial(weighted_average, clients, samples), wide),
        ("pfl_ext (out=)", "ours", partial(weighted_average, clients, samples, out=_copy(clients[0])), wide),
        ("pfl_ext (prepared)", "ours", partial(weighted_average, [prepare(x) for x in clients], samples), wide),
        ("PFLlib", "naive", partial(opponents.pfllib, modules, samples), dtype),
    ]
    if dtype != torch.bfloat16:
        arrays = [[x.numpy() for x in client] for client in clients]
        entries += [
            ("Flower (copies)", "naive", partial(opponents.flower_copies, arrays, samples), dtype),
            ("Flower (running sum)", "naive", partial(opponents.flower_running_sum, arrays, samples), dtype),
        ]
    entries += [
        ("FL-bench / FedLab", "naive", partial(opponents.fl_bench, clients, samples), wide),
        ("add_ per client", "skilled", partial(opponents.per_client_add, clients, samples), dtype),
        ("add_ per tensor", "skilled", partial(opponents.per_tensor_add, clients, samples), dtype),
        ("_foreach_add_", "skilled", partial(opponents.foreach_add, clients, samples), dtype),
        (_FLAT, "skilled", partial(opponents.matrix_product, models.matrix, samples), dtype),
    ]
    return _case(spec, models, models.average, [Contestant(*entry) for entry in entries], passes=spec.clients + 1)


def _rows(spec: Spec, models: ClientModels) -> Case:
    matrix, samples, dtype = models.matrix, models.samples, models.dtype
    wide = torch.promote_types(dtype, torch.float32)
    contestants = [
        Contestant("pfl_ext", "ours", partial(weighted_average, matrix, samples), wide),
        Contestant("pfl_ext (out=)", "ours", partial(weighted_average, matrix, samples, out=matrix[0].clone()), wide),
        Contestant("(w * M).sum(0)", "naive", partial(opponents.scaled_rows_sum, matrix, samples), dtype),
        Contestant("w @ M", "skilled", partial(opponents.matrix_product, matrix, samples), dtype),
    ]
    return _case(spec, models, models.average, contestants, passes=spec.clients + 1)


def _server_update(spec: Spec, models: ClientModels) -> Case:
    dtype = models.dtype
    wide = torch.promote_types(dtype, torch.float32)
    given = (models.server, models.clients, models.samples)
    out = _copy(models.server)
    contestants = [
        Contestant("pfl_ext", "ours", partial(server_update, *given, lr=_LR), wide),
        Contestant("pfl_ext (out=)", "ours", partial(server_update, *given, lr=_LR, out=out), wide),
        Contestant("loop over parameters", "naive", partial(opponents.naive_server_update, *given, _LR), dtype),
        Contestant(
            "_foreach differences", "skilled", partial(opponents.server_update_foreach_deltas, *given, _LR), dtype
        ),
        Contestant("_foreach mix", "skilled", partial(opponents.server_update_foreach_mix, *given, _LR), dtype),
    ]
    # The server is read as well.
    return _case(spec, models, models.updated_server, contestants, passes=spec.clients + 2)


def _streaming(spec: Spec, models: ClientModels) -> Case:
    clients, samples, dtype = models.clients, models.samples, models.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def ours(clients: Sequence[Sequence[Tensor]]) -> Any:
        average = StreamingAverage()
        for client, count in zip(clients, samples, strict=True):
            average.add(client, weight=count)
        return average.result()

    contestants = [
        Contestant("pfl_ext", "ours", partial(ours, clients), wide),
        Contestant("pfl_ext (prepared)", "ours", partial(ours, [prepare(x) for x in clients]), wide),
        Contestant("loop over parameters", "naive", partial(opponents.naive_streaming, clients, samples), dtype),
        Contestant("_foreach_add_", "skilled", partial(opponents.streaming_foreach, clients, samples), dtype),
    ]
    # Every client is read, and with each the sums are read and written; at the end they are read, the result written.
    return _case(spec, models, models.average, contestants, passes=3 * spec.clients + 2)


_BUILDERS: dict[str, Callable[[Spec, ClientModels], Case]] = {
    "average": _average,
    "rows": _rows,
    "server_update": _server_update,
    "streaming": _streaming,
}


def _copy(tensors: list[Tensor]) -> list[Tensor]:
    """A target to write to, in memory that is really there: untouched pages would count as extra memory later."""
    return [x.clone() for x in tensors]


def _case(spec: Spec, models: ClientModels, expected: Expected, contestants: list[Contestant], passes: int) -> Case:
    return Case(
        spec,
        contestants,
        expected,
        data_bytes=models.bytes,
        limit_bytes=passes * models.bytes // spec.clients,
        large_buffer=models.matrix,
    )


FAMILY = Family(
    name="averaging",
    summary="weighted average of client models, delta form, streaming",
    ops={
        "average": "`weighted_average(clients, weights)`: clients as lists of tensors",
        "rows": "`weighted_average(M, weights)`: clients as the rows of one matrix",
        "server_update": f"`server_update(server, clients, weights, lr={_LR})`",
        "streaming": "`StreamingAverage`: one client at a time, then the result",
    },
    notes={
        "pfl_ext (prepared)": "each client was given to `prepare` before",
        "PFLlib": "per parameter, weighted clones added to a zeroed copy of a model",
        "Flower (copies)": "NumPy on one thread, `inplace=False`: a weighted copy of every client, then their sum",
        "Flower (running sum)": "NumPy on one thread, its default `inplace=True`",
        "FL-bench / FedLab": "`stack(dim=-1) * w`, `sum(-1)`",
        _FLAT: "is given the clients as one matrix already, not as lists; the race of rows compares like with like",
        "_foreach mix": "`(1 - lr) * server + lr * average`: a client that did not move may still move the server",
    },
    shapes=tuple(SHAPE_SETS),
    clients=(8, _DETAILED, 100),
    dtypes=("float32", "float64", "bfloat16"),
    plan=_plan,
    cases=_cases,
)
