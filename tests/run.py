"""Runs every test and closes with one line: N passed, N failed.

    python tests/run.py DOCTEST_BINARY...     the C++ tests given, then pytest over tests/

A test is a doctest test case or a pytest test. The exit code is 0 only if something ran and nothing failed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str]) -> tuple[int, str]:
    """Runs a command in the repository's root, showing its output as it comes. Returns exit code and output."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines)


def doctest_counts(code: int, output: str) -> tuple[int, int]:
    """Passed and failed test cases of a doctest binary; one that died counts as a failure."""
    summary = re.search(r"test cases:\s*\d+ \|\s*(\d+) passed \|\s*(\d+) failed", output)
    if summary is None:
        return 0, 1
    passed, failed = map(int, summary.groups())
    return passed, max(failed, int(code != 0))


def pytest_counts(code: int, report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of a pytest run, from its JUnit report."""
    if not report.exists():
        return 0, 1, 0
    suite = ElementTree.parse(report).getroot().find("testsuite")
    n, failures, errors, skipped = (int(suite.get(what)) for what in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    return n - failed - skipped, max(failed, int(code != 0)), skipped


def main() -> int:
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # tests that call make do not speak to the one that called this
        os.environ.pop(name, None)
    passed = failed = 0
    for binary in sys.argv[1:]:
        print(f"--- {binary}", flush=True)
        p, f = doctest_counts(*run([binary, "--no-colors=1"]))
        passed, failed = passed + p, failed + f
    print("--- pytest", flush=True)
    report = ROOT / "build" / "pytest.xml"
    report.unlink(missing_ok=True)
    code, _ = run([sys.executable, "-m", "pytest", "-rs", "--durations=5", f"--junitxml={report}", "tests"])
    p, f, skipped = pytest_counts(code, report)
    passed, failed = passed + p, failed + f
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
