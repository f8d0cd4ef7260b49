"""The tensors that `golden hex` writes: op vectors, the steps of a trace, or the weights of a model file.

A model file's tensors are those of the file, under the names of `--info`. Where several values share a byte or a word,
unpacking gives them one by one, output by output, the same way for every scheme:

    NAME.codes    (..., n_out, n_in): int4 (A8W4), uint4 or uint2 (GPTQ, AWQ); of a 2:4 sparse matrix those of the
                  weights that are kept, (..., n_out, n_in / 2), in their order
    NAME.mask     (..., n_out, n_in), of a sparse matrix: uint1, whether the weight is kept
    NAME.zeros    (..., n_out, n_groups): uint4
    NAME.scales   AWQ's, (n_out, n_groups), which lie the other way round in the file

All else is as the file has it (formats/tensors.py, formats/gptq.py, formats/moe.py).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from formats.gptq import GptqLayout, check_masks
from formats.low_bits import unpack_codes, unpack_mask, unpack_nibbles
from formats.model_file import FileHeader, map_tensors, read_format, read_header
from formats.moe import LADDER, MoeLayout
from formats.schemes import AWQ_FILE
from golden import awq
from golden.op_cases import read_cases
from golden.trace import read_trace

AWQ_PARTS = {"qweight": "codes", "qzeros": "zeros", "scales": "scales"}  # in a file, and unpacked


class Values(NamedTuple):
    """A tensor, and the bits of each value: fewer than its numpy type has where it was unpacked."""

    array: np.ndarray
    bits: int
    packed: bool = False  # unpacking would change it

    @property
    def type(self) -> str:
        """As manifests have it: "int8", "uint4", "float32"."""
        return self.array.dtype.name.rstrip("0123456789") + str(self.bits)


class TensorFile(NamedTuple):
    """What a file has, each tensor read when it is asked for."""

    kind: str  # "w": weights of a model file; "s": steps of a trace; "v": op vectors
    tensors: dict[str, Callable[[], Values]]

    def columns(self, matrix: str) -> int | None:
        """The inputs of a row of a quantized matrix or activation; None if there is none of that name."""
        for part in ("mask", "codes", "q"):  # of a sparse matrix, codes are fewer
            if f"{matrix}.{part}" in self.tensors:
                return self.tensors[f"{matrix}.{part}"]().array.shape[-1]
        return None


def whole(array: np.ndarray) -> Values:
    """Values with all the bits of their type."""
    return Values(array, 8 * array.dtype.itemsize)


def unpacked(head: FileHeader, tensors: dict[str, np.ndarray], name: str) -> Values | None:
    """One tensor of a model file, unpacked; None if it is not packed. tensors: the file's."""
    matrix, _, part = name.rpartition(".")
    packed, layout = tensors[name], head.layout
    if head.file_format is AWQ_FILE and part in AWQ_PARTS:
        return whole(packed.T) if part == "scales" else Values(awq.unpack(packed).T, 4)
    rows = packed.reshape(-1, packed.shape[-1])  # of all experts

    def by_row(values: np.ndarray, bits: int) -> Values:
        return Values(values.reshape(*packed.shape[:-1], -1), bits)

    if isinstance(layout, GptqLayout) or (isinstance(layout, MoeLayout) and layout.format == LADDER):
        if part == "zeros":
            return by_row(unpack_nibbles(rows, tensors[f"{matrix}.scales"].shape[-1]), 4)
        if part == "mask":
            return by_row(unpack_mask(rows).astype(np.uint8), 1)
        if part == "codes" and layout.of(matrix).bits < 8:
            return by_row(unpack_codes(rows, layout.of(matrix).bits), layout.of(matrix).bits)
    elif isinstance(layout, MoeLayout) and layout.format == "a8w4" and part == "codes" and packed.dtype == np.uint8:
        return by_row(unpack_codes(rows, 4).astype(np.int8) - np.int8(8), 4)
    return None


def of_model_file(head: FileHeader, tensors: dict[str, np.ndarray], name: str, unpack: bool) -> Values:
    """One tensor of a model file, unpacked or as it is. tensors: the file's."""
    values = unpacked(head, tensors, name)
    if values is None:
        return whole(tensors[name])
    return values if unpack else whole(tensors[name])._replace(packed=True)


def read_tensors(path: Path, unpack: bool = False) -> TensorFile:
    """The tensors of a safetensors file or of a model file. Raises ModelError."""
    file_format = None if path.suffix == ".safetensors" else read_format(path)
    if file_format is None:
        steps = {name: partial(whole, array) for name, array in read_trace(path).items()}
        return TensorFile("v" if read_cases(path) else "s", steps)
    head = read_header(path, file_format)
    tensors, found = map_tensors(path, head), {}
    check_masks(path, tensors)
    for name in tensors:
        matrix, _, part = name.rpartition(".")
        shown = f"{matrix}.{AWQ_PARTS[part]}" if unpack and file_format is AWQ_FILE and part in AWQ_PARTS else name
        found[shown] = partial(of_model_file, head, tensors, name, unpack)
    return TensorFile("w", found)
