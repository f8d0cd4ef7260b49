"""MoE files: what the header says of the experts, and the list of tensors.

Attention, dense feed-forward layers, embedding and classifier are those of W8A8, with a scale per row, or, in a pure
file, stored as experts are. The matrices of a layer's experts lie one behind the other: gate and up of an expert are
one matrix (2 * moe_hidden_dim, dim), gate's rows first, which the fused operator (golden/grouped.py) takes as it lies.
NAME is layers.I.moe.gate_up_proj with (n_out, n_in) = (2 * moe_hidden_dim, dim), or layers.I.moe.down_proj with
(dim, moe_hidden_dim); E experts:

    a8w8    NAME.codes int8 (E, n_out, n_in); NAME.scales fp32 (E, n_out)
    a8w4    NAME.codes uint8 (E, n_out, n_in / 2): code + 8, 0 to 15, in the order of formats/low_bits.py;
            NAME.scales fp16 (E, n_out, n_in / group), or fp32 (E, n_out) if a row is a group;
            NAME.assist fp32 (E, n_out): 8 * sum of the row's weights (golden/grouped.py, assist_matrix)
    mxfp8   NAME.codes uint8 (E, n_out, n_in): E4M3; NAME.scales uint8 (E, n_out, n_in / group): E8M0

    ladder  the tensors of GPTQ files (formats/gptq.py) in the format of the place, with E in front

Other matrices have no E, and are as a8w8 says, with scales (n_out, 1), unless the file is pure; those of a ladder file
are as in GPTQ files.
"""

import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from formats.checkpoint import Config, Moe
from formats.errors import ModelError
from formats.gptq import (
    ENTRY_BYTES,
    MatrixFormat,
    activation_group,
    check_columns,
    matrix_tensors,
    pack_entries,
    read_entries,
)
from formats.limits import LIMITS
from formats.tensors import HEADER_SIZE, Tensor, int8_matrices, matrix_shapes, norm_shapes

LADDER = "ladder"
EXPERT_FORMATS = ("a8w8", "a8w4", "mxfp8", LADDER)  # by their numbers in the header
GROUPS = {"a8w8": (0,), "a8w4": (0, 32, 64, 128), "mxfp8": tuple(range(32, 1025, 32)), LADDER: (0,)}  # 0: a row
# What has a format of its own in a ladder file: attn and ffn are the matrices of attention and of dense layers.
LADDER_KINDS = ("embed", "attn", "ffn", "gate_up_proj", "down_proj", "classifier")
INT4_UNIT = 32  # codes of a row are a multiple of it: whole blocks of formats/low_bits.py
ALIGNMENT = 64  # bytes: every tensor begins at a multiple, so that rows can be read in aligned vectors
DENSE_LAYERS = "dense_layers"  # the first tensor: uint8 (n_layers,), 1 where a layer has no experts

_FIELDS = struct.Struct("<7i")  # format, n_experts, n_active, moe_hidden_dim, norm_topk_prob, group, pure


class MoeLayout(NamedTuple):
    """How the matrices of a file are stored."""

    format: str  # of the experts, one of EXPERT_FORMATS
    group: int  # weights along a row that share a scale, in mxfp8 activations as well; 0: a whole row, or a ladder
    pure: bool = False  # all other matrices are stored like that, too; never of a8w8, which has no other way
    formats: tuple[MatrixFormat, ...] = ()  # of a ladder: one for each of LADDER_KINDS

    def of(self, name: str) -> MatrixFormat:
        """The format of a matrix of a ladder by its step name, such as `layers.0.moe.down_proj`."""
        return self.formats[LADDER_KINDS.index(ladder_kind(name))]

    @property
    def is_uniform(self) -> bool:
        """Whether one set of formats is for all matrices: of a pure file, and of a ladder."""
        return self.pure or self.format == LADDER

    @property
    def activation_group(self) -> int:
        """The activations that share a scale, as the header has it; 0: those of a token, or as `format` says."""
        return activation_group(self.formats) if self.formats else 0


def ladder_kind(name: str) -> str:
    """Which of LADDER_KINDS the matrix of a step is, also that of one expert: `layers.0.moe.5.up_proj`."""
    if not name.startswith("layers."):
        return name
    _, _, block, part = name.split(".", 3)
    if block != "moe":
        return block
    return "down_proj" if part.endswith("down_proj") else "gate_up_proj"


def check_layout(where: object, config: Config, layout: MoeLayout, name: str = "group") -> None:
    """Refuses groups that a format has not, or that rows are no multiple of. Raises ModelError, naming `where`.

    name: what the group is called there.
    """
    assert config.moe is not None
    allowed = GROUPS[layout.format]
    if layout.group not in allowed:
        expected = "a multiple of 32 up to 1024" if layout.format == "mxfp8" else " or ".join(map(str, allowed))
        raise ModelError(f"{where}: {name} is {layout.group}, {layout.format} has {expected}")
    if layout.pure and layout.format in ("a8w8", LADDER):
        all_of_it = "is int8" if layout.format == "a8w8" else "has formats of its own"
        raise ModelError(f"{where}: pure is 1, but all of {layout.format} {all_of_it}: expected 0")
    if layout.format == LADDER:
        for matrix, shape in (*matrix_shapes(config), *expert_shapes(config)):
            check_columns(where, matrix, shape[-1], layout.of(matrix))
        return
    unit = max(layout.group, INT4_UNIT) if layout.format == "a8w4" else layout.group or 4
    widths = {"hidden_size": config.dim, "moe_intermediate_size": config.moe.hidden_dim}
    if layout.pure:
        widths["num_attention_heads * head_dim"] = config.q_dim
    if layout.pure and config.moe.dense_layers:
        widths["intermediate_size"] = config.hidden_dim
    for what, n in widths.items():
        if n % unit:
            raise ModelError(f"{where}: {what} is {n}, {layout.format} takes a multiple of {unit} here")


