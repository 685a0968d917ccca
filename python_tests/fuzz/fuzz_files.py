"""Fuzz every reader of files: ``python fuzz_files.py --cases 5000``. The corpus is run first, always."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import file_cases
from children import read_corpus, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="", help="only this family of cases")
    parser.add_argument("--findings", type=Path, help="write what was found to this file, in the form of the corpus")
    given = parser.parse_args()
    drawn = (file_cases.draw(given.seed, number) for number in range(given.cases))
    cases = itertools.chain(read_corpus("files"), drawn)
    if given.family:
        cases = (case for case in cases if case["family"] == given.family)
    report = run("file_cases", cases, {})
    print(report)
    if given.findings is not None:
        given.findings.write_text(json.dumps(report.findings, indent=1) + "\n", encoding="utf-8")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
