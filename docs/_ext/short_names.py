"""Docstrings name things shortly, as in :class:`Method`. Such a name is a link where the reference has it once."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode


def _found(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, words: nodes.Element) -> Any:
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".")
    objects = {
        (entry.docname, entry.node_id): (name, entry)
        for name, entry in env.domains["py"].objects.items()
        if name == target or name.endswith(f".{target}")
    }
    if len(objects) != 1:
        # A module is documented by its package; a class here may have a page and its source another.
        return None
    name, entry = next(iter(objects.values()))
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, words, name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("missing-reference", _found)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
