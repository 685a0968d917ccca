"""Pages that are made of the code: the Python reference of all public modules, and every command's options."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer

from pfl_ext import cli
from pfl_ext.algorithms import METHODS
from pfl_ext.federation import Method
from pfl_ext.options import Options, plain_value

FOLDER = Path(__file__).resolve().parents[1] / "generated"

PACKAGES = {
    "pfl_ext": "Runs and comparisons",
    "pfl_ext.ops": "Ops",
    "pfl_ext.optim": "Optimisers",
    "pfl_ext.nn": "Networks",
    "pfl_ext.data": "Data",
    "pfl_ext.tasks": "Tasks",
    "pfl_ext.metrics": "Metrics",
    "pfl_ext.federation": "Federation",
    "pfl_ext.engines": "Engines",
    "pfl_ext.algorithms": "Methods",
    "pfl_ext.reports": "Results",
    "pfl_ext.flower": "Flower",
}
"""What users import from, and what each page is called."""

NOT_FOR_CALLERS = ("pfl_ext.__main__", "pfl_ext.commands", "pfl_ext.printed", "pfl_ext.configs", "pfl_ext.benchmarks")
"""No interface of Python: the command line, the papers' files, the benchmarks."""


# ---- the Python reference --------------------------------------------------------------------------------------------


def modules() -> Iterator[ModuleType]:
    """All public modules, packages first."""
    package = importlib.import_module("pfl_ext")
    names = [found.name for found in pkgutil.walk_packages(package.__path__, "pfl_ext.")]
    for name in ["pfl_ext", *sorted(names)]:
        private = any(part.startswith("_") for part in name.split("."))
        if not private and not name.startswith(NOT_FOR_CALLERS):
            yield importlib.import_module(name)


def page_of(module: str) -> str:
    """The name of a module's page: that of the package it is in."""
    return max((name for name in PACKAGES if f"{module}.".startswith(f"{name}.")), key=len)


def entries(module: ModuleType, known: set[Any]) -> Iterator[tuple[str, Any]]:
    """The names of a module's ``__all__`` with their values, without modules and what ``known`` has."""
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        # A function or class is one thing under any name. Constants of several names may be equal and the same object.
        thing = id(value) if _is_code(value) else (name, id(value))
        if not inspect.ismodule(value) and thing not in known and name != "__version__":
            known.add(thing)
            yield name, value


def _is_code(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, "__wrapped__")


def _comment(name: str, value: Any) -> list[str]:
    """The docstring below a constant, in whichever module it is written."""
    for module in modules():
        if getattr(module, name, None) is value and name in getattr(module, "__all__", ()):
            found = ModuleAnalyzer.for_module(module.__name__).find_attr_docs().get(("", name))
            if found:
                return list(found)
    return []


