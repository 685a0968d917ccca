"""Builds the native libraries: ``pfl_ext/_C`` (CPU) and, where torch has CUDA and an nvcc fits it, ``pfl_ext/_C_cuda``.

What is set here by environment variables:

=======================  =======================================================================================
PFL_EXT_CUDA             ``auto`` (default) builds the CUDA library where it can and says why where it cannot;
                         ``1`` fails where it cannot; ``0`` never builds it
PFL_EXT_NATIVE           ``0`` installs without any native library: everything runs on the plain-torch default
PFL_EXT_CXX_FLAGS        more flags for the C++ compiler of ``_C``, after ours and at the link too: a sanitizer's, say
PFL_EXT_NVCC_FLAGS       more flags for nvcc
TORCH_CUDA_ARCH_LIST     CUDA architectures, as for every torch extension; default ``DEFAULT_CUDA_ARCHS`` below
MAX_JOBS                 compilers at once; default: as many as cores and memory allow
CXX, CUDA_HOME           the C++ compiler; the CUDA toolkit
=======================  =======================================================================================

torch's own extension helper is not used: it gives all sources of a library the same flags (ours differ by instruction
set), takes the folder above a wrapper script ``nvcc`` for the toolkit, and fails with an IndexError on a machine
without a GPU and an architecture list.
"""

from __future__ import annotations

import datetime
import importlib.util
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

DEFAULT_CUDA_ARCHS = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
# Kernel arguments of 32 KB, on which the list kernels rely, came with CUDA 12.1.
OLDEST_CUDA = (12, 1)
# The largest process on our largest files takes 0.5 GiB under nvcc and 0.4 GiB under g++; with room for larger ones.
GIB_PER_JOB = 1.5
USUAL_CUDA = Path("/usr/local/cuda")
# The oldest torch whose stable ABI the library uses: 2.10 (one byte each for major and minor).
TORCH_TARGET = "0x020a000000000000"

