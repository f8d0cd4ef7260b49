"""Writing int8 weights: what Q8 and W8A8 files share."""

from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from formats.model_file import write_array
from formats.tensors import HEADER_SIZE, Tensor
from golden.q8 import Quantized, quantize

BLOCK_VALUES = 1 << 24  # quantize this many weights at a time, so that memory stays bounded whatever the matrix


def write_codes(f: BinaryIO, weight: np.ndarray, group_size: int) -> np.ndarray:
    """Appends the codes of a whole matrix (n_out, n_in); its scales (n_out, n_in / group_size). 0: a group is a row."""
    rows = max(1, BLOCK_VALUES // weight.shape[1])
    scales = []
    for start in range(0, len(weight), rows):
        block = quantize(weight[start : start + rows], group_size or weight.shape[1])
        write_array(f, block.codes, "i1")
        scales.append(block.scales)
    return np.concatenate(scales)


def write_matrix(f: BinaryIO, weight: np.ndarray | Quantized, group_size: int) -> None:
    """Appends codes and scales of a whole matrix, as `write_codes`; those of one that is quantized already."""
    if isinstance(weight, Quantized):
        write_array(f, weight.codes, "i1")
        write_array(f, weight.scales, "f4")
    else:
        write_array(f, write_codes(f, weight, group_size), "f4")


def progress_bar(tensors: Sequence[Tensor], shown: bool, desc: str | None = None) -> tqdm:
    """One that counts matrices and vectors."""
    total = sum(not tensor.name.endswith((".scales", ".assist")) for tensor in tensors)
    return tqdm(total=total, unit="tensor", desc=desc, disable=not shown)


def write_tensors(
    f: BinaryIO, tensors: Sequence[Tensor], load: Callable[[str], np.ndarray | Quantized], group_size: int, bar: tqdm
) -> None:
    """Writes every tensor of a file, behind room for the header. The codes of a matrix bring their scales along.

    load(name): the values of a tensor, fp32; for NAME.codes and NAME.scales together, those of the matrix NAME, or its
    codes and scales.
    """
    f.write(bytes(HEADER_SIZE))
    for name, dtype, _ in tensors:
        stem, _, part = name.rpartition(".")
        if part == "codes":
            bar.set_postfix_str(stem)
            write_matrix(f, load(stem), group_size)
            bar.update()
        elif part != "scales":
            write_array(f, load(name), dtype)
            bar.update()
