"""Judges a port's operations by the op vectors: its outputs, under the names of golden/data/ops.safetensors.

A port reads the inputs and parameters of a case (golden/op_cases.py says where they stand), computes, and writes
its outputs as tensors of the same names into a safetensors file of its own. It need not have all cases.
"""

from typing import Any

import numpy as np

from golden.trace import THE_CONTRACT, StepReport, Tolerances, missing_step, relative_error


def judge_output(name: str, expected: np.ndarray, found: np.ndarray, limit: float) -> StepReport:
    """One output. limit 0: the same values (0 and -0 are the same); otherwise a relative error by norm."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        note = f"{found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}"
        return StepReport(name, float("inf"), note, ok=False)
    if limit == 0:
        wrong = int((found != expected).sum())
        note = f"{wrong} of {expected.size} differ" if wrong else "exact"
        return StepReport(name, wrong / max(expected.size, 1), note, wrong == 0)
    with np.errstate(invalid="ignore"):
        error = relative_error(expected, found)
    return StepReport(name, error, "" if error <= limit else f"above {limit:g}", error <= limit)


def judge_ops(
    cases: dict[str, dict[str, Any]],
    expected: dict[str, np.ndarray],
    found: dict[str, np.ndarray],
    tolerances: Tolerances = THE_CONTRACT,
) -> list[StepReport]:
    """Every output, in the order of the cases.

    Inputs may be there as well; they are not looked at. A tensor of an unknown name is reported as wrong.
    """
    reports = []
    for case, about in cases.items():
        for output, limit in about["outputs"].items():
            name = f"{case}.{output}"
            if name in found:
                reports.append(judge_output(name, expected[name], found[name], tolerances.of(name, limit)))
            else:
                reports.append(missing_step(name))
    unknown = sorted(found.keys() - expected.keys())
    return reports + [StepReport(name, float("inf"), "no such op vector", ok=False) for name in unknown]
