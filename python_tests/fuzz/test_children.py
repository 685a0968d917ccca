from __future__ import annotations

from pathlib import Path

from children import run

JUDGE = """
import os, signal, time
def judge(case):
    if case["do"] == "die":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if case["do"] == "exit":
        os._exit(3)
    if case["do"] == "hang":
        time.sleep(600)
    if case["do"] == "fail":
        raise KeyError("x")
    return {"find": "something", "known": "known: a fault"}.get(case["do"])
"""


def test_death_hang_and_failure_are_findings_and_the_next_case_is_run(tmp_path: Path) -> None:
    (tmp_path / "judge_of_test.py").write_text(JUDGE, encoding="utf-8")
    deeds = ["fine", "die", "fine", "hang", "exit", "fail", "find", "known", "fine"]
    cases = [{"family": deed, "do": deed} for deed in deeds]
    report = run("judge_of_test", cases, {"PYTHONPATH": str(tmp_path)}, seconds=5)
    found = {finding["case"]["do"]: finding["finding"] for finding in report.findings}
    assert set(found) == {"die", "hang", "exit", "fail", "find"} and report.cases == len(deeds)
    assert "SIGSEGV" in found["die"] and "last words" in found["die"]
    assert "a hang" in found["hang"] and "status 3" in found["exit"] and "KeyError" in found["fail"]
    assert report.left_out == {"a fault": 1} and "something" in str(report)
