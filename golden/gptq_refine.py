"""After GPTQ: scales and codes are improved in turn, each step with the exact cost of the outputs.

GPTQ fixes the grid of a group before it knows the codes, and each code before it knows those behind it. Once all are
there, both can be had anew. With H = X^T X, damped as for GPTQ, the cost of a row w that became q is d H d^T,
d = w - q.

    scales   With the codes fixed, q is linear in the scales of the row's groups: q = sum over groups of s_g b_g, where
             b_g has the whole numbers w' of group g (golden/gptq.py) and 0 elsewhere. So the best scales solve
             A s = r with A_gh = b_g H b_h^T and r_g = b_g H w^T: least squares, one small system for each row.
    codes    With the scales fixed, column after column gets the value of its grid that makes the cost least while all
             others stay: q_i + (d H)_i / H_ii, rounded (coordinate descent, as QuantEase has it, Behdin et al. 2023,
             arXiv 2309.01885).

Neither step can raise the cost: scales that rounding to fp16 makes worse are left as they were. Int8 scales are fitted
one after the other, each to the whole number that is best while the others stay. Zero points, the scale codes of the
two-level form (whose row scale is refitted), and the choice of 2:4 stay.
"""

import numpy as np

from golden.forward import F32, F64
from golden.gptq import Matrix, expand, stands_for
from golden.gptq_grid import Grid, as_stored, middle_code, to_codes, to_values

BLOCK = 32  # columns whose changes reach the columns outside of the block at once


def units(m: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """w', and the scales to fit: what a matrix stands for is their product. (n_out, n_in), (n_out, n_groups), fp64.

    In the two-level form and with int8 scales there is one scale, the row's, and w' are multiplied by the groups' whole
    numbers.
    """
    n_in = m.codes.shape[1]
    whole = expand(m._replace(scales=m.scales.astype(F32)), m.form.group or n_in).codes.astype(F64)
    if m.row_scales is None:
        return whole, m.scales.astype(F64)
    return whole * np.repeat(m.scales.astype(F64), m.form.group, axis=1), m.row_scales.astype(F64)[:, None]


def refit_scales(weight: np.ndarray, m: Matrix, hessian: np.ndarray) -> Matrix:
    """The scales with the least cost for these codes, row by row. weight: (n_out, n_in); hessian: damped, fp64."""
    if m.form.int8_scales:
        return refit_int8_scales(weight, m, hessian)
    whole, old = units(m)
    n_out, n_groups = old.shape
    size = whole.shape[1] // n_groups
    a, r = np.empty((n_out, n_groups, n_groups)), np.empty((n_out, n_groups))
    for g in range(n_groups):
        at = slice(g * size, (g + 1) * size)
        toward = whole[:, at] @ hessian[at]
        a[:, g] = (toward * whole).reshape(n_out, n_groups, size).sum(axis=2)
        r[:, g] = np.einsum("ij,ij->i", toward, weight)
    own = np.diagonal(a, axis1=1, axis2=2)
    used = own > 0  # a group whose codes are all zero has no scale to fit
    solvable = a + np.eye(n_groups) * np.where(used, 1e-9 * own, 1)[:, None, :]
    found = np.linalg.solve(solvable, np.where(used, r, old)[..., None])[..., 0]
    found = np.where((found > 0).all(axis=1, keepdims=True), found, old)
    stored = found.astype(F32) if m.row_scales is not None else as_stored(found, m.form)

    def cost(s: np.ndarray) -> np.ndarray:
        return np.einsum("ig,igh,ih->i", s, a, s) - 2 * (s * r).sum(axis=1)

    best = np.where((cost(stored.astype(F64)) < cost(old))[:, None], stored, old.astype(F32))
    if m.row_scales is not None:
        return m._replace(row_scales=best[:, 0])
    return m._replace(scales=best.astype(m.scales.dtype))


def refit_int8_scales(weight: np.ndarray, m: Matrix, hessian: np.ndarray) -> Matrix:
    """One pass over the groups: each scale becomes the best of -127..127 but 0. Arguments as for `refit_scales`."""
    size, scales, row_scales = m.form.group, m.scales.astype(F64), m.row_scales.astype(F64)
    whole = expand(m, size).codes.astype(F64)
    pull = (weight - stands_for(m)) @ hessian  # d H, (n_out, n_in)
    for g in range(scales.shape[1]):
        at = slice(g * size, (g + 1) * size)
        toward = whole[:, at] @ hessian[at] * row_scales[:, None]  # what one more of this scale takes from the pull
        own = (toward[:, at] * whole[:, at]).sum(axis=1)
        step = (pull[:, at] * whole[:, at]).sum(axis=1) / np.where(own > 0, own, np.inf)
        new = np.clip(np.rint(scales[:, g] + step), -127, 127)
        new = np.where(new == 0, scales[:, g], new)
        pull -= toward * (new - scales[:, g])[:, None]
        scales[:, g] = new
    return m._replace(scales=scales.astype(np.int8))


def improve_codes(weight: np.ndarray, m: Matrix, hessian: np.ndarray) -> Matrix:
    """One pass of coordinate descent over the codes, first to last column; the grids stay."""
    form, n_in = m.form, m.codes.shape[1]
    size = form.group or n_in
    scales = m.scales.astype(F32) * (1 if m.row_scales is None else m.row_scales[:, None])
    zeros = np.full_like(scales, middle_code(form) if form.int8_scales else 0)
    if m.zeros is not None:
        zeros = m.zeros.astype(F32)
    whole, fitted = units(m)
    codes, value = m.codes.T.astype(F64), (whole * np.repeat(fitted, n_in // fitted.shape[1], axis=1)).T.copy()
    pull = hessian @ (weight.T - value)  # H d, (n_in, n_out): a column is a row here
    for start in range(0, n_in, BLOCK):
        at = slice(start, min(start + BLOCK, n_in))
        moved = np.zeros((at.stop - start, len(weight)))
        near = pull[at].copy()
        for k in range(at.stop - start):
            i = start + k
            grid = Grid(scales[:, i // size], zeros[:, i // size], m.table)
            code = to_codes(value[i] + near[k] / hessian[i, i], grid, form)
            new = to_values(code, grid, form)
            if m.kept is not None:
                code, new = np.where(m.kept[:, i], code, codes[i]), np.where(m.kept[:, i], new, 0)
            moved[k], codes[i], value[i] = new - value[i], code, new
            near -= hessian[at, i, None] * moved[k]
        pull -= hessian[:, at] @ moved
    return m._replace(codes=np.ascontiguousarray(codes.T).astype(m.codes.dtype))


def refine(weight: np.ndarray, m: Matrix, hessian: np.ndarray, rounds: int) -> Matrix:
    """Scales, then codes, `rounds` times, and scales once more. weight: (n_out, n_in) fp32.

    hessian: (n_in, n_in) fp64, damped (golden.gptq_quantize.damped). Raises OverflowError if fp16 cannot hold a scale.
    """
    w = weight.astype(F64)
    for _ in range(rounds):
        m = improve_codes(w, refit_scales(w, m, hessian), hessian)
    return refit_scales(w, m, hessian) if rounds else m
