"""Builds the emulator: the CUDA kernels as a Python module that runs on the host.

The module is compiled by ninja into ``build/emulator-<variant>/``, again when a source, a header or a flag changes.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

__all__ = ["VARIANTS", "CompilerMissing", "build", "load", "sanitizer_environment"]

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "csrc"

COMMON_FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",  # pybind11 requires it
    "-DPFL_EMULATOR",
    "-ffp-contract=off",  # a rounding must not depend on what the compiler happens to fuse
    "-fno-strict-aliasing",  # device code may view the same bytes as float4, uint4 or pairs of halves
    f"-ffile-prefix-map={REPOSITORY}/=",  # messages name files as the repository does
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # `#pragma unroll` is for nvcc
]

VARIANTS = {
    "plain": ["-O2"],
    "sanitized": [
        "-O1",
        "-g1",  # a report needs line numbers, nothing else; full debug information doubles the time to compile
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined,float-cast-overflow",
        "-fno-sanitize=vptr",  # kernels have no virtual functions, and pybind11 has many
        "-fno-sanitize-recover=undefined,float-cast-overflow",
    ],
    # The portable way to switch between threads, which plain replaces on x86-64 by a faster one.
    "ucontext": ["-O2", "-DPFL_EMULATOR_UCONTEXT"],
}

# Two at once: each takes about a gigabyte and CI machines have two cores.
JOBS = 2


class CompilerMissing(RuntimeError):
    """There is no C++ compiler, so the emulator cannot be built here."""


def compiler() -> str:
    """The C++ compiler: ``$CXX``, or g++, or clang++."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    for candidate in candidates:
        if path := shutil.which(candidate):
            return path
    raise CompilerMissing(f"no C++ compiler: tried {', '.join(candidates)}; install g++ or set CXX")


def escape(path: Path) -> str:
    """The path as ninja reads it: space, colon and dollar are its syntax."""
    return re.sub(r"([ :$])", r"$\1", str(path))


def build(variant: str = "plain", verbose: bool = False) -> Path:
    """Brings the module up to date and returns its path."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: choose one of {', '.join(VARIANTS)}")
    cxx = compiler()
    import ninja
    import pybind11

    directory = REPOSITORY / "build" / f"emulator-{variant}"
    module = f"_emulator{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = [*COMMON_FLAGS, *VARIANTS[variant], f"-I{SOURCES}"]
    for path in (pybind11.get_include(), sysconfig.get_path("include")):
        flags += ["-isystem", path]  # not our headers, not our warnings
    sources = sorted((SOURCES / "emulator").glob("*.cpp"))
    objects = [f"{source.stem}.o" for source in sources]
    rules = [
        f"cxx = {cxx}",
        f"flags = {shlex.join(flags).replace('$', '$$')}",
        "rule compile",
        "  command = $cxx $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        "  command = $cxx $flags -shared $in -o $out",
        "  description = link $out",
        *(f"build {obj}: compile {escape(source)}" for obj, source in zip(objects, sources, strict=True)),
        f"build {module}: link {' '.join(objects)}",
        f"default {module}",
        "",
    ]

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:  # two test runs may start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        manifest = directory / "build.ninja"
        text = "\n".join(rules)
        if not manifest.exists() or manifest.read_text() != text:
            manifest.write_text(text)
        command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(directory), "-j", str(JOBS)]
        # The compiler itself must not run under a sanitizer that is preloaded into this process.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        result = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        raise RuntimeError(f"building the {variant} emulator failed:\n{result.stdout}")
    if verbose:
        print(result.stdout, end="")
    return directory / module


def sanitizer_environment() -> dict[str, str]:
    """The environment variables under which Python can load the sanitized variant."""
    libraries = []
    # libstdc++ too: AddressSanitizer intercepts `throw` when it starts, and Python itself does not load libstdc++.
    for name in ("libasan.so", "libstdc++.so"):
        path = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):  # the compiler prints the bare name of a library it does not find
            raise CompilerMissing(f"{compiler()} has no {name}: install the sanitizer runtime")
        libraries.append(path)
    # Python keeps memory until it exits, so leaks cannot be told from what it means to keep.
    return {"LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}


@functools.cache
def load(variant: str = "plain") -> ModuleType:
    """Builds the module if it is out of date and imports it."""
    path = build(variant)
    if variant == "sanitized":
        needed = sanitizer_environment()
        preloaded = os.environ.get("LD_PRELOAD", "")
        # Without them AddressSanitizer ends the process, at the import or at the first exception.
        if not all(library in preloaded for library in needed["LD_PRELOAD"].split(":")):
            settings = " ".join(f"{name}={value}" for name, value in needed.items())
            raise RuntimeError(f"the sanitized emulator needs its runtime preloaded; start Python with {settings}")
    spec = importlib.util.spec_from_file_location("_emulator", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="plain")
    parser.add_argument(
        "--print-environment",
        action="store_true",
        help="print the environment variables that a test run of the sanitized variant needs, and exit",
    )
    arguments = parser.parse_args()
    try:
        if arguments.print_environment:
            for name, value in sanitizer_environment().items():
                print(f"{name}={value}")
        else:
            print(build(arguments.variant, verbose=True))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
