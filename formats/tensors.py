"""Every tensor of a model file, in the order of the file: one function per scheme.

Sizes, offsets, exporters, readers and benchmarks all come from these lists, and a test holds them equal to what the
programs print with --info. The first tensor begins behind the header, at byte 256. Each follows the one before, at the
next multiple of the scheme's alignment (formats/schemes.py); bytes in between are 0. GPTQ's list is in formats/gptq.py,
MoE's in formats/moe.py.

Names are those of the steps that use the tensors (golden/forward.py). A quantized matrix is several tensors:

    Q8, W8A8   NAME.codes    int8 (n_out, n_in)
               NAME.scales   fp32 (n_out, n_in / group_size)
    AWQ        NAME.qweight  int32 (n_in, n_out / 8), eight codes each (golden/awq.py)
               NAME.qzeros   int32 (n_in / group_size, n_out / 8)
               NAME.scales   fp16 (n_in / group_size, n_out)
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from formats.checkpoint import Config

HEADER_SIZE = 256  # bytes in front of the first tensor
PLACES_PER_LAYER = 4  # activations that are quantized in a layer: static W8A8 has a scale for each, and for the last


class Tensor(NamedTuple):
    """One tensor of a model file."""

    name: str
    dtype: str  # numpy's: "<f4", "<f2", "<i4", "|i1" or "|u1"; outside model files also "bfloat16"
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class FileTensor(NamedTuple):
    """A tensor and the byte of the file at which it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + Tensor(self.name, self.dtype, self.shape).n_bytes


def with_offsets(tensors: Iterable[Tensor], start: int = HEADER_SIZE, alignment: int = 1) -> Iterator[FileTensor]:
    """Tensors with their offsets, one behind the other from byte `start`, each at a multiple of alignment."""
    for tensor in tensors:
        start += -start % alignment
        yield FileTensor(*tensor, offset=start)
        start += tensor.n_bytes


def weights_end(tensors: Iterable[Tensor], alignment: int = 1) -> int:
    """The byte behind the last tensor, where the tokenizer section begins."""
    end = HEADER_SIZE
    for tensor in with_offsets(tensors, alignment=alignment):
        end = tensor.end
    return end


# ----------------------------------------------------------------------------
# What the lists consist of


def layer_norm_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of the norms that every model has, and of what a rotated one is rotated by."""
    for part in ("attn.norm", "ffn.norm"):
        for i in range(config.n_layers):
            yield f"layers.{i}.{part}", (config.dim,)
    yield "norm", (config.dim,)
    if config.rotation_block:
        yield "rotation", (config.dim,)


def head_norm_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of Qwen3's norms of queries and keys; none for other models."""
    for part in ("attn.q_norm", "attn.k_norm") if config.has_head_norms else ():
        for i in range(config.n_layers):
            yield f"layers.{i}.{part}", (config.head_dim,)


def norm_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every norm, in the order of Q8 and W8A8 files."""
    yield from layer_norm_shapes(config)
    yield from head_norm_shapes(config)


def matrix_shapes(config: Config) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and shape (n_out, n_in) of every matrix: embedding, each projection over all layers, classifier.

    Layers with experts have no feed-forward matrices of this kind (formats/moe.py).
    """
    c = config
    yield "embed", (c.vocab_size, c.dim)
    for part, shape in (
        ("attn.q_proj", (c.q_dim, c.dim)),
        ("attn.k_proj", (c.kv_dim, c.dim)),
        ("attn.v_proj", (c.kv_dim, c.dim)),
        ("attn.o_proj", (c.dim, c.q_dim)),
        ("ffn.gate_proj", (c.hidden_dim, c.dim)),
        ("ffn.down_proj", (c.dim, c.hidden_dim)),
        ("ffn.up_proj", (c.hidden_dim, c.dim)),
    ):
        for i in range(c.n_layers):
            if part.startswith("attn.") or not c.has_experts(i):
                yield f"layers.{i}.{part}", shape
    if not c.tied:
        yield "classifier", (c.vocab_size, c.dim)


def int8_matrices(config: Config, group_size: int) -> Iterator[Tensor]:
    """Codes and scales of every matrix. group_size 0: one scale per row."""
    for name, (n_out, n_in) in matrix_shapes(config):
        yield Tensor(f"{name}.codes", "|i1", (n_out, n_in))
        yield Tensor(f"{name}.scales", "<f4", (n_out, n_in // (group_size or n_in)))


# ----------------------------------------------------------------------------
# The schemes


def q8_tensors(config: Config, group_size: int) -> Iterator[Tensor]:
    """Q8, in the order of llama2.c's version 2: norms, then matrices."""
    for name, shape in norm_shapes(config):
        yield Tensor(name, "<f4", shape)
    yield from int8_matrices(config, group_size)


def w8a8_tensors(config: Config, group_size: int, static: bool) -> Iterator[Tensor]:
    """W8A8: norms, static scales of activations if there are any, then matrices. group_size 0: one scale per row."""
    for name, shape in norm_shapes(config):
        yield Tensor(name, "<f4", shape)
    if static:
        yield Tensor("act_scales", "<f4", (PLACES_PER_LAYER * config.n_layers + 1,))
    yield from int8_matrices(config, group_size)


def awq_tensors(config: Config, group_size: int) -> Iterator[Tensor]:
    """AWQ, in the order of KuiperLLama's `ak48`: Qwen3's head norms come last; norms and tables are fp16."""
    for name, shape in layer_norm_shapes(config):
        yield Tensor(name, "<f2", shape)
    for name, (n_out, n_in) in matrix_shapes(config):
        if name.startswith("layers."):
            yield Tensor(f"{name}.qweight", "<i4", (n_in, n_out // 8))
            yield Tensor(f"{name}.qzeros", "<i4", (n_in // group_size, n_out // 8))
            yield Tensor(f"{name}.scales", "<f2", (n_in // group_size, n_out))
        else:
            yield Tensor(name, "<f2", (n_out, n_in))
    for name, shape in head_norm_shapes(config):
        yield Tensor(name, "<f2", shape)
