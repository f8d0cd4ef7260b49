"""GPTQ files: each kind of matrix has its own bits and groups. The entries of the header, and the list of tensors.

Nine entries of four bytes at 0xC0 of the header say how matrices are stored, in the order of `KINDS`; the byte behind
them whether activations are gathered before they are quantized. GPTQ checkpoints of others are in formats/packing.py.
golden/gptq.py says what the tensors of a matrix mean:

    8 bits, a row's scale   NAME.codes int8 (n_out, n_in); NAME.scales fp32 (n_out,)
    8 bits, groups          NAME.codes int8 (n_out, n_in); NAME.scales fp16 (n_out, n_groups)
    4 bits, 2 bits          NAME.codes uint8 (n_out, n_in * bits / 8), in the order of formats/low_bits.py;
                            NAME.scales fp16 (n_out, n_groups); NAME.zeros uint8 (n_out, ceil(n_groups / 2)), the
                            first in the low half
    2 bits in two levels    NAME.codes uint8 (n_out, n_in / 4); NAME.groups uint8 (n_out, n_groups): the scale's code in
                            the low half, the zero point's in the high; NAME.row_scales fp32 (n_out,)
    int8 scales             NAME.codes uint8 (n_out, n_in * bits / 8) of 4, 5 or 6 bits; NAME.groups int8 (n_out,
                            n_groups); NAME.row_scales fp32 (n_out,); before them at 4 and 5 bits NAME.table int8
                            (2^bits,), of experts (n_experts, 2^bits)
    4 bits, 2:4 sparse      NAME.mask uint8 (n_out, n_in / 8): bit k % 8 of byte k / 8 says that weight k is kept;
                            NAME.codes uint8 (n_out, n_in / 4) of the kept ones; scales and zeros as above
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from formats.checkpoint import Config
from formats.errors import ModelError
from formats.low_bits import why_not_two_of_four
from formats.tensors import Tensor, matrix_shapes, norm_shapes

KINDS = ("embed", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj", "classifier")
ALIGNMENT = 64  # bytes: every tensor begins at a multiple, so that a row of codes can be read in aligned vectors
ROW_UNIT = 64  # every row is a multiple of it
ACTIVATION_GROUPS = (32, 64)
# The places whose activations may be gathered, with the width of each in a Config; the order of a file.
ORDER_PLACES = {"attn.norm": "dim", "attn.mix": "q_dim", "ffn.norm": "dim", "ffn.swiglu": "hidden_dim"}

SPARSE, TWO_LEVEL, INT8_SCALES = 1, 2, 4  # flags of an entry
_ENTRY = struct.Struct("<BBH")
ENTRY_BYTES = _ENTRY.size


class MatrixFormat(NamedTuple):
    """How a matrix is stored. group: weights along a row that share a scale; 0: a whole row."""

    bits: int
    group: int = 0
    sparse: bool = False  # two of each four weights are zero and not stored
    two_level: bool = False  # scales and zero points of groups are 4-bit codes under one fp32 scale per row
    int8_scales: bool = False  # scales of groups are int8 under one fp32 scale per row; there are no zero points

    @property
    def has_table(self) -> bool:
        """Whether codes index int8 values, 16 or 32: nl4, and 5 bits, on a grid that is not linear."""
        return self.int8_scales and self.bits <= 5

    @property
    def has_zeros(self) -> bool:
        """Whether each group has a zero point of its own in `zeros`."""
        return self.bits < 8 and not self.two_level and not self.int8_scales

    def __str__(self) -> str:
        """As messages and --info have it: "4 bits in groups of 64, 2:4 sparse"."""
        groups = f"{self.bits} bits in groups of {self.group}" if self.group else f"{self.bits} bits per row"
        flags = {", two-level": self.two_level, ", by table": self.has_table, ", 2:4 sparse": self.sparse}
        return groups + "".join(text for text, is_set in flags.items() if is_set)


# Every format that a program runs. Groups of 32, and 2 bits in one level, are for checkpoints made elsewhere.
FORMATS = frozenset(
    {MatrixFormat(8, group) for group in (0, 32, 64, 128)}
    | {MatrixFormat(4, group) for group in (0, 32, 64, 128)}
    | {MatrixFormat(2, group) for group in (0, 32, 64, 128)}
    | {MatrixFormat(2, 64, two_level=True)}
    | {MatrixFormat(4, group, sparse=True) for group in (64, 128)}
    | {MatrixFormat(bits, group, int8_scales=True) for bits in (4, 5, 6) for group in (32, 64, 128)}
)


class GptqLayout(NamedTuple):
    """What the header of a GPTQ file says about its matrices: one format for each of KINDS."""

    formats: tuple[MatrixFormat, ...]
    has_order: bool = False

    def of(self, name: str) -> MatrixFormat:
        """The format of a matrix by its step name, such as `layers.0.attn.q_proj`."""
        return self.formats[KINDS.index(name.rsplit(".", 1)[-1])]

    @property
    def activation_group(self) -> int:
        """The activations that share a scale."""
        return activation_group(self.formats)


def activation_group(formats: Iterable[MatrixFormat]) -> int:
    """The activations of a file with these formats that share a scale: 64, or 32 where a weight group is as short."""
    return 32 if any(f.group == 32 for f in formats) else 64


# ----------------------------------------------------------------------------
# The header


N_BYTES = len(KINDS) * ENTRY_BYTES + 1  # in the header


def pack_entries(formats: Iterable[MatrixFormat]) -> bytes:
    """The entries of a header, one for each format."""
    return b"".join(
        _ENTRY.pack(f.bits, SPARSE * f.sparse + TWO_LEVEL * f.two_level + INT8_SCALES * f.int8_scales, f.group)
        for f in formats
    )


def read_entries(path: Path, raw: bytes, kinds: Sequence[str], tied: bool, group_size: int) -> tuple[MatrixFormat, ...]:
    """The formats of a header's entries, the first for the embedding, the last for the classifier.

    Raises ModelError, naming path and field, for those that no program runs, and for a group_size that is not theirs.
    """
    formats = []
    for kind, (bits, flags, group) in zip(kinds, _ENTRY.iter_unpack(raw[: len(kinds) * ENTRY_BYTES]), strict=True):
        found = MatrixFormat(bits, group, *(bool(flags & flag) for flag in (SPARSE, TWO_LEVEL, INT8_SCALES)))
        if found not in FORMATS or flags >= 2 * INT8_SCALES:
            raise ModelError(f"{path}: {kind} has bits {bits}, flags {flags}, group {group}: not supported")
        formats.append(found)
    if tied and formats[0] != formats[-1]:
        raise ModelError(f"{path}: the classifier is the embedding, but its format is {formats[-1]}, not {formats[0]}")
    if group_size != activation_group(formats):
        raise ModelError(f"{path}: group_size is {group_size}, expected {activation_group(formats)}")
    return tuple(formats)


def check_columns(path: object, name: str, n_in: int, form: MatrixFormat) -> None:
    """Raises ModelError, naming path and matrix, for rows that are not whole blocks and groups."""
    if n_in % ROW_UNIT or n_in % (form.group or n_in):
        of = f"groups of {form.group}" if n_in % ROW_UNIT == 0 else f"a multiple of {ROW_UNIT}"
        raise ModelError(f"{path}: {name} has {n_in} columns, expected {of}")


def pack_layout(layout: GptqLayout) -> bytes:
    """The bytes of the header from 0xC0 on."""
    return pack_entries(layout.formats) + bytes([layout.has_order])


def read_layout(path: Path, own: bytes, config: Config, group_size: int) -> tuple[Config, GptqLayout]:
    """The layout that a header says, and the config as it is. own: the header's bytes from 0xC0 on.

    Raises ModelError, naming path and field, for what no program runs.
    """
    has_order = own[N_BYTES - 1]
    if has_order > 1:
        raise ModelError(f"{path}: has_order is {has_order}, expected 0 or 1")
    layout = GptqLayout(read_entries(path, own, KINDS, config.tied, group_size), bool(has_order))
    for name, (_, n_in) in matrix_shapes(config):
        check_columns(path, name, n_in, layout.of(name))
    return config, layout


# ----------------------------------------------------------------------------
# Tensors


def matrix_tensors(name: str, shape: tuple[int, ...], form: MatrixFormat) -> Iterator[Tensor]:
    """The tensors of one matrix (n_out, n_in), or of all experts', one behind the other (E, n_out, n_in)."""
    *rows, n_in = shape
    n_groups = n_in // (form.group or n_in)
    if form.sparse:
        yield Tensor(f"{name}.mask", "|u1", (*rows, n_in // 8))
    if form.has_table:
        yield Tensor(f"{name}.table", "|i1", (*rows[:-1], 1 << form.bits))
    if form.bits == 8:
        yield Tensor(f"{name}.codes", "|i1", shape)
    else:
        n_codes = n_in // 2 if form.sparse else n_in
        yield Tensor(f"{name}.codes", "|u1", (*rows, n_codes * form.bits // 8))
    if form.two_level or form.int8_scales:
        yield Tensor(f"{name}.groups", "|u1" if form.two_level else "|i1", (*rows, n_groups))
        yield Tensor(f"{name}.row_scales", "<f4", tuple(rows))
    elif form.bits == 8 and not form.group:
        yield Tensor(f"{name}.scales", "<f4", tuple(rows))
    else:
        yield Tensor(f"{name}.scales", "<f2", (*rows, n_groups))
    if form.has_zeros:
        yield Tensor(f"{name}.zeros", "|u1", (*rows, (n_groups + 1) // 2))


def check_masks(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises ModelError, naming path and tensor, for a mask that does not keep two of each four weights.

    Rows of experts are counted through from the first expert's.
    """
    for name, mask in tensors.items():
        if name.endswith(".mask") and (why := why_not_two_of_four(mask.reshape(-1, mask.shape[-1]))):
            raise ModelError(f"{path}: {name}: {why}")


def gptq_tensors(config: Config, layout: GptqLayout) -> Iterator[Tensor]:
    """Norms, orders of gathered activations if there are any, then matrices, all in the order of Q8 files."""
    for name, shape in norm_shapes(config):
        yield Tensor(name, "<f4", shape)
    for place, width in ORDER_PLACES.items() if layout.has_order else ():
        for i in range(config.n_layers):
            yield Tensor(f"layers.{i}.{place}.order", "<i4", (getattr(config, width),))
    for name, shape in matrix_shapes(config):
        yield from matrix_tensors(name, shape, layout.of(name))
