"""Grids of the low-bit formats: which values a group of weights may take, and which grid suits it best.

A weight with code c stands for scale * (step * c - zero): step is 1, or 5 in the two-level form, whose zero points lie
between codes; or, by a table, for scale * table[c]. `plain_grid` takes a group's range, as rounding to nearest does.
`best_grid` tries narrower ranges (all 256 pairs of codes in the two-level form, both signs of int8 scales) and takes
the one with the smallest sum of importance * (rounded - w)^2.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from formats.gptq import MatrixFormat
from golden.forward import F32, F64
from golden.gptq import F16, ZERO_STEPS

SHRINKS = tuple(1 - i / 40 for i in range(21))  # of a group's range: 1, 0.975, ... 0.5
LEVELS = 16  # of the two-level form's scales and zero points
# What codes by table stand for, by bits: Lloyd-Max values (`fitted_table`) of weights in groups of 32, each with its
# best scale of either sign; of 4 bits of normally distributed weights, of 5 bits of SmolLM2's.
# fmt: off
NORMAL_TABLES = {
    4: np.array([-127, -100, -79, -62, -47, -34, -21, -9, 2, 13, 25, 36, 50, 65, 82, 106], np.int8),
    5: np.array([-127, -107, -92, -80, -71, -63, -55, -48, -42, -35, -30, -24, -19, -13, -7, -2,
                 4, 9, 13, 19, 24, 30, 35, 42, 48, 55, 63, 71, 80, 92, 105, 125], np.int8),
}
# fmt: on
TRIED_VALUES = 1 << 16  # weights that are tried at a time: they stay in the cache


class Grid(NamedTuple):
    """One group of each row: scale (rows,) fp32, zero (rows,) whole numbers in fp32, in the steps of the format.

    table: what codes stand for times the scale, rising; there is no zero then.
    """

    scale: np.ndarray
    zero: np.ndarray
    table: np.ndarray | None = None


def code_range(form: MatrixFormat) -> tuple[int, int]:
    """The smallest and the largest code."""
    return (-127, 127) if form.bits == 8 else (0, 2**form.bits - 1)


def step_of(form: MatrixFormat) -> int:
    """How many steps of the zero point there are from one code to the next."""
    return ZERO_STEPS if form.two_level else 1


def middles(table: np.ndarray) -> np.ndarray:
    """Where the nearest value of a rising table changes, (n - 1,) fp64."""
    return (table[1:].astype(F64) + table[:-1]) / 2


@cache
def _cells(table: bytes) -> np.ndarray:
    """The code of each cell k / 2 < x <= (k + 1) / 2, k = -256 .. 255: its nearest value of a table of int8."""
    middle = (np.arange(-256, 256) + 0.5) / 2
    return np.searchsorted(middles(np.frombuffer(table, np.int8)), middle).astype(np.uint8)


def _cell_of(x: np.ndarray) -> np.ndarray:
    """The cell of each x. Middles of whole numbers are multiples of 1/2, so which half unit x is in decides."""
    half = np.ceil(x * 2)
    half += 255
    return np.clip(half, 0, 511, out=half).astype(np.intp)


def nearest_codes(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the nearest value of a rising table for each x, uint8; of two as near, the lower."""
    return _cells(table.tobytes()).take(_cell_of(x), mode="clip")


def to_codes(w: np.ndarray, grid: Grid, form: MatrixFormat) -> np.ndarray:
    """The nearest code of each weight, whole numbers in w's type. w: (rows,) or (rows, n)."""
    shape = (-1,) + (1,) * (w.ndim - 1)
    scale, zero = (v.astype(w.dtype).reshape(shape) for v in grid[:2])
    codes = w / np.where(scale != 0, scale, np.inf)
    if grid.table is not None:
        return nearest_codes(codes, grid.table).astype(w.dtype)
    codes += zero
    if form.two_level:
        codes /= ZERO_STEPS
    return np.clip(np.rint(codes, out=codes), *code_range(form), out=codes)


