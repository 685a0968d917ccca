from __future__ import annotations

import itertools

import file_cases
from children import read_corpus, run


def test_a_tampered_file_ends_in_one_clear_error_and_nothing_is_lost() -> None:
    drawn = (file_cases.draw(0, number) for number in range(300))
    report = run("file_cases", itertools.chain(read_corpus("files"), drawn), {})
    assert not report.findings, str(report)


def test_the_same_seed_draws_the_same_cases() -> None:
    assert [file_cases.draw(3, n) for n in range(50)] == [file_cases.draw(3, n) for n in range(50)]
