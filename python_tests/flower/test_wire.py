"""What passes between server and clients: tensors to the bit, and nothing but what is expected."""

from __future__ import annotations

import gc
import json
import math
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed here: make flower makes an environment with it")

import numpy as np
from flwr.app import Array, ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

from pfl_ext.federation import Diverged, Reply, Request, Work
from pfl_ext.flower import load_kept, read_arrays, save_kept, write_arrays
from pfl_ext.flower.arrays import copied, record_of, viewed
from pfl_ext.flower.grid import ArrivingGrid
from pfl_ext.flower.records import read_reply, read_request, reply_of, request_of, told
from pfl_ext.flower.state import ContextStore, NodeFiles

TENSORS = {
    "matrix": torch.randn(3, 4),
    "number": torch.tensor(5),
    "nothing": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
    "double": torch.randn(7, dtype=torch.float64),
    "transposed": torch.randn(4, 5).t(),
    "half": torch.randn(3).half(),
    "bytes": torch.arange(4, dtype=torch.uint8),
    "infinity": torch.tensor([math.inf, -0.0, math.nan]),
}


def test_tensors_come_back_to_the_bit() -> None:
    found = copied(record_of(TENSORS))
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes(), name


def test_a_view_is_of_the_bytes_that_came_and_numpy_in_fortran_order_is_read_too() -> None:
    array = Array(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert viewed({"x": array})["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    array = Array(np.zeros(4, dtype="float32"))
    x = viewed({"x": array})["x"]
    assert bytes(x.numpy().data) in array.data and x.numpy().ctypes.data - id(array.data) < 200


def test_a_type_that_numpy_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match=r"w is torch\.bfloat16"):
        write_arrays({"w": torch.zeros(2, dtype=torch.bfloat16)})


def _npy(header: str, data: bytes = b"\0" * 16) -> bytes:
    text = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


@pytest.mark.parametrize(
    ("stype", "data"),
    [
        ("pickle", b"\x80\x04."),
        ("numpy.ndarray", b""),
        ("numpy.ndarray", b"\x80\x04N."),
        ("numpy.ndarray", _npy("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }")),
        ("numpy.ndarray", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }")),
        ("numpy.ndarray", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,), }")),
        ("numpy.ndarray", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 99999999999), }")),
        (
            "numpy.ndarray",
            _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999, 99999999999), }", b""),
        ),
        ("numpy.ndarray", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "(" * 60)),
        ("numpy.ndarray", _npy("__import__('os').abort()")),
        ("numpy.ndarray", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", b"\0" * 15)),
        ("numpy.ndarray", _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", b"\0" * 17)),
    ],
)
def test_what_is_no_array_of_numbers_is_refused_by_name(stype: str, data: bytes) -> None:
    with pytest.raises(ValueError, match="weight is no array of numbers"):
        read_arrays({"weight": Array("float32", (4,), stype, data)})


def test_a_request_and_its_reply_come_back_as_they_were() -> None:
    request = Request(3, 7, "personal", sent={"model": torch.randn(4)}, budget=9)
    shared = torch.randn(5)
    found, model = read_request(request_of(request, "run", {"model": torch.ones(2)}, shared, {}))
    assert (found.client, found.round, found.stage, found.budget) == (3, 7, "personal", 9)
    assert found.received is not None and torch.equal(found.received["model"], torch.ones(2))
    assert torch.equal(found.sent["model"], request.sent["model"]) and model is not None and torch.equal(model, shared)
    reply = Reply(
        3,
        {"model": torch.randn(4)},
        report={"loss": 0.1 + 0.2, "odd": math.nan},
        metrics={("personal", "test"): {"accuracy": 1 / 3}},
        work=Work(3, 10, 4, 16, 8, 0.5),
        received={"model": 2},
        trained_parameters=6,
    )
    same = read_reply(reply_of(reply), request)
    assert torch.equal(same.sent["model"], reply.sent["model"])
    assert same.report["loss"] == 0.1 + 0.2 and math.isnan(same.report["odd"])
    assert (same.metrics, same.work, same.received) == (reply.metrics, reply.work, reply.received)
    assert same.trained_parameters == 6 and same.error is None
    failed = read_reply(reply_of(Reply(3, error=Diverged(3, 7, "loss"))), request)
    assert isinstance(failed.error, Diverged) and (failed.error.client, failed.error.what) == (3, "loss")


GOOD: dict[str, Any] = {
    "report": {},
    "metrics": [],
    "work": [0, 0, 0, 0, 0, 0.0],
    "received": {},
    "trained_parameters": 0,
    "error": None,
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"report": {"loss": "high"}}, "report loss is a str"),
        ({"report": {str(i): 0 for i in range(2000)}}, "at most 1000 entries"),
        ({"report": {"loss": 10**400}}, "report loss is a number of 401 digits"),
        ({"report": {"lo\ud800": 0}}, r"report has the name 'lo\\ud800'; at most 200 printable"),
        ({"metrics": [["a" * 201, "test", {}]]}, "metrics has the name 'aaa"),
        ({"metrics": [["model", str(i), {str(j): 0 for j in range(40)}] for i in range(40)]}, "more than 1000 numbers"),
        ({"received": {"a\nb": 1}}, "received has the name"),
        ({"metrics": [["model", "test"]]}, "not a model, a split and its numbers"),
        ({"work": [0, -1, 0, 0, 0, 0.0]}, "trained is '-1'"),
        ({"work": [0, 0, 0, 0, 0, math.inf]}, "begin is not finite"),
        ({"work": None}, "work is 'None'"),
        ({"received": {"model": 1e99}}, "received model"),
        ({"error": 3}, "error is a int"),
        ({"client": 4}, "it has client"),
    ],
)
def test_a_reply_with_something_else_in_it_is_refused(change: dict[str, Any], told: str) -> None:
    content = RecordDict({"pfl_ext": ConfigRecord({"json": json.dumps({**GOOD, **change})})})
    with pytest.raises(ValueError, match=told):
        read_reply(content, Request(0, 1, "train"))
    good = RecordDict({"pfl_ext": ConfigRecord({"json": json.dumps(GOOD)})})
    assert read_reply(good, Request(0, 1, "train")).client == 0


