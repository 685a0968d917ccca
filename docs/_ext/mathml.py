"""Equations as MathML, which browsers draw by themselves: no script, no fonts, nothing to load, also from a disk."""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

# What the translation of docutils does not know: sizes, which browsers find by themselves, and one kind of dots.
_SIZES = re.compile(r"\\(?:[bB]ig{1,2}[lrm]?|textstyle|displaystyle)(?![A-Za-z])\s*")
_DOTS = re.compile(r"\\dots(?![A-Za-z])")

_ENTITY = re.compile(r"&(?!amp;|lt;|gt;|#)\w+;")  # of HTML; XML has no others than these
_NAMES = "{http://www.w3.org/1998/Math/MathML}"
ElementTree.register_namespace("", _NAMES.strip("{}"))

_logger = logging.getLogger(__name__)


def _drawn(node: nodes.math | nodes.math_block, block: bool) -> str:
    tex = _DOTS.sub(r"\\ldots", _SIZES.sub("", node.astext())).strip()
    try:
        return _with_accents(tex2mathml(tex, as_block=block))
    except MathError as error:
        _logger.warning("equation %r: %s", node.astext(), error, location=node)
        return ""


def _with_accents(drawn: str) -> str:
    """An index of a letter with an accent goes beside it. It comes as what is below the letter: <munderover>."""
    math = ElementTree.fromstring(_ENTITY.sub(lambda found: html.unescape(found[0]), drawn))
    for element in math.iter(f"{_NAMES}munderover"):
        letter, index, accent = element
        if letter.tag != f"{_NAMES}mo" and accent.tag == f"{_NAMES}mo":
            element.tag = f"{_NAMES}msub"
            over = ElementTree.Element(f"{_NAMES}mover", {"accent": "true"})
            over.extend([letter, accent])
            element[:] = [over, index]
    return ElementTree.tostring(math, encoding="unicode")


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_drawn(node, block=False))
    raise nodes.SkipNode


def _displayed(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="equation">{_drawn(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_displayed, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
