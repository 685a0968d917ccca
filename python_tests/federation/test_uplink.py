"""Uploads that are copied to the host's pinned memory while the client trains give what those on the GPU give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Request, Settings
from pfl_ext.federation.uplink import ToHost


def _vectors(
    name: str, network: nn.Module, dataset: Dataset, partition: Partition, **settings: object
) -> dict[str, Tensor]:
    given = Settings(rounds=2, device="cuda", **settings)  # type: ignore[arg-type]
    run = Federation(METHODS[name](lr=0.1), copy.deepcopy(network), dataset, partition, given)
    run.run()
    return {**run.server, **run.engine.state()}


@pytest.mark.parametrize("protocol", ["wait-free", "compute-and-wait", "until-arrival"])
@pytest.mark.parametrize("name", ["ditto", "scd", "fedavg"])
def test_uploads_by_way_of_the_host_on_cuda_give_the_same_bits(
    name: str, protocol: str, device_type: str, network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    if device_type == "cpu":
        pytest.skip("that is where uploads are already")
    expected, found = (
        _vectors(name, network, dataset, partition, protocol=protocol, uploads=where) for where in ("device", "host")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_upload_on_cuda_has_arrived_when_it_was_waited_for_and_is_copied_beside_other_work(device_type: str) -> None:
    if device_type == "cpu":
        pytest.skip("that is where uploads are already")
    uplink = ToHost(torch.device("cuda", 0))
    vector = torch.arange(1000, dtype=torch.float32, device=device_type)
    arrived = uplink.begin(lambda request, kind, vectors: vectors, Request(0, 1, "train"), {"model": vector})
    (vector * 2).sum()  # what the client trains meanwhile
    found = arrived()["model"]
    assert isinstance(found, Tensor) and found.is_pinned()
    assert torch.equal(found, torch.arange(1000, dtype=torch.float32))
    assert uplink._stream != torch.cuda.current_stream()


def test_uploads_to_the_host_are_refused_where_they_are_there() -> None:
    with pytest.raises(ValueError, match=r"uploads is 'host'; .*device where device is not cuda"):
        Settings(uploads="host")
