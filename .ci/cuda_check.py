"""Reads what ptxas said while the wheel was built, then loads the CUDA library without a GPU.

`make build` compiles the CUDA code with warnings and register spills as errors (STRICT_NVCC in the Makefile). Here its
log is searched for kernels with a stack frame, the trace of an argument struct that was copied to every thread, and the
installed library is asked whether it registered a kernel for every op. Where no CUDA library was built, says why.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path


def main(log: str) -> int:
    """Check the log and the library; 0 if all is well."""
    warnings.simplefilter("error")
    from pfl_ext import _native
    from pfl_ext.ops._declare import OPS

    library = _native.status()["cuda"]
    build = _native.build_info()
    if build.get("cuda") is None:
        print(f"no CUDA library to check: {library.reason}")
        return 0
    if "-warn-spills" not in build["cuda"]["nvcc_flags"]:
        print(f"the library was built without spills as errors: {build['cuda']['nvcc_flags']}")
        return 1

    text = Path(log).read_text()
    frames = re.findall(r"(\d+) bytes stack frame", text)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    stacked = sum(bytes_ != "0" for bytes_ in frames)
    if frames:
        architectures = build["cuda"]["architectures"]
        print(f"{len(frames)} kernels over {architectures}: {max(registers)} registers at most, no spills")
    else:
        print("nothing was compiled anew; spills were errors when it was")
    if stacked:
        print(f"{stacked} kernels have a stack frame; see {log}")
        return 1

    if not library.loaded:
        print(f"the library does not load: {library.reason}")
        return 1
    missing = [name for name, op in OPS.items() if not op.has_kernel("CUDA") and "cuda" not in op.plain_on]
    if missing:
        print(f"ops without a CUDA kernel, and no word why: {missing}")
        return 1
    print(f"_C_cuda loads without a GPU and registers {sum(op.has_kernel('CUDA') for op in OPS.values())} ops")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
