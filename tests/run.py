"""Runs every test and closes with one line: N passed, N failed.

    python tests/run.py DOCTEST_BINARY...     the C++ tests given, then pytest over tests/

A test is a doctest test case or a pytest test. The exit code is 0 only if something ran and nothing failed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str]) -> tuple[int, str]:
    """Runs a command in the repository's root, showing its output as it comes. Returns exit code and output."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines)


def counts(code: int, output: str, patterns: dict[str, str]) -> tuple[int, int, int]:
    """Passed, failed and skipped as the runner's summary says; a runner that died counts as a failure."""
    found = {what: sum(map(int, re.findall(pattern, output))) for what, pattern in patterns.items()}
    failed = found["failed"]
    if code != 0 and failed == 0:
        failed = 1
    return found["passed"], failed, found.get("skipped", 0)


def main() -> int:
    # Threads that spin while they wait are slow beyond measure where another process has the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    passed = failed = skipped = 0
    doctest = {"passed": r"test cases:\s*\d+ \|\s*(\d+) passed", "failed": r"test cases:.*?(\d+) failed"}
    for binary in sys.argv[1:]:
        print(f"--- {binary}", flush=True)
        p, f, _ = counts(*run([binary, "--no-colors=1"]), doctest)
        passed, failed = passed + p, failed + f
    print("--- pytest", flush=True)
    summary = {"passed": r"(\d+) passed", "failed": r"(\d+) (?:failed|error)", "skipped": r"(\d+) skipped"}
    code, output = run([sys.executable, "-m", "pytest", "-q", "-rs", "--durations=8", "tests"])
    p, f, s = counts(code, (output.strip().splitlines() or [""])[-1], summary)
    passed, failed, skipped = passed + p, failed + f, skipped + s
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
