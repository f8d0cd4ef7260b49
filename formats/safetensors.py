"""safetensors files with numpy alone: 8 bytes with the length of a JSON header, the header, the tensors.

Elsewhere the package of that name reads and writes them. This is for machines that lack it, and for writing a file one
tensor after another, whatever the model's size.
"""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from formats.tensors import Tensor, with_offsets

# By numpy's names, "bfloat16" where ml_dtypes is there; others are not read.
TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "bfloat16", "I32": "<i4", "I8": "|i1"}


def read(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file by name."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, t in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in t["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], TYPES[t["dtype"]]).reshape(t["shape"])
    return tensors


def header(tensors: Iterable[Tensor]) -> bytes:
    """What stands in front of these tensors, in this order."""
    names = {dtype: name for name, dtype in TYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in with_offsets(tensors, start=0):
        entries[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (tensor.offset, tensor.end),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
