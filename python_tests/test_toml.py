"""What is written as TOML is read back as it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_ext.toml import as_toml, read_toml, tomllib

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
TABLES = st.recursive(
    st.dictionaries(TEXT, VALUES | st.lists(VALUES, max_size=3), max_size=4),
    lambda inner: st.dictionaries(TEXT, VALUES | inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(TABLES)
def test_every_table_comes_back(content: dict[str, Any]) -> None:
    assert tomllib.loads(as_toml(content)) == content


def test_none_is_left_out_and_paths_and_tuples_have_their_forms(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(as_toml({"a": None, "b": (1, 2), "c": {"d": Path("e/f"), "g": math.inf}}), encoding="utf-8")
    assert read_toml(path) == {"b": [1, 2], "c": {"d": "e/f", "g": math.inf}}
    with pytest.raises(TypeError, match="is a object; TOML has none"):
        as_toml({"a": object()})
