"""The whole state of a run in a safetensors file: tensors, and JSON in its header. No code, nothing unpickled.

Where clients are in several places, each writes what its clients keep into a shard, a file beside it. The checkpoint
names its shards and their digests, and is written last: until it is there, they count for nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import pfl_ext

from .store import merged

__all__ = ["Checkpoints", "DamagedCheckpoint", "ForeignCheckpoint", "digest", "load", "newest", "save", "write_shard"]

_FORMAT = "pfl_ext checkpoint 3"
_LATE = 60.0  # seconds after which a checkpoint is due however few rounds there were
_NAME = re.compile(r"checkpoint-(\d{8})\.safetensors")
_SHARD = re.compile(r"(checkpoint-\d{8})\.clients-\d+-of-\d+\.safetensors")
_SHARDS = "shards"


class DamagedCheckpoint(RuntimeError):
    """The file is not what was written, or not what a run can go on from."""


class ForeignCheckpoint(RuntimeError):
    """The file belongs to another run, or to another version."""


def digest(tensor: Tensor) -> str:
    """What tells a tensor's numbers from others."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def _described(tensor: Tensor) -> list[Any]:
    """A tensor's type, shape and digest: the same bytes may also be other numbers."""
    return [str(tensor.dtype), list(tensor.shape), digest(tensor)]


def _good(path: Path) -> bool:
    """Whether nothing in a file is damaged."""
    try:
        load(path)
    except (DamagedCheckpoint, ForeignCheckpoint):
        return False
    return True


def save(
    folder: Path,
    step: int,
    identity: Mapping[str, Any],
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shards: Sequence[Path] = (),
    good: Callable[[Path], bool] = _good,
) -> Path:
    """Write a checkpoint, and remove the others but one that is good.

    The file appears under its name when it is complete and on the disk; until then the earlier ones are untouched.

    Args:
        folder: where the checkpoints of the run are.
        step: a number that grows from one checkpoint to the next.
        identity: what a run that wants to go on from here must have in common with this one.
        state: everything else that is not a tensor; both as JSON has it.
        tensors: by name.
        shards: files of :func:`write_shard` in the same folder that belong to it.
        good: whether a checkpoint is, of those that were there before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_stem(step)}.safetensors"
    absent = [shard for shard in shards if not shard.is_file()]
    if absent:
        raise OSError(
            f"{absent[0]} is not there, though another process has written it: all machines must see the folder under "
            "one path. Name one on a file system that they share by --output"
        )
    content = {
        "versions": _versions(),
        "identity": identity,
        "state": state,
        _SHARDS: {shard.name: _seal(_metadata(shard)) for shard in shards},
    }
    try:
        _write(path, content, tensors)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the checkpoint {path} could not be written ({error}); the earlier ones are as they were. "
            "Make room or give the folder back its permissions, then go on with --resume"
        ) from error
    others = [other for other in _all(folder) if other != path]
    second = next((other for other in others if good(other)), None)
    for old in others:
        # A damaged one that is newer stays until the run has passed it: it may be that it could not be read just now.
        if second is not None and old < second:
            old.unlink(missing_ok=True)
    _remove_shards(folder)
    return path


def _stem(step: int) -> str:
    return f"checkpoint-{step:08d}"


def _write(path: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A file of tensors with a header, their digests in it; it appears when it is complete and on the disk."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({**content, "tensors": {name: _described(tensor) for name, tensor in plain.items()}})
    metadata = {
        "format": _FORMAT,
        "content": text,
        "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    }
    temporary = path.with_suffix(".partial")
    try:
        save_file(plain, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError):
        temporary.unlink(missing_ok=True)
        raise


def write_shard(stem: Path, number: int, count: int, tensors: Mapping[str, Tensor]) -> Path:
    """Write what the clients of one place of ``count`` keep; the checkpoint of that stem names it afterwards."""
    path = stem.with_name(f"{stem.name}.clients-{number}-of-{count}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(path, {}, tensors)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path}, a part of a checkpoint, could not be written ({error}); the earlier ones are as they were. "
            "Make room or give the folder back its permissions, then go on with --resume"
        ) from error
    return path


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def _seal(metadata: Mapping[str, str]) -> str:
    """What tells a file's header, and with it everything in the file, from others."""
    return metadata.get("digest", "")


