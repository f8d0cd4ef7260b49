// MXFP8: 8-bit floats in blocks, each under one power of two (OCP Microscaling Formats 1.0).
//
// Elements are E4M3: a sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN, and there
// is no infinity. A scale is E8M0: a byte b means 2^(b - 127), 255 is NaN. Files have both as they are here,
// and golden/mx.py is the reference.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "engine/cpu/rows.h"
#include "engine/cpu/scratch.h"
#include "engine/os/threads.h"

constexpr int e4m3_emax = 8, scale_bias = 127, scale_nan = 255;
constexpr float e4m3_largest = 448;

// What an element means.
inline float e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value =
        exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
    if ((code & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
    return code & 0x80 ? -value : value;
}

// What each of the 256 codes means.
inline const std::array<float, 256> e4m3_values = [] {
    std::array<float, 256> all;
    for (int code = 0; code < 256; code++) all[size_t(code)] = e4m3_value(uint8_t(code));
    return all;
}();

// The element nearest to x, halves to even; beyond the largest the largest; 0x7f for NaN.
inline uint8_t e4m3_code(float x) {
    if (std::isnan(x)) return 0x7f;
    const float magnitude = std::min(std::fabs(x), e4m3_largest);
    int exponent = -6;  // of the subnormals, and of the smallest normals
    if (magnitude >= 0x1p-6f) exponent = std::ilogb(magnitude);
    // In steps of 2^(exponent - 3): 8 to 16, or 0 to 8 for subnormals. 16 is the next exponent's 8.
    const int steps = int(std::nearbyintf(std::ldexp(magnitude, 3 - exponent)));
    const int code = std::min(steps + (exponent + 6) * 8, 0x7e);
    return uint8_t(code | (std::signbit(x) ? 0x80 : 0));
}

// An element's value times its block's scale.
inline float scaled_value(uint8_t code, uint8_t scale) {
    return scale == scale_nan ? std::numeric_limits<float>::quiet_NaN()
                              : std::ldexp(e4m3_values[code], scale - scale_bias);
}

// codes (n,) of a block x (n,), and its scale, which is returned: 2^(floor(log2(max|x|)) - emax), at least
// 2^-127. With a NaN in it, all of the block is NaN.
inline uint8_t quantize_mx_block(uint8_t* codes, const float* x, int n) {
    float largest = 0;
    bool has_nan = false;
    for (int i = 0; i < n; i++) {
        largest = std::max(largest, std::fabs(x[i]));
        has_nan = has_nan || std::isnan(x[i]);
    }
    int shared = -scale_bias;
    if (largest > 0) shared = std::max(shared, (std::isinf(largest) ? 128 : std::ilogb(largest)) - e4m3_emax);
    for (int i = 0; i < n; i++)
        codes[i] =
            e4m3_code(has_nan && !std::isnan(x[i]) ? std::copysign(0.0f, x[i]) : std::ldexp(x[i], -shared));
    return has_nan ? scale_nan : uint8_t(shared + scale_bias);
}

// Activations in MXFP8 with their memory, a row per token.
struct MxRows {
    int n_rows = 0, n_cols = 0;
    int block = 32;               // columns that share a scale; divides n_cols
    std::vector<uint8_t> codes;   // (max_rows, n_cols) of the widest rows
    std::vector<uint8_t> scales;  // (max_rows, n_blocks)
    std::vector<float> values;    // (max_rows, n_cols), what codes mean, without the scales

    int n_blocks() const { return n_cols / block; }
    uint8_t* row_codes(int t) { return codes.data() + size_t(t) * n_cols; }
    const uint8_t* row_codes(int t) const { return codes.data() + size_t(t) * n_cols; }
    uint8_t* row_scales(int t) { return scales.data() + size_t(t) * n_blocks(); }
    const uint8_t* row_scales(int t) const { return scales.data() + size_t(t) * n_blocks(); }
    float* row_values(int t) { return values.data() + size_t(t) * n_cols; }
    const float* row_values(int t) const { return values.data() + size_t(t) * n_cols; }

    // Makes room for `rows` rows of `columns` in blocks of n. What was there is lost.
    void resize(int rows, int columns, int n) {
        n_rows = rows, n_cols = columns, block = n;
        scratch(codes, size_t(rows) * columns);
        scratch(values, size_t(rows) * columns);
        scratch(scales, size_t(rows) * n_blocks());
    }
};

// x (n_cols,) becomes row t of `out`.
inline void quantize_row(MxRows& out, int t, const float* x) {
    for (int b = 0; b < out.n_blocks(); b++) {
        const int first = b * out.block;
        out.row_scales(t)[b] = quantize_mx_block(out.row_codes(t) + first, x + first, out.block);
    }
    for (int k = 0; k < out.n_cols; k++) out.row_values(t)[k] = e4m3_values[out.row_codes(t)[k]];
}

// Row i of `out` becomes row rows[i] of x.
inline void gather(MxRows& out, const MxRows& x, std::span<const int> rows) {
    out.resize(int(rows.size()), x.n_cols, x.block);
    for (int i = 0; i < out.n_rows; i++) {
        const int from = rows[size_t(i)];
        std::copy_n(x.row_codes(from), x.n_cols, out.row_codes(i));
        std::copy_n(x.row_values(from), x.n_cols, out.row_values(i));
        std::copy_n(x.row_scales(from), x.n_blocks(), out.row_scales(i));
    }
}

// Row t of x times a row of weights, given what its elements mean (n_cols,) and its scales (n_blocks,): each
// block is added up in fp32, then times both scales; then the blocks.
inline float dot(const MxRows& x, int t, const float* w_values, const uint8_t* w_scales) {
    const uint8_t* x_scales = x.row_scales(t);
    float out = 0;
    for (int b = 0; b < x.n_blocks(); b++) {
        if (x_scales[b] == scale_nan || w_scales[b] == scale_nan)
            return std::numeric_limits<float>::quiet_NaN();
        const int first = b * x.block;
        const float *x_block = x.row_values(t) + first, *w_block = w_values + first;
        float sum = 0;  // products of two elements are exact
#pragma omp simd reduction(+ : sum)
        for (int k = 0; k < x.block; k++) sum += x_block[k] * w_block[k];
        out += std::ldexp(sum, x_scales[b] + w_scales[b] - 2 * scale_bias);
    }
    return out;
}

// Row first_row + t of `out` (n, n_rows) = row t of x times each row of a matrix: codes (n_rows, x.n_cols),
// scales (n_rows, x.n_blocks).
inline void matmul(Rows& out, int first_row, const MxRows& x, const uint8_t* codes, const uint8_t* scales) {
    parallel_ranges(out.n_cols, [&](int begin, int end) {
        std::vector<float> values(size_t(x.n_cols));
        for (int i = begin; i < end; i++) {
            for (int k = 0; k < x.n_cols; k++)
                values[size_t(k)] = e4m3_values[codes[size_t(i) * size_t(x.n_cols) + size_t(k)]];
            for (int t = 0; t < x.n_rows; t++)
                out.row(first_row + t)[i] =
                    dot(x, t, values.data(), scales + size_t(i) * size_t(x.n_blocks()));
        }
    });
}
