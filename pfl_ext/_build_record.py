"""What a native library was built from, in digests: ``setup.py`` records them, ``_native`` compares them at import.

Nothing but the standard library: ``setup.py`` reads this file before the package can be imported.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["SOURCES", "declared_schemas", "schemas_digest", "sources_digest"]

SOURCES = {"_C": ("common", "cpu", "glue"), "_C_cuda": ("common", "cuda", "glue")}
"""The folders of ``csrc`` that each library is compiled from."""


def declared_schemas(ops: Path) -> list[str]:
    """The schemas in the folder ``pfl_ext/ops``, read from the calls of ``declare`` without importing torch."""
    found = []
    for path in sorted(ops.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "declare"):
                continue
            schema = node.args[0] if node.args else None
            if not (isinstance(schema, ast.Constant) and isinstance(schema.value, str)):
                raise ValueError(f"{path}:{node.lineno}: the schema given to declare() must be one plain string")
            found.append(schema.value)
    return found


def schemas_digest(schemas: Iterable[str]) -> str:
    """One short digest of all schemas: kernels built for others would read their arguments wrongly."""
    return hashlib.sha256("\n".join(sorted(schemas)).encode()).hexdigest()[:16]


def sources_digest(csrc: Path, library: str) -> str:
    """One short digest of the names and bytes of a library's sources."""
    digest = hashlib.sha256()
    for folder in SOURCES[library]:
        for path in sorted((csrc / folder).rglob("*")):
            if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
                content = path.read_bytes()
                digest.update(f"{path.relative_to(csrc).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
