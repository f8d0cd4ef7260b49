"""A digest of every step of a run: eight bytes that say whether a port has the same bits, at the size of real models.

A step's digest is of all its tokens, in order, modulo 2^64:

    row(t)   = sum over i of splitmix64(i * 2^32 + the bits of the token's value i)
    digest   = splitmix64(digest ^ row(t)), token by token, from 0

The bits of a value are those of its type as an unsigned number. Of scores, probabilities and attention's weights a
token has those of its own position and earlier ones: value i = head * (position + 1) + key.

A file of them is a JSON object of cases by name. The `steps` of a case has the digest of each step by name, 16
hexadecimal digits; `n_before`, if it is there, says at which position the run began. models/sizes.py makes one.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from formats.errors import ModelError
from golden.fp32 import splitmix64
from golden.trace import StepReport, missing_step, read_trace, step_order

ROW_VALUES = 1 << 18  # whose hashes are made at a time, so that they stay in the cache
BY_KEY = ("attn.scores", "attn.probs", "attn.weights", "attn.weights.q")  # steps with a value for each key


def row_hashes(values: np.ndarray) -> np.ndarray:
    """`row` of each row of values, (n, ...) of any type: (n,) uint64."""
    n = len(values)
    bits = np.ascontiguousarray(values).reshape(n, -1)
    bits = bits.view(f"<u{bits.itemsize}")
    hashes = np.zeros(n, np.uint64)
    for start in range(0, bits.shape[1], max(1, ROW_VALUES // n)):
        part = bits[:, start : start + max(1, ROW_VALUES // n)]
        i = np.arange(start, start + part.shape[1], dtype=np.uint64) << np.uint64(32)
        hashes += splitmix64(part | i).sum(axis=1, dtype=np.uint64)
    return hashes


class StepDigests:
    """A step function that keeps the digest of every step alone. A sequence may come in several passes."""

    def __init__(self, first: int = 0) -> None:
        """first: the position of the first token."""
        self._first = first
        self._found: dict[str, np.uint64] = {}
        self._n_tokens: dict[str, int] = {}

    def __call__(self, name: str, value: np.ndarray) -> np.ndarray:
        first = self._n_tokens.get(name, self._first)
        if name.endswith(BY_KEY):
            hashes = np.concatenate([row_hashes(row[None, ..., : first + t + 1]) for t, row in enumerate(value)])
        else:
            hashes = row_hashes(value)
        found = self._found.get(name, np.uint64(0))
        for row in hashes:
            found = splitmix64(np.array([found ^ row]))[0]
        self._found[name], self._n_tokens[name] = found, first + len(value)
        return value

    def hex(self) -> dict[str, str]:
        """The digest of every step, 16 hexadecimal digits."""
        return {name: f"{found:016x}" for name, found in self._found.items()}


def digests_of(trace: Mapping[str, np.ndarray], first: int = 0) -> dict[str, str]:
    """The digests of a trace's steps. It has all positions from `first` on."""
    digests = StepDigests(first)
    for name, value in trace.items():
        if name not in ("tokens", "positions"):
            digests(name, value)
    return digests.hex()


def read_digests(path: Path, case: str) -> tuple[dict[str, str], int]:
    """The digests of a case, and the position at which its run begins. Raises ModelError naming the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[case]
        return {str(name): str(value) for name, value in found["steps"].items()}, int(found.get("n_before", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path}: has no case {case} with steps, each with its digest") from None


def compare_digests(a: Path, b: Path, case: str) -> list[StepReport]:
    """Every step of a case against a port's digests, or against its trace. Raises ModelError."""
    expected, first = read_digests(a, case)
    found = read_digests(b, case)[0] if b.suffix == ".json" else digests_of(read_trace(b), first)
    reports = []
    for name in sorted(expected.keys() | found.keys(), key=step_order):
        if name not in found:
            reports.append(missing_step(name))
        elif name not in expected:
            reports.append(StepReport(name, float("inf"), "A has no such step", ok=False))
        else:
            ok = found[name] == expected[name]
            note = "" if ok else f"digest {found[name]}, expected {expected[name]}"
            reports.append(StepReport(name, 0.0 if ok else float("inf"), note, ok))
    return reports
