"""Options: read off dataclasses and signatures, parsed, suggested."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from pfl_ext.engines import EngineOptions
from pfl_ext.federation import Settings, option
from pfl_ext.options import REQUIRED, Option, OptionError, nearest, of_dataclass, of_signature
from pfl_ext.sections import settings_options


@dataclass(frozen=True)
class Schedule:
    """When things happen.

    More about it.
    """

    rounds: int = option(20, "how many")
    seed: int = option(0, "the one seed")


@dataclass(frozen=True)
class Compute:
    """Where it runs."""

    device: str = option("cpu", "the device")


@dataclass(frozen=True)
class Grouped(Schedule, Compute):
    """The rest."""

    extra: float = option(0.5, "its own", choices=(0.5, 1.0))
    seed: int = option(3, "another default")


def test_a_group_is_the_class_that_declares_the_option() -> None:
    found = of_dataclass(Grouped)
    groups = {name: made.group for name, made in found.items()}
    assert groups == {
        "extra": "The rest",
        "rounds": "When things happen",
        "seed": "When things happen",  # declared anew for another default: it stays where it was
        "device": "Where it runs",
    }
    assert list(dict.fromkeys(groups.values())) == ["The rest", "When things happen", "Where it runs"]
    assert found["seed"].default == 3 and found["extra"].choices == (0.5, 1.0) and found["rounds"].type is int


def test_settings_options_are_all_fields_of_the_settings() -> None:
    assert settings_options().keys() == {*Settings.__dataclass_fields__, *EngineOptions.__dataclass_fields__}
    assert of_dataclass(Grouped)["device"].group == "Where it runs"
    assert all(made.group and made.help for made in settings_options().values())


def test_options_of_a_signature_are_its_keyword_only_parameters() -> None:
    def cut(data: Any, *, generator: Any, k: Annotated[int, "classes"], test: Literal["a", "b"] = "a") -> None:
        """Cut it."""

    found = of_signature(cut)
    assert list(found) == ["k", "test"] and found["k"].default is REQUIRED and found["k"].help == "classes"
    assert found["test"].choices == ("a", "b") and found["test"].group == "Cut it"


@pytest.mark.parametrize(
    ("kind", "value", "accepted"),
    [
        (str, 3, "text"),
        (str, {}, "text"),
        (int, True, "an integer"),
        (int, float("inf"), "an integer"),
        (float, {}, "a number"),
        (float, [], "a number"),
        (bool, 1, "true or false"),
        (Path, 3, "a path"),
        (tuple[float, ...], {"a": 1}, "a list of numbers"),
        (tuple[str, ...], [3], "a list of names"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_accepted(kind: Any, value: Any, accepted: str) -> None:
    with pytest.raises(OptionError) as refused:
        Option("some", kind, None, "").parse(value)
    assert str(refused.value).startswith(f"some is {value!r}; accepted is {accepted}")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--learning-rate", "--lr"),
        ("learning_rate", "lr"),
        ("--epochs", "--local-epochs"),
        ("--dataset", "--data"),
        ("--num-clients", "--clients"),
        ("--batch-sise", "--batch-size"),
    ],
)
def test_the_nearest_name_is_found_by_meaning_and_by_spelling(wrong: str, right: str) -> None:
    known = ["--lr", "--local-epochs", "--data", "--data-root", "--clients", "--batch-size", "--new-clients"]
    if not wrong.startswith("-"):
        known = [name[2:].replace("-", "_") for name in known]
    assert nearest(wrong, known).startswith(f" (did you mean {right}")


def test_a_synonym_of_an_option_that_is_not_there_is_not_suggested() -> None:
    assert nearest("learning_rate", ["rounds", "k"]) == ""
