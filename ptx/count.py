"""What kernels cost at the shapes of real models: a table of instructions, wavefronts and sectors (counters.py).

    .venv/bin/python -m ptx.count                 all of CASES
    .venv/bin/python -m ptx.count --kinds gemm    instructions by kind, of the kernels whose name contains this

Of a grid in which all blocks do the same, some blocks are run; instructions are per 1,024 weights, keys or values.
"""

import argparse
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ptx.counters import Counters
from ptx.instructions import implement
from ptx.machine import run
from ptx.parse import kernels_of
from ptx.suite import ptx_file

RNG = np.random.default_rng(1)


class Memory:
    """Device memory of one launch."""

    def __init__(self) -> None:
        self.buffers: dict[int, np.ndarray] = {}

    def put(self, values: np.ndarray) -> int:
        """Copies values to a new allocation; returns its address."""
        address = (len(self.buffers) + 1) << 32
        self.buffers[address] = np.ascontiguousarray(values).view("u1").ravel().copy()
        return address

    def normal(self, *shape: int, dtype: str = "f2") -> int:
        return self.put(RNG.standard_normal(shape).astype(dtype))

    def zeros(self, n: int, dtype: str = "f4") -> int:
        return self.put(np.zeros(n, dtype))


@dataclass
class Case:
    """A launch: make(memory) gives grid, block, dynamic shared bytes and arguments. `unit`: what instructions are
    counted per, and how many thousand (1,024) of them there are; `least`: bytes that have to be read and written."""

    kernel: str
    shape: str
    make: Callable
    unit: str
    thousands: float
    least: int
    ptx: str = "runq_awq"