def _remove_shards(folder: Path) -> None:
    """Remove shards that no checkpoint has, or has had when its writer was killed."""
    there = {path.stem for path in _all(folder)}
    for path in folder.iterdir():
        found = _SHARD.fullmatch(path.name)
        if found is not None and found[1] not in there:
            path.unlink(missing_ok=True)


def _versions() -> dict[str, str]:
    """What may change the last bits of a run, or what it means."""
    return {"torch": torch.__version__, "pfl_ext": pfl_ext.__version__}


def _all(folder: Path) -> list[Path]:
    """The folder's checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Identity, state and tensors of a checkpoint.

    Raises:
        DamagedCheckpoint: if anything in it is not as it was written.
        ForeignCheckpoint: it has another format.
    """
    content, tensors = _read(path)
    return content["identity"], content["state"], tensors


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """What the header says, and the tensors, those of the shards among them."""
    content, tensors, _ = _read_file(path)
    parts = ("versions", "identity", "state", _SHARDS)
    if not all(isinstance(content.get(part), dict) for part in parts):
        raise DamagedCheckpoint(f"{path}: its header does not have {', '.join(parts)}")
    found = []
    for name, seal in content[_SHARDS].items():
        shard = path.parent / name
        if _SHARD.fullmatch(name) is None:  # nothing outside the folder is read
            raise DamagedCheckpoint(f"{path}: {name!r} is no name of a part of it")
        _, rows, theirs = _read_file(shard)
        if theirs != seal:
            raise DamagedCheckpoint(f"{shard} is not the part that {path.name} was written with")
        found.append(rows)
    if found:
        if any(rows.keys() != found[0].keys() for rows in found):
            raise DamagedCheckpoint(f"{path}: its parts do not have the same vectors")
        tensors |= {f"clients/{name}": tensor for name, tensor in merged(found).items()}
    return content, tensors


