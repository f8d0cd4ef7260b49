"""grouped_matmul_swiglu_quant: what the experts of a mixture do to their tokens up to the down projection, in one step.

Tokens stand sorted by expert: rows 0 to a - 1 belong to expert 0, rows a to b - 1 to expert 1, and so on; the group
list says where. Each row is multiplied by its expert's matrix, the first half of the N results goes through swish and
is multiplied by the second half, and the N / 2 products are quantized as x is. Definition: the operator
GroupedMatmulSwigluQuantV2 of Huawei's CANN library, with the differences that docs/moe.md lists.

    x            Quantized: codes (M, K) int8, scales (M, 1) fp32; or MX: codes (M, K), scales (M, K / block)
    weight       Int8Experts, Int4Experts, or MX: codes (E, N, K), scales (E, N, K / block)
                 or, of a ladder, Quantized: codes (E, N, K) int8, scales (E, N, K / group) fp32; x then has groups, too
    group_list   E whole numbers: the end of each expert's rows ("cumsum"), or how many they are ("count")
    result       of x's kind, (M, N / 2). Rows that belong to no expert are not touched.

Rows of a weight are output channels, as everywhere here; the operator's document has (E, K, N).
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from golden.forward import swiglu
from golden.fp32 import F32, F64, scaled_sum
from golden.mx import BLOCK_UNIT, LARGEST_BLOCK, MX, element_values, quantize_mx, scale_values
from golden.q8 import Quantized, group_sums, matmul, quantize, rows_of

MAX_N, MAX_K = 10240, 65536  # the operator's; with K at most 65536 an int32 holds any sum of products of two int8
GROUP_LIST_TYPES = ("cumsum", "count")
PATHS = ("direct", "msd")
GROUP_PART = 64


class Int8Experts(NamedTuple):
    """A8W8. codes: (E, N, K) int8; scales: (E, N) fp32, one per output channel."""

    codes: np.ndarray
    scales: np.ndarray


class Int4Experts(NamedTuple):
    """A8W4. codes: (E, N, K) int8 in -8..7; scales: (E, N, G) fp32, one per K / G codes; assist: (E, N) fp32.

    G = 1: a scale per output channel. assist: see `assist_matrix`.
    """

    codes: np.ndarray
    scales: np.ndarray
    assist: np.ndarray


Experts = Int8Experts | Int4Experts | Quantized | MX


# ----------------------------------------------------------------------------
# What is refused


def group_starts(group_list: np.ndarray, kind: str, n_experts: int, n_rows: int) -> np.ndarray:
    """Where the rows of each expert begin, and where the last one's end: (E + 1,) int64. Raises ValueError."""
    if kind not in GROUP_LIST_TYPES:
        raise ValueError(f"group_list_type is {kind!r}, expected {' or '.join(GROUP_LIST_TYPES)}")
    if group_list.shape != (n_experts,) or group_list.dtype.kind not in "iu":
        found = f"{group_list.dtype} {group_list.shape}"
        raise ValueError(f"group_list is {found}, expected a whole number for each of {n_experts} experts")
    ends = group_list.astype(np.int64)
    if kind == "count":
        if (ends < 0).any():
            raise ValueError(f"group_list has the count {ends[ends < 0][0]}, expected 0 or more")
        ends = np.cumsum(ends)
    starts = np.concatenate([[0], ends])
    if (np.diff(starts) < 0).any():
        i = int(np.argmax(np.diff(starts) < 0))
        raise ValueError(f"group_list has the end {ends[i]} of expert {i} behind {starts[i]}: ends must not fall")
    if starts[-1] > n_rows:
        raise ValueError(f"group_list ends at row {starts[-1]}, x has {n_rows} rows")
    return starts


