from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import op_cases
import pytest
import torch
from call import DRAWN, NATIVE, Call, compare
from children import read_corpus, run
from guarded_tensors import LAYOUTS, Memory, draw_tensor

from pfl_ext import _native, ops
from pfl_ext.ops._declare import OPS

CASES = 2000
_OF_THE_LIBRARY = {"end_prepared_", "proximal_sgd_step_again_"}  # called where there are tickets
BACKENDS = [*_native.available_isas(), "plain"]


def test_there_are_cases_of_every_public_and_every_raw_op() -> None:
    assert op_cases.covered() == {f"ops.{name}" for name in ops.__all__} | {f"raw.{name}" for name in OPS}


def test_every_raw_op_is_reached_and_few_sound_cases_are_refused() -> None:
    drawn = [case for case in (op_cases.draw(1, number) for number in range(640)) if "damage" not in case]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        assert not [finding for finding in map(op_cases.judge, drawn) if finding]
    expected = set(OPS) if NATIVE else {name for name in OPS if name not in _OF_THE_LIBRARY}
    assert {event.key for event in seen.key_averages()} >= {f"pfl_ext::{name}" for name in expected}
    calls = [DRAWN[case["family"]].build(case["case"], Memory()) for case in drawn]
    results = [op_cases.called(call, call.arguments, call.options, 1) for call in calls]
    for family in set(DRAWN) - {"overlapping_out"}:
        answers = [x for x, case in zip(results, drawn, strict=True) if case["family"] == family]
        # Convolutions refuse images that are smaller than their kernel.
        assert sum(isinstance(x, Exception) for x in answers) <= len(answers) / 2, family


@pytest.mark.parametrize("number", range(len(BACKENDS)), ids=BACKENDS)
def test_no_case_crashes_hangs_writes_elsewhere_or_is_wrong(number: int) -> None:
    backend = BACKENDS[number]
    environment = {"PFL_EXT_NATIVE": "0"} if backend == "plain" else {"PFL_EXT_ISA": backend}
    drawn = (op_cases.draw(0, case) for case in range(CASES) if case // 20 % len(BACKENDS) == number)
    report = run("op_cases", itertools.chain(read_corpus("ops"), drawn), environment)
    assert not report.findings, str(report)


def test_the_same_seed_draws_the_same_cases() -> None:
    assert [op_cases.draw(3, n) for n in range(50)] == [op_cases.draw(3, n) for n in range(50)]
    assert op_cases.draw(3, 0) != op_cases.draw(4, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_byte_beside_a_tensor_is_watched(layout: str) -> None:
    memory = Memory()
    x = memory.make(draw_tensor(random.Random(0), [3, 4], "float32", "normal", layout))
    assert memory.changed([]) is None
    x.add_(1)
    assert memory.changed([x]) is None and "was changed" in str(memory.changed([]))
    x.untyped_storage()[x.storage_offset() * 4 - 1] = 0
    assert "memory around" in str(memory.changed([x]))


def test_an_element_beyond_its_bound_is_found_and_one_within_is_not() -> None:
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert compare("x", (truth * (1 + 1e-7)).float(), truth, truth, 4, torch.float32) is None
    assert "element 1" in str(compare("x", (truth + torch.tensor([0, 1e-5])).float(), truth, truth, 4, torch.float32))
    nan = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    assert "instead of nan" in str(compare("x", truth.float(), nan, nan, 4, torch.float32))


def _spoiled(value: Any) -> Any:
    """A result that is two per cent off, or the other of two."""
    if isinstance(value, torch.Tensor):
        return ~value if value.dtype == torch.bool else value * 1.02 if value.dtype.is_floating_point else value
    if isinstance(value, dict):
        return {key: _spoiled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_spoiled, value))
    return not value if isinstance(value, bool) else value


@pytest.mark.parametrize("family", sorted(set(DRAWN) - {"overlapping_out"}))
def test_results_that_are_two_per_cent_off_are_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = DRAWN[family]

    def build(case: dict[str, Any], memory: Memory) -> Call:
        call = drawn.build(case, memory)
        right = call.function

        def spoiled(*arguments: Any, **options: Any) -> Any:
            result = right(*arguments, **options)
            for x in call.written:
                if x.is_floating_point() or x.is_complex():
                    x.mul_(1.02)
            return _spoiled(result)

        call.function = spoiled
        return call

    numbers = (number for number in range(10_000) if sorted(DRAWN)[number % len(DRAWN)] == family)
    cases = (op_cases.draw(5, number) for number in numbers)
    sound = list(itertools.islice((case for case in cases if "damage" not in case), 40))
    assert not [found for found in map(op_cases.judge, sound) if found and not found.startswith("known: ")]
    monkeypatch.setitem(DRAWN, family, dataclasses.replace(drawn, build=build))
    found = [finding for finding in map(op_cases.judge, sound) if finding and not finding.startswith("known: ")]
    print(family, len(found))
    assert len(found) >= 10


def _case(family: str) -> dict[str, Any]:
    """The first sound case of a family."""
    return next(
        case
        for case in (op_cases.draw(0, number) for number in range(10_000))
        if case["family"] == family and "damage" not in case and case["case"].get("raw")
    )


def test_a_step_that_is_a_little_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case("proximal_step")
    assert op_cases.judge(case) is None
    right = torch.ops.pfl_ext.proximal_sgd_step_

    def wrong(params: Any, *rest: Any) -> None:
        right(params, *rest)
        for x in params:
            x.mul_(1.02)

    monkeypatch.setattr(torch.ops.pfl_ext, "proximal_sgd_step_", wrong)
    assert "wrong" in str(op_cases.judge(case))


def test_a_write_before_a_refusal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes_and_refuses(params: Any, *rest: Any) -> None:
        params[0].add_(1)
        raise ValueError("no")

    case = {**_case("proximal_step"), "damage": {"path": ["arguments", 4], "kind": "negative"}}
    assert op_cases.judge(case) is None
    monkeypatch.setattr(torch.ops.pfl_ext, "proximal_sgd_step_", writes_and_refuses)
    case["case"]["params"][0] |= {"shape": [3], "values": "normal"}
    assert "was changed" in str(op_cases.judge(case))
