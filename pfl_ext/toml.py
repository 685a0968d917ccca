"""TOML files: the tables of runs, read and written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["as_toml", "read_toml"]


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        ValueError: it is not TOML.
        OSError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not TOML: it is not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError of another kind
        raise ValueError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from None


def as_toml(content: Mapping[str, Any]) -> str:
    """The text of a TOML file with this content: values first, then a table for each mapping, and tables in it.

    TOML has no null: what is None is left out.
    """
    return "\n".join(_lines(content, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(name)} = {_value(v)}" for name, v in table.items() if v is not None and not isinstance(v, Mapping)]
    if path and (lines or not table):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            lines += _lines(inner, (*path, name))
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(text: str) -> str:
    # JSON's escapes are TOML's too, but for DEL, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):  # nan and inf are written as Python does
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str | Path):
        return _text(str(value))
    raise TypeError(f"{value!r} is a {type(value).__name__}; TOML has none here")
