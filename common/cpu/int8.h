// Int8 matrices as the fast kernels take them, and what an instruction set has to bring for a kernel.
//
// The plain loops of each program specify its arithmetic. The kernels give the same int8 codes, the same
// scales and the same int32 accumulator for every group, bit for bit; only the fp32 sum over groups may be
// rounded differently. tests/int8_matmul_test.cpp holds them equal.
//
// An instruction set is a struct (int8_avx2.h, int8_avx512.h, int8_neon.h, int8_i8mm.h) of constants and of
// the few operations that dot_row (int8_rows.h) and tile (int8_panels.h) are made of. A lane is one int32 of
// a vector, and the four int8 in its place.
//
//   lanes             int32 lanes of a vector
//   panel_vectors     vectors that hold a panel's rows; two where that leaves registers enough
//   tile_tokens       tokens whose accumulators, for a panel's rows, fit into the registers; a power of two
//   flip              codes of w are xor-ed with it before they are multiplied
//   offset            xor-ing adds this to each code of w, so offset * sum(x) is taken off each accumulator
//   dot4(acc, w, x)   acc[lane] += w[lane][0..3] . x[lane][0..3], exact, bytes of w flipped
//   add_lanes(a, ..)  the sums of the lanes of four vectors, exact
//   add_scaled(s, ..) sums[lane] += acc[lane] * scales[lane], rounded once (a fused multiply-add)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common/cpu/scratch.h"

// How far ahead of use weights that are read once are asked for, in bytes. Rows, panels and row blocks lie
// one behind the other, so near the end of one this reaches into the next; past the last, a prefetch does
// nothing.
constexpr int prefetch_distance = 8192;

// A sum of this many products of codes stays within int32: 2^16 * 127 * 128 < 2^31.
constexpr int max_group_size = 1 << 16;

// A quantized matrix, row by row. Value (i, j) is codes[i * n_cols + j] * scales[i * n_groups + j /
// group_size]. Of packed weights row_codes(i) and row_scales(i) are where the panel begins whose first row is
// i.
struct Int8Matrix {
    const int8_t* codes = nullptr;  // (n_rows, n_cols), each in -127..127
    const float* scales = nullptr;  // (n_rows, n_groups)
    const int32_t* sums = nullptr;  // (n_rows, n_groups), the sum of each group's codes; activations only
    int n_rows = 0;
    int n_cols = 0;
    int group_size = 1;   // divides n_cols
    bool packed = false;  // weights only: in panels (int8_pack.h)

    int n_groups() const { return n_cols / group_size; }
    const int8_t* row_codes(int i) const { return codes + size_t(i) * n_cols; }
    const float* row_scales(int i) const { return scales + size_t(i) * n_groups(); }
    const int32_t* row_sums(int i) const { return sums + size_t(i) * n_groups(); }
};

// Quantized activations with their memory, a row per token.
struct Int8Rows {
    int n_rows = 0, n_cols = 0;
    int group_size = 1;         // divides n_cols
    std::vector<int8_t> codes;  // (max_rows, n_cols) of the widest rows
    std::vector<float> scales;  // (max_rows, n_groups)
    std::vector<int32_t> sums;  // (max_rows, n_groups), the sum of each group's codes; for the kernels alone

    int n_groups() const { return n_cols / group_size; }
    int8_t* row_codes(int t) { return codes.data() + size_t(t) * n_cols; }
    const int8_t* row_codes(int t) const { return codes.data() + size_t(t) * n_cols; }
    float* row_scales(int t) { return scales.data() + size_t(t) * n_groups(); }
    const float* row_scales(int t) const { return scales.data() + size_t(t) * n_groups(); }
    int32_t* row_sums(int t) { return sums.data() + size_t(t) * n_groups(); }

    // Makes room for `rows` rows of `columns` in groups of `group`. What was there is lost.
    void resize(int rows, int columns, int group) {
        n_rows = rows, n_cols = columns, group_size = group;
        scratch(codes, size_t(rows) * columns);
        scratch(scales, size_t(rows) * n_groups());
        scratch(sums, size_t(rows) * n_groups());
    }
    Int8Matrix view() const { return {codes.data(), scales.data(), sums.data(), n_rows, n_cols, group_size}; }
};

// out (x.n_rows, w.n_rows) fp32 = x times w transposed.
struct Int8Product {
    float* out;
    Int8Matrix w;
};

// The scale of a group whose largest magnitude is amax. Returns what its values are multiplied by: 127 /
// amax; or 0, with scale 0, where that is not finite (amax 0, or below 3.74e-37). If `fixed_scale` is not
// null, it is the scale, whatever amax is; below 2.94e-39 its inverse is not finite, and codes are 0.
inline float choose_scale(float* scale, float amax, const float* fixed_scale) {
    constexpr float largest = std::numeric_limits<float>::max();
    if (fixed_scale != nullptr) {
        *scale = *fixed_scale;
        const float inv = 1.0f / *scale;
        return inv <= largest ? inv : 0.0f;
    }
    const float inv = 127.0f / amax;
    const bool usable = inv <= largest && inv > 0;  // NaN compares false
    *scale = usable ? amax / 127.0f : 0.0f;
    return usable ? inv : 0.0f;
}

// to[i * stride] = the code of x[i], for n values under one scale, which is returned: as the programs' plain
// loops.
inline float quantize_values(int8_t* to, size_t stride, const float* x, int n) {
    float amax = 0, scale;
    for (int i = 0; i < n; i++) amax = std::max(amax, std::fabs(x[i]));
    const float inv = choose_scale(&scale, amax, nullptr);
    for (int i = 0; i < n; i++) {
        const float whole = std::nearbyintf(x[i] * inv);
        const float low = whole > -127.0f ? whole : -127.0f;  // in this order, NaN becomes -127
        to[i * stride] = int8_t(std::min(127.0f, low));
    }
    return scale;
}

// Four lanes, in any instruction set (GCC manual, "Using Vector Instructions through Built-in Functions").
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef float Float4 __attribute__((vector_size(16)));

template <class Vector, class T>
inline Vector load4(const T* p) {
    Vector v;
    static_assert(sizeof(v) == 4 * sizeof(T));
    std::memcpy(&v, p, sizeof v);
    return v;
}
