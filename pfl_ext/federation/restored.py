"""Whether what a checkpoint holds is what a run can go on from: checked in full before anything is changed.

A file's digests tell damage. These checks are for what has good digests and is still not of such a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .checkpoint import DamagedCheckpoint
from .clock import PROTOCOLS
from .messages import Work

__all__ = ["check_clients", "check_plain", "check_reports", "check_rounds", "check_vectors", "parts_of"]

_PARTS = ("server", "clients", "rounds", "reports")
_RECEIVED = ("down_parameters", "down_bytes")


def _refuse(what: str) -> NoReturn:
    raise DamagedCheckpoint(f"the checkpoint is not one that this run can go on from: {what}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _count(label: str, value: object, most: float = math.inf) -> int:
    """A whole number from 0 to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        _refuse(
            f"{label} is {_shown(value)}; a whole number from 0 {'on' if most == math.inf else f'to {most}'} is one"
        )
    return value


def _time(label: str, value: object) -> None:
    """A finite number of 0 or more."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value >= 0):
        _refuse(f"{label} is {_shown(value)}; a finite number of 0 or more is one")


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each part by their names in it."""
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for label, tensor in tensors.items():
        part, _, name = label.partition("/")
        if part not in parts:
            _refuse(f"it has a tensor {_shown(label)}, which belongs to none of {', '.join(_PARTS)}")
        parts[part][name] = tensor
    return parts


def check_plain(state: Mapping[str, Any], clients: int) -> None:
    """Refuse a checkpoint whose counts of rounds and clients cannot be those of a run."""
    round = _count("round", state.get("round"))
    done = _count("personalized", state.get("personalized"), clients)
    recorded = _count("recorded", state.get("recorded"))
    if recorded != round and (recorded, done) != (round + 1, clients):
        _refuse(f"recorded is {recorded} after round {round}, with {done} of {clients} clients personalised")
    received = state.get("received_last")
    if not isinstance(received, dict) or received.keys() != set(_RECEIVED):
        _refuse(f"received_last is {_shown(received)}; {' and '.join(_RECEIVED)} are in it")
    for name, count in received.items():
        _count(name, count)
    dropped = state.get("dropped_last")
    if not isinstance(dropped, list):
        _refuse(f"dropped_last is {_shown(dropped)}; a list of clients is one")
    for client in dropped:
        _count("a client of dropped_last", client, clients - 1)