def to_values(codes: np.ndarray, grid: Grid, form: MatrixFormat) -> np.ndarray:
    """What codes stand for, in their type."""
    shape = (-1,) + (1,) * (codes.ndim - 1)
    scale, zero = (v.astype(codes.dtype).reshape(shape) for v in grid[:2])
    if grid.table is not None:
        return grid.table.astype(codes.dtype).take(codes.astype(np.intp), mode="clip") * scale
    return (step_of(form) * codes - zero) * scale


def rounded(w: np.ndarray, grid: Grid, form: MatrixFormat) -> np.ndarray:
    """What the nearest codes stand for, in w's type: to_values(to_codes(w)), by a table in one step."""
    if grid.table is None:
        return to_values(to_codes(w, grid, form), grid, form)
    scale = grid.scale.astype(w.dtype).reshape((-1,) + (1,) * (w.ndim - 1))
    values = grid.table.astype(w.dtype)[_cells(grid.table.tobytes())]
    found = values.take(_cell_of(w / np.where(scale != 0, scale, np.inf)), mode="clip")
    found *= scale
    return found


# ----------------------------------------------------------------------------
# Choosing one


def as_stored(scale: np.ndarray, form: MatrixFormat) -> np.ndarray:
    """A scale as the file has it, fp32: rounded to fp16, unless it is an 8-bit row's. Raises OverflowError."""
    if form.bits == 8 and not form.group:
        return scale.astype(F32)
    with np.errstate(over="ignore"):
        half = scale.astype(F16)
    if not np.isfinite(half).all():
        raise OverflowError(f"a scale of {scale.max():.6g}, fp16 ends at 65504")
    return half.astype(F32)


