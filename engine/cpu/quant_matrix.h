// A quantized matrix as a file has it, the activations that it is multiplied by, and their products.
//
// A program has a matrix of its own, as its scheme stores it, and shows it to the kernels as a QuantMatrix.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "engine/cpu/quant_gemm_matrix.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/vector.h"

using QuantMatrix = QuantGemmMatrix;
using QuantRows = QuantGemmRows;

// A sum of this many products of codes stays within int32: 2^16 * 127 * 128 < 2^31.
constexpr int max_group_size = 1 << 16;

// What a row of a matrix has.
inline int n_groups(const QuantMatrix& w) { return w.n_cols / w.group_size; }  // of activations
inline int n_scales(const QuantMatrix& w) { return w.n_cols / w.group; }       // groups of weights
inline size_t code_bytes(const QuantMatrix& w) {
    return size_t(w.kind == QUANT_GEMM_SPARSE ? w.n_cols / 2 : w.n_cols) * size_t(w.bits) / 8;
}
inline size_t mask_bytes(const QuantMatrix& w) { return size_t(w.n_cols) / 8; }
inline size_t zero_bytes(const QuantMatrix& w) { return size_t(n_scales(w) + 1) / 2; }

// Int8 weights: codes (n_rows, n_cols), scales fp32 (n_rows, n_cols / group); activations have as many
// scales.
inline QuantMatrix int8_matrix(const int8_t* codes, const float* scales, int n_rows, int n_cols, int group) {
    QuantMatrix w{};
    w.codes = reinterpret_cast<const uint8_t*>(codes), w.scales = scales;
    w.kind = QUANT_GEMM_SIGNED, w.scale_type = QUANT_GEMM_GROUP_FP32, w.bits = 8;
    w.n_rows = n_rows, w.n_cols = n_cols, w.group = w.group_size = group;
    return w;
}

// A program's matrix as the kernels take it: of int8 codes with scales here, of few bits in expand_rows.h.
template <class Matrix>
constexpr bool has_few_bits = requires(const Matrix& m) {
    m.levels;
};
template <class Matrix>
requires(!has_few_bits<Matrix>) QuantMatrix view_of(const Matrix& m) {
    return int8_matrix(m.codes, m.scales, m.n_rows, m.n_cols, m.group_size);
}

inline int n_groups(const QuantRows& x) { return x.n_cols / x.group_size; }
inline const int8_t* row_codes(const QuantRows& x, int t) { return x.codes + size_t(t) * x.n_cols; }
inline const float* row_scales(const QuantRows& x, int t) { return x.scales + size_t(t) * n_groups(x); }
inline const int32_t* row_sums(const QuantRows& x, int t) { return x.sums + size_t(t) * n_groups(x); }
inline QuantRows one_row(const QuantRows& x, int t) {
    return {row_codes(x, t), row_scales(x, t), row_sums(x, t), 1, x.n_cols, x.group_size};
}

struct OtherKernels;  // quant_matmul.h

// Quantized activations with their memory, a row per token.
struct Int8Rows {
    int n_rows = 0, n_cols = 0;
    int group_size = 1;         // divides n_cols
    std::vector<int8_t> codes;  // (max_rows, n_cols) of the widest rows
    std::vector<float> scales;  // (max_rows, n_groups)
    std::vector<int32_t> sums;  // (max_rows, n_groups), the sum of each group's codes; for the kernels alone
    std::shared_ptr<OtherKernels> kernels;  // quantize these rows and multiply by them; null: this build's

    Int8Rows() = default;
    Int8Rows(int max_rows, int columns, int group) { resize(max_rows, columns, group); }

    int n_groups() const { return n_cols / group_size; }
    int8_t* row_codes(int t) { return codes.data() + size_t(t) * n_cols; }
    const int8_t* row_codes(int t) const { return codes.data() + size_t(t) * n_cols; }
    float* row_scales(int t) { return scales.data() + size_t(t) * n_groups(); }
    const float* row_scales(int t) const { return scales.data() + size_t(t) * n_groups(); }
    int32_t* row_sums(int t) { return sums.data() + size_t(t) * n_groups(); }
    const int32_t* row_sums(int t) const { return sums.data() + size_t(t) * n_groups(); }

    // Makes room for `rows` rows of `columns` in groups of `group`. What was there is lost.
    void resize(int rows, int columns, int group) {
        n_rows = rows, n_cols = columns, group_size = group;
        scratch(codes, size_t(rows) * columns);
        scratch(scales, size_t(rows) * n_groups());
        scratch(sums, size_t(rows) * n_groups());
    }
    QuantRows view() const { return {codes.data(), scales.data(), sums.data(), n_rows, n_cols, group_size}; }
};

// Behind the quantizing of row t: if its values x are not all finite, which codes cannot say, the row gets
// NaN for scales. So it goes on to the logits, and ends the run.
inline void keep_nan(Int8Rows& out, int t, const float* x) {
    if (all_finite(x, size_t(out.n_cols))) return;
    std::fill_n(out.row_scales(t), out.n_groups(), std::numeric_limits<float>::quiet_NaN());
}

// Row i of `out` becomes row rows[i] of x.
inline void gather(Int8Rows& out, const Int8Rows& x, std::span<const int> rows) {
    out.resize(int(rows.size()), x.n_cols, x.group_size);
    for (int i = 0; i < out.n_rows; i++) {
        const int from = rows[size_t(i)];
        std::copy_n(x.row_codes(from), x.n_cols, out.row_codes(i));
        std::copy_n(x.row_scales(from), x.n_groups(), out.row_scales(i));
        std::copy_n(x.row_sums(from), x.n_groups(), out.row_sums(i));
    }
}

// out (x.n_rows, w.n_rows) fp32 = x times w transposed: one of the products that read the same activations x.
struct QuantProduct {
    float* out;
    QuantMatrix w;
    const struct PackedMatrix* packed;  // w, as the kernels read it fastest; null: w itself is read
};
