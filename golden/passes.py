"""A product as an array of cells computes it, pass by pass: every partial sum, and fp32 results to the bit.

    python -m golden passes 16x32x2048g64 --tile 16x16 --out DIR

A pass takes K inputs of M outputs for all tokens, a tile of weights. A group of inputs, under one scale, is one or more
passes, whose integer sums add up; then one unit per output converts, scales and adds in fp32. Pass p of a row of tiles
belongs to group p * K / group_size.

    x.codes          (n, k) int8, in tiles of all tokens by K inputs
    x.scales         (n, groups) fp32, group by group
    w.codes          (m, k) int8, in tiles of M x K
    w.scales         (m, groups) fp32, in tiles of M x 1
    pass.sums        (row of tiles, pass, token, output) int32: of this pass alone
    pass.totals      the same: of the group's passes up to this one; after its last, the accumulator of the contract
    out              (row of tiles, group, token, output) fp32: `out` after this group, so that the last is the result

The order of operations, group after group from the first, out = +0 before it; fp32 rounds half to even:

    a   = fp32(total)            exact to 2^24
    s   = fp32(w.scale * x.scale)
    out = fp32(a * s + out)      one rounding, as docs/numerics.md has it

Where a tile has more outputs than there are left, its weights and scales are 0.
"""

import re
from pathlib import Path

import numpy as np

from golden.fp32 import F32, fma
from golden.hex_files import Laid, lay_out_tiles, write_folder
from golden.hex_tensors import whole
from golden.op_cases import read_cases
from golden.q8 import Quantized, group_sums
from golden.tiles import tile
from golden.trace import read_trace

SHAPE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,4})x([1-9]\d{0,4})g([1-9]\d{0,4})", re.ASCII)  # n, m, k, group_size


# ----------------------------------------------------------------------------
# Arithmetic


def running_sums(accumulators: np.ndarray, x: Quantized, w: Quantized) -> np.ndarray:
    """`out` after each group, (n, m, groups) fp32, as the module's docstring has it.

    accumulators: (n, m, groups) int32.
    """
    out = np.empty(accumulators.shape, F32)
    last = np.zeros(accumulators.shape[:2], F32)
    for g in range(accumulators.shape[2]):
        scales = w.scales[None, :, g] * x.scales[:, g, None]
        last = out[..., g] = fma(accumulators[..., g].astype(F32), scales, last)
    return out


def pass_totals(sums: np.ndarray, n_groups: int) -> np.ndarray:
    """Sums of each pass -> those of the group's passes up to each. sums: (n, m, passes) int32."""
    return sums.reshape(*sums.shape[:2], n_groups, -1).cumsum(axis=-1, dtype=np.int32).reshape(sums.shape)


# ----------------------------------------------------------------------------
# Operands