def range_grid(low: np.ndarray, high: np.ndarray, form: MatrixFormat, symmetric: bool, first_zero: int) -> Grid:
    """The grid of groups whose weights go from low to high, each (rows,) fp32; the range is widened to include 0.

    symmetric: the zero point is the middle code. first_zero: the smallest zero point that may be used.
    """
    low, high = np.minimum(low, F32(0)), np.maximum(high, F32(0))
    if form.bits == 8:
        return Grid(as_stored(np.maximum(high, -low) / F32(127), form), np.zeros_like(low))
    top = code_range(form)[1]
    if symmetric:
        scale = as_stored(np.maximum(high, -low) * F32(2 / top), form)
        return Grid(scale, np.full_like(low, (top + 1) // 2))
    scale = as_stored((high - low) / F32(top), form)
    return Grid(scale, np.clip(np.rint(-low / np.where(scale > 0, scale, np.inf)), first_zero, top).astype(F32))


def group_ends(w: np.ndarray, kept: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest weight of each row, of those that are kept; 0 if that is beyond."""
    w = w if kept is None else np.where(kept, w, 0)
    return w.min(axis=1).astype(F32), w.max(axis=1).astype(F32)


def plain_grid(
    w: np.ndarray, form: MatrixFormat, symmetric: bool, first_zero: int = 0, kept: np.ndarray | None = None
) -> Grid:
    """The grid of the whole range of each row of w, (rows, n)."""
    return range_grid(*group_ends(w, kept), form, symmetric, first_zero)


def error_of(w: np.ndarray, importance: np.ndarray, grid: Grid, form: MatrixFormat) -> np.ndarray:
    """The sum of importance * (rounded - w)^2 of each row, fp64. w: (rows, n) fp32; importance: the same or (n,)."""
    d = rounded(w, grid, form)
    d -= w
    squares = np.square(d, dtype=F64)
    return squares @ importance if importance.ndim == 1 else (squares * importance).sum(axis=1)


def best_grid(
    w: np.ndarray,
    importance: np.ndarray,
    form: MatrixFormat,
    symmetric: bool,
    first_zero: int = 0,
    kept: np.ndarray | None = None,
) -> Grid:
    """The best of SHRINKS for each row. w: (rows, n) fp32; importance: (n,) or (rows, n), 0 where not kept."""
    low, high = group_ends(w, kept)
    best, smallest = range_grid(low, high, form, symmetric, first_zero), np.full(len(w), np.inf)
    rows = max(1, TRIED_VALUES // w.shape[1])
    for start in range(0, len(w), rows):
        at = slice(start, start + rows)
        weight = importance if importance.ndim == 1 else importance[at]
        for shrink in SHRINKS:
            grid = range_grid(low[at] * F32(shrink), high[at] * F32(shrink), form, symmetric, first_zero)
            error = error_of(w[at], weight, grid, form)
            better = error < smallest[at]
            smallest[at][better] = error[better]
            for chosen, tried in zip(best[:2], grid[:2], strict=True):
                chosen[at][better] = tried[better]
    return best


# ----------------------------------------------------------------------------
# Int8 scales of groups under one fp32 scale per row


def middle_code(form: MatrixFormat) -> int:
    """The code that is taken off all codes where they have neither zero points nor a table: 32 of 6 bits."""
    return 1 << form.bits - 1


def units_at_ends(form: MatrixFormat, table: np.ndarray | None) -> tuple[float, float]:
    """The smallest and the largest whole number that a code stands for: of 6 bits -32 and 31."""
    if table is not None:
        return float(table[0]), float(table[-1])
    return -middle_code(form), middle_code(form) - 1


def scales_of_range(w: np.ndarray, form: MatrixFormat, table: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The smallest scale, of either sign, with which each row of w is in range: (rows,), (rows,) fp32, both >= 0."""
    (low, high), (first, last) = group_ends(w, None), units_at_ends(form, table)
    low, high = np.minimum(low, F32(0)), np.maximum(high, F32(0))
    return np.maximum(low / F32(first), high / F32(last)), np.maximum(low / F32(-last), high / F32(-first))


def int8_row_scales(weight: np.ndarray, form: MatrixFormat, table: np.ndarray | None) -> np.ndarray:
    """The fp32 scale of each row, under which its widest group has 127: (n_out,). weight: (n_out, n_in)."""
    groups = weight.reshape(-1, form.group).astype(F32)
    widest = np.minimum(*scales_of_range(groups, form, table)).reshape(len(weight), -1).max(axis=1)
    return (widest / F32(127)).astype(F32)


def int8_grid(s: np.ndarray, row_scale: np.ndarray, form: MatrixFormat, table: np.ndarray | None) -> Grid:
    """The grid of one group of each row with int8 scales s, (rows,)."""
    return Grid(s.astype(F32) * row_scale, np.full(len(s), middle_code(form), F32), table)


def best_int8_scales(
    w: np.ndarray, importance: np.ndarray | None, row_scale: np.ndarray, form: MatrixFormat, table: np.ndarray | None
) -> np.ndarray:
    """The int8 scale of a group of each row, (rows,): of SHRINKS in both signs. w: (rows, n); importance: (n,).

    importance None: the smallest that has all in range.
    """
    w = np.ascontiguousarray(w, F32)
    unit = np.where(row_scale > 0, row_scale, np.inf).astype(F32)
    ranges = [scale / unit for scale in scales_of_range(w, form, table)]
    if importance is None:
        s = np.clip(np.ceil(np.minimum(*ranges)), 1, 127)
        return np.where(ranges[0] <= ranges[1], s, -s).astype(F32)
    best, smallest = np.ones(len(w), F32), np.full(len(w), np.inf)
    rows = max(1, TRIED_VALUES // w.shape[1])
    for start in range(0, len(w), rows):
        at = slice(start, start + rows)
        for sign, whole in zip((1, -1), ranges, strict=True):
            for shrink in SHRINKS:
                s = F32(sign) * np.clip(np.rint(whole[at] * F32(shrink)), 1, 127)
                error = error_of(w[at], importance, int8_grid(s, row_scale[at], form, table), form)
                better = error < smallest[at]
                smallest[at][better], best[at][better] = error[better], s[better]
    return best


def fitted_table(groups: np.ndarray, form: MatrixFormat, table: np.ndarray) -> tuple[np.ndarray, float]:
    """One step of Lloyd and Max from a table: the table (2^bits,) int8 that suits its own codes best, and their error.

    groups: (n, group) fp32, each with its best scale of either sign. Each value becomes the mean of what its code
    stands for, in units of the scales; the largest is 127 (Lloyd 1982, "Least Squares Quantization in PCM"). The error,
    of the table that came in, is the sum of squares over that of the weights.
    """
    row_scale = int8_row_scales(groups, form, table)
    s = best_int8_scales(groups, np.ones(groups.shape[1]), row_scale, form, table)
    scale = (s * row_scale)[:, None].astype(F64)
    codes = nearest_codes(groups / scale, table)
    error = np.square(table[codes] * scale - groups).sum() / np.square(groups, dtype=F64).sum()
    sums, weights = (np.bincount(codes.ravel(), v.ravel(), len(table)) for v in (scale * groups, scale**2 + 0 * groups))
    values = np.where(weights > 0, sums / np.where(weights > 0, weights, 1), table)
    return np.rint(values * 127 / np.abs(values).max()).astype(np.int8), float(error)


# ----------------------------------------------------------------------------
# Two levels


def row_scales(weight: np.ndarray, form: MatrixFormat, shrink: float = 1.0) -> np.ndarray:
    """The fp32 scale of each row, under which its widest group has scale code 15: (n_out,). weight: (n_out, n_in)."""
    groups = weight.reshape(len(weight), -1, form.group).astype(F32)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    widest = ((high - low) * F32(shrink)).max(axis=1)
    return (widest / F32(ZERO_STEPS * code_range(form)[1] * (LEVELS - 1))).astype(F32)


def plain_codes(w: np.ndarray, row_scale: np.ndarray, form: MatrixFormat) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point codes, (rows,) each, for the whole range of a group of each row: w is (rows, group)."""
    low, high = (np.minimum(w.min(axis=1), 0), np.maximum(w.max(axis=1), 0))
    unit = np.where(row_scale > 0, row_scale, np.inf).astype(F32)
    s = np.clip(np.rint((high - low) / F32(ZERO_STEPS * code_range(form)[1]) / unit), 1, LEVELS - 1)
    return s.astype(F32), np.clip(np.rint(-low / (s * unit)), 0, LEVELS - 1).astype(F32)


def best_codes(
    w: np.ndarray, importance: np.ndarray, row_scale: np.ndarray, form: MatrixFormat
) -> tuple[np.ndarray, np.ndarray]:
    """The best scale and zero point codes of a group of each row, of all pairs; w: (rows, group), importance: (group,).

    Scale code 0 makes all weights of a group 0.
    """
    w = w.astype(F32)
    s_best, z_best = np.zeros(len(w), F32), np.zeros(len(w), F32)
    smallest = (np.square(w) * importance).sum(axis=1, dtype=F64)  # of scale code 0
    rows = max(1, TRIED_VALUES // w.shape[1])
    top = F32(code_range(form)[1])
    for start in range(0, len(w), rows):
        at = slice(start, start + rows)
        t, squares = np.empty(w[at].shape, F32), np.empty(w[at].shape, F64)
        for s in range(1, LEVELS):
            scale = row_scale[at] * F32(s)
            units = w[at] / np.where(scale > 0, scale, np.inf).astype(F32)[:, None]
            for z in range(LEVELS):
                np.add(units, F32(z), out=t)
                t *= F32(1 / ZERO_STEPS)
                np.rint(t, out=t)
                np.clip(t, F32(0), top, out=t)
                t *= F32(ZERO_STEPS)
                t -= F32(z)
                t -= units
                np.square(t, out=squares, dtype=F64)
                error = (squares @ importance) * np.square(scale, dtype=F64)
                better = error < smallest[at]
                smallest[at][better], s_best[at][better], z_best[at][better] = error[better], s, z
    return s_best, z_best


def groups_of(n_in: int, form: MatrixFormat) -> Iterator[slice]:
    """The columns of each group."""
    size = form.group or n_in
    return (slice(start, start + size) for start in range(0, n_in, size))
