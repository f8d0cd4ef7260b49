"""tests/run.py: what it counts, and what it says of tests that were skipped."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.helpers import ROOT
from tests.run import Counts, doctest_counts, pytest_counts, summary

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


def test_the_end_says_what_was_skipped():
    counts = Counts(3, 0, Counter({"needs a GPU": 1})) + Counts(2, 1, Counter({"needs qemu-user": 2}))
    assert summary(counts).splitlines() == [
        "skipped, each with what it needs (3):",
        "    2  needs qemu-user",
        "    1  needs a GPU",
        "5 passed, 1 failed, 3 skipped",
    ]
    assert summary(Counts(5, 0)) == "5 passed, 0 failed"


def test_a_skip_that_is_on_no_list_is_a_failure(tmp_path):
    """SKIPS of tests/conftest.py, as .ci/run has it: of marks, of calls, of modules."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "skips").write_text("needs this\n")
    modules = {
        "mark": "@pytest.mark.skipif(True, reason=WHY)\ndef test(): pass\n",
        "call": "def test(): pytest.skip(WHY)\n",
        "module": 'pytest.importorskip("no_such_module", reason=WHY)\n',
    }
    command = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", tmp_path]
    environment = os.environ | {"SKIPS": "skips"}
    for reason, end in (("needs this", "3 skipped"), ("needs that", "1 failed, 2 errors")):
        for name, text in modules.items():
            (tmp_path / f"test_{name}.py").write_text(f'import pytest\nWHY = "{reason}"\n{text}')
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert end in done.stdout.splitlines()[-1]
        assert (done.returncode == 0) == (reason == "needs this"), done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("*.py")), ids=lambda path: path.stem)
def test_every_skip_says_what_it_needs(path):
    reasons = re.findall(r'(?:pytest\.skip\(|\breason=)f?"([^"]*)', path.read_text())
    assert [reason for reason in reasons if not reason.startswith("needs ")] == []