def _entry(module: ModuleType, name: str, value: Any) -> list[str]:
    path = f"{module.__name__}.{name}"
    if inspect.isclass(value):
        lines = [f".. autoclass:: {path}"]
        if not (issubclass(value, Method) and value is not Method):  # its members are the hooks of Method
            lines += ["   :members:", "   :exclude-members: " + ", ".join(_options(value)) or "none"]
        return [*lines, ""]
    if _is_code(value):
        return [f".. autofunction:: {path}", ""]
    text = _comment(name, value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        text += ["", "Keys: " + ", ".join(f"``{key}``" for key in value)]
    elif isinstance(value, tuple | int | str | float) and len(repr(value)) < 200:
        text += ["", f"Value: ``{value!r}``"]
    return [f".. py:data:: {path}", "", *("   " + line for line in text), ""]


def _options(value: type) -> list[str]:
    return [field.name for field in dataclasses.fields(value)] if issubclass(value, Options) else []


def _summary(module: ModuleType, name: str, value: Any) -> str:
    documented = inspect.getdoc(value) if _is_code(value) else "\n".join(_comment(name, value))
    if not documented and isinstance(value, tuple):
        return ", ".join(f"``{one}``" for one in value)
    first = re.split(r"\n\s*\n|(?<=(?<!al)\.)\s", (documented or "").strip(), maxsplit=1)[0]
    return " ".join(first.split()).rstrip(":")


def _table(module: ModuleType, found: Sequence[tuple[str, Any]]) -> list[str]:
    lines = [".. list-table::", "   :widths: 30 70", "   :class: names", ""]
    for name, value in found:
        lines.append(f"   * - :py:obj:`{name} <{module.__name__}.{name}>`")
        lines.append(f"     - {_summary(module, name, value)}")
    return [*lines, ""]


def _heading(text: str, mark: str) -> list[str]:
    return [text, mark * len(text), ""]


def python_pages() -> dict[str, str]:
    """Name and text of each page of the Python reference."""
    known: set[Any] = set()
    pages: dict[str, list[str]] = {}
    inner: dict[str, list[str]] = {name: [] for name in PACKAGES}
    for package, title in PACKAGES.items():
        module = importlib.import_module(package)
        found = list(entries(module, known))
        lines = [*_heading(f"{title}: {package}", "="), f".. automodule:: {package}", "   :no-members:", ""]
        lines += _table(module, found)
        for name, value in found:
            lines += _entry(module, name, value)
        pages[package] = lines
    for module in modules():
        if module.__name__ in PACKAGES:
            continue
        found = list(entries(module, known))
        if found:
            lines = inner[page_of(module.__name__)]
            lines += [*_heading(module.__name__, "-"), f".. automodule:: {module.__name__}", "   :no-members:", ""]
            for name, value in found:
                lines += _entry(module, name, value)
    texts = {}
    for package, title in PACKAGES.items():
        lines = pages[package]
        if inner[package]:
            below = f"{package}-modules"
            lines += ["", ".. toctree::", "   :hidden:", "", f"   {below}", ""]
            lines += [f"What its modules have beside these, for those who extend them: :doc:`{below}`.", ""]
            texts[below] = "\n".join([*_heading(f"{title}: the modules of {package}", "="), *inner[package]])
        texts[package] = "\n".join(lines)
    listed = [f"   {title} <{name}>" for name, title in PACKAGES.items()]
    rows = [f"   * - :doc:`{name}`\n     - {title}" for name, title in PACKAGES.items()]
    head = [*_heading("Python reference", "="), "Made of the docstrings. Every page lists what its module exports.", ""]
    texts["index"] = "\n".join(
        [*head, ".. toctree::", "   :hidden:", "", *listed, "", ".. list-table::", "", *rows, ""]
    )
    return texts


# ---- the options of methods and settings -----------------------------------------------------------------------------


def _signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Options have a table, which a signature of forty of them would only repeat."""
    return ("(**options)", None) if what == "class" and issubclass(value, Options) and _options(value) else None


def _option_table(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Below the docstring of a class with options: what each is, and its default."""
    if what != "class" or not issubclass(value, Options):
        return
    common = set() if value is Method or not issubclass(value, Method) else set(_options(Method))
    fields = [field for field in dataclasses.fields(value) if field.name not in common]
    if not fields:
        if common:
            lines += ["", "It has the options of every method and no others: :class:`~pfl_ext.federation.Method`."]
        return
    lines += ["", ".. list-table:: Options", "   :header-rows: 1", "   :widths: 26 20 54", ""]
    lines += ["   * - option", "     - default", "     - what it is"]
    for field in fields:
        default = "none" if field.default in (None, "", ()) else f"``{plain_value(field.default)}``"
        text = field.metadata["help"].replace("*", "\\*").replace("|", "\\|").replace("`", "\\`")
        choices = field.metadata["choices"]
        if choices:
            text += ": " + ", ".join(f"``{choice}``" for choice in choices)
        lines += [f"   * - ``{field.name}``", f"     - {default}", f"     - {text}"]
    lines.append("")
    if common:
        lines += ["And those of every method: :class:`~pfl_ext.federation.Method`.", ""]


_AS_WRITTEN: dict[str, list[str]] = {}


def _kept(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon, which takes what is before a colon in an attribute's docstring for its type."""
    if what in ("attribute", "data", "property") and not any(line.endswith(":") for line in lines):
        _AS_WRITTEN[name] = [*lines]


def _brought_back(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """After it."""
    if name in _AS_WRITTEN:
        lines[:] = _AS_WRITTEN.pop(name)


def _no_way_back(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """From source code no links to the reference: viewcode gets those of a module that has two pages wrong."""
    if page.startswith("_modules/"):
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


# ---- commands --------------------------------------------------------------------------------------------------------


class _Shown(Exception):
    """A parser was asked to print its help."""


def parser_of(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser that a command line's ``--help`` would print, with all that it knows."""

    def shown(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise _Shown(parser)

    before, argparse.ArgumentParser.print_help = argparse.ArgumentParser.print_help, shown  # type: ignore[method-assign]
    try:
        cli.main([*arguments, "--help"])
    except _Shown as found:
        parser: argparse.ArgumentParser = found.args[0]
        return parser
    finally:
        argparse.ArgumentParser.print_help = before  # type: ignore[method-assign]
    raise ValueError(f"pfl-ext {' '.join(arguments)} --help printed no help")


EXAMPLES = {"run": ["run", "fedavg"], "flower": ["flower", "new", "FOLDER", "fedavg"]}
"""The command lines whose help has everything, where the command alone has not."""
MORE = {"bench": {"bench federation": ["bench", "federation"]}}
"""Parsers below a command."""


def _plain(text: str) -> str:
    """Text of a help as reStructuredText that shows it as it is."""
    return re.sub(r"([*`|\\_])", r"\\\1", text)


def _usage(parser: argparse.ArgumentParser) -> str:
    return " ".join((parser.usage or parser.format_usage().removeprefix("usage: ")).split())


def _command(name: str, parser: argparse.ArgumentParser) -> list[str]:
    lines = [".. code-block:: text", "", f"   {_usage(parser)}", ""]
    if parser.description:
        lines += [_plain(" ".join(parser.description.split())), ""]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if not actions:
            continue
        title = {"positional arguments": "What is named without a flag", "options": "Options"}.get(group.title or "")
        lines += [f".. rubric:: {_plain(title or group.title or 'Options')}", ""]
        if group.description:
            lines += [_plain(" ".join(group.description.split())), ""]
        lines += [".. list-table::", "   :widths: 38 62", "   :class: options", ""]
        for action in actions:
            lines += [f"   * - {_written(action)}", f"     - {_told(parser, action)}"]
        lines.append("")
    return lines


def _written(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"``{action.metavar or action.dest}``"
    if action.nargs == 0:
        return ", ".join(f"``{flag}``" for flag in action.option_strings)
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.rpartition(".")[2].upper()
    )
    value = " ".join(value) if isinstance(value, tuple) else value
    return ", ".join(
        f"``{flag} {value.replace(',', ', ') if len(value) > 24 else value}``" for flag in action.option_strings
    )


def _told(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    if action.help is None:
        return ""
    if action.help == argparse.SUPPRESS:
        return "(for the program's own use)"
    formatter = parser._get_formatter()
    return _plain(" ".join(formatter._expand_help(action).split()))


def command_pages() -> dict[str, str]:
    """Name and text of each command's page."""
    texts = {}
    for command, about in cli._COMMANDS.items():
        lines = [*_heading(f"pfl-ext {command}", "="), _plain(about[0].upper() + about[1:] + "."), ""]
        if command == "run":
            lines += [
                "Below are the options of ``pfl-ext run fedavg``. Each method has options of its own beside the ones "
            ]
            lines += [
                "that all methods share: :doc:`/generated/api/pfl_ext.algorithms` and :doc:`/methods` list them.",
                "",
            ]
        lines += _command(command, parser_of(EXAMPLES.get(command, [command])))
        for title, arguments in MORE.get(command, {}).items():
            lines += [*_heading(f"pfl-ext {title}", "-"), *_command(title, parser_of(arguments))]
        texts[command] = "\n".join(lines)
    rows = [f"   * - :doc:`{name}`\n     - {_plain(about)}" for name, about in cli._COMMANDS.items()]
    head = [*_heading("Commands", "="), "Made of the code: every command with all its options.", ""]
    listed = [f"   {name} <{name}>" for name in cli._COMMANDS]
    texts["index"] = "\n".join(
        [*head, ".. toctree::", "   :hidden:", "", *listed, "", ".. list-table::", "", *rows, ""]
    )
    return texts


# ---- into files ------------------------------------------------------------------------------------------------------


def _write(app: Sphinx) -> None:
    with mock(app.config.autodoc_mock_imports):
        made = {"api": python_pages(), "commands": command_pages()}
    for folder, texts in made.items():
        (FOLDER / folder).mkdir(parents=True, exist_ok=True)
        for path in (FOLDER / folder).glob("*.rst"):
            if path.stem not in texts:
                path.unlink()
        for name, text in texts.items():
            path = FOLDER / folder / f"{name}.rst"
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    assert METHODS
    app.connect("builder-inited", _write)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _option_table, priority=400)
    app.connect("autodoc-process-docstring", _kept, priority=400)
    app.connect("autodoc-process-docstring", _brought_back, priority=600)
    app.connect("html-page-context", _no_way_back)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
