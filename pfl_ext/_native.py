"""Loads the compiled libraries, and knows why one is missing.

``_C`` holds the CPU kernels, ``_C_cuda`` the CUDA ones. Neither is needed: an op without a native kernel runs its
plain-torch default. ``status()`` says what was loaded; one warning is given where something that belongs to this
installation could not be.

A library counts as loaded when it was built for the schemas that the Python code declares and registers a kernel for
each op that is meant to have one. In a source tree, one that is older than ``csrc`` is used, with a warning.

Environment variables, read at import:

* ``PFL_EXT_NATIVE=0``: load no native library, silently. Everything runs on the plain-torch default.
* ``PFL_EXT_ISA=baseline|avx2|avx512``: use the CPU kernels of that instruction set instead of the machine's best.
"""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ._build_record import schemas_digest, sources_digest
from .ops._declare import OPS

__all__ = ["ISAS", "Library", "available_isas", "build_info", "isa", "load", "set_isa", "status"]

ISAS = ("baseline", "avx2", "avx512")

_FOLDER = Path(__file__).parent


class Library:
    """A native library: whether it is in use, and the reason in words if not."""

    # Not a dataclass: making one takes 0.3 ms of every import.
    def __init__(self, name: str) -> None:
        self.name = name
        self.loaded = False
        self.reason = "not loaded yet"
        self.outdated = False
        """In use, but built from other sources than the ``csrc`` beside it."""
        self.handle: ctypes.CDLL | None = None


class _BadEnvironment(SystemExit, ValueError):
    """A variable that cannot be met: a program ends with this one line, and who imports in a ``try`` can catch it."""


_cpu = Library("_C")
_cuda = Library("_C_cuda")


def status() -> dict[str, Library]:
    """Both libraries by the device they serve."""
    return {"cpu": _cpu, "cuda": _cuda}


def build_info() -> dict[str, Any]:
    """What the libraries were built with; empty where nothing was built."""
    try:
        info: dict[str, Any] = json.loads((_FOLDER / "_build.json").read_text())
    except FileNotFoundError:
        return {}
    return info


def _open(library: Library, device: str, info: dict[str, Any]) -> None:
    path = _FOLDER / f"{library.name}.abi3.so"
    if not path.exists():
        library.reason = f"{path.name} is not part of this installation"
        return
    # Before it is opened: a kernel that is registered stays, and one for another schema reads its arguments wrongly.
    if info.get("schemas") != schemas_digest(op.schema for op in OPS.values()):
        library.reason = f"{path.name} {_age(info)} was not built for the ops that this version of pfl_ext declares"
        return
    try:
        torch.ops.load_library(str(path))
        handle = ctypes.CDLL(str(path))
    except (OSError, RuntimeError) as error:
        library.reason = f"{path.name} does not load with torch {torch.__version__}: {error}"
        return
    meant = [op for op in OPS.values() if device not in op.plain_on]
    missing = [op.name for op in meant if not op.has_kernel(device.upper())]
    if missing:
        library.reason = (
            f"{path.name} has no kernel for {len(missing)} of {len(meant)} ops ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}): it is empty, incomplete, or not pfl_ext's"
        )
        return
    library.handle, library.loaded, library.reason = handle, True, ""
    if (tree := _tree()) is not None:
        now = sources_digest(tree / "csrc", library.name)
        library.outdated = info.get("sources", {}).get(library.name) != now


def _tree() -> Path | None:
    """The source tree that the package is used from, if it is."""
    above = _FOLDER.resolve().parent
    return above if (above / "csrc").is_dir() and (above / "setup.py").is_file() else None


def _build_command() -> str:
    import shlex  # for a warning only

    tree = _tree()
    what = (
        "--force-reinstall pfl_ext (or the path of its source tree)" if tree is None else f"-e {shlex.quote(str(tree))}"
    )
    return f"pip install --no-build-isolation --no-deps {what}"


def _age(info: dict[str, Any]) -> str:
    return f"of {info['built']}" if "built" in info else "of an unknown age"


def _warn_outdated(libraries: list[Library], info: dict[str, Any]) -> None:
    warnings.warn(
        f"pfl_ext uses {' and '.join(library.name for library in libraries)} {_age(info)}, built from other sources "
        f"than those in {_tree()}/csrc: results are those of the older code. To build anew: {_build_command()}",
        RuntimeWarning,
        stacklevel=4,
    )


def _warn_default_on(devices: str, library: Library) -> None:
    warnings.warn(
        f"pfl_ext runs its plain-torch default on {devices}, which is correct but slow: {library.reason}. "
        f"To build the library: {_build_command()}. To run without it and without this warning: PFL_EXT_NATIVE=0.",
        RuntimeWarning,
        stacklevel=4,
    )


def load() -> None:
    """Load what there is. Called once, by ``import pfl_ext``, after the ops are declared."""
    if os.environ.get("PFL_EXT_NATIVE", "1") == "0":
        _cpu.reason = _cuda.reason = "PFL_EXT_NATIVE=0"
        return
    info = build_info()
    _open(_cpu, "cpu", info)
    if not _cpu.loaded:
        _cuda.reason = "the CPU library is not in use"
        _warn_default_on("all devices", _cpu)
        return
    if wanted := os.environ.get("PFL_EXT_ISA"):
        try:
            set_isa(wanted)
        except ValueError as error:
            raise _BadEnvironment(f"PFL_EXT_ISA: {error}") from None

    built = info.get("cuda")
    if built is None:
        _cuda.reason = f"not built: {info.get('cuda_reason') or 'no build information'}"
    elif torch.version.cuda is None:
        _cuda.reason = f"built for CUDA {built['version']}, and torch {torch.__version__} is a build without CUDA"
    elif torch.version.cuda.split(".")[0] != built["version"].split(".")[0]:
        # The stable ABI spans torch releases, not CUDA majors.
        _cuda.reason = f"built for CUDA {built['version']}, and torch {torch.__version__} has CUDA {torch.version.cuda}"
        _warn_default_on("CUDA devices", _cuda)
    else:
        _open(_cuda, "cuda", info)
        if not _cuda.loaded:
            _warn_default_on("CUDA devices", _cuda)
    if outdated := [library for library in (_cpu, _cuda) if library.outdated]:
        _warn_outdated(outdated, info)


def isa() -> str | None:
    """The instruction set in use, or None without a CPU library."""
    if _cpu.handle is None:
        return None
    _cpu.handle.pfl_ext_isa.restype = ctypes.c_char_p
    name: bytes = _cpu.handle.pfl_ext_isa()
    return name.decode()


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this machine has and the library was built for."""
    handle = _cpu.handle
    if handle is None:
        return ()
    return tuple(name for name in ISAS if handle.pfl_ext_has_isa(name.encode()))


def set_isa(name: str) -> None:
    """Use the CPU kernels of one instruction set from now on, in the whole process."""
    if _cpu.handle is None:
        raise RuntimeError(f"no instruction set can be chosen: {_cpu.reason}")
    if name not in available_isas():
        raise ValueError(
            f"instruction set {name!r} is not to be had here; this machine has {', '.join(available_isas())}"
        )
    _cpu.handle.pfl_ext_set_isa(name.encode())
