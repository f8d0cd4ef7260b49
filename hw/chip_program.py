"""A model as the image of memory that hw/rtl/chip_axi.sv runs from: its program, weights, tables and KV cache.

    python -m hw.chip_program MODEL [--array 16x16] [--kv fp32]     prints the program of a layer

MODEL is a file of Q8, or of W8A8 with dynamic scales. A program is a list of steps, each an instruction of
eight words (hw/rtl/step_sequencer.sv); none of them is a loop or a jump. A step also has the name under which a trace
has its result, docs/numerics.md.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats.checkpoint import Config
from golden.forward import rope_table
from golden.q8 import Int8File, Quantized
from golden.schemes import read_file

STEPS = ["end", "embed", "copy", "norm", "quantize", "multiply", "rotate", "store", "attend", "add", "gate"]
TOKEN, POSITION = 1, 2  # what goes into an address
KV_FORMATS = {"fp32": 0, "q8": 2, "int8": 3}  # int8: q8, for attention in int8


@dataclass(frozen=True)
class Step:
    """One instruction. Sizes and vectors count numbers, memory and step bytes. result: its name in a trace."""

    kind: str
    result: str
    n: int = 0
    a: int = 0
    b: int = 0
    out: int = 0
    group: int = 0
    groups: int = 0
    row: int = 0
    memory: int = 0
    step: int = 0
    constant: float = 0.0
    index: int = 0
    kv: int = 0
    to_memory: bool = False

    def words(self) -> list[int]:
        """The instruction, eight words of 32 bits."""
        constant = int(np.float32(self.constant).view(np.uint32))
        flags = STEPS.index(self.kind) | self.index << 4 | self.kv << 6 | self.to_memory << 8 | self.n << 16
        low, high = self.memory & 0xFFFFFFFF, self.memory >> 32
        vectors = self.a | self.b << 16, self.out | self.group << 16
        return [flags, *vectors, self.groups | self.row << 16, low, high, self.step, constant]


@dataclass(frozen=True)
class Image:
    """Memory before the first token, and what the host has to know of it. Addresses are in bytes."""

    memory: np.ndarray  # uint8
    steps: list[Step]
    program: int
    logits: int
    config: Config


def pack_matrix(w: Quantized, cols: int) -> np.ndarray:
    """The stream of weights (docs/rtl.md) of a matrix in int8: for each `cols` outputs and group scales, then codes."""
    n_rows, n_groups = w.scales.shape
    tiles = -(-n_rows // cols)
    codes = np.zeros((tiles * cols, w.codes.shape[1]), np.int8)
    scales = np.zeros((tiles * cols, n_groups), np.float32)
    codes[:n_rows], scales[:n_rows] = w.codes, w.scales
    codes = codes.reshape(tiles, cols, n_groups, -1).transpose(0, 2, 3, 1)  # (tiles, groups, inputs, outputs)
    scales = np.ascontiguousarray(scales.reshape(tiles, cols, n_groups).transpose(0, 2, 1))
    parts = [scales.view(np.uint8).reshape(tiles, n_groups, -1), codes.view(np.uint8).reshape(tiles, n_groups, -1)]
    return np.concatenate(parts, axis=-1).ravel()


def pack_rows(w: Quantized) -> np.ndarray:
    """Rows as hw/rtl/dequantizer.sv takes them: for each group its scale, then its codes. (rows, bytes) uint8."""
    n_rows, n_groups = w.scales.shape
    codes = np.ascontiguousarray(w.codes).view(np.uint8).reshape(n_rows, n_groups, -1)
    scales = np.ascontiguousarray(w.scales, np.float32).view(np.uint8).reshape(n_rows, n_groups, 4)
    return np.concatenate([scales, codes], axis=-1).reshape(n_rows, -1)


class Memory:
    """Places for arrays, one behind the other, each at a multiple of 4 KB."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = []
        self.end = 0

    def place(self, values: np.ndarray) -> int:
        """Puts the bytes of `values` into memory; their address."""
        at, raw = self.end, np.ascontiguousarray(values).view(np.uint8).ravel()
        self.end = -(-(at + len(raw)) // 4096) * 4096
        self.parts += [raw, np.zeros(self.end - at - len(raw), np.uint8)]
        return at


def build(model: Int8File, rows: int, cols: int, kv: str = "fp32", context: int = 512) -> Image:
    """The image of a model for an array of rows x cols cells; kv: a key of KV_FORMATS.
    Raises ValueError with the reason if the chip cannot run the model.
    """
    c = model.config
    if model.static:
        raise ValueError("expected dynamic scales")
    group_of = lambda n: model.group_size or n  # noqa: E731
    q_dim, kv_dim, d = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.head_dim
    if any(group_of(n) % rows for n in (c.dim, q_dim, c.hidden_dim)):
        raise ValueError(f"groups are no multiple of {rows} rows")
    kv_words = d if kv == "fp32" else 1 + d // 4  # of a head's key or value
    memory = Memory()
    table = memory.place(pack_rows(model.matrix("embed")))
    table_row = len(pack_rows(Quantized(*(x[:1] for x in model.matrix("embed")))).ravel())
    cos, sin = rope_table(c, np.arange(context))
    turns = memory.place(np.stack([cos, sin], axis=-1))  # (context, d / 2, 2)
    cache_bytes = context * kv_words * 4  # of a layer, a head, keys or values
    cache = memory.place(np.zeros(c.n_layers * c.n_kv_heads * 2 * cache_bytes, np.uint8))

    # Vectors, in the memory of the chip.
    places, at = {}, 0
    for name, n in {"x": c.dim, "turn": d, "normed": max(c.dim, q_dim), "q": q_dim, "k": kv_dim, "v": kv_dim,
                    "gate": c.hidden_dim, "up": c.hidden_dim, "proj": c.dim}.items():  # fmt: skip
        places[name], at = at, at + n
    steps: list[Step] = []

    def add(kind: str, result: str, n: int, a: str = "x", b: str = "x", out: str = "x", **more: float) -> None:
        vectors = {
            "a": places[a] + more.pop("a_at", 0),
            "b": places[b] + more.pop("b_at", 0),
            "out": places[out] + more.pop("out_at", 0),
        }
        steps.append(Step(kind, result, n, **vectors, **more))

    def norm(name: str) -> None:
        weights = memory.place(np.asarray(model.vector(name), np.float32))
        add("norm", name, c.dim, out="normed", row=c.dim, memory=weights, constant=c.norm_eps)
        quantize(name, "normed", c.dim)

    def quantize(name: str, a: str, n: int) -> None:
        add("quantize", name, n, a=a, group=group_of(n), groups=n // group_of(n))

    def multiply(name: str, n: int, out: str, **more: int) -> None:
        add("multiply", name, n, out=out, memory=memory.place(pack_matrix(model.matrix(name), cols)), **more)

    add("embed", "embed", c.dim, group=group_of(c.dim), groups=c.dim // group_of(c.dim), row=table_row // 4,
        memory=table, step=table_row, index=TOKEN)  # fmt: skip
    add("copy", "", d, out="turn", row=d, memory=turns, step=4 * d, index=POSITION)
    for i in range(c.n_layers):
        attn, ffn = f"layers.{i}.attn.", f"layers.{i}.ffn."
        norm(attn + "norm")
        multiply(attn + "q_proj", q_dim, "q")
        multiply(attn + "k_proj", kv_dim, "k")
        multiply(attn + "v_proj", kv_dim, "v")
        for part, n_heads in (("q", c.n_heads), ("k", c.n_kv_heads)) if c.arch == "qwen3" else ():
            weights = memory.place(np.asarray(model.vector(f"{attn}{part}_norm"), np.float32))
            for at in range(0, n_heads * d, d):
                add("norm", f"{attn}{part}_norm", d, a=part, a_at=at, out=part, out_at=at, row=d, memory=weights,
                    constant=c.norm_eps)  # fmt: skip
        add("rotate", attn + "q_rope", q_dim, a="q", b="turn", out="q", group=d)
        add("rotate", attn + "k_rope", kv_dim, a="k", b="turn", out="k", group=d)
        # The cache of a head: keys of all positions, then values.
        head_cache = [cache + (i * c.n_kv_heads + h) * 2 * cache_bytes for h in range(c.n_kv_heads)]
        for h in range(c.n_kv_heads):
            for values, (a, name) in enumerate((("k", "k_rope"), ("v", "v_proj"))):
                add("store", attn + name, d, a=a, a_at=h * d, group=d, row=kv_words, kv=KV_FORMATS[kv],
                    memory=head_cache[h] + values * cache_bytes, step=4 * kv_words, index=POSITION)  # fmt: skip
        for h in range(c.n_heads):
            add("attend", attn + "mix", d, a="q", a_at=h * d, out="normed", out_at=h * d, row=kv_words,
                kv=KV_FORMATS[kv], memory=head_cache[h * c.n_kv_heads // c.n_heads], step=cache_bytes,
                constant=1 / np.sqrt(d))  # fmt: skip
        quantize(attn + "mix", "normed", q_dim)
        multiply(attn + "o_proj", c.dim, "proj")
        add("add", attn + "residual", c.dim, b="proj", group=c.dim)
        norm(ffn + "norm")
        multiply(ffn + "gate_proj", c.hidden_dim, "gate")
        multiply(ffn + "up_proj", c.hidden_dim, "up")
        add("gate", ffn + "swiglu", c.hidden_dim, a="gate", b="up", out="gate", group=c.hidden_dim)
        quantize(ffn + "swiglu", "gate", c.hidden_dim)
        multiply(ffn + "down_proj", c.dim, "proj")
        add("add", ffn + "residual", c.dim, b="proj", group=c.dim)
    norm("norm")
    classifier = memory.place(pack_matrix(model.matrix("classifier"), cols))
    logits = memory.place(np.zeros(c.vocab_size, np.float32))
    add("multiply", "logits", c.vocab_size, memory=classifier, step=logits - classifier, row=c.vocab_size,
        to_memory=True)  # fmt: skip
    add("end", "", 0)
    words = np.array([step.words() for step in steps], np.int64).astype(np.uint32)
    program = memory.place(words)
    return Image(np.concatenate(memory.parts), steps, program, logits, c)


def main() -> int:
    """Prints the steps of the first layer."""
    parser = argparse.ArgumentParser(prog="python -m hw.chip_program", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--array", default="16x16")
    parser.add_argument("--kv", choices=KV_FORMATS, default="fp32")
    args = parser.parse_args()
    rows, cols = map(int, args.array.split("x"))
    image = build(read_file(args.model), rows, cols, args.kv)
    for step in image.steps:
        if not step.result.startswith("layers.") or step.result.startswith("layers.0."):
            print(f"{step.kind:<9}{step.result:<24}", *(f"{word:08x}" for word in step.words()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
