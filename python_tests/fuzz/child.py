"""The process that may die: reads cases as lines of JSON, answers each with a line of JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    judge = module.judge
    getattr(module, "prepare", lambda: None)()
    # Whatever an op prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        case = json.loads(line)
        try:
            finding = judge(case)
        except Exception:
            finding = "the fuzzer itself failed: " + traceback.format_exc()
        print(json.dumps({"finding": finding, "case": case}), file=answers, flush=True)


if __name__ == "__main__":
    main()