def test_what_was_read_leaves_memory_at_once() -> None:
    content = reply_of(Reply(0, {"model": torch.ones(3)}))
    array = weakref.ref(content["sent"]["model"])
    gc.collect()
    gc.disable()  # a few large arrays do not call it either
    try:
        reply = read_reply(content, Request(0, 1, "train"))
        del content
        assert array() is None and reply.sent["model"].tolist() == [1.0] * 3
    finally:
        gc.enable()


def test_what_a_client_says_cannot_begin_a_line_of_the_log() -> None:
    content = RecordDict({"pfl_ext": ConfigRecord({"json": json.dumps({**GOOD, "error": "loss\nWARNING :\x1b[2J"})})})
    error = read_reply(content, Request(0, 1, "train")).error
    assert error is not None and error.what == "loss?WARNING :?[2J"
    assert told("größer\r\n" + "x" * 1000) == "größer??" + "x" * 492


def test_a_reply_cannot_speak_for_another_client() -> None:
    content = RecordDict({"pfl_ext": ConfigRecord({"json": json.dumps({**GOOD, "work": [5, 1, 1, 1, 1, 0.0]})})})
    reply = read_reply(content, Request(2, 1, "train"))
    assert (reply.client, reply.work.client) == (2, 2)


# ---- what is kept ----------------------------------------------------------------------------------------------------


def _context() -> Context:
    return Context(1, 2, {}, RecordDict(), {})


def test_what_a_client_keeps_is_in_its_context_by_run() -> None:
    context, initial = _context(), {"personal": torch.zeros(3)}
    ContextStore(context, "a", initial, {4: 0}).write(4, "personal", torch.ones(3))
    again, other = ContextStore(context, "a", initial, {4: 0}), ContextStore(context, "b", initial, {4: 0})
    assert again.written(4, "personal") and torch.equal(again.read(4, "personal"), torch.ones(3))
    assert not other.written(4, "personal") and torch.equal(other.read(4, "personal"), torch.zeros(3))
    with pytest.raises(ValueError, match=r"personal of client 4 is \[2\]; \[3\] is kept"):
        again.write(4, "personal", torch.ones(2))
    assert load_kept(context) is None
    save_kept(context, {"w": torch.ones(2)})
    assert torch.equal((load_kept(context) or {})["w"], torch.ones(2))


def test_a_node_keeps_copies_of_the_last_checkpoints(tmp_path: Any) -> None:
    files = NodeFiles(tmp_path, "run", 0)
    for moment in range(1, 6):
        files.save(moment, {"personal": torch.full((2,), float(moment))})
    assert sorted(files.moments()) == [3, 4, 5]
    assert files.load(4)["personal"].tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="there are copies of: 3, 4, 5"):
        files.load(1)
    (tmp_path / "client-0-run-00000005.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read"):
        files.load(5)


class _Slow(Grid):
    """A grid with replies that arrive from time to time, and a count of those that nobody has taken yet."""

    def __init__(self, replies: Sequence[Message]) -> None:
        self.replies = {message.metadata.reply_to_message_id: message for message in replies}
        self.asked: list[list[str]] = []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.asked.append(list(message_ids))
        return [self.replies.pop(name) for name in self.asked[-1] if name in self.replies and name != "late"]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return ["0", "1", "late"]

    set_run = run = create_message = get_node_ids = send_and_receive = None  # type: ignore[assignment]


def test_streamed_replies_are_fetched_one_at_a_time_and_a_late_one_is_not_waited_for() -> None:
    made = [make_message(Metadata(1, name, 1, 1, name, "", 0.0, 9.0, "train"), RecordDict()) for name in ("0", "1")]
    grid = _Slow(made)
    begin = time.monotonic()
    found = list(ArrivingGrid(grid).send_and_receive([], timeout=0.2))
    assert {message.metadata.reply_to_message_id for message in found} == {"0", "1"}
    assert all(len(names) == 1 for names in grid.asked) and 0.2 <= time.monotonic() - begin < 5


def test_no_more_bytes_are_sent_than_by_flowers_average() -> None:
    from flwr.app import MetricRecord

    from pfl_ext.ops import weighted_average

    models = [{"w": torch.randn(50, 50), "count": torch.tensor(3 + k)} for k in range(3)]
    metrics = MetricRecord({"num-examples": 1})
    records = [RecordDict({"arrays": write_arrays(model), "metrics": metrics}) for model in models]
    theirs = aggregate_arrayrecords(records, "num-examples")
    ours = write_arrays(weighted_average(models))
    assert ours.count_bytes() <= theirs.count_bytes()
