"""The file of golden vectors of single operations, golden/data/ops.safetensors: how it is written and read.

A case is one call of one operation: inputs, the parameters that are no tensors, and outputs, under the names
`CASE.INPUT` and `CASE.OUTPUT`. The file carries them all: its metadata has one entry, `cases`, a JSON object that
says for every case

    op          the operation, "quantize"
    inputs      names of its input tensors
    outputs     names of its output tensors, each with what it is held to: 0 for the same values, or the largest
                relative error by norm
    and its parameters by their names, such as group_size, eps, or theta.

golden/op_vectors.py makes the cases. `golden diff ops.safetensors MINE.safetensors` judges a port's outputs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from formats.errors import ModelError, shown
from formats.fields import is_number
from formats.files import replacing

EXACT = 0.0  # the limit of an output that has to be the same values


class OpVectors:
    """Cases in the order of their making: every tensor by its full name, and what the metadata says of each case."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}
        self.cases: dict[str, dict[str, Any]] = {}

    def add(
        self,
        case: str,
        op: str,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, tuple[np.ndarray, float]],
        **parameters: Any,
    ) -> None:
        """One case. outputs: each tensor with its tolerance, `EXACT` or a relative error by norm."""
        limits = {name: limit for name, (_, limit) in outputs.items()}
        self.cases[case] = {"op": op, "inputs": list(inputs), "outputs": limits, **parameters}
        values = inputs | {name: value for name, (value, _) in outputs.items()}
        self.tensors |= {f"{case}.{name}": np.ascontiguousarray(value) for name, value in values.items()}

    def save(self, path: Path) -> None:
        """Writes the file; always the same bytes."""
        with replacing(path) as f:
            f.write(save(self.tensors, {"cases": json.dumps(self.cases)}))  # one entry: their order is not defined


def read_cases(path: Path | str) -> dict[str, dict[str, Any]]:
    """The cases of a file of op vectors, by name; none if it is another kind of file. Raises ModelError."""
    with safe_open(path, framework="numpy") as f:
        text, tensors = (f.metadata() or {}).get("cases", "{}"), set(f.keys())
    try:
        cases = json.loads(text)
        limits = {
            f"{name}.{output}": limit for name, case in cases.items() for output, limit in case["outputs"].items()
        }
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        raise ModelError(f"{path}: its metadata has cases, but not in the form of op vectors") from None
    for name, limit in limits.items():
        if name not in tensors or not is_number(limit):
            raise ModelError(f"{path}: cases: {name} is {shown(limit)}, expected a limit for a tensor of the file")
    return cases