def _check(what: str, found: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if found.dtype != dtype or found.shape != shape:
        raise ValueError(f"{what} is {found.dtype} {found.shape}, expected {np.dtype(dtype)} {shape}")


def _check_block(what: str, x: MX) -> None:
    n, n_blocks = x.codes.shape[-1], x.scales.shape[-1] if x.scales.ndim else 0
    block = n // n_blocks if n_blocks else 0
    if block * n_blocks != n or block == 0 or block % BLOCK_UNIT or block > LARGEST_BLOCK:
        raise ValueError(
            f"{what} has {n_blocks} scales for {n} elements, expected blocks of a multiple of {BLOCK_UNIT}, "
            f"at most {LARGEST_BLOCK}"
        )
    _check(f"{what}'s scales", x.scales, np.uint8, (*x.codes.shape[:-1], n_blocks))


def check_operands(x: Quantized | MX, weight: Experts) -> tuple[int, int, int, int]:
    """Shapes and types of the operands, and M, E, N, K. Raises ValueError with the numbers that do not fit."""
    if x.codes.ndim != 2 or weight.codes.ndim != 3 or weight.codes.shape[2] != x.codes.shape[1]:
        raise ValueError(f"x is {x.codes.shape} and weight {weight.codes.shape}, expected (M, K) and (E, N, K)")
    (m, k), (e, n, _) = x.codes.shape, weight.codes.shape
    if not 1 <= k <= MAX_K:
        raise ValueError(f"K is {k}, expected 1 to {MAX_K}")
    if not 1 <= n <= MAX_N or n % 2:
        raise ValueError(f"N is {n}, expected an even number, at most {MAX_N}")
    if isinstance(weight, MX) != isinstance(x, MX):
        raise ValueError("x and weight are of two kinds: MX goes with MX, int8 with int8 or int4")
    if isinstance(weight, MX):
        _check("x", x.codes, np.uint8, (m, k))
        _check("weight", weight.codes, np.uint8, (e, n, k))
        _check_block("x", x)
        _check_block("weight", weight)
        if x.block != weight.block:
            raise ValueError(f"x has blocks of {x.block} and weight of {weight.block}, expected the same")
        return m, e, n, k
    _check("x", x.codes, np.int8, (m, k))
    _check("weight", weight.codes, np.int8, (e, n, k))
    if isinstance(weight, Quantized):
        n_groups = x.scales.shape[-1] if x.scales.ndim else 0
        if n_groups == 0 or k % n_groups:
            raise ValueError(f"x's scales are {x.scales.shape}, expected (M, G) with a G that divides K {k}")
        _check("x's scales", x.scales, F32, (m, n_groups))
        _check("weight's scales", weight.scales, F32, (e, n, n_groups))
        return m, e, n, k
    _check("x's scales", x.scales, F32, (m, 1))
    if isinstance(weight, Int8Experts):
        _check("weight's scales", weight.scales, F32, (e, n))
        return m, e, n, k
    n_groups = weight.scales.shape[-1] if weight.scales.ndim == 3 else 0
    if n_groups == 0 or k % n_groups:
        raise ValueError(f"weight's scales are {weight.scales.shape}, expected (E, N, G) with a G that divides K {k}")
    _check("weight's scales", weight.scales, F32, (e, n, n_groups))
    _check("weight's assist matrix", weight.assist, F32, (e, n))
    if weight.codes.size and not -8 <= weight.codes.min() <= weight.codes.max() <= 7:
        raise ValueError(f"weight has codes of {weight.codes.min()} to {weight.codes.max()}, expected -8 to 7")
    return m, e, n, k


# ----------------------------------------------------------------------------
# int4 weights, in two ways


def msd_split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 as two int4, each in -8..7: x = 16 * high + low + 8.

    high = floor(x / 16) is the upper half of the byte as it stands; low = (x & 15) - 8 is the lower half with its top
    bit flipped, read as two's complement.
    """
    return x >> 4, (x & 15) - np.int8(8)


def assist_matrix(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """8 * sum over k of weight, (E, N) fp32: what the 8 of `msd_split` adds to every product with a row.

    codes: (E, N, K) int8; scales: (E, N, G) fp32.
    """
    sums = codes.reshape(*scales.shape, -1).sum(axis=-1, dtype=np.int64)  # exact
    return (8 * sums * scales.astype(F64)).sum(axis=-1).astype(F32)


def int4_sums(x: np.ndarray, w: np.ndarray, n_groups: int, path: str = "direct") -> np.ndarray:
    """`group_sums` of int8 x and int4 w: directly, or from two int4 x int4 products.

    Both give the same integers: sum(x w) = sum((16 high + low + 8) w) = 16 sum(high w) + sum(low w) + 8 sum(w).
    """
    if path == "direct":
        return group_sums(x, w, n_groups)
    high, low = msd_split(x)
    eights = 8 * w.reshape(len(w), n_groups, -1).sum(axis=-1, dtype=np.int32)  # (N, n_groups)
    return 16 * group_sums(high, w, n_groups) + group_sums(low, w, n_groups) + eights


# ----------------------------------------------------------------------------
# The operator


def expert_matmul(x: Quantized | MX, weight: Experts, expert: int, path: str = "direct") -> np.ndarray:
    """x times the matrix of one expert, (M, N) fp32, to the bit as programs have it (docs/numerics.md).

    path "msd": int4 weights as the split has them, with the assist matrix for the sum of the eights; fp64 between
    integers and the result.
    """
    if isinstance(weight, MX):
        w = MX(weight.codes[expert], weight.scales[expert], weight.element)
        return mx_matmul(x, w)
    if isinstance(weight, Quantized):
        return matmul(x, rows_of(weight, expert))
    if isinstance(weight, Int8Experts) or path == "direct":
        return scaled_sums(expert_sums(x, weight, expert), x, weight, expert)
    codes, scales = weight.codes[expert], weight.scales[expert].astype(F64)
    high, low = (group_sums(part, codes, scales.shape[1]).astype(F64) for part in msd_split(x.codes))
    product = np.einsum("mng,ng->mn", 16 * high + low, scales) + weight.assist[expert]
    with np.errstate(over="ignore"):
        return (product * x.scales.astype(F64)).astype(F32)


def expert_sums(x: Quantized, weight: Int8Experts | Int4Experts | Quantized, expert: int) -> np.ndarray:
    """The accumulators of `expert_matmul`, (M, N, parts) int32: `group_sums`, before any scale.

    A8W8 has one group. A group of A8W4 that is a multiple of 64 (GROUP_PART) is added up in parts of 64.
    """
    n_groups = 1 if isinstance(weight, Int8Experts) else weight.scales.shape[2]
    size = x.codes.shape[1] // n_groups
    if isinstance(weight, Int4Experts) and size % GROUP_PART == 0:
        n_groups *= size // GROUP_PART
    return group_sums(x.codes, weight.codes[expert], n_groups)


def scaled_sums(
    sums: np.ndarray, x: Quantized, weight: Int8Experts | Int4Experts | Quantized, expert: int
) -> np.ndarray:
    """`scaled_sum` of the sums of an expert's product, (M, N) fp32. sums: (M, N, parts), some whole number a group."""
    scales = weight.scales[expert]
    scales = scales[:, None] if scales.ndim == 1 else scales
    with np.errstate(over="ignore"):
        return scaled_sum(sums, scales.repeat(sums.shape[2] // scales.shape[1], axis=1), x.scales)


def mx_matmul(x: MX, w: MX) -> np.ndarray:
    """x @ w.T, (M, N) fp32. x: (M, K), w: (N, K).

    A block is summed in fp64, first element to last, which is exact for E4M3; times both scales, rounded to fp32; then
    blocks are added in order, from +0, so that none is -0.
    """
    values = element_values(x.element).astype(F64)
    blocks = [values[m.codes].reshape(*m.scales.shape, m.block) for m in (x, w)]
    scales = [scale_values(m.scales) for m in (x, w)]
    out = np.zeros((len(x.codes), len(w.codes)), F32)
    with np.errstate(over="ignore", invalid="ignore"):
        for b in range(x.scales.shape[1]):
            total = np.zeros(out.shape)
            for k in range(x.block):
                total += blocks[0][:, b, k, None] * blocks[1][None, :, b, k]
            out += (total * scales[0][:, b, None] * scales[1][None, :, b]).astype(F32)
    return out


def output_group(x: Quantized | MX, weight: Experts) -> int:
    """The values of a result that share a scale: x's, or all N / 2 of a token."""
    if isinstance(weight, Int8Experts | Int4Experts):
        return weight.codes.shape[1] // 2
    return x.block if isinstance(x, MX) else x.group_size


def quantize_like(values: np.ndarray, x: Quantized | MX, group: int) -> Quantized | MX:
    """Values (M, n) fp32, quantized as x is: int8, or MX with x's elements, with a scale per group."""
    return quantize_mx(values, group, x.element) if isinstance(x, MX) else quantize(values, group)


def empty_like(x: Quantized | MX, n: int, group: int) -> Quantized | MX:
    """Zeros of x's kind, (M, n)."""
    return x._replace(
        codes=np.zeros((len(x.codes), n), x.codes.dtype), scales=np.zeros((len(x.codes), n // group), x.scales.dtype)
    )


def grouped_matmul_swiglu_quant(
    x: Quantized | MX,
    weight: Experts,
    group_list: np.ndarray,
    group_list_type: str = "cumsum",
    out: Quantized | MX | None = None,
    path: str = "direct",
) -> Quantized | MX:
    """The operator; the module's docstring has the shapes. Writes into `out` and returns it; None: into zeros.

    Raises ValueError, before it writes anything, for shapes, types and sizes that it does not take.
    """
    m, n_experts, n, _ = check_operands(x, weight)
    if path not in PATHS:
        raise ValueError(f"path is {path!r}, expected {' or '.join(PATHS)}")
    group = output_group(x, weight)
    if n // 2 % group:
        what = "block" if isinstance(x, MX) else "group"
        raise ValueError(f"N / 2 is {n // 2}, no multiple of the {what} {group}")
    starts = group_starts(group_list, group_list_type, n_experts, m)
    wanted = empty_like(x, n // 2, group)
    if out is None:
        out = wanted
    if not isinstance(out, type(x)):
        raise ValueError(f"out is a {type(out).__name__}, expected a {type(x).__name__}")
    _check("out", out.codes, wanted.codes.dtype.type, wanted.codes.shape)
    _check("out's scales", out.scales, wanted.scales.dtype.type, wanted.scales.shape)
    for expert, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            product = expert_matmul(rows_of(x, slice(start, end)), weight, expert, path)
            with np.errstate(over="ignore", invalid="ignore"):
                hidden = swiglu(product[:, : n // 2], product[:, n // 2 :])
            result = quantize_like(hidden, x, group)
            out.codes[start:end], out.scales[start:end] = result.codes, result.scales
    return out
