"""Runs every test and closes with one line: N passed, N failed.

    python tests/run.py [--no-pytest] DOCTEST_BINARY...     the C++ tests given, then pytest over tests/

A test is a doctest test case or a pytest test. The exit code is 0 only if something ran and nothing failed. Pytest has
a process per core; tests that are marked `alone`, as they measure time, run by themselves at the end.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
# Files that take longest, or have one test that does. They begin first, so that none runs on when all others are done.
SLOW = ["recipe", "plain", "hw", "rtl", "chip", "tokenizer", "fuzz", "broken_files", "runq", "runq_awq", "planted_bugs"]
# Files that other goals run, which build what they look at: make test-web, test-web-node, test-book, test-dist.
ELSEWHERE = ["web", "web_places", "web_node", "book", "dist"]


class Counts(NamedTuple):
    """What came of some tests."""

    passed: int = 0
    failed: int = 0
    skipped: Counter = Counter()  # noqa: RUF012  how many tests were skipped for each reason

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


def run_doctest(binary: str, which: str) -> Counts:
    """One run of a doctest binary, `which` of all. Its output is shown at its end, so that two can run side by side."""
    done = subprocess.run(
        [binary, "--no-colors=1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    print(f"--- {which}: {binary}\n{done.stdout}", end="", flush=True)
    return doctest_counts(done.returncode, done.stdout)


def doctest_counts(code: int, output: str) -> Counts:
    """Test cases of a doctest binary; one that died counts as a failure."""
    summary = re.search(r"test cases:\s*\d+ \|\s*(\d+) passed \|\s*(\d+) failed", output)
    if summary is None:
        return Counts(failed=1)
    passed, failed = map(int, summary.groups())
    return Counts(passed, max(failed, int(code != 0)))


def pytest_counts(code: int, report: Path) -> Counts:
    """Tests of a pytest run, from its JUnit report."""
    if not report.exists():
        return Counts(failed=1)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    n, failures, errors = (int(suite.get(what)) for what in ("tests", "failures", "errors"))
    skipped = Counter(case.get("message") for case in suite.iter("skipped"))
    failed = failures + errors
    return Counts(n - failed - skipped.total(), max(failed, int(code != 0)), skipped)


def run_pytest(name: str, *options: str) -> Counts:
    """One run of pytest. name: of its report."""
    print(f"--- pytest, {name}", flush=True)
    report = ROOT / "build" / f"pytest-{name}.xml"
    report.unlink(missing_ok=True)
    names = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")} - {*ELSEWHERE}
    files = [f"tests/test_{name}.py" for name in sorted(names, key=lambda name: (name not in SLOW, name))]
    command = [sys.executable, "-m", "pytest", "--durations=25", f"--junitxml={report}", *options, *files]
    return pytest_counts(subprocess.run(command, cwd=ROOT, check=False).returncode, report)


def summary(counts: Counts) -> str:
    """What was skipped and what would make it run, and the last line."""
    reasons = [f"  {n:3}  {reason}" for reason, n in counts.skipped.most_common()]
    skipped = counts.skipped.total()
    lines = [f"skipped, each with what it needs ({skipped}):", *reasons] if reasons else []
    lines.append(f"{counts.passed} passed, {counts.failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return "\n".join(lines)


def main() -> int:
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # tests that call make do not speak to the one that called this
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in tests/conftest.py
    counts = Counts()
    binaries = [argument for argument in sys.argv[1:] if argument != "--no-pytest"]
    n = str(len(os.sched_getaffinity(0)))
    print(f"step 2 of 3: {len(binaries)} C++ test programs, two at a time", flush=True)
    # Most have as many threads as there are cores. Two at a time leave no core idle where they have not.
    with ThreadPoolExecutor(2) as pool:
        which = [f"{i} of {len(binaries)}" for i in range(1, len(binaries) + 1)]
        for found in pool.map(run_doctest, binaries, which):
            counts += found
    if len(binaries) == len(sys.argv) - 1:
        print("step 3 of 3: pytest", flush=True)
        # A file's tests share what they have made, so that a file is for one process.
        counts += run_pytest("together", "-m", "not alone", "-n", n, "--dist=loadfile", "--no-loadscope-reorder")
        counts += run_pytest("alone", "-m", "alone")
    print(summary(counts))
    return 0 if counts.failed == 0 and counts.passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
