"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): rounding column after column, each making up for those before it.

A matrix W (n_out, n_in) meets inputs X (tokens, n_in). What rounding costs the output is |X (W - Q)^T|^2, and with
H = X^T X that is the sum of d H d^T over the rows d of W - Q. Columns are rounded from first to last. With U the upper
Cholesky factor of the inverse of H, H^-1 = U^T U, column i costs e^2 with e = (w_i - q_i) / U_ii, and the columns j
behind it take over what they can: w_j -= e U_ij. H gets 5 % of its mean diagonal added: it has an
inverse then, and is less a matter of the very tokens that were seen.

2:4 sparsity (SparseGPT, Frantar and Alistarh 2023, arXiv 2301.00774) is the same with zeros for values: of four
neighbours the two with the smallest w^2 / U_ii^2 become 0, and the others make up for them, too.

Scales and zero points of a group are chosen when its first column comes (golden/gptq_grid.py), for the weights as they
are then, with importance 1 / U_ii^2.

Columns whose inputs are large should go first, while many are left to make up for them. `column_order` takes whole
groups in the order of their inputs' size, and columns by size within each. So groups are contiguous in the file, a
program knows nothing of the order, and a grid is still chosen for the weights as they have become.
"""

from typing import NamedTuple

import numpy as np

from formats.gptq import MatrixFormat
from golden.forward import F32, F64
from golden.gptq import F16, Matrix
from golden.gptq_grid import (
    NORMAL_TABLES,
    Grid,
    best_codes,
    best_grid,
    best_int8_scales,
    int8_grid,
    int8_row_scales,
    plain_codes,
    plain_grid,
    row_scales,
    to_codes,
    to_values,
)

DAMPING = 0.05  # of the mean of H's diagonal
BLOCK = 32  # columns whose updates of the columns behind them are made at once


class Curvature(NamedTuple):
    """What GPTQ knows of the inputs of a place.

    order: (n_in,), the column that comes k-th; factor: (n_in, n_in) fp64, U of the reordered H.
    """

    order: np.ndarray
    factor: np.ndarray


def column_order(diagonal: np.ndarray, form: MatrixFormat) -> np.ndarray:
    """Groups by the size of their inputs, and columns within each; fours of the sparse form stay in order.

    diagonal: (n_in,) of H. Returns (n_in,), the column that comes k-th.
    """
    size = form.group or len(diagonal)
    groups = diagonal.reshape(-1, size)
    first = np.argsort(-groups.sum(axis=1), kind="stable")
    within = np.argsort(-groups[first], axis=1, kind="stable")
    return (first[:, None] * size + (np.arange(size) if form.sparse else within)).ravel()


def damped(hessian: np.ndarray, damping: float = DAMPING) -> np.ndarray:
    """H with `damping` times its mean diagonal added to the diagonal; channels that are always 0 get 1 first."""
    h = hessian.copy()
    diagonal = np.diag(h).copy()
    unused = diagonal == 0
    h[unused, unused] = 1
    mean = diagonal.mean()
    h[np.diag_indices_from(h)] += damping * (mean if mean > 0 else 1)
    return h


def curvature(hessian: np.ndarray, order: np.ndarray | None = None, damping: float = DAMPING) -> Curvature:
    """Dampens H, (n_in, n_in) fp64, and factors its inverse. Channels whose input is always 0 count as uncorrelated.

    order: from `column_order`; None: as they are. damping: of the mean of H's diagonal.
    """
    return factored(np.linalg.inv(damped(hessian, damping)), np.arange(len(hessian)) if order is None else order)


def factored(inverse: np.ndarray, order: np.ndarray) -> Curvature:
    """The curvature of an H that is damped and inverted already, for which several orders may be wanted."""
    inverse = inverse[np.ix_(order, order)]
    return Curvature(order, np.linalg.cholesky((inverse + inverse.T) / 2).T.copy())


class Grids:
    """Scales and zero points of a matrix while it is quantized: those of a group for all rows, once they are set.

    table: of rising int8 values, for a format that has one; None: of NORMAL_TABLES.
    """

    def __init__(
        self,
        weight: np.ndarray,
        form: MatrixFormat,
        symmetric: bool,
        first_zero: int,
        search: bool,
        table: np.ndarray | None = None,
    ):
        self._form, self._symmetric, self._first_zero, self._search = form, symmetric, first_zero, search
        n_out, n_in = weight.shape
        self.size = form.group or n_in
        self.scales = np.zeros((n_out, n_in // self.size), F32)  # codes, in the two-level form and with int8 scales
        self.zeros = np.zeros_like(self.scales)
        self.table = None if not form.has_table else NORMAL_TABLES[form.bits] if table is None else table
        self.row_scales = None
        if form.two_level:
            self.row_scales = row_scales(weight, form)
        elif form.int8_scales:
            self.row_scales = int8_row_scales(weight, form, self.table)
        self._set = np.zeros(n_in // self.size, bool)

    def is_set(self, group: int) -> bool:
        return bool(self._set[group])

    def set(self, group: int, w: np.ndarray, importance: np.ndarray, kept: np.ndarray | None = None) -> None:
        """Chooses the grid of one group for its weights w, (n_out, size). importance: (size,) fp64."""
        w, form = np.ascontiguousarray(w, F32), self._form
        if form.int8_scales:
            s = best_int8_scales(w, importance if self._search else None, self.row_scales, form, self.table)
            z = int8_grid(s, self.row_scales, form, self.table).zero
        elif form.two_level:
            choose = (w, importance, self.row_scales, form) if self._search else (w, self.row_scales, form)
            s, z = best_codes(*choose) if self._search else plain_codes(*choose)
        elif self._search:
            weight = importance if kept is None else importance * kept
            s, z, _ = best_grid(w, weight, form, self._symmetric, self._first_zero, kept)
        else:
            s, z, _ = plain_grid(w, form, self._symmetric, self._first_zero, kept)
        self.scales[:, group], self.zeros[:, group], self._set[group] = s, z, True

    def of(self, group: int) -> Grid:
        """The grid of a group, its scale in fp32."""
        scale = self.scales[:, group]
        scale = scale if self.row_scales is None else scale * self.row_scales
        return Grid(scale, self.zeros[:, group], self.table)

    def matrix(self, codes: np.ndarray, kept: np.ndarray | None) -> Matrix:
        """The quantized matrix with these codes, (n_out, n_in) whole numbers of any type."""
        form = self._form
        kind = np.uint8 if form.two_level else np.int8 if form.int8_scales else F16
        if form.bits == 8 and not form.group:
            kind = F32
        return Matrix(
            form,
            np.ascontiguousarray(codes).astype(np.int8 if form.bits == 8 else np.uint8),
            self.scales.astype(kind),
            self.zeros.astype(np.uint8) if form.has_zeros or form.two_level else None,
            self.row_scales,
            kept,
            self.table,
        )


def largest_two(score: np.ndarray) -> np.ndarray:
    """Which two of each four are largest, the first of equals: (rows, n) -> (rows, n) bool."""
    fours = score.reshape(len(score), -1, 4)
    rank = np.argsort(np.argsort(-fours, axis=2, kind="stable"), axis=2, kind="stable")
    return (rank < 2).reshape(score.shape)


def round_matrix(
    weight: np.ndarray,
    form: MatrixFormat,
    symmetric: bool = False,
    first_zero: int = 0,
    table: np.ndarray | None = None,
) -> Matrix:
    """Plain rounding to nearest, each group on the grid of its range; of each four the two largest are kept if sparse.

    weight: (n_out, n_in) fp32. table: see `Grids`. Raises OverflowError if fp16 cannot hold a scale.
    """
    kept = largest_two(np.abs(weight)) if form.sparse else None
    return _round(weight, Grids(weight, form, symmetric, first_zero, False, table), form, kept, None)


def round_best(
    weight: np.ndarray,
    form: MatrixFormat,
    importance: np.ndarray | None = None,
    symmetric: bool = False,
    first_zero: int = 0,
    table: np.ndarray | None = None,
) -> Matrix:
    """Rounding to nearest, each group on the best grid. importance: (n_in,) fp64; None: all 1. table: see `Grids`."""
    importance = np.ones(weight.shape[1]) if importance is None else importance
    kept = largest_two(np.square(weight, dtype=F64) * importance) if form.sparse else None
    return _round(weight, Grids(weight, form, symmetric, first_zero, True, table), form, kept, importance)


def _round(
    weight: np.ndarray, grids: Grids, form: MatrixFormat, kept: np.ndarray | None, importance: np.ndarray | None
) -> Matrix:
    codes = np.empty(weight.shape, F32)
    unimportant = np.ones(weight.shape[1]) if importance is None else importance
    for g in range(grids.scales.shape[1]):
        at = slice(g * grids.size, (g + 1) * grids.size)
        grids.set(g, weight[:, at], unimportant[at], None if kept is None else kept[:, at])
        codes[:, at] = to_codes(weight[:, at].astype(F32), grids.of(g), form)
    if kept is not None:
        codes[~kept] = 0
    return grids.matrix(codes, kept)


def quantize_matrix(
    weight: np.ndarray,
    inputs: Curvature,
    form: MatrixFormat,
    symmetric: bool = False,
    first_zero: int = 0,
    table: np.ndarray | None = None,
) -> Matrix:
    """GPTQ of a matrix, (n_out, n_in) fp32. Raises OverflowError if fp16 cannot hold a scale.

    inputs: of H, in no order or in that of `column_order` for this format. table: see `Grids`.
    """
    w = weight[:, inputs.order].T.astype(F64)  # (n_in, n_out): a column is a row here
    u, n_in = inputs.factor, len(w)
    own = np.diag(u)
    importance = 1 / np.square(own)
    grids = Grids(weight, form, symmetric, first_zero, True, table)
    codes, kept = np.empty((n_in, len(weight))), np.ones((n_in, len(weight)), bool) if form.sparse else None
    for start in range(0, n_in, BLOCK):
        end = min(start + BLOCK, n_in)
        errors = np.empty((end - start, len(weight)))
        for i in range(start, end):
            group = inputs.order[i] // grids.size
            if not grids.is_set(group):  # the group's columns are the next, and all are up to date
                at = slice(i, i + grids.size)
                likely = largest_two((np.square(w[at]) * importance[at, None]).T) if form.sparse else None
                grids.set(group, w[at].T, importance[at], likely)
            if form.sparse and i % 4 == 0:
                four = slice(i, i + 4)
                kept[four] = largest_two((np.square(w[four]) * importance[four, None]).T).T
            grid = grids.of(group)
            codes[i] = to_codes(w[i], grid, form)
            value = to_values(codes[i], grid, form)
            if form.sparse:
                value, codes[i] = np.where(kept[i], value, 0), np.where(kept[i], codes[i], 0)
            errors[i - start] = (w[i] - value) / own[i]
            w[i + 1 : end] -= u[i, i + 1 : end, None] * errors[i - start]
        w[end:] -= u[start:end, end:].T @ errors
    back = np.argsort(inputs.order)
    return grids.matrix(codes[back].T, None if kept is None else np.ascontiguousarray(kept[back].T))
