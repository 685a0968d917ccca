"""Cases of files that were tampered with: checkpoints, partitions, NumPy archives, TOML configurations.

A case names an original and a list of edits. The original is written anew, edited, and read as a user would; what may
happen is that it is read as it was, that an edit made another good file of it, or that it ends in one clear error.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import json
import math
import os
import random
import resource
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from known import KNOWN_FILES, known

from pfl_ext import cli, data
from pfl_ext.commands import compare as compare_command
from pfl_ext.commands import run as run_command
from pfl_ext.commands import sweep as sweep_command
from pfl_ext.data import Partition
from pfl_ext.federation import DamagedCheckpoint, ForeignCheckpoint, checkpoint

__all__ = ["FAMILIES", "draw", "judge", "prepare"]

_WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    2**40,
    2**70,
    -(2**63),
    1e308,
    1e-320,
    "",
    "text",
    "../..",
    [],
    [1],
    {},
    {"a": 1},
    [[]],
]
_IDENTITY = {"method": "FedAvg", "seed": 0}

# A file that asks for a tebibyte is to be refused, not to be served by a machine that has it.
_LIMIT = 16 * 2**30

# Where the files of this process are, and a folder that code of a file would make: see prepare().
_FOLDER = Path()
_CANARY = Path()


# ---- edits -----------------------------------------------------------------------------------------------------------


def _draw_bytes(choice: random.Random) -> list[dict[str, Any]]:
    """Edits of bytes; places are parts of the file's length."""
    kind = choice.choice(["flip", "flip", "flip", "truncate", "grow", "zero", "repeat", "head", "all"])
    if kind == "flip":
        # Most files are mostly numbers: half of the flips go to the first bytes, where the structure is.
        reach = 1.0 if choice.random() < 0.5 else 0.05
        return [
            {"kind": kind, "at": choice.random() * reach, "bit": choice.randrange(8)}
            for _ in range(choice.choice([1, 1, 2, 9]))
        ]
    return [
        {"kind": kind, "at": choice.random(), "count": choice.choice([1, 7, 64, 4096]), "byte": choice.randrange(256)}
    ]


def _edit_bytes(content: bytes, edit: dict[str, Any]) -> bytes:
    place = min(int(edit["at"] * len(content)), max(len(content) - 1, 0))
    changed = bytearray(content)
    if edit["kind"] == "flip":
        if content:
            changed[place] ^= 1 << edit["bit"]
    elif edit["kind"] == "truncate":
        del changed[place:]
    elif edit["kind"] == "grow":
        changed[place:place] = bytes([edit["byte"]]) * edit["count"]
    elif edit["kind"] == "zero":
        end = min(place + edit["count"], len(changed))
        changed[place:end] = bytes(end - place)
    elif edit["kind"] == "repeat":
        changed += content[place:]
    elif edit["kind"] == "head":
        changed[:8] = bytes([edit["byte"]]) * 8
    elif edit["kind"] == "all":
        return bytes([edit["byte"]]) * edit["count"]
    return bytes(changed)


def _draw_header(choice: random.Random) -> list[dict[str, Any]]:
    kind = choice.choice(
        ["dtype", "shape", "offsets", "name", "missing", "metadata", "deep", "twice", "length", "extra"]
    )
    return [
        {
            "kind": f"header {kind}",
            "pick": choice.random(),
            "wrong": choice.randrange(len(_WRONG)),
            "number": choice.choice([0, 1, -1, 2**31, 2**62, 3]),
        }
    ]