COMMON_FLAGS = ["-std=c++20", "-O3", f"-I{CSRC}"]
# -ffp-contract=off and nvcc's -fmad=false: a product is rounded before it is added, on every instruction set and on
# the GPU, so that element-wise ops give the same bits everywhere. They are bound by memory: it costs nothing.
# -fno-math-errno, -fno-trapping-math: nobody reads errno or the exception flags, and without these two a loop with a
# square root or a condition around a division is not vectorised. No result depends on them.
CXX_FLAGS = [
    *(*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
NVCC_FLAGS = [*COMMON_FLAGS, "-fmad=false", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]
# A function that no source defines is an error of the link and not of the first call.
LINK_FLAGS = ["-Wl,--no-undefined"] if platform.system() == "Linux" else []
STABLE_ABI_FLAGS = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]

if platform.machine() in ("x86_64", "AMD64"):
    ISA_FLAGS = {
        "baseline": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
        "avx512": [
            *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd"),
            *("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mprefer-vector-width=512"),
        ],
    }
else:
    ISA_FLAGS = {"baseline": []}
# Kernels that wait for memory. From the third-level cache on, reading by 64 bytes is 13 % slower than by 32 on an
# AMD EPYC of the Zen 4 kind, which halves such an instruction anyway; from the nearer caches it is 3 % faster.
WAITING_FOR_MEMORY = {"averaging", "proximal", "sharpness"}
SHORTER_VECTORS = {"avx512": ["-mprefer-vector-width=256"]}


def environment_choice(name: str, choices: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name, default)
    if value not in choices:
        raise SystemExit(f"{name}={value!r} is not accepted; use one of {', '.join(choices)}")
    return value


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def find_nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return str(Path(home) / "bin" / "nvcc")
    if on_path := shutil.which("nvcc"):
        return on_path
    usual = USUAL_CUDA / "bin" / "nvcc"
    return str(usual) if usual.is_file() else None


class CudaToolkit:
    """An nvcc and its toolkit's folder, asked of nvcc itself: the one on PATH may be a script that calls another."""

    def __init__(self, nvcc: str) -> None:
        self.nvcc = nvcc
        release = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version"))
        if release is None:
            raise RuntimeError(f"{nvcc} --version names no release")
        self.version = (int(release[1]), int(release[2]))
        top = re.search(r"^#\$ TOP=(.+)$", output_of(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
        if top is None:
            raise RuntimeError(f"{nvcc} --dryrun names no toolkit folder")
        self.root = Path(top[1].strip()).resolve()
        folders = [self.root / "lib64", self.root / "lib", *self.root.glob("targets/*/lib")]
        # PyPI's packages of the toolkit (docs/install.md) have the library under the name that programs load alone.
        names = ("libcudart.so", f"libcudart.so.{self.version[0]}")
        self.cudart = next((f / name for f in folders for name in names if (f / name).exists()), None)

    @property
    def architectures(self) -> set[str]:
        listed = output_of(self.nvcc, "--list-gpu-arch")
        return {f"{int(number) // 10}.{int(number) % 10}" for number in re.findall(r"compute_(\d+)\b", listed)}


def decide_cuda(torch_cuda: str | None) -> tuple[CudaToolkit | None, str]:
    """The toolkit to build ``_C_cuda`` with, or None, and the reason in words."""
    choice = environment_choice("PFL_EXT_CUDA", ("auto", "1", "0"), "auto")
    if choice == "0":
        return None, "PFL_EXT_CUDA=0"
    toolkit, reason = None, ""
    nvcc = find_nvcc()
    if torch_cuda is None:
        reason = "this torch is a build without CUDA"
    elif nvcc is None:
        reason = f"torch has CUDA {torch_cuda}, but no nvcc is in CUDA_HOME, on PATH or in {USUAL_CUDA}"
    else:
        try:
            found = CudaToolkit(nvcc)
        except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
            reason = f"{nvcc} cannot be used: {error}"
        else:
            version = ".".join(map(str, found.version))
            if found.version[0] != int(torch_cuda.split(".")[0]):
                reason = f"nvcc is of CUDA {version}, torch of CUDA {torch_cuda}: the major versions must agree"
            elif found.version < OLDEST_CUDA:
                reason = f"nvcc is of CUDA {version}; {'.'.join(map(str, OLDEST_CUDA))} or later is needed"
            elif found.cudart is None:
                reason = f"the toolkit in {found.root} has no libcudart.so"
            else:
                toolkit, reason = found, f"torch has CUDA {torch_cuda}, nvcc is of CUDA {version}"
    if choice == "1" and toolkit is None:
        raise SystemExit(f"PFL_EXT_CUDA=1, but the CUDA library cannot be built: {reason}")
    return toolkit, reason


def gencode_flags(toolkit: CudaToolkit) -> tuple[list[str], str]:
    """nvcc's flags for the architecture list, and that list as used."""
    given = os.environ.get("TORCH_CUDA_ARCH_LIST")
    flags, used = [], []
    for entry in re.split(r"[;\s]+", (given or DEFAULT_CUDA_ARCHS).strip()):
        match = re.fullmatch(r"(\d+\.\d)([af]?)(\+PTX)?", entry)
        if match is None:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST={given!r}: {entry!r} is not of the form 8.0, 9.0a or 12.0+PTX")
        if match[1] not in toolkit.architectures:
            if given:
                raise SystemExit(f"TORCH_CUDA_ARCH_LIST={given!r}: {toolkit.nvcc} does not know {entry}")
            continue  # a default that this toolkit has not yet, or no longer
        number = match[1].replace(".", "") + match[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        used.append(entry)
    return flags, ";".join(used)


def job_count() -> int:
    if given := os.environ.get("MAX_JOBS"):
        if not given.isdecimal() or int(given) == 0:
            raise SystemExit(f"MAX_JOBS={given!r} is not accepted; a positive whole number is")
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        memory = None
    available = int(memory[1]) / 2**20 if memory else 4.0
    return max(1, min(cores, int(available / GIB_PER_JOB)))


class NinjaFile:
    """The compile and link steps of a build.ninja, each with flags of its own."""

    def __init__(self) -> None:
        from ninja import ninja_syntax

        self.text = io.StringIO()
        self.escape = ninja_syntax.escape
        # Not wrapped: a continued line loses a space where a quoted path has two.
        self.writer = ninja_syntax.Writer(self.text, width=sys.maxsize)

    def rule(self, name: str, command: list[str], arguments: str, depfile: bool = True) -> None:
        """A step: a command to be taken as it is, and arguments with ninja's variables."""
        self.writer.rule(
            name,
            f"{self.escape(shlex.join(command))} {arguments}",
            description=f"{name} $out",
            depfile="$out.d" if depfile else None,
            deps="gcc" if depfile else None,
        )

    def build(self, out: Path, rule: str, inputs: list[Path], flags: list[str]) -> Path:
        paths = [self.escape(str(path)) for path in (out, *inputs)]  # the writer itself leaves a $ in a path alone
        self.writer.build(paths[0], rule, paths[1:], variables={"flags": self.escape(shlex.join(flags))})
        return out

    def run(self, folder: Path) -> None:
        import ninja

        (folder / "build.ninja").write_text(self.text.getvalue())
        command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(folder), "-j", str(job_count())]
        if subprocess.run(command).returncode != 0:
            raise SystemExit(
                f"compiling pfl_ext failed; the commands are in {folder / 'build.ninja'}.\n"
                "A C++20 compiler is needed (set CXX to choose one). PFL_EXT_CUDA=0 leaves the CUDA library out, "
                "PFL_EXT_NATIVE=0 installs without native code."
            )


def build_record() -> dict[str, object]:
    """The digests by which ``pfl_ext._native`` knows at import what the libraries were built from."""
    path = ROOT / "pfl_ext" / "_build_record.py"
    spec = importlib.util.spec_from_file_location("pfl_ext_build_record", path)
    assert spec is not None and spec.loader is not None
    record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    return {
        "schemas": record.schemas_digest(record.declared_schemas(ROOT / "pfl_ext" / "ops")),
        "sources": {library: record.sources_digest(CSRC, library) for library in record.SOURCES},
    }


def sources(folder: str, pattern: str) -> list[Path]:
    """The files to compile in a folder of csrc. None is an error: an empty library links."""
    found = sorted((CSRC / folder).glob(pattern))
    if not found:
        raise SystemExit(
            f"there is no {pattern} in {CSRC / folder}: this copy of pfl_ext's source is incomplete. Build from the "
            "whole repository or its source distribution; PFL_EXT_NATIVE=0 installs without native code."
        )
    return found


class BuildNative(build_ext):
    """Compiles both libraries with one ninja run."""

    def build_extensions(self) -> None:
        import torch

        torch_root = Path(torch.__file__).parent
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        cxx = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if cxx is None:
            raise SystemExit(
                "no C++ compiler found: install g++ or clang++, or set CXX. PFL_EXT_NATIVE=0 does without."
            )

        file = NinjaFile()
        extra_cxx = shlex.split(os.environ.get("PFL_EXT_CXX_FLAGS", ""))
        file.rule("cxx", [cxx, *CXX_FLAGS, *extra_cxx], "-MMD -MF $out.d $flags -c $in -o $out")
        file.rule("link", [cxx, "-shared", *LINK_FLAGS, *extra_cxx], "$in -o $out $flags", depfile=False)
        stable = [*STABLE_ABI_FLAGS, "-isystem", str(torch_root / "include")]
        libtorch = [f"-L{torch_root / 'lib'}", "-ltorch_cpu"]

        outputs = {
            ext.name.rsplit(".", 1)[-1]: Path(self.get_ext_fullpath(ext.name)).resolve() for ext in self.extensions
        }
        objects = [
            file.build(folder / "cpu" / f"{source.stem}.o", "cxx", [source], stable)
            for source in sources("cpu", "*.cpp")
        ]
        for source in sources("cpu/kernels", "*.cpp"):
            for isa, flags in ISA_FLAGS.items():
                out = folder / "cpu" / "kernels" / f"{source.stem}.{isa}.o"
                shorter = SHORTER_VECTORS.get(isa, []) if source.stem in WAITING_FOR_MEMORY else []
                objects.append(file.build(out, "cxx", [source], [*flags, *shorter, f"-DPFL_ISA={isa}"]))
        file.build(outputs["_C"], "link", objects, libtorch)

        info = {
            "built": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "torch_target": "2.10",
            **build_record(),
            "cxx": output_of(cxx, "--version").splitlines()[0],
            "cxx_flags": shlex.join([*CXX_FLAGS, *extra_cxx]).replace(str(CSRC), "csrc"),
            "isa_flags": {isa: shlex.join(flags) for isa, flags in ISA_FLAGS.items()},
            "cuda": None,
            "cuda_reason": "",
        }
        toolkit, info["cuda_reason"] = decide_cuda(torch.version.cuda)
        if toolkit is not None:
            archs, used = gencode_flags(toolkit)
            extra = shlex.split(os.environ.get("PFL_EXT_NVCC_FLAGS", ""))
            # nvcc writes the dependencies of the host pass in gcc's form.
            nvcc = [toolkit.nvcc, f"-ccbin={cxx}", *NVCC_FLAGS, *archs, *extra]
            file.rule("nvcc", nvcc, "-MD -MF $out.d $flags -c $in -o $out")
            cuda_objects = [
                file.build(folder / "cuda" / f"{source.stem}.o", "nvcc", [source], [*stable, "-DUSE_CUDA"])
                for source in sources("cuda", "*.cu")
            ]
            libcuda = [*libtorch, "-ltorch_cuda", f"-L{toolkit.cudart.parent}", f"-l:{toolkit.cudart.name}"]
            file.build(outputs["_C_cuda"], "link", cuda_objects, libcuda)
            info["cuda"] = {
                "version": ".".join(map(str, toolkit.version)),
                "architectures": used,
                "nvcc_flags": shlex.join([*NVCC_FLAGS, *extra]).replace(str(CSRC), "csrc"),
            }
            print(f"pfl_ext: building _C and _C_cuda for {used}: {info['cuda_reason']}")
        else:
            self.extensions = [ext for ext in self.extensions if not ext.name.endswith("_C_cuda")]
            outputs.pop("_C_cuda").unlink(missing_ok=True)  # of an earlier build in this folder
            print(f"pfl_ext: building _C without _C_cuda: {info['cuda_reason']}")

        for out in outputs.values():
            out.parent.mkdir(parents=True, exist_ok=True)
        file.run(folder)
        self.build_info = outputs["_C"].parent / "_build.json"
        self.build_info.write_text(json.dumps(info, indent=1) + "\n")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        shutil.copy2(self.build_info, ROOT / "pfl_ext" / "_build.json")


if __name__ == "__main__":  # as pip runs it; the tests import it
    native = environment_choice("PFL_EXT_NATIVE", ("1", "0"), "1") == "1"
    names = ["pfl_ext._C", "pfl_ext._C_cuda"] if native else []
    setup(
        ext_modules=[Extension(name, sources=[], py_limited_api=True) for name in names],
        cmdclass={"build_ext": BuildNative},
        options={"bdist_wheel": {"py_limited_api": "cp310"}} if native else {},
    )
