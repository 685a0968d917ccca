"""Links that leave docs/: to other Markdown files of the repository, which become pages here, and to its code.

The pages are Markdown that is read in the repository too, so their links are paths of it. What is no page here is
shown as a file to download where it is one file, and as its path where it is a folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent

PAGES = {
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "csrc/README.md": "native-code",
    "csrc/emulator/README.md": "emulator",
    "experiments/README.md": "experiments",
    "pfl_ext/data/digits.md": "digits",
    "pfl_ext/data/speeches.md": "speeches",
}
"""Markdown files elsewhere in the repository, and the names of their pages."""

FOLDER = DOCS / "generated" / "repository"
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#]+)(#[\w-]+)?\)")


def rewritten(text: str, folder: Path, page: Path) -> str:
    """Markdown of a file in ``folder`` with its links as the page at ``page`` needs them."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES:
            path = FOLDER / f"{PAGES[name]}.md"
        elif name == "README.md":
            path = DOCS / "index.md"
        elif path.is_dir():
            return words if words.startswith("`") else f"{words} (`{name}/`)" if words != name else f"`{name}/`"
        if words == Path(target).name and path.suffix == ".md":
            words = ""  # its title
        return f"[{words}]({os.path.relpath(path, page.parent)}{anchor})"

    # Code is left alone: blocks, and what is in single backquotes as far as no link goes around it.
    parts = re.split(r"(^```.*?^```)", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _copied(app: Sphinx) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for source, name in PAGES.items():
        page = FOLDER / f"{name}.md"
        text = rewritten((ROOT / source).read_text(encoding="utf-8"), (ROOT / source).parent, page)
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(name))
    if page.suffix == ".md" and page.parent != FOLDER:
        source[0] = rewritten(source[0], page.parent, page)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("builder-inited", _copied)
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
