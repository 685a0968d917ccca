"""What the documentation site is made of; ``make site`` builds it as a whole."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import pfl_ext
from pfl_ext import cli, ops

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def extensions() -> Iterator[dict[str, ModuleType]]:
    """Those of the site, by name."""
    pytest.importorskip("sphinx")
    found = {}
    for path in (DOCS / "_ext").glob("*.py"):
        spec = importlib.util.spec_from_file_location(f"site_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        found[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[path.stem])
    yield found


def test_every_command_has_a_page_with_all_its_options(
    extensions: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    pages = extensions["reference"].command_pages()
    assert set(pages) == {*cli._COMMANDS, "index"}
    with pytest.raises(SystemExit):
        cli.main(["run", "fedavg", "--help-all"])
    flags = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.M))
    assert len(flags) > 40
    assert {flag for flag in flags if f"``{flag} " not in pages["run"] and f"``{flag}``" not in pages["run"]} == set()
    assert "which kernel computes each op" in pages["info"] and "\\|" not in pages["index"].partition("list-table")[0]


def test_the_reference_has_every_public_name_once(extensions: dict[str, ModuleType]) -> None:
    reference = extensions["reference"]
    mocked = pytest.importorskip("sphinx.ext.autodoc.mock").mock
    with mocked(["flwr"]):
        pages = reference.python_pages()
        modules = [module.__name__ for module in reference.modules()]
    text = "\n".join(pages.values())
    documented = re.findall(r"^\.\. (?:autofunction|autoclass|py:data):: (\S+)", text, re.M)
    assert len(documented) == len(set(documented))
    assert {f"pfl_ext.ops.{name}" for name in ops.__all__} <= set(documented)
    assert "pfl_ext.federation.privacy.epsilon" in documented and "pfl_ext.compare" in documented
    assert {"pfl_ext.metrics", "pfl_ext.engines.workers"} <= set(modules)
    assert not any(part.startswith("_") for name in modules for part in name.split("."))
    assert set(reference.PACKAGES) >= {
        f"pfl_ext.{name}" for name in pfl_ext.__all__ if importlib.util.find_spec(f"pfl_ext.{name}")
    }


def test_options_of_a_method_are_a_table(extensions: dict[str, ModuleType]) -> None:
    from pfl_ext.algorithms import Ditto, FedAvg

    lines: list[str] = ["Ditto."]
    extensions["reference"]._option_table(None, "class", "Ditto", Ditto, None, lines)
    assert "   * - ``lam``" in lines and "     - ``1.0``" in lines and not any("``lr``" in line for line in lines)
    lines = []
    extensions["reference"]._option_table(None, "class", "FedAvg", FedAvg, None, lines)
    assert len(lines) == 2 and "the options of every method" in lines[1]


def test_links_that_leave_the_docs_lead_to_pages_files_or_plain_paths(extensions: dict[str, ModuleType]) -> None:
    links = extensions["repository_links"]
    page = DOCS / "tutorials" / "some.md"

    def made(text: str) -> str:
        return str(links.rewritten(text, page.parent, page))

    assert made("[a](../../CONTRIBUTING.md#versions)") == "[a](../generated/repository/contributing.md#versions)"
    assert made("[a](../../README.md)") == "[a](../index.md)"
    assert made("[examples/](../../examples)") == "examples/ (`examples/`)"
    assert made("[`x`](../data.md) [b](https://example.org/x)") == "[`x`](../data.md) [b](https://example.org/x)"
    assert made("```\n[a](../../README.md)\n```") == "```\n[a](../../README.md)\n```"
    assert all((ROOT / name).is_file() for name in links.PAGES)


def test_equations_that_docutils_does_not_know_are_drawn(extensions: dict[str, ModuleType]) -> None:
    nodes = pytest.importorskip("docutils.nodes")
    draw = extensions["mathml"]._drawn
    drawn = draw(nodes.math_block(text=r"\sum_k \tfrac{1}{2} \big\|x_1, \dots, x_n\Big\|^2"), True)
    assert drawn.lstrip().startswith("<math") and "∑" in drawn and "…" in drawn
    assert "munderover" not in draw(nodes.math(text=r"\hat \jmath_k + \overline{h}_k + \bar v_k"), False)


def test_every_page_is_in_the_navigation() -> None:
    listed = set()
    for path in DOCS.rglob("*.md"):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(path.parent / f"{name}.md").resolve() for name in names}
    pages = {path for path in DOCS.rglob("*.md") if "generated" not in path.parts}
    assert pages - listed == {DOCS / "index.md"}


def _checked(site: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/site_check.py", site], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_the_check_of_the_site_sees_broken_links_lost_pages_and_what_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="a.html#there">a</a><link rel="stylesheet" href="s.css">')
    (tmp_path / "a.html").write_text('<p id="there"><a href="https://example.org">elsewhere</a>')
    (tmp_path / "s.css").write_text("p { background: url(data:image/png;base64,AA==) }")
    assert _checked(tmp_path)[0] == 0
    (tmp_path / "lost.html").write_text("<p>")
    (tmp_path / "a.html").write_text('<a href="none.html"></a><script src="https://cdn.example/x.js"></script>')
    (tmp_path / "s.css").write_text('@import "https://fonts.example/x.css";')
    status, told = _checked(tmp_path)
    assert status == 1
    for wrong in (
        "index.html names a.html#there, and there is no such anchor",
        "a.html names none.html, which is not there",
        "a.html loads https://cdn.example/x.js",
        "s.css loads https://fonts.example/x.css",
        "lost.html is linked from nowhere",
    ):
        assert wrong in told
