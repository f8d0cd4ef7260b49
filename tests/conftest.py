"""What holds for all of pytest's tests, and the programs that they start.

SKIPS=FILE in the environment: a test that is skipped fails, unless the reason is a line of that file (.ci/skips).
"""

import os
from pathlib import Path

import pytest

# Matrices are small here: threads of OpenBLAS would wait for each other most of the time. Set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads of OpenMP that wait would keep the cores from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ALLOWED = Path(os.environ["SKIPS"]).read_text().splitlines() if "SKIPS" in os.environ else None


def _unless_allowed(report):
    """The report of a test, or of a module; one that was skipped for a reason that SKIPS lacks has failed."""
    if ALLOWED is not None and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in ALLOWED:
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} was skipped, and {os.environ['SKIPS']} does not have: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _unless_allowed((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _unless_allowed((yield))
