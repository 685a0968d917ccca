"""Local steps replayed from a CUDA graph give what steps give that are taken one by one."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded_graphs import recorded_graphs
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Streams
from pfl_ext.federation import Federation, Settings, graphs

_SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0,), "lambdas": (0.5,)},
    "fedgen": {"generator_steps": 3},
    "fedbuff": {"buffer": 2},
}
_NEVER = ["apfl", "fedem", "fedgen", "fedproto", "fedrod-h", "fml", "gpfl", "per-fedavg", "pfedme", "plgu-lf", "scd"]
"""Whose clients take no step on the task's own loss by itself."""


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


@pytest.fixture
def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64)[y]
    return Dataset("points", x, y, ("a", "b", "c"), torch.zeros(60, dtype=torch.bool), dtype=torch.float64)


@pytest.fixture
def partition() -> Partition:
    """Two clients with 22 samples to train on, of which batches of four leave a smaller one."""

    def cut(first: int, last: int) -> tuple[Tensor, ...]:
        return tuple(torch.arange(30 * k + first, 30 * k + last) for k in range(2))

    none = torch.empty(0, dtype=torch.int64)
    return Partition(cut(0, 22), cut(22, 26), cut(26, 30), none, none)


@pytest.fixture(autouse=True)
def on_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Graphs of whole steps; not for the tests that need no device."""
    if "device_type" not in request.fixturenames:
        yield
        return
    if request.getfixturevalue("device_type") == "cpu":
        pytest.skip("graphs are CUDA's")
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        pytest.skip("a graph needs torch's caching allocator")
    with recorded_graphs():
        yield


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each replay."""
    counted: list[int] = []
    record = graphs.record

    def counting(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
        replay = record(function, device)
        return lambda: (counted.append(1), replay())[1]

    monkeypatch.setattr(graphs, "record", counting)
    return counted


def _found(
    name: str, network: nn.Module, dataset: Dataset, partition: Partition, *, device: str = "cuda", graphs: bool = True,
    options: dict[str, Any] | None = None, **settings: Any,
) -> tuple[list[Any], list[Tensor]]:  # fmt: skip
    """What a run reports, and all that the server and the clients have in the end."""
    given = {"lr": 0.1, "batch_size": 4, "momentum": 0.5, "local_epochs": 2, **_SHORT.get(name, {}), **(options or {})}
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    torch.cuda.manual_seed(0)
    run = Federation(
        METHODS[name](**given), copy.deepcopy(network), dataset, partition,
        Settings(**{"rounds": 2, "device": device, "graphs": graphs, **settings}), auxiliary=auxiliary,
    )  # fmt: skip
    records = [record["models"] for record in run.run()]
    return records, [*run.server.values(), *run.engine.state().values()]


def _check_same(name: str, *given: Any, **options: Any) -> None:
    (expected_records, expected), (records, found) = (
        _found(name, *given, graphs=recorded, **options) for recorded in (False, True)
    )
    assert records == expected_records and len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_replayed_steps_on_cuda_give_the_bits_of_steps_one_by_one(
    name: str, device_type: str, network: nn.Module, dataset: Dataset, partition: Partition, replays: list[int]
) -> None:
    _check_same(name, network, dataset, partition, options={"local_epochs": 1})
    assert bool(replays) == (name not in _NEVER)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0, "weight_decay": 0.1},
        {"clip": 0.5},
        {"lr_rounds": "cosine"},
        {"local_steps": 7},
    ],
    ids=str,
)
def test_options_of_a_step_on_cuda_are_in_its_graph(
    options: dict[str, Any], device_type: str, network: nn.Module, dataset: Dataset, partition: Partition,
    replays: list[int],
) -> None:  # fmt: skip
    _check_same("fedprox", network, dataset, partition, options=options)
    assert replays


@pytest.mark.parametrize("options", [{"lr_steps": "cosine"}, {"lr_warmup_steps": 3}, {"optimizer": "adam"}], ids=str)
def test_steps_of_which_python_decides_on_cuda_are_not_recorded(
    options: dict[str, Any], device_type: str, network: nn.Module, dataset: Dataset, partition: Partition,
    replays: list[int],
) -> None:  # fmt: skip
    _check_same("fedavg", network, dataset, partition, options={"momentum": 0.0, **options})
    assert not replays


