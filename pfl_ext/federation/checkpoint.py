"""The whole state of a run in one safetensors file: tensors, and JSON in its header. No code, nothing unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Checkpoints", "DamagedCheckpoint", "ForeignCheckpoint", "digest", "load", "newest", "save"]

_FORMAT = "pfl_ext checkpoint 1"
_LATE = 60.0  # seconds after which a checkpoint is due however few rounds there were
_NAME = re.compile(r"checkpoint-(\d{8})\.safetensors")


class DamagedCheckpoint(RuntimeError):
    """The file is not what was written."""


class ForeignCheckpoint(RuntimeError):
    """The file belongs to another run."""


def digest(tensor: Tensor) -> str:
    """What tells a tensor's numbers from others."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()


def save(
    folder: Path, step: int, identity: Mapping[str, Any], state: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Write a checkpoint and remove all but the one before it.

    The file appears under its name when it is complete and on the disk; until then the earlier ones are untouched.

    Args:
        folder: where the checkpoints of the run are.
        step: a number that grows from one checkpoint to the next.
        identity: what a run that wants to go on from here must have in common with this one.
        state: everything else that is not a tensor; both as JSON has it.
        tensors: by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = json.dumps(
        {"identity": identity, "state": state, "digests": {name: digest(tensor) for name, tensor in plain.items()}}
    )
    metadata = {
        "format": _FORMAT,
        "content": content,
        "digest": hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
    }
    path = folder / f"checkpoint-{step:08d}.safetensors"
    temporary = path.with_suffix(".partial")
    try:
        save_file(plain, temporary, metadata)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"the checkpoint {path} could not be written ({error}); the earlier ones are as they were. "
            "Make room or give the folder back its permissions, then go on with --resume"
        ) from error
    for old in _all(folder)[2:]:
        old.unlink(missing_ok=True)
    return path


def _all(folder: Path) -> list[Path]:
    """The folder's checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Identity, state and tensors of a checkpoint.

    Raises:
        DamagedCheckpoint: if anything in it is not as it was written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error})") from error
    if metadata.get("format") != _FORMAT:
        raise DamagedCheckpoint(f"{path} is not a checkpoint of this library (its format: {metadata.get('format')})")
    text = metadata.get("content", "")
    if hashlib.blake2b(text.encode(), digest_size=16).hexdigest() != metadata.get("digest"):
        raise DamagedCheckpoint(f"{path}: its header is damaged")
    content = json.loads(text)
    wrong = [
        name for name, known in content["digests"].items() if name not in tensors or digest(tensors[name]) != known
    ]
    if wrong or len(tensors) != len(content["digests"]):
        raise DamagedCheckpoint(f"{path}: {', '.join(wrong[:3]) or 'its list of tensors'} is damaged")
    return content["identity"], content["state"], tensors


def newest(folder: Path, identity: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """State and tensors of the newest good checkpoint, None where there is none at all.

    A damaged one is named in a warning and the one before it is taken.

    Raises:
        ForeignCheckpoint: it is of a run that differs in ``identity``.
        DamagedCheckpoint: there are checkpoints, and none is good.
    """
    paths = _all(folder)
    for path in paths:
        try:
            theirs, state, tensors = load(path)
        except DamagedCheckpoint as error:
            warnings.warn(f"{error}; the checkpoint before it is tried", RuntimeWarning, stacklevel=2)
            continue
        ours = json.loads(json.dumps(identity))
        differing = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
        if differing:
            raise ForeignCheckpoint(
                f"{path} is of another run; they differ in "
                + "; ".join(f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in differing[:4])
                + ". Use the options of that run, or another output folder"
            )
        return state, tensors
    if paths:
        raise DamagedCheckpoint(f"no checkpoint in {folder} is good; begin anew in another folder")
    return None


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are.
        identity: what a run that wants to go on from here must have in common with this one.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """See the class."""
        self.folder, self.identity = folder, identity
        self._saved_at = time.monotonic()

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

    def save(self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write one; see :func:`save`."""
        save(self.folder, step, self.identity, state, tensors)
        self._saved_at = time.monotonic()

    def newest(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """State and tensors of the newest good one; see :func:`newest`."""
        return newest(self.folder, self.identity)
