"""Decisions of setup.py: where CUDA is, for which architectures, how many compilers at once."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pfl_ext._build_record import declared_schemas, schemas_digest, sources_digest
from pfl_ext.ops._declare import OPS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("pfl_ext_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("PFL_EXT_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A toolkit's folder with an nvcc that only answers questions, and a wrapper for it alone on PATH."""

    def make(release="13.0", libcudart="libcudart.so") -> Path:
        root = tmp_path / "toolkit"
        (root / "bin").mkdir(parents=True)
        (root / "lib64").mkdir()
        if libcudart:
            (root / "lib64" / libcudart).touch()
        nvcc = root / "bin" / "nvcc"
        nvcc.write_text(
            "#!/bin/sh\n"
            'case "$*" in\n'
            f'*--version*) echo "Cuda compilation tools, release {release}, V{release}.1";;\n'
            f'*--dryrun*) echo "#$ _HERE_={root}/bin"; echo "#$ TOP={root}/bin/..";;\n'
            '*--list-gpu-arch*) printf "compute_75\\ncompute_80\\ncompute_90\\ncompute_120\\n";;\n'
            "esac\n"
        )
        wrapper = tmp_path / "path" / "nvcc"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
        for script in (nvcc, wrapper):
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{wrapper.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
        return root

    return make


def test_the_toolkit_behind_a_wrapper_script_is_found(build, toolkit):
    root = toolkit()
    found, reason = build.decide_cuda("13.0")
    assert found.root == root.resolve()
    assert found.cudart == root.resolve() / "lib64" / "libcudart.so"
    assert reason == "torch has CUDA 13.0, nvcc is of CUDA 13.0"


def test_a_toolkit_of_packages_which_has_the_library_under_its_loaders_name_alone_will_do(build, toolkit):
    root = toolkit(libcudart="libcudart.so.13")
    found, _ = build.decide_cuda("13.0")
    assert found.cudart == root.resolve() / "lib64" / "libcudart.so.13"


@pytest.mark.parametrize(
    ("torch_cuda", "options", "reason"),
    [
        (None, {}, "this torch is a build without CUDA"),
        ("12.8", {}, "nvcc is of CUDA 13.0, torch of CUDA 12.8: the major versions must agree"),
        ("12.0", {"release": "12.0"}, "nvcc is of CUDA 12.0; 12.1 or later is needed"),
        ("13.0", {"libcudart": ""}, "has no libcudart.so"),
        ("13.0", {"release": "unknown"}, "names no release"),
    ],
)
def test_auto_says_why_cuda_is_left_out_and_1_fails_with_that_reason(
    build, toolkit, monkeypatch, torch_cuda, options, reason
):
    toolkit(**options)
    found, said = build.decide_cuda(torch_cuda)
    assert found is None
    assert reason in said
    monkeypatch.setenv("PFL_EXT_CUDA", "1")
    with pytest.raises(SystemExit, match="PFL_EXT_CUDA=1, but the CUDA library cannot be built") as error:
        build.decide_cuda(torch_cuda)
    assert reason in str(error.value)


def test_no_nvcc_anywhere(build, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "USUAL_CUDA", tmp_path)
    found, reason = build.decide_cuda("13.0")
    assert found is None
    assert "no nvcc is in CUDA_HOME, on PATH" in reason


def test_cuda_can_be_refused_and_a_wrong_choice_is_named(build, toolkit, monkeypatch):
    toolkit()
    monkeypatch.setenv("PFL_EXT_CUDA", "0")
    assert build.decide_cuda("13.0") == (None, "PFL_EXT_CUDA=0")
    monkeypatch.setenv("PFL_EXT_CUDA", "yes")
    with pytest.raises(SystemExit, match="PFL_EXT_CUDA='yes' is not accepted; use one of auto, 1, 0"):
        build.decide_cuda("13.0")


def test_default_architectures_are_those_the_toolkit_knows_and_end_in_ptx(build, toolkit):
    toolkit()
    flags, used = build.gencode_flags(build.decide_cuda("13.0")[0])
    assert used == "7.5;8.0;9.0;12.0+PTX"
    assert flags[0] == "-gencode=arch=compute_75,code=sm_75"
    assert flags[-1] == "-gencode=arch=compute_120,code=compute_120"


def test_architectures_can_be_chosen_and_unknown_ones_are_refused(build, toolkit, monkeypatch):
    toolkit()
    cuda = build.decide_cuda("13.0")[0]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")
    flags, used = build.gencode_flags(cuda)
    assert used == "8.0;9.0a+PTX"
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "5.0")
    with pytest.raises(SystemExit, match=r"does not know 5\.0"):
        build.gencode_flags(cuda)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SystemExit, match="'Hopper' is not of the form"):
        build.gencode_flags(cuda)