@pytest.mark.parametrize("settings", [{"uploads": "host"}, {"drop_last": True}, {"personal_cap": 5}], ids=str)
def test_settings_on_cuda_go_with_graphs(
    settings: dict[str, Any], device_type: str, network: nn.Module, dataset: Dataset, partition: Partition,
    replays: list[int],
) -> None:  # fmt: skip
    _check_same("scd", network, dataset, partition, **settings)
    _check_same("ditto", network, dataset, partition, **settings)
    assert replays


def test_dropout_on_cuda_draws_anew_in_every_replay(
    device_type: str, dataset: Dataset, partition: Partition, replays: list[int]
) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3)).double()
    _check_same("fedavg", network, dataset, partition)
    assert replays


def test_graphs_on_a_second_cuda_gpu_are_recorded_there(
    device_type: str, network: nn.Module, dataset: Dataset, partition: Partition, replays: list[int]
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for device in ("cuda:0", "cuda:1"):
        _check_same("fedavg", network, dataset, partition, device=device)
    assert replays


class _Read(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().abs().max().item())


class _Decide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class _Choose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[x > 0].mean()


class _FromHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(x.shape[1]).to(x.device, x.dtype)


class _CumulativeNorm(nn.BatchNorm1d):
    """Reads on the host how many batches it has seen."""

    def __init__(self) -> None:
        super().__init__(4, momentum=None)


@pytest.mark.parametrize("layer", [_Read, _Decide, _Choose, _FromHost, _CumulativeNorm])
def test_what_no_graph_can_hold_on_cuda_is_refused(
    layer: type[nn.Module], device_type: str, dataset: Dataset, partition: Partition
) -> None:
    network = nn.Sequential(layer(), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match=r"graphs is true, and a step of this method cannot be recorded .*: use false"):
        _found("fedavg", network, dataset, partition)
    _found("fedavg", network, dataset, partition, graphs=False)


def test_a_graph_on_cuda_repeats_what_it_recorded(device_type: str) -> None:
    """What no check can see: what Python changes between replays. A simulated GPU has it too, so that tests see it."""
    at, out, rate, calls = torch.tensor([1.0, 2.0], device="cuda"), torch.zeros(2, device="cuda"), [2.0], [0]
    last: list[Tensor] = []

    def step() -> None:
        calls[0] += 1
        out.add_(at * rate[0])
        last[:] = [out + 1]

    replay = graphs.record(step, at.device)
    assert out.tolist() == [0, 0] and calls == [1]  # nothing is computed while it is recorded
    recorded_at, [recorded_last] = at, last
    replay()
    assert out.tolist() == [2, 4] and recorded_last.tolist() == [3, 5]
    at.copy_(torch.tensor([10.0, 10.0]))  # into the memory that was recorded
    replay()
    assert out.tolist() == [22, 24] and recorded_last.tolist() == [23, 25]
    at, rate[0] = torch.tensor([0.0, 0.0], device="cuda"), 5.0  # another tensor, another number: not seen
    replay()
    assert out.tolist() == [42, 44] and calls == [1]
    out.data = torch.zeros(2, device="cuda")  # other memory below the same tensor: not seen either
    replay()
    assert out.tolist() == [0, 0] and recorded_last.tolist() == [63, 65]
    assert recorded_at.tolist() == [10, 10]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.copy_(torch.ones(2)),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
    ],
)
def test_what_waits_on_cuda_is_refused_in_a_recording(read: Callable[[Tensor], Any], device_type: str) -> None:
    x = torch.tensor([1.0, 2.0], device="cuda")

    def step() -> None:
        x.add_(1)
        read(x)

    with pytest.raises(ValueError, match="graphs is true, and a step of this method cannot be recorded"):
        graphs.record(step, x.device)


def test_streams_beside_graphs_on_cuda_are_refused(
    device_type: str, network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    with pytest.raises(ValueError, match="streams is 2, and graphs is true: torch records one graph at a time"):
        settings = Settings(device="cuda", graphs=True)
        Federation(METHODS["fedavg"](), network, dataset, partition, settings, engine=Streams(2))


def test_graphs_are_refused_where_there_is_no_gpu() -> None:
    with pytest.raises(ValueError, match=r"graphs is True; .*false where device is not cuda"):
        Settings(graphs=True)