def _edit_safetensors(content: bytes, edit: dict[str, Any]) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = sorted(name for name in header if name != "__metadata__")
    name = names[int(edit["pick"] * len(names))]
    entry, wrong, number = header[name], _WRONG[edit["wrong"]], edit["number"]
    what = edit["kind"].removeprefix("header ")
    if what == "dtype":
        dtypes = ["F32", "I32", "F64", "I64", "U8", "BOOL", "F16", "BF16", "X9", "F8_E4M3", "C64"]
        entry["dtype"] = dtypes[edit["wrong"] % len(dtypes)]
    elif what == "shape":
        entry["shape"] = wrong if edit["pick"] < 0.5 else [*entry["shape"], number]
    elif what == "offsets":
        entry["data_offsets"] = (
            wrong if edit["pick"] < 0.5 else [entry["data_offsets"][0], entry["data_offsets"][1] + number]
        )
    elif what == "name":
        header["another"] = header.pop(name)
    elif what == "missing":
        del header[name]
    elif what == "metadata":
        metadata = header.get("__metadata__", {})
        keys = sorted(metadata)
        key = keys[int(edit["pick"] * len(keys))] if keys else "x"
        metadata[key] = wrong if edit["number"] > 2 else "text" if edit["number"] else ""
    elif what == "extra":
        header["extra"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(body), len(body)]}
    text = json.dumps(header)
    if what == "deep":
        text = text[:-1] + ', "deep": ' + "[" * 5000 + "]" * 5000 + "}"
    if what == "twice":
        text = text[:-1] + f', "{name}": {json.dumps(entry)}}}'
    encoded = text.encode()
    stated = len(encoded) + (number if what == "length" else 0)
    return struct.pack("<Q", stated % 2**64) + encoded + body


def _edited(content: bytes, edits: list[dict[str, Any]]) -> bytes:
    for edit in edits:
        content = (_edit_safetensors if edit["kind"].startswith("header ") else _edit_bytes)(content, edit)
    return content