def test_compilers_at_once_are_bounded_by_cores_and_memory(build, monkeypatch):
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(build.Path, "read_text", lambda _: "MemAvailable:    6291456 kB\n")
    assert build.job_count() == 4  # 6 GiB at 1.5 each
    monkeypatch.setattr(build.Path, "read_text", lambda _: "MemAvailable:     524288 kB\n")
    assert build.job_count() == 1
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(build.Path, "read_text", lambda _: "MemAvailable: 99999999 kB\n")
    assert build.job_count() == 2
    monkeypatch.setenv("MAX_JOBS", "7")
    assert build.job_count() == 7
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(SystemExit, match="MAX_JOBS='many' is not accepted"):
        build.job_count()


@pytest.mark.parametrize("name", ["plain", "x  " * 40 + "x", "a $dollar", "quote's"])
def test_a_build_works_in_a_folder_of_any_name(build, tmp_path, name):
    pytest.importorskip("ninja")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path / name
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "greeting.h").write_text("inline const char* greeting() { return TEXT; }\n")
    (folder / "main.cpp").write_text(
        '#include <cstdio>\n#include "greeting.h"\nint main() { std::puts(greeting()); }\n'
    )
    file = build.NinjaFile()
    file.rule("cxx", [compiler, f"-I{folder / 'include'}"], "-MMD -MF $out.d $flags -c $in -o $out")
    file.rule("link", [compiler], "$in -o $out $flags", depfile=False)
    compiled = file.build(folder / "main.o", "cxx", [folder / "main.cpp"], ['-DTEXT="1 $HOME  2"'])
    program = file.build(folder / "main", "link", [compiled], [f"-L{folder}"])
    file.run(folder)
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout == "1 $HOME  2\n"
    (folder / "main.cpp").write_text("int main() { return wrong; }\n")
    with pytest.raises(SystemExit, match="compiling pfl_ext failed; the commands are in"):
        file.run(folder)


# ---- metadata --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project() -> dict:
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def packages(project: dict, extra: str) -> set[str]:
    """The packages that an extra asks for, with those of the extras that it names."""
    found = set()
    for requirement in project["optional-dependencies"][extra]:
        if own := re.fullmatch(r"pfl_ext\[(.+)\]", requirement):
            found |= set().union(*(packages(project, name) for name in own[1].split(",")))
        else:
            found.add(requirement)
    return found