def _check_names(part: str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if saved.keys() != expected.keys():
        name = sorted(saved.keys() ^ expected.keys())[0]
        _refuse(f"{part}/{name} is {'not in it' if name in expected else 'in it, and this run has no such vector'}")


def _check_alike(label: str, saved: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if saved.dtype != dtype or tuple(saved.shape) != shape:
        _refuse(f"{label} is {list(saved.shape)} of {saved.dtype}, this run has {list(shape)} of {dtype}")


def check_vectors(part: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, each with the same shape and type."""
    _check_names(part, saved, expected)
    for name, vector in expected.items():
        _check_alike(f"{part}/{name}", saved[name], vector.dtype, tuple(vector.shape))


def check_clients(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], clients: int) -> None:
    """Rows as :meth:`ClientStore.tensors` gives them; of ``expected`` only types and widths count."""
    _check_names("clients", saved, expected)
    for label, numbers in saved.items():
        name, _, kind = label.rpartition("/")
        if kind != "clients":
            continue
        _check_alike(f"clients/{label}", numbers, torch.int64, (numbers.numel(),))
        wrong = [k for k in numbers.tolist() if not 0 <= k < clients]
        if wrong or len(numbers.unique()) != len(numbers):
            what = f"has the client {wrong[0]}" if wrong else "names a client twice"
            _refuse(f"clients/{label} {what}; this run has clients 0 to {clients - 1}")
        rows = expected[f"{name}/rows"]
        _check_alike(f"clients/{name}/rows", saved[f"{name}/rows"], rows.dtype, (len(numbers), *rows.shape[1:]))


def check_reports(saved: Mapping[str, Tensor], clients: int) -> None:
    """A value, and whether there is one, for each client."""
    for name, tensor in saved.items():
        _check_alike(f"reports/{name}", tensor, torch.float64, (2, clients))
        if not ((tensor[1] == 0) | (tensor[1] == 1)).all():
            _refuse(f"reports/{name} says of a client neither that it has a value nor that it has none")


def check_rounds(
    state: object,
    saved: Mapping[str, Tensor],
    own: tuple[Mapping[str, Any], Mapping[str, Tensor]],
    round: int,
    clients: int,
    server: Mapping[str, Tensor],
    kept: Mapping[str, Tensor],
) -> None:
    """Timelines, or the turns in flight.

    Args:
        state, saved: what was saved of them.
        own: what this run has of them now.
        round: after which they were saved.
        clients: how many.
        server: the server's vectors.
        kept: what clients keep, as of :func:`check_clients`.
    """
    if not isinstance(state, dict):
        _refuse(f"rounds is {_shown(state)}; a mapping is one")
    if state.keys() != own[0].keys():
        _refuse(f"rounds has {sorted(state)}; this run has {sorted(own[0])}")
    if "turns" in state:
        _check_flight(state, own[0], clients, round)
        sent_as = {f"sent/{name}": vector for name, vector in server.items()}
        kept_as = {
            f"kept/{label[:-5]}": torch.empty(rows.shape[1:], dtype=rows.dtype)
            for label, rows in kept.items()
            if label.endswith("/rows")
        }
        _check_flying(state["turns"], saved, sent_as | kept_as, set(kept_as))
        return
    # A run that was begun with a clock may go on without; how one goes on that had none is for the rounds to say.
    for name, times in saved.items():
        if name not in PROTOCOLS:
            _refuse(f"rounds/{_shown(name)} is in it, and there is no such protocol")
        _check_alike(f"rounds/{name}", times, torch.float64, (2 + clients,))
        if not (times.isfinite() & (times >= 0)).all():
            _refuse(f"rounds/{name} has a time that is not finite or below 0")
    if saved and own[1].keys() - saved.keys():
        _refuse(f"rounds/{sorted(own[1].keys() - saved.keys())[0]} is not in it")


def _check_flight(state: Mapping[str, Any], own: Mapping[str, Any], clients: int, round: int) -> None:
    turns = state["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 7 for turn in turns):
        _refuse(f"the turns in flight are {_shown(turns)}")
    for i, turn in enumerate(turns):
        _check_turn(f"turn {i} in flight", turn, clients, round)
    if len({turn[0][0] for turn in turns}) != len(turns):
        _refuse("a client is in flight twice")
    for name, ours in own.items():
        values = state[name]
        if name == "turns":
            continue
        if not isinstance(ours, list):
            (_count if isinstance(ours, int) else _time)(name, values)
            continue
        if not isinstance(values, list) or (name == "_begun" and len(values) != clients):
            _refuse(f"{name} is {_shown(values)}; a list is one, of {clients} numbers where there is one a client")
        for value in values:
            (_time if name == "_places" else _count)(name, value)


def _check_flying(
    turns: list[list[Any]], saved: Mapping[str, Tensor], known: Mapping[str, Tensor], kept: set[str]
) -> None:
    """The vectors of turns in flight: those ``known`` by their names like these, others like each other's."""
    found: list[set[str]] = [set() for _ in turns]
    kinds = dict(known)
    for label, vector in saved.items():
        number, _, name = label.partition("/")
        fits = name.startswith("sent/") or name in kept
        if not number.isdecimal() or int(number) >= len(turns) or not fits:
            _refuse(f"rounds/{_shown(label)} belongs to no turn in flight, or is nothing that clients keep")
        like = kinds.setdefault(name, vector)
        _check_alike(f"rounds/{label}", vector, like.dtype, tuple(like.shape))
        found[int(number)].add(name)
    sent = [{name for name in names if name.startswith("sent/")} for names in found]
    flying = [names for names, turn in zip(sent, turns, strict=True) if turn[4]]
    if any(names and not turn[4] for names, turn in zip(sent, turns, strict=True)):
        _refuse("an upload is there that has arrived already")
    if any(names != flying[0] or not names for names in flying):
        _refuse(f"the uploads on their way have {sorted(map(sorted, flying))}; each has the same vectors")


def _check_turn(label: str, turn: list[Any], clients: int, round: int) -> None:
    work, version, arrival, done, flying, report, trained = turn
    if not isinstance(work, list) or len(work) != len(Work._fields):
        _refuse(f"the work of {label} is {_shown(work)}; it has {', '.join(Work._fields)}")
    for name, value in zip(Work._fields, work, strict=True):
        if name == "begin":
            _time(f"{name} of {label}", value)
        else:
            _count(f"{name} of {label}", value, clients - 1 if name == "client" else math.inf)
    _count(f"the version of {label}", version, round)
    _time(f"the arrival of {label}", arrival)
    _time(f"the end of {label}", done)
    _count(f"trained_parameters of {label}", trained)
    if not isinstance(flying, bool):
        _refuse(f"whether {label} is on its way is {_shown(flying)}")
    plain = isinstance(report, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in report.values()
    )
    if not plain:
        _refuse(f"the report of {label} is {_shown(report)}; numbers by name are one")
