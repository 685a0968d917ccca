"""Cases of all ops: drawn from a seed, run, judged."""

from __future__ import annotations

import random
from typing import Any

import averaging_cases  # noqa: F401 (they register what they cover)
import distillation_cases  # noqa: F401
import layer_cases  # noqa: F401
import spectral_cases  # noqa: F401
import torch
import weights_cases  # noqa: F401
from call import DRAWN, NATIVE, Call, bits
from guarded_tensors import Memory
from known import KNOWN, known
from torch import Tensor
from wrong_arguments import damaged, draw_damage

__all__ = ["called", "covered", "draw", "judge"]

_REFUSALS = (ValueError, TypeError, RuntimeError)
_NEVER_SAID = ("INTERNAL ASSERT", "bad_alloc", "vector::", "std::")


def covered() -> set[str]:
    """The ops that cases are drawn of: ``ops.<name>`` and ``raw.<name>``."""
    return {name for drawn in DRAWN.values() for name in drawn.covers}


def draw(seed: int, number: int) -> dict[str, Any]:
    """Case ``number`` of a seed; one in four has a wrong argument."""
    choice = random.Random(f"{seed}:{number}")
    family = sorted(DRAWN)[number % len(DRAWN)]
    case = {"family": family, "case": DRAWN[family].draw(choice), "threads": choice.choice([1, 1, 2, 3])}
    if choice.random() < 0.25:
        case["damage"] = {"seed": choice.randrange(2**31)}
    return case


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [x for inner in value for x in _tensors(inner)] if isinstance(value, list | tuple) else []


def _refusal(error: BaseException) -> str | None:
    """What is wrong with the way in which a call was refused."""
    message = str(error)
    if not isinstance(error, _REFUSALS):
        return f"refused by {type(error).__name__}: {message.splitlines()[0] if message else ''}"
    if not message:
        return f"refused by a {type(error).__name__} without a word"
    return next((f"refused with {word!r}: {message.splitlines()[0]}" for word in _NEVER_SAID if word in message), None)


def called(call: Call, arguments: list[Any], options: dict[str, Any], threads: int) -> Any:
    """The result, or the exception."""
    torch.set_num_threads(threads)
    try:
        return call.function(*arguments, **options)
    except Exception as error:
        return error
    finally:
        torch.set_num_threads(1)  # what follows is faster on one


def _found(case: dict[str, Any]) -> str | None:
    memory = Memory()
    call = DRAWN[case["family"]].build(case["case"], memory)
    arguments, options = call.arguments, call.options
    wrong = case.get("damage")
    if wrong and "seed" in wrong:
        wrong = case["damage"] = draw_damage(wrong["seed"], arguments, options)
    if fault := known(case, "", KNOWN):
        return f"known: {fault}"
    if wrong:
        arguments, options = damaged(wrong, arguments, options)
    result = called(call, arguments, options, case["threads"])
    if isinstance(result, Exception):
        if not (wrong or call.may_refuse):
            return f"refused without a reason: {type(result).__name__}: {result}"
        return _refusal(result) or memory.changed([])
    if wrong:
        # It may have been an argument like any other; what it should not touch is the same in any case.
        return memory.changed(call.written + call.writable)
    if changed := memory.changed(call.written):
        return changed
    alone = case["threads"] == 1 or not call.again or not NATIVE
    found = None if alone else [bits(x) for x in _tensors(result) + call.written]
    if (finding := call.check(result)) or alone:
        return finding
    # The same bits need no second comparison.
    memory.reset()
    result = called(call, arguments, options, 1)
    if isinstance(result, Exception):
        return f"refused with one thread and not with {case['threads']}: {type(result).__name__}: {result}"
    if changed := memory.changed(call.written):
        return changed
    same = found == [bits(x) for x in _tensors(result) + call.written]
    return None if same else f"other bits with {case['threads']} threads than with one"


def judge(case: dict[str, Any]) -> str | None:
    """Run a case. None if all is well, ``known: ...`` if it was left out, else what is wrong."""
    finding = _found(case)
    if finding is not None and not finding.startswith("known: ") and (fault := known(case, finding, KNOWN)):
        return f"known: {fault}"
    return finding