def _awq(m: Memory, n_in: int, n_out: int, group: int) -> bytes:
    words = RNG.integers(0, 1 << 32, (n_in + n_in // group, n_out // 8), dtype="u4")
    scales = m.put((RNG.random((n_in // group, n_out)) * 0.01).astype("f2"))
    matrix = struct.pack("<QQQQiii4x", m.put(words[:n_in]), m.put(words[n_in:]), scales, 0, n_in, n_out, group)
    return matrix


def _products(m: Memory, n_in: int, n_out: int, n_tokens: int) -> bytes:
    product = _awq(m, n_in, n_out, 128) + struct.pack("<Q?7x", m.zeros(n_tokens * n_out), False)
    return product + bytes(128) + struct.pack("<i4x", 1)


def _scratch(m: Memory, n_values: int) -> bytes:
    return struct.pack("<QQ", m.zeros(n_values), m.zeros(64, "u4"))


def _gemv(words: int, warps: int, n_in: int, n_out: int, splits: int, m: Memory) -> tuple:
    tiles, steps = -(-n_out // (64 * words)), -(-n_in // (16 * warps * splits))
    arguments = struct.pack("<Q", m.normal(n_in)) + _products(m, n_in, n_out, 1)
    arguments += _scratch(m, splits * tiles * max(32 * warps, 64 * words))
    return (tiles, splits, 1), 32 * warps, warps * (4 * (672 * words + 128) + 32 * steps), arguments


def _gemm(tile: int, n_tokens: int, n_in: int, n_out: int, blocks: int, m: Memory) -> tuple:
    columns, k_groups = (256, 1) if tile > 64 else (128, 2 if tile > 32 else 4)
    part, token_tiles, tile_stages = 128 * tile + 2 * columns * 16, -(-n_tokens // tile), -(-n_in // (64 * k_groups))
    each, extra = divmod(-(-n_out // columns) * token_tiles * tile_stages, blocks)
    shares = struct.pack("<iiiiI", token_tiles, tile_stages, each, extra, (1 << 32) // 128)
    arguments = struct.pack("<Qi", m.normal(n_tokens, n_in), n_tokens) + shares + _products(m, n_in, n_out, n_tokens)
    arguments += _scratch(m, 2 * blocks * tile * columns)
    return (blocks, 1, 1), k_groups * columns * max(64, tile) // 128, 3 * k_groups * part, arguments


def _attention(tokens: int, kv_heads: int, keys: int, splits: int, m: Memory) -> tuple:
    """Four heads of 128 elements for each kv head."""
    heads, cache = 4 * kv_heads, [m.normal(kv_heads, keys, 128) for _ in range(2)]
    pos = m.put(np.array([keys - tokens], "i4"))
    pointers = [m.normal(tokens * heads, 128), *cache, m.zeros(tokens * heads * 128, "f2"), pos]
    partials = [m.zeros(heads * splits * 128), m.zeros(heads * splits * 2), m.zeros(kv_heads, "u4")]
    arguments = struct.pack("<QQQQQiiiifi", *pointers, tokens, 4, kv_heads, keys, 128**-0.5, splits)
    arguments += struct.pack("<QQQ", *partials)
    if tokens > 1:
        return (-(-tokens // 32), kv_heads, 1), 256, 2 * 2 * 64 * (128 + 8) * 2, arguments
    return (1, kv_heads, splits), 256, 4 * 4 * (8 * 128 + 4), arguments


def _rmsnorm(dim: int, m: Memory) -> tuple:
    pointers = (m.zeros(dim, "f2"), m.normal(dim, dtype="f4"), m.normal(dim))
    return (1, 1, 1), dim // 16, 0, struct.pack("<QQQif", *pointers, dim, 1e-6)


def _swiglu(n: int, m: Memory) -> tuple:
    pointers = (m.zeros(n, "f2"), m.normal(n, dtype="f4"), m.normal(n, dtype="f4"))
    return (-(-n // 512), 1, 1), 256, 0, struct.pack("<QQQQ", *pointers, n)


def _classifier(n_rows: int, n_in: int, m: Memory) -> tuple:
    pointers = (m.zeros(n_rows), m.normal(n_in), m.normal(n_rows, n_in))
    return (-(-n_rows // 8), 1, 1), 256, 0, struct.pack("<QQQii", *pointers, n_rows, n_in)


def _dequantize(n_in: int, n_out: int, m: Memory) -> tuple:
    arguments = _awq(m, n_in, n_out, 128) + struct.pack("<Q", m.zeros(n_in * n_out, "f2"))
    return (-(-n_out // 1024), n_in // 8, 1), 128, 0, arguments


def _tile(n_tokens: int, n_rows: int, n_cols: int, m: Memory) -> tuple:
    codes = [m.put(RNG.integers(-127, 128, (n, n_cols), dtype="i1")) for n in (n_rows, n_tokens)]
    scales = [m.put(RNG.random((n, n_cols // 64), dtype="f4").astype(t)) for n, t in ((n_rows, "f2"), (n_tokens, "f4"))]
    w = struct.pack("<QQQQi4xQiiiiiii4x", codes[0], 0, scales[0], 0, 0, 0, 0, 0, 8, n_rows, n_cols, 64, 64)
    x = struct.pack("<QQQiii4x", codes[1], scales[1], m.zeros(n_tokens * n_cols // 64), n_tokens, n_cols, 64)
    return (-(-n_rows // 64), -(-n_tokens // 64), 1), 128, 0, w + x + struct.pack("<Q", m.zeros(n_tokens * n_rows))


def _awq_bytes(n_in: int, n_out: int, n_tokens: int) -> int:
    weights = n_in * n_out
    return weights // 2 + weights // 128 * 5 // 2 + n_tokens * (2 * n_in + 4 * n_out)


def _rung(grid: tuple, threads: int, n_tokens: int, n_in: int, n_out: int, m: Memory) -> tuple:
    """Of bench/awq_kernels.cuh: out, x, of several tokens by tiles their number, w."""
    arguments = struct.pack("<QQ", m.zeros(n_tokens * n_out), m.normal(n_tokens, n_in))
    if threads == 64:
        arguments += struct.pack("<i4x", n_tokens)
    return (*grid, 1), threads, 0, arguments + _awq(m, n_in, n_out, 128)


def _product_case(
    kernel: str, n_tokens: int, n_in: int, n_out: int, make: Callable, note: str = "", ptx: str = "runq_awq"
) -> Case:
    shape = f"{n_tokens} x {n_in} x {n_out}{note}"
    return Case(kernel, shape, make, "weights", n_in * n_out / 1024, _awq_bytes(n_in, n_out, n_tokens), ptx)


CASES = [
    *(
        _product_case(
            kernel, n_tokens, n_in, n_out, partial(_rung, grid, threads, n_tokens, n_in, n_out), "", "awq_kernels"
        )
        for kernel, n_tokens, n_in, n_out, grid, threads in (
            ("plain_product", 1, 4096, 512, (4, 1), 128),
            ("fma_gemv", 1, 4096, 512, (8, 1), 256),
            ("plain_product", 16, 2048, 256, (2, 16), 128),
            ("shared_gemm<64>", 16, 2048, 256, (4, 1), 64),
        )
    ),
    _product_case("awq_gemv<4,8>", 1, 4096, 512, partial(_gemv, 4, 8, 4096, 512, 8), ", 8 splits"),
    _product_case("awq_gemv<1,8>", 1, 4096, 256, partial(_gemv, 1, 8, 4096, 256, 4), ", 4 splits"),
    _product_case("awq_gemm<16>", 16, 2048, 256, partial(_gemm, 16, 16, 2048, 256, 8), ", 8 blocks"),
    _product_case("awq_gemm<64>", 64, 1024, 256, partial(_gemm, 64, 64, 1024, 256, 2), ", 2 blocks"),
    *(
        Case(
            "attention_kernel<4>" if tokens > 1 else "token_attention<4>",
            f"{tokens} x {4 * kv_heads} heads, {kv_heads} kv heads, {keys:,} keys{note}",
            partial(_attention, tokens, kv_heads, keys, splits),
            "queries by keys",
            tokens * 4 * kv_heads * keys / 1024,
            2 * 2 * kv_heads * 128 * keys + tokens * 2 * 2 * 4 * kv_heads * 128,
        )
        for tokens, kv_heads, keys, splits, note in (
            (1, 8, 1024, 16, ", 16 splits"),
            (32, 1, 512, 1, ""),
        )
    ),
    Case("rmsnorm_kernel", "1 x 4,096", partial(_rmsnorm, 4096), "values", 4, 8 * 4096),
    Case("swiglu_kernel", "1 x 12,288", partial(_swiglu, 12288), "values", 12, 10 * 12288),
    Case("fp16_gemv", "1 x 4,096 x 64", partial(_classifier, 64, 4096), "weights", 256, 2 * 64 * 4096 + 2 * 4096 + 256),
    Case("awq_dequantize", "128 x 2,048", partial(_dequantize, 128, 2048), "weights", 256, 2048 * 128 * 5 // 2 + 5120),
    Case(
        "multiply_tile<Format<8,false,false>>",
        "64 x 1,024 x 64",
        partial(_tile, 64, 64, 1024),
        "weights",
        64,
        2 * 64 * 1024 + 64 * 16 * 6 + 64 * 64 * 4,
        "backend",
    ),
]


def count(case: Case, kernels: dict) -> Counters:
    """Runs a case; what it cost."""
    memory, counters = Memory(), Counters()
    grid, block, shared, arguments = case.make(memory)
    run(kernels[case.kernel], grid, (block, 1, 1), shared, arguments, memory.buffers, counters)
    return counters


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ptx.count", description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", metavar="NAME", help="instructions by kind")
    args = parser.parse_args()
    kernels = {name: kernels_of(ptx_file(name, 80).read_text(), implement) for name in {c.ptx for c in CASES}}
    if args.kinds is None:
        print(
            "| kernel | shape | instructions per 1,024 of | shared wavefronts / least | sectors / coalesced / least |"
        )
        print("|---|---|---|---|---|")
    for case in CASES:
        if args.kinds is not None and args.kinds not in case.kernel:
            continue
        c = count(case, kernels[case.ptx])
        if args.kinds is not None:
            print(f"{case.kernel}, {case.shape}: PTX instructions of a warp per 1,024 {case.unit}")
            for kind, n in c.instructions.most_common():
                print(f"    {kind:10} {n / case.thousands:9.2f}")
            for (what, size), n in c.wavefronts.items():
                print(f"    {what} of {size} bytes: {n} wavefronts, {c.least_wavefronts[what, size]} at least")
            for (what, size), n in c.sectors.items():
                print(f"    global {what} of {size} bytes: {n} sectors, coalesced {c.least_sectors[what, size]}")
            continue
        shared = f"{c.wavefronts.total():,} / {c.least_wavefronts.total():,}" if c.wavefronts else "-"
        sectors = f"{c.sectors.total():,} / {c.least_sectors.total():,} / {-(-case.least // 32):,}"
        instructions = sum(c.instructions.values()) - c.instructions["free"]
        name = case.kernel.partition("<Format")[0]
        print(
            f"| `{name}` | {case.shape} | {instructions / case.thousands:.1f} {case.unit} | {shared} | {sectors} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
