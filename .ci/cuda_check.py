"""Compiles all CUDA code for every architecture with warnings as errors, and fails on a register spill.

Then loads the library without a GPU and checks that it registered a kernel for every op that has one. Where there is no
nvcc that fits torch, says so and does nothing: `make test` does not need one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "cuda-check"

# Every op with a CUDA kernel; the check that registration happened is done by name in a fresh process.
REGISTRATION = """
import sys, warnings
warnings.simplefilter("error")
import pfl_ext
from pfl_ext import _native
from pfl_ext.ops._declare import OPS
assert _native.status()["cuda"].loaded, _native.status()["cuda"].reason
missing = [name for name, op in OPS.items() if op.has_kernel("CPU") and not op.has_kernel("CUDA")]
assert not missing, f"no CUDA kernel for {missing}"
print(f"_C_cuda loads without a GPU and registers {sum(op.has_kernel('CUDA') for op in OPS.values())} ops")
"""


def main() -> int:
    """Build, read ptxas' report, load."""
    sys.path.insert(0, str(ROOT))
    flags = "-Werror=all-warnings -Xptxas=-v,-warn-spills,-Werror"
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        f"--build-temp={BUILD / 'temp'}",
        f"--build-lib={BUILD / 'lib'}",
    ]
    environment = {**os.environ, "PFL_EXT_NVCC_FLAGS": flags}
    for object_file in BUILD.rglob("*.o"):  # ptxas reports only what it compiles
        object_file.unlink()
    run = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if "building _C without _C_cuda" in run.stdout:
        print(re.search(r"pfl_ext: building.*", run.stdout)[0], "- nothing to check")  # type: ignore[index]
        return 0
    if run.returncode != 0:
        print(run.stdout[-8000:])
        return 1
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", run.stdout)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", run.stdout)]
    used = [frame for frame in frames if frame != ("0", "0", "0")]
    print(f"{len(frames)} kernels over all architectures, {len(used)} with a stack, at most {max(registers)} registers")
    if used or not frames:
        print(run.stdout[-8000:])
        return 1
    # The package's Python files beside the libraries just built.
    link = BUILD / "package"
    link.mkdir(exist_ok=True)
    subprocess.run(["cp", "-r", str(ROOT / "pfl_ext"), str(link)], check=True)
    for built in (BUILD / "lib" / "pfl_ext").iterdir():
        subprocess.run(["cp", str(built), str(link / "pfl_ext")], check=True)
    return subprocess.run([sys.executable, "-c", REGISTRATION], cwd=link).returncode


if __name__ == "__main__":
    sys.exit(main())
