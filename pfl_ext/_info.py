"""What ``pfl-ext info`` prints: versions, how the libraries were built, and which kernel serves which op."""

from __future__ import annotations

import os
import platform

import torch

from . import __version__, _native
from .ops._declare import OPS

__all__ = ["report"]


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [title, *(f"  {name:<{width}}  {value}" for name, value in rows), ""]


def _served_by(device: str) -> tuple[str, str]:
    """The words for a native kernel and for the default, with the reason."""
    library = _native.status()[device]
    if library.loaded:
        return f"native ({library.name})", "plain torch: no native kernel of this op"
    return "native", f"plain torch: {library.reason}"


def report() -> str:
    """The whole text that ``pfl-ext info`` prints."""
    build = _native.build_info()
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    lines = _section(
        "versions",
        [
            ("pfl_ext", __version__),
            ("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"),
            ("python", f"{platform.python_version()} on {platform.platform()}"),
            ("GPUs", ", ".join(gpus) or "none visible"),
        ],
    )
    if build:
        cuda = build["cuda"]
        rows = [
            (
                "built",
                f"{build['built']} against torch {build['torch']}, stable ABI of {build['torch_target']} and later",
            ),
            ("C++ compiler", build["cxx"]),
            ("C++ flags", build["cxx_flags"]),
            *((f"  {isa}", flags or "(none more)") for isa, flags in build["isa_flags"].items()),
        ]
        if cuda:
            rows += [("CUDA", f"{cuda['version']} for {cuda['architectures']}"), ("nvcc flags", cuda["nvcc_flags"])]
        else:
            rows += [("CUDA", f"not built: {build['cuda_reason']}")]
    else:
        rows = [("built", "nothing: installed without native libraries")]
    lines += _section("build", rows)

    rows = []
    for device, library in _native.status().items():
        outdated = ", built from other sources than those in csrc" if library.outdated else ""
        rows.append((library.name, f"serves {device}{outdated}" if library.loaded else f"not in use: {library.reason}"))
    if _native.isa():
        forced = " (PFL_EXT_ISA)" if os.environ.get("PFL_EXT_ISA") else " (the best of this machine)"
        rows.append(("instruction set", f"{_native.isa()}{forced}; available: {', '.join(_native.available_isas())}"))
        rows.append(("threads", str(torch.get_num_threads())))
    lines += _section("libraries", rows)

    width = max(map(len, OPS))
    lines.append("ops")
    for device in _native.status():
        native, default = _served_by(device)
        for name, op in OPS.items():
            served = native if op.has_kernel(device.upper()) else default
            if device in op.plain_on:
                served = f"plain torch: {op.plain_on[device]}"
            lines.append(f"  {device:<4}  {name:<{width}}  {served}")
    return "\n".join(lines)
