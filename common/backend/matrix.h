// A low-bit matrix on both sides of the C interface.
#pragma once

#include "common/backend/quant_gemm.h"
#include "common/cpu/lowbit.h"

// Precondition: w has a table of zero points, or none are taken off (zero_point is 0).
inline QuantGemmMatrix to_c(const LowbitMatrix& w) {
    return {w.codes, w.mask,   w.scales, w.zeros, w.levels,     w.row_scales,
            w.bits,  w.n_rows, w.n_cols, w.group, w.group_size, w.packed ? 1 : 0};
}

// Of a matrix in this process's own memory.
inline LowbitMatrix from_c(const QuantGemmMatrix& w) {
    LowbitMatrix m;
    m.codes = static_cast<const uint8_t*>(w.codes), m.mask = static_cast<const uint8_t*>(w.mask);
    m.scales = static_cast<const Half*>(w.scales), m.row_scales = static_cast<const float*>(w.row_scales);
    m.zeros = static_cast<const uint8_t*>(w.zeros), m.levels = static_cast<const uint8_t*>(w.levels);
    m.bits = w.bits, m.n_rows = w.n_rows, m.n_cols = w.n_cols;
    m.group = w.group, m.group_size = w.group_size, m.packed = w.packed != 0;
    return m;
}
