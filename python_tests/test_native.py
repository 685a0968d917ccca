"""Loading the libraries: what is used, what is said where something is missing, and that everything still works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pfl_ext
from pfl_ext import _native
from pfl_ext._build_record import sources_digest
from pfl_ext.ops._declare import OPS

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pfl_ext
import torch
from pfl_ext import _native
from pfl_ext.ops import weighted_average
result = weighted_average([[torch.tensor([1.0])], [torch.tensor([3.0])]], nonfinite="raise")[0].item()
print(json.dumps({
    "warnings": [str(w.message) for w in caught if "pfl_ext" in str(w.message)],
    "result": result,
    "isa": _native.isa(),
    "cpu": _native.status()["cpu"].reason,
    "cuda": _native.status()["cuda"].reason,
}))
"""

needs_library = pytest.mark.skipif(not _native.status()["cpu"].loaded, reason="no native library is installed")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the installed package, to be damaged."""
    shutil.copytree(Path(pfl_ext.__file__).parent, tmp_path / "pfl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "pfl_ext"


def run(package: Path, code: str = PROBE, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PFL_EXT_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=package.parent,
        env={**clean, "PYTHONPATH": str(package.parent), **environment},
        capture_output=True,
        text=True,
    )


def probe(package: Path, **environment: str) -> dict:
    done = run(package, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_library
def test_a_sound_installation_loads_without_a_word(package):
    found = probe(package)
    assert found["warnings"] == []
    assert found["cpu"] == ""
    assert found["result"] == 2.0


def test_without_any_library_everything_works_after_one_warning_that_says_why_and_how_to_mend_it(package):
    for library in package.glob("*.so"):
        library.unlink()
    found = probe(package)
    assert found["result"] == 2.0
    (warning,) = found["warnings"]
    assert "_C.abi3.so is not part of this installation" in warning
    assert "pip install --no-build-isolation" in warning


@needs_library
def test_a_damaged_library_is_reported_and_not_used(package):
    (package / "_C.abi3.so").write_bytes(b"not a library")
    found = probe(package)
    assert found["result"] == 2.0
    (warning,) = found["warnings"]
    assert "_C.abi3.so does not load with torch" in warning


def test_native_code_can_be_switched_off_silently(package):
    found = probe(package, PFL_EXT_NATIVE="0")
    assert found["warnings"] == []
    assert found["isa"] is None
    assert found["cpu"] == "PFL_EXT_NATIVE=0"
    assert found["result"] == 2.0


@needs_library
@pytest.mark.parametrize("isa", _native.available_isas())
def test_an_instruction_set_can_be_forced(package, isa):
    assert probe(package, PFL_EXT_ISA=isa)["isa"] == isa


@needs_library
@pytest.mark.parametrize("isa", ["avx1024", *sorted(set(_native.ISAS) - set(_native.available_isas()))])
def test_an_instruction_set_that_is_not_here_is_refused_by_name(package, isa):
    done = run(package, PFL_EXT_ISA=isa)
    assert done.returncode != 0
    assert f"instruction set {isa!r} is not to be had here; this machine has baseline" in done.stderr
    before = _native.isa()
    with pytest.raises(ValueError, match="not to be had here"):
        _native.set_isa(isa)
    assert _native.isa() == before


def rewrite_build(package: Path, **changes: object) -> None:
    path = package / "_build.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def compile_library(path: Path, code: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path.unlink(missing_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", path], input=code, text=True, check=True)


@needs_library
@pytest.mark.parametrize("code", ["", "int somebody_elses() { return 1; }"], ids=["empty", "foreign"])
def test_a_library_that_registers_no_op_is_not_called_loaded(package, code):
    compile_library(package / "_C.abi3.so", code)
    found = probe(package)
    meant = [op for op in OPS.values() if "cpu" not in op.plain_on]
    assert f"_C.abi3.so has no kernel for {len(meant)} of {len(meant)} ops ({meant[0].name}, " in found["cpu"]
    (warning,) = found["warnings"]
    assert found["cpu"] in warning and "pip install --no-build-isolation" in warning
    assert found["isa"] is None
    assert found["result"] == 2.0


@needs_library
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
def test_an_empty_cuda_library_is_not_called_loaded_and_the_cpu_library_still_serves(package):
    rewrite_build(package, cuda={"version": torch.version.cuda, "architectures": "8.0", "nvcc_flags": ""})
    compile_library(package / "_C_cuda.abi3.so", "")
    found = probe(package)
    assert "_C_cuda.abi3.so has no kernel for" in found["cuda"]
    assert found["cpu"] == ""
    (warning,) = found["warnings"]
    assert found["cuda"] in warning


@needs_library
@pytest.mark.parametrize("schemas", ["0123456789abcdef", None], ids=["other", "no record"])
def test_a_library_built_for_other_schemas_is_not_opened(package, schemas):
    rewrite_build(package, schemas=schemas, built="2020-01-01T00:00:00+00:00")
    found = probe(package)
    assert found["isa"] is None
    (warning,) = found["warnings"]
    assert "_C.abi3.so of 2020-01-01T00:00:00+00:00 was not built for the ops that this version" in warning
    assert "pip install --no-build-isolation" in warning
    assert found["result"] == 2.0
    done = run(package, PROBE + "\nfrom pfl_ext.ops._declare import OPS\nprint(OPS['nonfinite'].has_kernel('CPU'))")
    assert done.stdout.splitlines()[-1] == "False"


@pytest.fixture
def source_tree(package: Path) -> Path:
    """The package in a source tree of its own, with libraries that were built from it."""
    tree = package.parent
    (tree / "setup.py").touch()
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    rewrite_build(package, sources={name: sources_digest(tree / "csrc", name) for name in ("_C", "_C_cuda")})
    return tree


@needs_library
def test_a_library_built_from_the_sources_beside_it_loads_without_a_word(package, source_tree):
    (source_tree / "csrc" / "emulator" / "more.cpp").touch()  # in no library
    found = probe(package)
    assert found["warnings"] == []
    assert found["cpu"] == ""


@needs_library
@pytest.mark.parametrize("change", ["edited", "added", "no record"])
def test_a_library_older_than_the_sources_beside_it_is_used_with_one_warning(package, source_tree, change):
    if change == "edited":
        with (source_tree / "csrc" / "cpu" / "kernels" / "averaging.cpp").open("a") as file:
            file.write("// one more line\n")
    elif change == "added":
        (source_tree / "csrc" / "cpu" / "more.cpp").touch()
    else:
        rewrite_build(package, sources={})
    found = probe(package)
    (warning,) = found["warnings"]
    assert f"built from other sources than those in {source_tree / 'csrc'}" in warning
    assert f"pip install --no-build-isolation --no-deps -e {source_tree}" in warning
    assert found["cpu"] == "" and found["isa"] is not None
    assert re.search(r"_C +serves cpu, built from other sources than those in csrc", info(package, "info").stdout)


@needs_library
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
def test_another_cuda_major_is_reported_with_both_versions_and_the_cpu_library_still_serves(package):
    rewrite_build(package, cuda={"version": "11.8", "architectures": "8.0", "nvcc_flags": ""})
    found = probe(package)
    (warning,) = found["warnings"]
    assert "built for CUDA 11.8" in warning
    assert f"CUDA {torch.version.cuda}" in warning
    assert "pip install --no-build-isolation" in warning
    assert found["cpu"] == ""


@needs_library
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")
def test_a_broken_cuda_library_does_not_take_the_cpu_ops_down(package):
    rewrite_build(package, cuda={"version": torch.version.cuda, "architectures": "8.0", "nvcc_flags": ""})
    (package / "_C_cuda.abi3.so").write_bytes(b"not a library")
    found = probe(package)
    (warning,) = found["warnings"]
    assert "_C_cuda.abi3.so does not load" in warning
    assert found["cpu"] == ""
    assert found["result"] == 2.0


@needs_library
def test_a_library_built_without_cuda_says_why_in_info_only(package):
    rewrite_build(package, cuda=None, cuda_reason="no nvcc was found")
    found = probe(package)
    assert found["warnings"] == []
    assert found["cuda"] == "not built: no nvcc was found"


# ---- pfl-ext info ----------------------------------------------------------------------------------------------------


def info(package: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys, runpy; sys.argv[1:] = {list(arguments)!r}; runpy.run_module('pfl_ext', run_name='__main__')"
    return run(package, code, **environment)


@needs_library
def test_info_shows_versions_build_instruction_set_and_who_serves_each_op(package):
    done = info(package, "info")
    assert done.returncode == 0, done.stderr
    for words in (
        f"torch    {torch.__version__}",
        "C++ compiler",
        "-ffp-contract=off",
        f"instruction set  {_native.available_isas()[-1]} (the best of this machine)",
    ):
        assert words in done.stdout
    assert re.search(r"cpu +weighted_average +native \(_C\)", done.stdout)


def test_info_says_why_an_op_is_not_served_natively(package):
    done = info(package, "info", PFL_EXT_NATIVE="0")
    for device in ("cpu", "cuda"):
        assert re.search(rf"{device} +weighted_average +plain torch: PFL_EXT_NATIVE=0", done.stdout)


def test_an_unknown_command_is_refused_with_the_known_ones(package):
    done = info(package, "inform")
    assert done.returncode == 2
    assert "info" in done.stderr
    assert "bench" in done.stderr


def test_no_command_at_all_prints_a_short_help(package):
    done = info(package)
    assert done.returncode == 0, done.stderr
    assert "usage: pfl-ext COMMAND" in done.stdout and len(done.stdout.splitlines()) < 25
    assert all(f"  {command} " in done.stdout for command in ("run", "compare", "sweep", "data", "bench", "info"))


@needs_library
def test_the_version_is_written_the_same_in_both_places():
    from importlib.metadata import version

    assert version("pfl_ext") == pfl_ext.__version__
