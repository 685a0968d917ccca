"""The page as one file: text and tables first, numbers, chart library and script last."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from pfl_ext import __version__

from ..results import ResultsFolder
from .found import Found, Reader
from .numbers import numbers
from .sections import sections

__all__ = ["content", "document", "write_page"]

_LIBRARY = ("static/uPlot.iife.js", "static/uPlot.min.css")


def write_page(folders: Sequence[Path], target: Path) -> Found:
    """Write one HTML file about the runs below some folders; whole or not at all. Returns what is in it.

    Args:
        folders: of runs, comparisons or sweeps, or with any of these in them.
        target: the file.

    Raises:
        FileNotFoundError: a folder without results.
        ValueError: no run can be read; the message says why.
        ImportError: without the chart library.
        ResultsError: the file cannot be written.
    """
    found = Reader(folders).read()
    text = document(found)
    with ResultsFolder(target.parent).replacing(target.name) as path:
        path.write_text(text, encoding="utf-8")
    return found


def content(found: Found) -> dict[str, Any]:
    """What changes while runs go on: the parts that are text, and the numbers."""
    return {"parts": sections(found), "numbers": numbers(found)}


def document(found: Found, *, live: bool = False) -> str:
    """The whole page.

    A browser runs no script of it but these two, and loads nothing: names and messages in results may say what they
    like.

    Args:
        found: what is shown.
        live: it asks the server that it came from for newer numbers.
    """
    code, look = _library()
    style = look + _own("page.css")
    script = _own("page.js")
    asked = "'self'" if live else "'none'"
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"connect-src {asked}; "
        f"style-src {_hash(style)}; script-src {_hash(code)} {_hash(script)}"
    )
    now = datetime.now().astimezone()
    made = f"Made by pfl_ext {__version__} on {now:%Y-%m-%d at %H:%M:%S %Z}. Charts: uPlot. Everything is in this file."
    parts = sections(found) | {
        "policy": policy,
        "style": style,
        "made": escape(made),
        "numbers": embedded({"live": live, **numbers(found)}),
        "library": code,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _own("page.html"))


def embedded(value: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or opens a comment."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _own(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _library() -> tuple[str, str]:
    """Script and style of uPlot, from the package that ships them; it is not imported.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec("uplot")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if all((place / name).is_file() for name in _LIBRARY):
            code, look = ((place / name).read_text(encoding="utf-8") for name in _LIBRARY)
            return code.replace("</script", "<\\/script"), look
    raise ImportError("the page's charts need uPlot from the package uplot-python: pip install 'pfl_ext[report]'")