def pack_layout(config: Config, layout: MoeLayout) -> bytes:
    """The bytes of the header from 0xC0 on."""
    m = config.moe
    assert m is not None
    number = EXPERT_FORMATS.index(layout.format)
    fields = number, m.n_experts, m.n_active, m.hidden_dim, m.norm_topk_prob, layout.group, layout.pure
    return _FIELDS.pack(*fields) + pack_entries(layout.formats)


def read_layout(path: Path, own: bytes, config: Config, group_size: int) -> tuple[Config, MoeLayout]:
    """The layout that a header says, and the config with its experts. Raises ModelError for what no program runs.

    own: the header's bytes from 0xC0 on. Which layers are dense stands behind the header.
    """
    number, n_experts, n_active, hidden_dim, normalize, group, pure = _FIELDS.unpack_from(own)
    is_ladder = EXPERT_FORMATS[number : number + 1] == (LADDER,)
    if any(own[_FIELDS.size + is_ladder * ENTRY_BYTES * len(LADDER_KINDS) :]):
        raise ModelError(f"{path}: a reserved byte of the header is not 0")
    for name, value in (("n_experts", n_experts), ("n_active", n_active), ("moe_hidden_dim", hidden_dim)):
        if not LIMITS[name].holds(value):
            raise ModelError(f"{path}: {name} is {value}, expected {LIMITS[name]}")
    if n_active > n_experts:
        raise ModelError(f"{path}: n_active is {n_active}, there are {n_experts} experts")
    if not 0 <= number < len(EXPERT_FORMATS):
        raise ModelError(f"{path}: format is {number}, expected 0 to {len(EXPERT_FORMATS) - 1}")
    for name, value in (("norm_topk_prob", normalize), ("pure", pure)):
        if value not in (0, 1):
            raise ModelError(f"{path}: {name} is {value}, expected 0 or 1")
    with path.open("rb") as f:
        f.seek(HEADER_SIZE)
        table = f.read(config.n_layers)
    if len(table) < config.n_layers or any(flag > 1 for flag in table):
        raise ModelError(f"{path}: {DENSE_LAYERS} has other bytes than 0 and 1, or ends too soon")
    moe = Moe(n_experts, n_active, hidden_dim, bool(normalize), tuple(i for i, flag in enumerate(table) if flag))
    entries = own[_FIELDS.size :]
    formats = read_entries(path, entries, LADDER_KINDS, config.tied, group_size) if is_ladder else ()
    config, layout = replace(config, moe=moe), MoeLayout(EXPERT_FORMATS[number], group, bool(pure), formats)
    check_layout(path, config, layout)
    return config, layout


def router_shapes(config: Config) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and shape of every router."""
    assert config.moe is not None
    for i in range(config.n_layers):
        if config.has_experts(i):
            yield f"layers.{i}.moe.router", (config.moe.n_experts, config.dim)


def expert_shapes(config: Config) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Name and shape (E, n_out, n_in) of the experts' matrices, layer by layer; none of a dense model."""
    for i in range(config.n_layers):
        if config.has_experts(i):
            e, hidden = config.moe.n_experts, config.moe.hidden_dim
            yield f"layers.{i}.moe.gate_up_proj", (e, 2 * hidden, config.dim)
            yield f"layers.{i}.moe.down_proj", (e, config.dim, hidden)


def stored_tensors(name: str, shape: tuple[int, ...], layout: MoeLayout) -> Iterator[Tensor]:
    """The tensors of one matrix of all experts (E, n_out, n_in), or, of a uniform file, of another (n_out, n_in)."""
    *rows, n_in = shape
    if layout.format == LADDER:
        yield from matrix_tensors(name, shape, layout.of(name))
    elif layout.format == "a8w8":
        yield Tensor(f"{name}.codes", "|i1", shape)
        yield Tensor(f"{name}.scales", "<f4", tuple(rows))
    elif layout.format == "mxfp8":
        yield Tensor(f"{name}.codes", "|u1", shape)
        yield Tensor(f"{name}.scales", "|u1", (*rows, n_in // layout.group))
    else:
        yield Tensor(f"{name}.codes", "|u1", (*rows, n_in // 2))
        if layout.group:
            yield Tensor(f"{name}.scales", "<f2", (*rows, n_in // layout.group))
        else:
            yield Tensor(f"{name}.scales", "<f4", tuple(rows))
        yield Tensor(f"{name}.assist", "<f4", tuple(rows))


def moe_tensors(config: Config, layout: MoeLayout) -> Iterator[Tensor]:
    """Which layers are dense, norms, routers, all matrices but the experts', then these."""
    yield Tensor(DENSE_LAYERS, "|u1", (config.n_layers,))
    for name, shape in norm_shapes(config):
        yield Tensor(name, "<f4", shape)
    for name, matrix in router_shapes(config):
        yield Tensor(name, "<f4", matrix)
    if layout.is_uniform:
        for name, matrix in matrix_shapes(config):
            yield from stored_tensors(name, matrix, layout)
    else:
        yield from int8_matrices(config, 0)
    for name, matrices in expert_shapes(config):
        yield from stored_tensors(name, matrices, layout)