def _read_file(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor], str]:
    """Header, tensors and seal of one file, checked."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, AttributeError) as error:
        # The last four: a type that safetensors knows and this torch does not.
        raise DamagedCheckpoint(f"{path} cannot be read ({error})") from error
    theirs = metadata.get("format")
    if theirs != _FORMAT:
        if str(theirs).startswith(_FORMAT[:-1]):
            raise ForeignCheckpoint(
                f"{path} has the format {theirs!r}, this version of pfl_ext reads {_FORMAT!r}. Go on with the version "
                "that the run was begun with, or begin anew in another folder"
            )
        raise DamagedCheckpoint(f"{path} is not a checkpoint of this library (its format: {theirs})")
    text = metadata.get("content", "")
    if hashlib.blake2b(text.encode(), digest_size=16).hexdigest() != _seal(metadata):
        raise DamagedCheckpoint(f"{path}: its header is damaged")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: its header is not JSON ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("tensors"), dict):
        raise DamagedCheckpoint(f"{path}: its header does not have tensors")
    known = content["tensors"]
    wrong = [name for name in known.keys() | tensors.keys() if name not in known or name not in tensors]
    wrong = wrong or [name for name, tensor in tensors.items() if _described(tensor) != known[name]]
    if wrong:
        raise DamagedCheckpoint(f"{path}: {', '.join(sorted(wrong)[:3])} is damaged")
    return content, tensors, _seal(metadata)


def newest(folder: Path, identity: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """State and tensors of the newest good checkpoint, None where there is none at all.

    A damaged one is named in a warning and the one before it is taken. Another version of torch or of this library is
    named in a warning too.

    Raises:
        ForeignCheckpoint: it is of a run that differs in ``identity``, or has another format.
        DamagedCheckpoint: there are checkpoints, and none is good.
    """
    found = _newest(folder, identity)
    return None if found is None else found[1:]


def _newest(
    folder: Path, identity: Mapping[str, Any], only: Path | None = None, whatever: Collection[str] = ()
) -> tuple[Path, dict[str, Any], dict[str, Tensor]] | None:
    paths = _all(folder) if only is None else [only]
    for path in paths:
        try:
            content, tensors = _read(path)
            if not isinstance(content["state"].get("round"), int):
                raise DamagedCheckpoint(f"{path} does not say after which round it was saved")
        except DamagedCheckpoint as error:
            warnings.warn(f"{error}; the checkpoint before it is tried", RuntimeWarning, stacklevel=3)
            continue
        ours, theirs = json.loads(json.dumps(identity)), content["identity"]
        compared = sorted((ours.keys() | theirs.keys()) - set(whatever))
        differing = [key for key in compared if ours.get(key) != theirs.get(key)]
        if differing:
            raise ForeignCheckpoint(
                f"{path} is of another run; they differ in "
                + "; ".join(
                    f"{key}: {_short(theirs.get(key))} there, {_short(ours.get(key))} here" for key in differing
                )
                + ". Use the options of that run, or another output folder"
            )
        for name, ours_is in _versions().items():
            if (theirs_is := content["versions"].get(name)) != ours_is:
                warnings.warn(
                    f"{path} was written with {name} {theirs_is}, this is {name} {ours_is}: the run goes on, but may "
                    "not be that of one version to the bit",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return path, content["state"], tensors
    if paths:
        raise DamagedCheckpoint(f"no checkpoint in {folder} is good; begin anew in another folder")
    return None


def _short(value: Any) -> str:
    return text if len(text := repr(value)) <= 60 else f"{text[:50]}..."


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are.
        identity: what a run that wants to go on from here must have in common with this one.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder, self.identity = folder, identity
        self._saved_at = time.monotonic()
        self._known: dict[Path, tuple[int, ...]] = {}  # what this process has written or found good, as it was then

    def begin(self) -> None:
        """Make the folder, for a run that begins anew.

        Raises:
            FileExistsError: it has checkpoints already.
            OSError: it cannot be made.
        """
        if _all(self.folder):
            raise FileExistsError(
                f"{self.folder} holds the checkpoints of another run: resume that run, or name another folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    def late(self) -> bool:
        """Whether the last one is more than a minute ago."""
        return time.monotonic() - self._saved_at > _LATE

    def stem(self, step: int) -> Path:
        """What the names of a checkpoint's files begin with."""
        return self.folder / _stem(step)

    def save(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: Sequence[Path] = ()
    ) -> None:
        """Write a checkpoint into the folder; the arguments are those of :func:`save`."""
        self._remember(save(self.folder, step, self.identity, state, tensors, shards, self._is_good))
        self._saved_at = time.monotonic()

    def newest(
        self, only: Path | None = None, whatever: Collection[str] = ()
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """State and tensors of the newest good one, or of that one, whatever some of the identity are there.

        See :func:`newest`.
        """
        found = _newest(self.folder, self.identity, only, whatever)
        if found is None:
            return None
        self._remember(found[0])
        return found[1:]

    def _remember(self, path: Path) -> None:
        self._known = {known: stamp for known, stamp in self._known.items() if known.exists()} | {path: _stamp(path)}

    def _is_good(self, path: Path) -> bool:
        """Whether a file is good; one that this process knows is not read again."""
        if self._known.get(path) != _stamp(path):
            if not _good(path):
                return False
            self._remember(path)
        return True


def _stamp(path: Path) -> tuple[int, ...]:
    """What tells whether a checkpoint's files were written to since."""
    every = [path, *sorted(path.parent.glob(f"{path.stem}.clients-*"))]
    return tuple(number for file in every for number in (file.stat().st_mtime_ns, file.stat().st_size))
