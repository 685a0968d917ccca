"""``import pfl_ext``: all parts by name, none of them imported before it is asked for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pfl_ext

ROOT = Path(__file__).parents[1]
PARTS = ("algorithms", "data", "engines", "federation", "metrics", "nn", "ops", "optim", "reports", "tasks")


def answer(code: str) -> object:
    """What a fresh interpreter prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys, pfl_ext\nprint(json.dumps({code}))"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_imports_the_ops_alone():
    loaded = answer("[n for n in sys.modules if n.startswith('pfl_ext.') and n.count('.') == 1]")
    assert set(loaded) == {"pfl_ext._build_record", "pfl_ext._native", "pfl_ext.ops"}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_there_when_it_is_asked_for(part):
    assert answer(f"[pfl_ext.{part}.__name__, 'pfl_ext.{part}' in sys.modules]") == [f"pfl_ext.{part}", True]


def test_the_parts_are_listed_before_they_are_imported():
    assert set(PARTS) <= set(answer("dir(pfl_ext)"))
    assert set(pfl_ext.__all__) == {*PARTS, "compare", "load_results", "run", "__version__"}


def test_another_name_is_refused_as_of_any_module():
    with pytest.raises(AttributeError, match="module 'pfl_ext' has no attribute 'algorithm'"):
        pfl_ext.algorithm  # noqa: B018
    assert not hasattr(pfl_ext, "engine")


def test_the_changelog_and_the_citation_are_of_this_version() -> None:
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    newest = re.search(r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?$", changelog, re.M)
    assert newest is not None
    released = re.search(rf'^version: {re.escape(pfl_ext.__version__)}\ndate-released: "(.+)"$', citation, re.M)
    assert released is not None
    assert newest[1] == "Unreleased" or newest.groups() == (pfl_ext.__version__, released[1])
