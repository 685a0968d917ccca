"""Dependencies point down: what each part of the package may import."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

import pfl_ext

# From the bottom up. A part imports parts of lower rows, never one of its own row or above.
LAYERS = (
    ("_build_record",),
    ("ops",),
    ("_native",),
    ("",),  # the package itself: the version, and the libraries loaded
    ("options", "toml"),
    ("nn", "optim", "metrics", "data", "_info"),
    ("tasks",),
    ("federation",),
    ("engines",),
    ("algorithms",),
    ("reports", "named"),
    ("sections", "benchmarks"),
    ("experiment",),
    ("comparison", "configuration", "runs", "exported", "catalogue"),
    ("running", "flower", "flower_app", "papers"),
    ("interface",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, row in enumerate(LAYERS) for part in row}


def _modules(root: Path) -> dict[str, Path]:
    """The modules of a package by their names, without the benchmarks: they are a folder of their own in the tree."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        if parts[1] == "benchmarks":
            continue
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _of_type_checkers(tree: ast.Module) -> set[ast.AST]:
    """What is under ``if TYPE_CHECKING``."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {inner for block in blocks for node in block.body for inner in ast.walk(node)}


def _imports(name: str, modules: dict[str, Path]) -> set[str]:
    """Everything of the package that a module imports: at its top, in functions, for type checkers."""
    path, root = modules[name], name.partition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # The package names its parts for type checkers and imports each when it is asked for: of those that read the
    # version from it none needs them.
    passed_over = _of_type_checkers(tree) if name == root else set()
    package = (name if path.name == "__init__.py" else name.rpartition(".")[0]).split(".")
    found = set()
    for node in ast.walk(tree):
        if node in passed_over:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {inner if (inner := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return {target for target in found if target.partition(".")[0] == root}


def _part(module: str) -> str:
    return (*module.split("."), "")[1]


def _graph(root: Path) -> dict[str, set[str]]:
    modules = _modules(root)
    return {name: _imports(name, modules) for name in modules}


def _violations(graph: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, targets in sorted(graph.items())
        for target in sorted(targets)
        if _part(name) != _part(target) and not RANK[_part(target)] < RANK[_part(name)]
    ]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return _graph(Path(pfl_ext.__file__).parent)


def test_every_part_has_its_place(graph: dict[str, set[str]]) -> None:
    assert {_part(name) for name in graph} == RANK.keys() - {"benchmarks"}


def test_only_what_is_there_is_imported(graph: dict[str, set[str]]) -> None:
    missing = {(name, target) for name, targets in graph.items() for target in targets if target not in graph}
    assert missing == {("pfl_ext.commands.bench", "pfl_ext.benchmarks")}


def test_parts_import_downwards(graph: dict[str, set[str]]) -> None:
    assert _violations(graph) == []


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    ("place", "line", "found"),
    [
        ("federation/a.py", "from pfl_ext.algorithms import FedAvg", "pfl_ext.algorithms"),
        ("federation/a.py", "def f():\n    from ..reports import tables", "pfl_ext.reports.tables"),
        ("federation/a.py", "if TYPE_CHECKING:\n    from .. import runs", "pfl_ext.runs"),
        ("ops/a.py", "import pfl_ext.nn", "pfl_ext.nn"),
        ("nn/a.py", "from ..optim import sam", "pfl_ext.optim"),
    ],
)
def test_an_import_upwards_is_seen_wherever_it_stands(place: str, line: str, found: str, tmp_path: Path) -> None:
    for name in ("runs.py", "reports/tables.py", *(f"{part}/__init__.py" for part in ("algorithms", "nn", "optim"))):
        (tmp_path / "pfl_ext" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pfl_ext" / name).write_text("")
    path = tmp_path / "pfl_ext" / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    module = f"pfl_ext.{place[:-3].replace('/', '.')}"
    assert _violations(_graph(tmp_path / "pfl_ext")) == [f"{module} imports {found}"]