def test_messages_and_pages_name_extras_that_exist_and_no_package_that_an_extra_has(project):
    extras = project["optional-dependencies"]
    named = set()
    pages = ("pfl_ext/**/*.py", "benchmarks/**/*.py", "*.md", "docs/*.md", "csrc/**/*.md")
    for path in (path for pattern in pages for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        for command in re.findall(r"pip install ([^`\n]+)", text):
            chosen = re.findall(r"\[([\w,]+)\]", command)
            named |= {name for names in chosen for name in names.split(",")}
            plain = set(re.findall(r"[\w-]+", re.sub(r"\[.*?\]|\(.*", "", command)))
            assert not plain & packages(project, "all"), (path, command)
    assert named >= {"plots", "report", "images", "dev"}
    assert named <= set(extras)


def test_the_extra_all_has_what_every_extra_of_users_has(project):
    extras = set(project["optional-dependencies"]) - {"all", "dev", "wandb", "mlflow"}  # the last two are large
    assert packages(project, "all") == set().union(*(packages(project, extra) for extra in extras))


def test_the_makefile_installs_the_extra_dev_and_constraints_pin_it(project):
    lines = (ROOT / "Makefile").read_text(encoding="utf-8")
    tools = {name: re.search(rf"^{name} := (.+)$", lines, re.M)[1] for name in ("TEST_TOOLS", "DEV_TOOLS")}
    installed = set(tools["DEV_TOOLS"].replace("$(TEST_TOOLS)", tools["TEST_TOOLS"]).split())
    # torch has a line of its own there; the others are dependencies that `pip install --no-deps` leaves out.
    needed = {re.match(r"[\w-]+", name)[0] for name in project["dependencies"]} - {"torch", "tomli"}
    assert installed == packages(project, "dev") | needed
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert installed <= pinned


# ---- what a public repository's CI would run -------------------------------------------------------------------------


def test_the_workflows_run_what_there_is():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert [path.stem for path in files] == ["docs", "tests", "wheels"]
    made, scripts = re.findall(r"run: make ([a-z-]+)", text), re.findall(r"(\.ci/[\w.]+)", text)
    assert {"site", "test"} <= set(made) <= targets
    assert scripts and all((ROOT / script).exists() for script in scripts)


def test_wheels_are_built_with_the_torch_that_is_tested(project):
    script = (ROOT / ".ci/wheel_toolkit.sh").read_text(encoding="utf-8")
    found = re.search(r"sed -n '(s/.+/p)' Makefile", script)
    done = subprocess.run(["sed", "-n", found[1], ROOT / "Makefile"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+\n", done.stdout)


# ---- what a build records --------------------------------------------------------------------------------------------


def test_the_schemas_read_at_build_time_are_those_declared_at_import():
    assert sorted(declared_schemas(ROOT / "pfl_ext" / "ops")) == sorted(op.schema for op in OPS.values())


def test_a_schema_that_cannot_be_read_at_build_time_is_refused_with_its_place(tmp_path):
    (tmp_path / "family.py").write_text('name = "op"\ndeclare(f"{name}(Tensor x) -> Tensor")\n')
    with pytest.raises(ValueError, match=r"family\.py:2: the schema given to declare\(\) must be one plain string"):
        declared_schemas(tmp_path)


def test_the_record_of_a_build_changes_with_its_schemas_and_sources(build, tmp_path):
    recorded = build.build_record()
    assert recorded["schemas"] == schemas_digest(op.schema for op in OPS.values())
    assert recorded["schemas"] != schemas_digest(f"{op.schema} " for op in OPS.values())
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    assert recorded["sources"] == {name: sources_digest(tmp_path / "csrc", name) for name in ("_C", "_C_cuda")}
    kernel = tmp_path / "csrc" / "cuda" / "kernels" / "averaging.cuh"
    kernel.rename(kernel.with_name("renamed.cuh"))
    assert recorded["sources"]["_C"] == sources_digest(tmp_path / "csrc", "_C")
    assert recorded["sources"]["_C_cuda"] != sources_digest(tmp_path / "csrc", "_C_cuda")


@pytest.mark.parametrize(
    "source", sorted((ROOT / "csrc" / "cpu" / "kernels").glob("*.cpp")), ids=lambda path: path.stem
)
def test_kernels_of_an_instruction_set_share_no_symbol_with_those_of_another(build, source, tmp_path):
    """A function with vague linkage is kept once for all sets: AVX-512 code could reach a machine without it."""
    compiler, nm = shutil.which(os.environ.get("CXX", "c++")), shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("needs a C++ compiler and nm")
    defined = {}
    for isa, flags in build.ISA_FLAGS.items():
        out = tmp_path / f"{isa}.o"
        # Without optimisation nothing is inlined away: every shared symbol shows.
        options = [flag for flag in build.CXX_FLAGS if flag != "-O3"]
        subprocess.run([compiler, *options, "-O0", *flags, f"-DPFL_ISA={isa}", "-c", source, "-o", out], check=True)
        listed = subprocess.run([nm, "--defined-only", "-C", out], check=True, capture_output=True, text=True).stdout
        rows = [line.split(maxsplit=2)[1:] for line in listed.splitlines()]
        shared = [name for kind, name in rows if kind in "WwVvu"]
        assert shared == []
        defined[isa] = {name for kind, name in rows if kind.isupper()}
        assert all(f"pfl::cpu::{isa}::" in name for name in defined[isa])
    assert all(defined.values())
