"""The source distribution: it holds the whole repository, and a build from less than that fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pfl_ext import _native

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".ci", "benchmarks", "configs", "csrc", "docs", "examples", "pfl_ext", "python_tests")
FILES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "setup.py",
)
# What earlier builds and tests leave in a tree.
LEFT = (
    "pfl_ext/_C.abi3.so",
    "pfl_ext/_build.json",
    "csrc/cpu/averaging.o",
    "docs/generated/api/index.rst",
    "python_tests/__pycache__/test_sdist.pyc",
)
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "_build.json", "generated")

PROBE = """
import json, torch, pfl_ext
from pfl_ext import _native
from pfl_ext.data import load
from pfl_ext.ops import weighted_average
from pfl_ext.ops._declare import OPS
print(json.dumps({
    "file": pfl_ext.__file__,
    "result": weighted_average([[torch.tensor([1.0])], [torch.tensor([3.0])]])[0].tolist(),
    "digits": len(load("digits")),
    "cpu": _native.status()["cpu"].reason,
    "cuda": _native.status()["cuda"].reason,
    "plain": [name for name, op in OPS.items() if not op.has_kernel("CPU") and "cpu" not in op.plain_on],
}))
"""

pytest.importorskip("setuptools", minversion="77")


def backend(tree: Path, call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the build backend as pip and build do, in a tree."""
    return subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta; print(build_meta.{call})"],
        cwd=tree,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: setuptools writes into it, and reads there what an earlier build listed."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=BUILT)
    for name in FILES:
        shutil.copy2(ROOT / name, copy / name)
    for name in LEFT:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).touch()
    return copy


@pytest.fixture(scope="module")
def archive(tree: Path) -> Path:
    done = backend(tree, "build_sdist('dist')")
    assert done.returncode == 0, done.stderr
    (found,) = (tree / "dist").glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def unpacked(tree: Path, archive: Path) -> Path:
    """The source distribution, unpacked."""
    with tarfile.open(archive) as file:
        file.extractall(tree.parent / "unpacked", filter="data")
    (folder,) = (tree.parent / "unpacked").iterdir()
    return folder


def files(tree: Path) -> set[str]:
    found = {path for folder in FOLDERS for path in (tree / folder).rglob("*") if path.is_file()}
    return {str(path.relative_to(tree)) for path in found} - set(LEFT) | set(FILES)


def test_a_source_distribution_has_every_file_that_builds_tests_and_explains_the_package(tree, unpacked):
    missing = {name for name in files(tree) if not (unpacked / name).is_file()}
    assert missing == set()
    assert "csrc/cpu/kernels/averaging.cpp" in files(tree)  # the list itself is not empty


@pytest.mark.parametrize("left", LEFT)
def test_a_source_distribution_has_nothing_that_was_built(tree, unpacked, left):
    assert (tree / left).exists()
    assert not (unpacked / left).exists()


@pytest.mark.parametrize("missing", ["csrc", "csrc/cpu/kernels"])
def test_a_build_without_the_sources_fails_and_says_what_is_missing(unpacked, tmp_path, missing):
    broken = tmp_path / "broken"
    shutil.copytree(unpacked, broken)
    shutil.rmtree(broken / missing)
    done = backend(broken, "build_wheel('dist')", PFL_EXT_CUDA="0")
    assert done.returncode != 0
    assert "this copy of pfl_ext's source is incomplete" in done.stderr
    assert list(broken.rglob("*.whl")) == []


@pytest.fixture(scope="module")
def environment(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with a wheel from the archive in it; torch and the test tools are lent to it.

    A minute of compiling: the archive is what people get, and nothing else in the tests builds from it.
    """
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("new")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    python = folder / "env" / "bin" / "python"
    offline = ["--no-index", "--no-deps"]
    build = {**os.environ, "PFL_EXT_CUDA": "0", "PFL_EXT_NATIVE": "1"}
    command([*pip, "wheel", *offline, "--no-build-isolation", "-w", folder / "wheels", archive], build)
    command([sys.executable, "-m", "venv", "--without-pip", folder / "env"])
    (wheel,) = (folder / "wheels").glob("*.whl")
    command([*pip, "--python", python, "install", *offline, wheel])
    (packages,) = (folder / "env" / "lib").glob("python3*/site-packages")
    (packages / "torch-and-tools.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # after its own on the path
    return python


def command(arguments: Sequence[str | Path], environment: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a pfl_ext, and no variable that names another one or chooses kernels."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PFL_EXT_") or name == "PYTHONPATH"]:
        monkeypatch.delenv(name)


def test_a_wheel_from_the_source_distribution_serves_every_op(environment: Path, elsewhere: None) -> None:
    found = json.loads(command([environment, "-W", "error", "-c", PROBE]))
    assert Path(found["file"]).is_relative_to(environment.parents[1])
    assert found["result"] == [2.0]
    assert found["digits"] == 1797
    assert found["cpu"] == ""
    assert found["cuda"] == "not built: PFL_EXT_CUDA=0"
    assert found["plain"] == []


def test_a_wheel_from_the_source_distribution_passes_its_op_tests(
    environment: Path, unpacked: Path, elsewhere: None
) -> None:
    """Without those that compile, those of sizes and threads, and all instruction sets but the best one: they show what
    is the same in every build."""
    left_out = ("compile", "gradcheck", "large", "thread", *_native.available_isas()[:-1])
    tests = [unpacked / "python_tests" / "ops", "-k", " and ".join(f"not {name}" for name in left_out)]
    run = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"  # -m would look into this folder first
    said = command([environment, "-c", run, "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests])
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) > 1000
