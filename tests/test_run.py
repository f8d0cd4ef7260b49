"""tests/run.py: what it counts, and what it says of tests that were skipped."""

import re
from collections import Counter

import pytest

from tests.helpers import ROOT
from tests.run import Counts, doctest_counts, pytest_counts, run_unless_passed, summary

REPORT = """<?xml version="1.0"?><testsuites><testsuite errors="1" failures="1" skipped="3" tests="9">
<testcase name="a"/><testcase name="b"><skipped type="pytest.skip" message="needs qemu-user"/></testcase>
<testcase name="c"><skipped type="pytest.skip" message="needs a GPU"/></testcase>
<testcase name="d"><skipped type="pytest.skip" message="needs qemu-user"/></testcase></testsuite></testsuites>"""


def test_a_report_of_pytest(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    skipped = Counter({"needs qemu-user": 2, "needs a GPU": 1})
    assert pytest_counts(1, tmp_path / "report.xml") == Counts(4, 2, skipped)
    assert pytest_counts(0, tmp_path / "none.xml") == Counts(0, 1)
    (tmp_path / "report.xml").write_text(REPORT.replace('errors="1" failures="1"', 'errors="0" failures="0"'))
    assert pytest_counts(0, tmp_path / "report.xml") == Counts(6, 0, skipped)
    assert pytest_counts(2, tmp_path / "report.xml").failed == 1  # interrupted, and nothing in the report says so


def test_doctest():
    line = "[doctest] test cases:  7 |  {} passed | {} failed | 0 skipped\n"
    assert doctest_counts(0, line.format(7, 0)) == Counts(7, 0)
    assert doctest_counts(1, line.format(5, 2)) == Counts(5, 2)
    assert doctest_counts(-11, line.format(7, 0)) == Counts(7, 1)  # died after the last test
    assert doctest_counts(-11, "") == Counts(0, 1)


def test_what_has_passed_in_the_same_bytes_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("TESTS_PASSED", str(tmp_path / "passed"))
    program = tmp_path / "some_test"

    def run(n_failed, comment="", data=b"data"):
        line = f"test cases: 3 | {3 - n_failed} passed | {n_failed} failed"
        program.write_text(f"#!/bin/sh\n# {comment}\necho '{line}'\nexit {n_failed}\n")
        program.chmod(0o755)
        return run_unless_passed(str(program), data)

    assert [run(1), run(1)] == [Counts(2, 1)] * 2
    assert run(0) == Counts(3, 0)
    left_out = run(0)
    assert (left_out.passed, left_out.failed, left_out.skipped.total()) == (0, 0, 1)
    assert run(0, comment="other bytes") == run(0, data=b"others") == Counts(3, 0)
    monkeypatch.delenv("TESTS_PASSED")
    assert run(0) == Counts(3, 0)


def test_the_end_says_what_was_skipped():
    counts = Counts(3, 0, Counter({"needs a GPU": 1})) + Counts(2, 1, Counter({"needs qemu-user": 2}))
    assert summary(counts).splitlines() == [
        "skipped, each with what it needs (3):",
        "    2  needs qemu-user",
        "    1  needs a GPU",
        "5 passed, 1 failed, 3 skipped",
    ]
    assert summary(Counts(5, 0)) == "5 passed, 0 failed"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("*.py")), ids=lambda path: path.stem)
def test_every_skip_says_what_it_needs(path):
    reasons = re.findall(r'(?:pytest\.skip\(|\breason=)f?"([^"]*)', path.read_text())
    assert [reason for reason in reasons if not reason.startswith("needs ")] == []