def draw(n: int, m: int, k: int, group_size: int) -> tuple[Quantized, Quantized]:
    """Tokens and weights, always the same for the same sizes: codes and scales of any value.

    Token 0 is all 127, token 1 all -128, output 0 all -128, output 1 all 127: their sums are the largest of both signs.
    """
    rng = np.random.default_rng(0)

    def operand(rows: int, lowest: int) -> Quantized:
        codes = rng.integers(lowest, 128, (rows, k)).astype(np.int8)
        return Quantized(codes, rng.uniform(0.5, 2, (rows, k // group_size)).astype(F32) / F32(64))

    x, w = operand(n, -127), operand(m, -128)
    x.codes[:2], w.codes[:2] = np.array([[127], [-128]])[:n], np.array([[-128], [127]])[:m]
    return x, w


def read_operand(source: Path, tensors: dict[str, np.ndarray], name: str) -> Quantized:
    """Tokens or weights of op vectors. Raises ValueError if they are none."""
    for part, dtype in (("codes", np.int8), ("scales", F32)):
        values = tensors.get(f"{name}.{part}")
        if values is None:
            raise ValueError(f"{source}: has no tensor {name}.{part}")
        if values.dtype != dtype or values.ndim != 2 or not values.size or not np.isfinite(values).all():
            found, expected = f"{values.dtype} {values.shape}", np.dtype(dtype).name
            raise ValueError(f"{source}: tensor {name}.{part} is {found}, expected finite {expected} (rows, columns)")
    x = Quantized(tensors[f"{name}.codes"], tensors[f"{name}.scales"])
    if len(x.codes) != len(x.scales) or x.codes.shape[1] % x.scales.shape[1]:
        raise ValueError(
            f"{source}: tensor {name}.scales is {x.scales.shape}, which does not go with codes {x.codes.shape}"
        )
    return x


def operands(case: str, source: Path) -> tuple[Quantized, Quantized]:
    """Tokens and weights of a product: of op vectors (`matmul.2x9x384g64`), or drawn (`16x32x2048g64`).

    Raises ValueError for what is neither.
    """
    if (shape := SHAPE.fullmatch(case)) is not None:
        n, m, k, group_size = map(int, shape.groups())
        if k % group_size:
            raise ValueError(f"{case}: groups of {group_size} do not divide {k} inputs")
        return draw(n, m, k, group_size)
    if read_cases(source).get(case, {}).get("op") != "matmul":
        raise ValueError(f"{case}: neither NxMxKgG nor a matmul case of {source}")
    tensors = read_trace(source)
    x, w = (read_operand(source, tensors, f"{case}.{name}") for name in "xw")
    if x.codes.shape[1] != w.codes.shape[1] or x.scales.shape[1] != w.scales.shape[1]:
        shapes = f"{x.codes.shape} and {x.scales.shape} of x, {w.codes.shape} and {w.scales.shape} of w"
        raise ValueError(f"{source}: {case}: codes and scales {shapes}, expected as many inputs and groups in both")
    return x, w


# ----------------------------------------------------------------------------
# Files


def lay_out_sums(name: str, sums: np.ndarray, n_outputs: int) -> Laid:
    """Results in the order in which the columns of an array have them, all those of a tile in a word.

    sums: (n, m, passes or groups); a tile has n tokens by n_outputs.
    """
    n, _, n_passes = sums.shape
    tiles = tile(sums.transpose(2, 0, 1), n, n_outputs)  # (pass, row of tiles) as one dimension
    tiles = tiles.reshape(n_passes, -1, n, n_outputs).swapaxes(0, 1)
    order = f"tiles of {n} tokens x {n_outputs} outputs: row of tiles, pass or group, token, output"
    rows = np.ascontiguousarray(tiles).reshape(-1, n, n_outputs)
    return Laid(name, sums.dtype.name, sums.shape, order, 32, n_outputs, rows, (n, n_outputs), False, tiles.shape[:2])


def write_passes(case: str, source: Path, shape: tuple[int, int], transpose: bool, kind: str, out: Path) -> str:
    """Writes operands, sums and results of a product on an array, and manifest.json. Returns the paths, a line each.

    shape: a tile's outputs and inputs. Raises ValueError for tiles that are no whole part of a group.
    """
    x, w = operands(case, source)
    m, k = shape
    if x.group_size % k:
        raise ValueError(f"--tile: {k} inputs, expected a divisor of the group's {x.group_size}")
    n, n_groups, n_passes = len(x.codes), x.scales.shape[1], x.codes.shape[1] // k
    sums = group_sums(x.codes, w.codes, n_passes)
    totals = pass_totals(sums, n_groups)
    accumulators = totals[..., x.group_size // k - 1 :: x.group_size // k]
    tensors = [
        lay_out_tiles("x.codes", whole(x.codes), (n, k), k),
        lay_out_tiles("x.scales", whole(x.scales), (n, 1), 1),
        lay_out_tiles("w.codes", whole(w.codes), (m, k), m if transpose else k, transpose),
        lay_out_tiles("w.scales", whole(w.scales), (m, 1), 1),
        lay_out_sums("pass.sums", sums, m),
        lay_out_sums("pass.totals", totals, m),
        lay_out_sums("out", running_sums(accumulators, x, w), m),
    ]
    return write_folder(source, tensors, kind, "v", out)
