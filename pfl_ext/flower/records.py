"""Requests and replies as records of Flower: JSON in a ConfigRecord, vectors in ArrayRecords."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from pfl_ext.federation import Diverged, Reply, Request, Work
from pfl_ext.federation.mapped import opened

from .arrays import copied, record_of, records_in

__all__ = [
    "REPORTS",
    "answer_of",
    "question_of",
    "read_answer",
    "read_question",
    "read_reply",
    "read_request",
    "reply_of",
    "request_of",
    "told",
]

_KEY = "pfl_ext"
REPORTS = 1000
"""Names under which a client may report numbers; the server keeps them."""
_NAME = 200  # characters


def question_of(what: Mapping[str, Any]) -> RecordDict:
    """Plain data as the content of a message."""
    return RecordDict({_KEY: ConfigRecord({"json": json.dumps(what)})})


answer_of = question_of


def read_question(content: RecordDict) -> dict[str, Any]:
    """The plain data of a message.

    Raises:
        ValueError: there is none.
    """
    record = records_in(content, ConfigRecord).get(_KEY)
    text = None if record is None else record.get("json")
    if not isinstance(text, str):
        raise ValueError("the message is not one of pfl_ext: it has no record of that name with JSON in it")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("the message holds JSON that is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"the message holds a {type(found).__name__}; a table is accepted")
    return found


read_answer = read_question


def told(what: object, most: int = 500) -> str:
    """What a client has a part in saying, for a line of the log: it must not end the line and begin another."""
    return "".join(c if c.isprintable() else "?" for c in str(what)[:most])


def _arrays(content: RecordDict, name: str) -> dict[str, Tensor]:
    return copied(records_in(content, ArrayRecord).get(name, ArrayRecord()))


# ---- requests --------------------------------------------------------------------------------------------------------


def request_of(
    request: Request, run: str, received: Mapping[str, Tensor], shared: Tensor | None, known: dict[int, Array]
) -> RecordDict:
    """A request as the content of a message.

    Args:
        request: it.
        run: which run it is of.
        received: what the server sends to this client.
        shared: the global model, where it is to be evaluated.
        known: as in :func:`~.arrays.record_of`.
    """
    plain = {"round": request.round, "stage": request.stage, "budget": request.budget}
    content = question_of({"run": run, "client": request.client, **plain})
    content["received"] = record_of(received, known)
    content["sent"] = record_of({name: opened(vector) for name, vector in request.sent.items()}, known)
    content["shared"] = record_of({} if shared is None else {"model": shared}, known)
    return content


def read_request(content: RecordDict) -> tuple[Request, Tensor | None]:
    """The request of a message, and the global model."""
    plain = read_question(content)
    request = Request(
        plain["client"],
        plain["round"],
        plain["stage"],
        received=_arrays(content, "received"),
        sent=_arrays(content, "sent"),
        budget=plain["budget"],
    )
    return request, _arrays(content, "shared").get("model")


# ---- replies ---------------------------------------------------------------------------------------------------------


def reply_of(reply: Reply) -> RecordDict:
    """A reply as the content of a message."""
    plain = {
        "report": reply.report,
        "metrics": [[model, split, metrics] for (model, split), metrics in reply.metrics.items()],
        "work": list(reply.work),
        "received": reply.received,
        "trained_parameters": reply.trained_parameters,
        "error": None if reply.error is None else reply.error.what,
    }
    content = answer_of(plain)
    for name, vectors in (("sent", reply.sent), ("kept", reply.kept)):
        content[name] = record_of({key: opened(vector) for key, vector in vectors.items()})
    return content


def read_reply(content: RecordDict, request: Request) -> Reply:
    """The reply of a message.

    Nothing that it says is taken on trust: who sent it is known, and the rest must be what a reply has.

    Raises:
        ValueError: it is no reply to such a request; the message says what is wrong.
    """
    plain = read_answer(content)
    names = ("report", "metrics", "work", "received", "trained_parameters", "error")
    if set(plain) != set(names):
        raise ValueError(f"it has {', '.join(sorted(map(str, plain)))[:200]}; {', '.join(names)} are accepted")
    error = plain["error"]
    if not (error is None or isinstance(error, str)):
        raise ValueError(f"error is a {type(error).__name__}; text is accepted")
    return Reply(
        request.client,
        _arrays(content, "sent"),
        _arrays(content, "kept"),
        _numbers("report", plain["report"]),
        _metrics(plain["metrics"]),
        _work(plain["work"], request.client),
        {
            _name("received", name): _count(f"received {name}", n)
            for name, n in _table("received", plain["received"]).items()
        },
        _count("trained_parameters", plain["trained_parameters"]),
        error=None if error is None else Diverged(request.client, request.round, told(error, 200)),
    )


def _table(label: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > REPORTS:
        raise ValueError(f"{label} is a {type(value).__name__}; a table of at most {REPORTS} entries is accepted")
    return value


def _number(label: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{label} is a {type(value).__name__}; a number is accepted")
    try:
        return float(value)
    except OverflowError:  # JSON's whole numbers have no end
        raise ValueError(f"{label} is a number of {len(str(abs(value)))} digits; one of float64 is accepted") from None


def _count(label: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError(f"{label} is {str(value)[:40]!r}; a whole number of 0 or more is accepted")
    return value


def _name(label: str, value: Any) -> str:
    """A name that the server's tables and files will have: half a character pair, say, cannot be written to any."""
    if not isinstance(value, str) or len(value) > _NAME or not value.isprintable():
        raise ValueError(f"{label} has the name {value!r:.60}; at most {_NAME} printable characters are accepted")
    return value


def _numbers(label: str, value: Any) -> dict[str, float]:
    return {_name(label, name): _number(f"{label} {name}", number) for name, number in _table(label, value).items()}


def _counts(label: str, value: Any) -> dict[str, int]:
    return {_name(label, name): _count(f"{label} {name}", number) for name, number in _table(label, value).items()}


def _metrics(value: Any) -> dict[tuple[str, str], dict[str, float]]:
    if not isinstance(value, list) or len(value) > REPORTS:
        raise ValueError(f"metrics are a {type(value).__name__}; a list is accepted")
    found = {}
    for entry in value:
        if not (isinstance(entry, list) and len(entry) == 3):
            raise ValueError("metrics have an entry that is not a model, a split and its numbers")
        model, split = (_name("metrics", name) for name in entry[:2])
        found[model, split] = _numbers("metrics", entry[2])
    if sum(map(len, found.values())) > REPORTS:
        raise ValueError(f"metrics have more than {REPORTS} numbers")
    return found


def _work(value: Any, client: int) -> Work:
    if not isinstance(value, list) or len(value) != len(Work._fields):
        raise ValueError(f"work is {str(value)[:60]!r}; {', '.join(Work._fields)} are accepted")
    counts = [_count(name, number) for name, number in zip(Work._fields[1:5], value[1:5], strict=True)]
    begin = _number("begin", value[5])
    if not math.isfinite(begin):
        raise ValueError("begin is not finite")
    return Work(client, counts[0], counts[1], counts[2], counts[3], begin)