def _places(value: Any, path: list[Any]) -> list[list[Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([path] if path else []) + [found for key, x in inner for found in _places(x, [*path, key])]


def _swap(value: Any, pick: float, wrong: Any) -> Any:
    """The same value with something in it replaced, or removed where ``wrong`` is None."""
    places = _places(value, [])
    if not places:
        return wrong
    path = places[int(pick * len(places))]
    changed = copy.deepcopy(value)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if wrong is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = wrong
    return changed


# ---- how it may end --------------------------------------------------------------------------------------------------


def _error(error: BaseException, accepted: tuple[type[BaseException], ...]) -> str | None:
    if not isinstance(error, accepted):
        return f"ended in {type(error).__name__}: {str(error)[:300]}"
    if not str(error).strip():
        return f"ended in a {type(error).__name__} without a word"
    return None


def _command(words: list[str]) -> str | None:
    """What is wrong with how a command ended: no traceback, a status, one line where it is not 0."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main(words)
    except BaseException as error:
        return f"the command ended in {type(error).__name__}: {str(error)[:300]}"
    said = [line for line in err.getvalue().splitlines() if line.startswith("pfl-ext")]
    if status not in (0, 1, 2) or (status and len(err.getvalue().strip().splitlines()) != 1) or (status and not said):
        return f"the command ended with {status} and said {err.getvalue()[-600:]!r}"
    return None


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- checkpoints -----------------------------------------------------------------------------------------------------

_RUN = [
    "--data",
    "digits",
    "--clients",
    "3",
    "--lr",
    "0.1",
    "--local-epochs",
    "1",
    "--quiet",
    "--no-plots",
    "--threads",
    "1",
]


def _draw_checkpoint(choice: random.Random) -> dict[str, Any]:
    if choice.random() < 0.2:
        part = choice.choice(["state", "state", "state", "identity", "tensors"])
        how = choice.choice(["dtype", "shape", "missing", "nan", "extra"])
        return {"forged": part, "how": how, "pick": choice.random(), "wrong": choice.randrange(len(_WRONG))}
    return {"edits": _draw_header(choice) if choice.random() < 0.4 else _draw_bytes(choice)}


_finished: Path | None = None


def _finished_run() -> Path:
    """A run of two rounds, made once a process."""
    global _finished
    if _finished is None:
        folder = _FOLDER / "finished"
        wrong = _command(["run", "fedavg", *_RUN, "--rounds", "2", "--checkpoint-every", "1", "--output", str(folder)])
        if wrong:
            raise RuntimeError(f"the original run failed: {wrong}")
        _finished = folder
    return _finished


def _forge(case: dict[str, Any], identity: Any, state: Any, tensors: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    wrong = _WRONG[case["wrong"]]
    if case["forged"] == "identity":
        return _swap(identity, case["pick"], wrong), state, tensors
    if case["forged"] == "state":
        return identity, _swap(state, case["pick"], wrong), tensors
    name = sorted(tensors)[int(case["pick"] * len(tensors))]
    x, changed = tensors[name], dict(tensors)
    if case["how"] == "dtype":
        changed[name] = x.to(torch.int32 if x.is_floating_point() else torch.float32)
    elif case["how"] == "shape":
        changed[name] = torch.cat([x.reshape(-1), x.reshape(-1)[:1]])
    elif case["how"] == "missing":
        del changed[name]
    elif case["how"] == "nan":
        changed[name] = (
            torch.full_like(x, math.nan) if x.is_floating_point() else x - 2**40 if x.dtype == torch.int64 else x
        )
    else:
        changed["another"] = x.clone()
    return identity, state, changed


def _judge_checkpoint(case: dict[str, Any], folder: Path) -> str | None:
    if "forged" in case:
        run = folder / "run"
        shutil.copytree(_finished_run(), run)
        last = sorted((run / "checkpoints").glob("*.safetensors"))[-1]
        step = int(last.stem.split("-")[1])
        try:
            forged = _forge(case, *checkpoint.load(last))
            checkpoint.save(run / "checkpoints", step, *forged)
        except (ValueError, TypeError, AttributeError):
            return None  # what cannot even be written
        before = _files(run)
        wrong = _command(
            ["run", "fedavg", *_RUN, "--rounds", "3", "--checkpoint-every", "1", "--output", str(run), "--resume"]
        )
        lost = [name for name in before if "checkpoint" not in name and not (run / name).exists()]
        return wrong or (f"lost {lost}" if lost else None)
    tensors = {"server/model": torch.arange(40.0).view(8, 5), "numbers": torch.arange(7), "none": torch.empty(0, 3)}
    state = {"round": 1, "history": [1.5, None, "x"], "clients": {"0": {"seen": 3}}}
    checkpoint.save(folder, 1, _IDENTITY, state, tensors)
    second = {name: x + 1 for name, x in tensors.items()}
    path = checkpoint.save(folder, 2, _IDENTITY, {**state, "round": 2}, second)
    path.write_bytes(_edited(path.read_bytes(), case["edits"]))
    before = _files(folder)
    try:
        found = checkpoint.newest(folder, _IDENTITY)
    except Exception as error:
        return _error(error, (DamagedCheckpoint, ForeignCheckpoint, OSError)) or (
            "the good checkpoint before it was not taken" if isinstance(error, DamagedCheckpoint) else None
        )
    if _files(folder) != before:
        return "reading changed the folder"
    if found is None:
        return "the checkpoints were not seen"
    for known_state, known_tensors in ((state, tensors), ({**state, "round": 2}, second)):
        same = found[0] == known_state and found[1].keys() == known_tensors.keys()
        if same and all(
            found[1][name].dtype == x.dtype and torch.equal(found[1][name], x) for name, x in known_tensors.items()
        ):
            return None
    return "neither of the two checkpoints was read, but something else"


# ---- partitions ------------------------------------------------------------------------------------------------------


def _draw_partition(choice: random.Random) -> dict[str, Any]:
    return {"edits": _draw_header(choice) if choice.random() < 0.5 else _draw_bytes(choice)}


def _judge_partition(case: dict[str, Any], folder: Path) -> str | None:
    samples = torch.arange(60)
    parts = [tuple(samples[start : start + 20].split(5)) for start in (0, 20, 40)]
    partition = Partition(*parts, torch.arange(60, 65), torch.arange(65, 70), {"dataset": "digits", "seed": 0})
    path = partition.save(folder / "partition.safetensors")
    path.write_bytes(_edited(path.read_bytes(), case["edits"]))
    before = _files(folder)
    try:
        found = Partition.load(path)
    except Exception as error:
        return _error(error, (ValueError, OSError))
    if _files(folder) != before:
        return "reading changed the folder"
    # The fingerprint is of the indices; what describes them is for people.
    return None if found.fingerprint == partition.fingerprint else "another partition was read"


# ---- NumPy archives --------------------------------------------------------------------------------------------------


class _Code:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (os.mkdir, (str(_CANARY),))


_SWAPS = (
    "object",
    "structured",
    "empty",
    "text",
    "complex",
    "large label",
    "negative label",
    "nan",
    "rank",
    "npy",
    "lengths",
    "nothing",
    "npy header",
    "pickle",
)


def _draw_npz(choice: random.Random) -> dict[str, Any]:
    case: dict[str, Any] = {
        "compressed": choice.random() < 0.5,
        "layout": choice.choice(["train", "domains", "labels"]),
    }
    if choice.random() < 0.5:
        return {**case, "edits": _draw_bytes(choice)}
    return {**case, "swap": choice.choice(_SWAPS), "pick": choice.random(), "wrong": choice.randrange(len(_WRONG))}


def _arrays(layout: str) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (24, 5, 5), dtype=np.uint8), generator.integers(0, 3, 24)
    if layout == "domains":
        return {"x_a": x, "y_a": y, "x_b": x[:7], "y_b": y[:7], "domains": np.array(["a", "b"])}
    if layout == "labels":
        return {"x_train": x.astype(np.float32), "y_train": (x[:, 0, :4] > 99).astype(np.uint8)}
    return {"x_train": x, "y_train": y, "x_test": x[:6], "y_test": y[:6], "classes": np.array(["p", "q", "r"])}


def _swapped(arrays: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    name = list(arrays)[int(case["pick"] * len(arrays))]
    x, swap = arrays[name], case["swap"]
    if swap == "object":
        arrays[name] = np.array([_Code(), None], dtype=object)
    elif swap == "structured":
        arrays[name] = np.zeros(len(x), dtype=[("a", "i4"), ("b", "f8")])
    elif swap == "empty":
        arrays[name] = x[:0]
    elif swap == "text":
        arrays[name] = np.array(["text"] * len(x))
    elif swap == "complex":
        arrays[name] = np.zeros(x.shape, dtype=np.complex64)
    elif swap == "large label":
        arrays[name] = np.full(len(x), [2**40, 2**62, 10**6, 2**31][case["wrong"] % 4])
    elif swap == "negative label":
        arrays[name] = np.full(len(x), -1)
    elif swap == "nan":
        arrays[name] = np.full(x.shape, [np.nan, np.inf][case["wrong"] % 2])
    elif swap == "rank":
        arrays[name] = np.zeros([(), (3,), (1, 1, 1, 1, 1, 1), (24, 0), (2, 3)][case["wrong"] % 5], dtype=np.float32)
    elif swap == "lengths":
        arrays[name] = x[:-1]
    elif swap == "nothing":
        return {}
    return arrays


def _edit_npy_header(path: Path, case: dict[str, Any]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = sorted(members)[int(case["pick"] * len(members))]
    content = members[name]
    shapes = [
        "(1099511627776,)",
        "(-1,)",
        "(24, 5, 5, 999999)",
        "((),)",
        "24",
        "__import__('os')",
        "(" * 300 + ")" * 300,
    ]
    types = ["'|O'", "'<f4'", "'<c16'", "'<U9999999'", "'|V99'", "'bad'", "None"]
    begin = content.index(b"{")
    end = content.index(b"}", begin) + 1
    header = f"{{'descr': {types[case['wrong'] % 7]}, 'fortran_order': False, 'shape': {shapes[case['wrong'] % 6]}, }}"
    encoded = header.encode() + b" " * 10 + b"\n"
    members[name] = content[:8] + struct.pack("<H", len(encoded)) + encoded + content[end:]
    with zipfile.ZipFile(path, "w") as archive:
        for member, value in members.items():
            archive.writestr(member, value)


def _judge_npz(case: dict[str, Any], folder: Path) -> str | None:
    path, arrays = folder / "data.npz", _arrays(case["layout"])
    write = np.savez_compressed if case["compressed"] else np.savez
    write(path, **arrays)
    original = data.load(f"npz:{path}").fingerprint
    swap = case.get("swap")
    if swap == "npy":
        with path.open("wb") as file:
            np.save(file, arrays[next(iter(arrays))])
    elif swap == "pickle":
        with path.open("wb") as file:
            np.save(file, np.array([_Code()], dtype=object))
    elif swap == "npy header":
        _edit_npy_header(path, case)
    elif swap is not None:
        write(path, **_swapped(arrays, case))
    else:
        path.write_bytes(_edited(path.read_bytes(), case["edits"]))
    try:
        found = data.load(f"npz:{path}")
    except Exception as error:
        return _error(error, (ValueError, OSError))
    if swap is None and found.fingerprint != original:
        return "damaged bytes were read as other data"
    return None


# ---- configurations --------------------------------------------------------------------------------------------------

_CONFIGURATION: dict[str, Any] = {
    "methods": ["fedavg", "ditto"],
    "seeds": [0, 1],
    "metric": "accuracy",
    "federation": {"rounds": 2, "lr": 0.1, "seed": 0, "threads": 1, "device": "cpu", "batch_size": 10},
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.5},
    "method": {"name": "fedavg"},
    "sweep": {"federation.lr": [0.1, 0.2]},
}


def _draw_toml(choice: random.Random) -> dict[str, Any]:
    command = choice.choice(["run", "data", "compare", "sweep"])
    if choice.random() < 0.35:
        return {"command": command, "edits": _draw_bytes(choice)}
    if choice.random() < 0.1:
        where = choice.choice(
            [["method", "name"], ["data", "name"], ["partition", "name"], ["federation", "network"], ["methods"]]
        )
        return {"command": command, "code": where}
    return {
        "command": command,
        "swaps": [
            {"pick": choice.random(), "wrong": choice.randrange(len(_WRONG))} for _ in range(choice.choice([1, 1, 2]))
        ],
    }


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _written(tables: Any) -> str:
    plain = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{key} = {_toml(value)}" for key, value in plain.items()]
    for key, table in tables.items():
        if isinstance(table, dict):
            lines += [f"[{key}]", *(f"{json.dumps(name)} = {_toml(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _judge_toml(case: dict[str, Any], folder: Path) -> str | None:
    tables = copy.deepcopy(_CONFIGURATION)
    command = case["command"]
    if command != "sweep":
        del tables["sweep"]
    if command == "run":
        del tables["methods"], tables["seeds"], tables["metric"]
    if "code" in case:
        gift = folder / "gift.py"
        gift.write_text(f"import os\nos.mkdir({str(_CANARY)!r})\nclass Gift: pass\n", encoding="utf-8")
        *path, last = case["code"]
        holder = tables
        for key in path:
            holder = holder[key]
        holder[last] = [f"{gift}:Gift"] if last == "methods" else f"{gift}:Gift"
    for swap in case.get("swaps", []):
        tables = _swap(tables, swap["pick"], _WRONG[swap["wrong"]])
    path = folder / "config.toml"
    path.write_bytes(_edited(_written(tables).encode(), case.get("edits", [])))
    before = _files(folder)
    words = [command, "--config", str(path)]
    if command != "data":
        words += ["--output", str(folder / "results")]
    wrong = _command(words)
    lost = [name for name, content in before.items() if _files(folder).get(name) != content]
    return wrong or (f"changed {lost}" if lost else None)


# ---- all -------------------------------------------------------------------------------------------------------------

FAMILIES: dict[str, tuple[Callable[[random.Random], dict[str, Any]], Callable[[dict[str, Any], Path], str | None]]] = {
    "checkpoint": (_draw_checkpoint, _judge_checkpoint),
    "partition": (_draw_partition, _judge_partition),
    "npz": (_draw_npz, _judge_npz),
    "toml": (_draw_toml, _judge_toml),
}


def prepare() -> None:
    """What a child does first."""
    global _FOLDER, _CANARY
    _FOLDER = Path(tempfile.mkdtemp(prefix="pfl-ext-fuzz-files-"))
    _CANARY = _FOLDER / "code was run"
    atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
    resource.setrlimit(resource.RLIMIT_AS, (_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
    # Configurations are read and checked, not run: an edit may ask for a million rounds.
    compare_command.execute = sweep_command.execute = lambda request: 0
    execute = run_command.execute
    run_command.execute = lambda request: execute(request) if request.output.quiet else 0


def draw(seed: int, number: int) -> dict[str, Any]:
    """Case ``number`` of a seed."""
    choice = random.Random(f"{seed}:{number}")
    family = sorted(FAMILIES)[number % len(FAMILIES)]
    return {"family": family, "case": FAMILIES[family][0](choice)}


def judge(case: dict[str, Any]) -> str | None:
    """Read the file of a case. None if all is well, ``known: ...`` if it was left out, else what is wrong."""
    if fault := known(case, "", KNOWN_FILES):
        return f"known: {fault}"
    folder = Path(tempfile.mkdtemp(dir=_FOLDER))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            finding = FAMILIES[case["family"]][1](case["case"], folder)
        if _CANARY.exists():
            _CANARY.rmdir()
            finding = "code of the file was run"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if finding is not None and (fault := known(case, finding, KNOWN_FILES)):
        return f"known: {fault}"
    return finding
