// Quantized activations in one of two codes: int8 under one scale for each row, or MXFP8.
#pragma once

#include <span>

#include "engine/cpu/mxfp8.h"
#include "engine/cpu/quant_matrix.h"

struct CodedRows {
    bool is_mx = false;
    int n_rows = 0, n_cols = 0;
    Int8Rows int8;  // a row's scale stands once for each group, as the kernels want it
    MxRows mx;

    // Makes room for `rows` rows of `columns`, in groups of `group` or blocks of `block`. What was there is
    // lost.
    void resize_int8(int rows, int columns, int group) {
        is_mx = false, n_rows = rows, n_cols = columns;
        int8.resize(rows, columns, group);
    }
    void resize_mx(int rows, int columns, int block) {
        is_mx = true, n_rows = rows, n_cols = columns;
        mx.resize(rows, columns, block);
    }
};

// Row i of `out` becomes row rows[i] of x.
inline void gather(CodedRows& out, const CodedRows& x, std::span<const int> rows) {
    out.is_mx = x.is_mx, out.n_rows = int(rows.size()), out.n_cols = x.n_cols;
    x.is_mx ? gather(out.mx, x.mx, rows) : gather(out.int8, x.int8, rows);
}
