"""Messages of the library in the words of the command line, and groups of settings in its help."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest

from pfl_ext.cli import _COMMANDS, main
from pfl_ext.commands import parsing
from pfl_ext.commands.flags import flag, known_flags, with_flags
from pfl_ext.commands.parser import Parser
from pfl_ext.federation import option
from pfl_ext.options import of_dataclass


@pytest.mark.parametrize(
    ("message", "spoken"),
    [
        ("allow it (download=True).", "allow it (--download)."),
        ("partition with validation=0.2, say", "partition with --validation 0.2, say"),
        ("name it by root=PATH or", "name it by --data-root PATH or"),
        ("device is 'abacus'", "--device is 'abacus'"),
        ("batch_size is 0", "--batch-size is 0"),
        # neither names of folders nor dotted names are options
        ("results/lam=1/ditto holds results", "results/lam=1/ditto holds results"),
        ("results/lam=1 holds results", "results/lam=1 holds results"),
        ("lam=1_alpha=5/ditto holds results", "lam=1_alpha=5/ditto holds results"),
        ("such as method.lr=0.1", "such as method.lr=0.1"),
        ("method.lr is 'fast'", "method.lr is 'fast'"),
        ("mnist is not in data", "mnist is not in data"),
    ],
)
def test_a_message_speaks_of_flags(message: str, spoken: str) -> None:
    assert with_flags(message, known_flags()) == spoken


def test_a_message_stays_as_it_is_where_a_command_has_no_flags() -> None:
    assert with_flags("device is 'abacus', download=True", {}) == "device is 'abacus', download=True"


def test_options_of_tables_have_the_flags_that_the_help_lists() -> None:
    spelled = [flag("data", "name"), flag("data", "root"), flag("partition", "file"), flag("network", "stem")]
    assert spelled == ["--data", "--data-root", "--partition-file", "--network-stem"]
    assert flag("federation", "clock_up") == "--clock-up" and flag("method", "lr") == "--lr"


@dataclass(frozen=True)
class _Schedule:
    """When things happen."""

    rounds: int = option(20, "how many")


@dataclass(frozen=True)
class _Compute:
    """Where it runs."""

    device: str = option("cpu", "the device")


@dataclass(frozen=True)
class _Grouped(_Schedule, _Compute):
    """All of it."""


def test_help_has_a_group_for_each_class_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "settings_options", lambda: of_dataclass(_Grouped))
    parser = Parser("some")
    parsing.add_settings(parser)
    text = parser.format_help()
    places = [text.index(part) for part in ("When things happen:", "--rounds", "Where it runs:", "--device")]
    assert places == sorted(places) and "All of it" not in text


@pytest.mark.parametrize("columns", [200, 84])
@pytest.mark.parametrize(
    "command", [[], *([name] for name in _COMMANDS), ["run", "ditto"], ["flower", "new", "x", "fedem"]]
)
def test_help_fits_the_terminal_and_100_columns(
    command: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for asked in ("--help", "--help-all"):
        with contextlib.suppress(SystemExit):
            main([*command, asked])
        lines = capsys.readouterr().out.splitlines()
        widest = 100 if columns > 100 or not command else columns
        # A name with a list of values is not broken.
        assert [line for line in lines if len(line) > widest and " " in line.strip()] == []
