// Weights that are not packed, times one token or a few: they stream past once, a row at a time, and the
// speed is that of memory. Codes of 2 and 4 bits are expanded to int8 first, in the first-level cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/cpu/expand_rows.h"
#include "common/cpu/fused_multiply_add.h"
#include "common/cpu/int8.h"
#include "common/cpu/quant_matrix.h"
#include "common/cpu/scratch.h"

// A row of weights: int8 codes (n_cols,), and a scale for each group of activations.
struct Int8Row {
    const int8_t* codes;
    const float* scales;
};

// The accumulator of one group, with what Isa::offset has added still in it. A cache line at a time, each
// vector of it into an accumulator of its own, since an addition waits for the one before it.
template <class Isa>
inline int32_t dot_group(const int8_t* x, const int8_t* w, int n) {
    constexpr int line = 64, step = 4 * Isa::lanes;  // bytes, the second of a vector
    typename Isa::Ints acc[4] = {Isa::splat(0), Isa::splat(0), Isa::splat(0), Isa::splat(0)};
    auto add = [&](int j, int k) {
        acc[j] = Isa::dot4(acc[j], Isa::flipped(Isa::load(w + k)), Isa::load(x + k));
    };
    int k = 0;
    for (; k + line <= n; k += line) {
        __builtin_prefetch(w + k + prefetch_distance);
        for (int j = 0; j < line / step; j++) add(j, k + j * step);
    }
    for (; k < n; k += step) add(0, k);
    const Int4 sums = Isa::add_lanes(acc[0], acc[1], acc[2], acc[3]);
    return sums[0] + sums[1] + sums[2] + sums[3];
}

// One output, row t of x times a row of weights. group_size is a multiple of 4 * Isa::lanes. Adding up the
// lanes of a vector takes several instructions, so four groups share them.
template <class Isa, int known_group_size = 0>
inline float dot_row(const QuantRows& x, int t, const Int8Row& w) {
    const int8_t *xr = row_codes(x, t), *wr = w.codes;
    const float *xs = row_scales(x, t), *ws = w.scales;
    const int32_t* x_sums = row_sums(x, t);
    const int group_size = known_group_size > 0 ? known_group_size : x.group_size, n = x.n_cols / group_size;
    const int groups_ahead = prefetch_distance / group_size + 1;
    auto multiply_group = [&](int g) {
        auto acc = Isa::splat(0);
        const size_t begin = size_t(g) * group_size, end = begin + group_size;
        for (size_t k = begin; k < end; k += 4 * Isa::lanes) {
            // Memory keeps up only if the next lines are already on their way.
            if (k % 64 == 0) __builtin_prefetch(wr + k + prefetch_distance);
            acc = Isa::dot4(acc, Isa::flipped(Isa::load(wr + k)), Isa::load(xr + k));
        }
        return acc;
    };
    float sum = 0;
    int g = 0;
    for (; g + 4 <= n; g += 4) {
        __builtin_prefetch(ws + g + groups_ahead);
        const auto a = multiply_group(g), b = multiply_group(g + 1);
        const auto c = multiply_group(g + 2), d = multiply_group(g + 3);
        const Int4 totals = Isa::add_lanes(a, b, c, d) - Isa::offset * load4<Int4>(x_sums + g);
        const Float4 products = __builtin_convertvector(totals, Float4);
        const Float4 scales = load4<Float4>(ws + g) * load4<Float4>(xs + g);
        for (int j = 0; j < 4; j++) sum = fused_multiply_add(products[j], scales[j], sum);
    }
    for (; g < n; g++) {  // what is left; or the only one, a group as long as the row
        __builtin_prefetch(ws + g + groups_ahead);
        const size_t k = size_t(g) * group_size;
        const int32_t total = dot_group<Isa>(xr + k, wr + k, group_size) - Isa::offset * x_sums[g];
        sum = fused_multiply_add(static_cast<float>(total), ws[g] * xs[g], sum);
    }
    return sum;
}

// Rows begin .. end - 1 of w times all tokens of x: out[t * w.n_rows + i]. A row's codes and scales are read
// where they lie if they are int8, and fp32 for each group of activations; otherwise they are expanded first.
template <class Isa>
inline void multiply_rows(float* out, const QuantRows& x, const QuantMatrix& w, int begin, int end) {
    static thread_local std::vector<int8_t> code_memory;
    static thread_local std::vector<float> scale_memory;
    const size_t row_bytes = code_bytes(w), mask_row = mask_bytes(w), groups = size_t(n_groups(w));
    const bool has_codes = w.bits == 8;
    const bool has_scales = w.scale_type != QUANT_GEMM_GROUP_FP16 && w.kind != QUANT_GEMM_TWO_LEVEL &&
                            size_t(n_scales(w)) == groups;
    // At the beginning of a cache line, so that no store goes into two.
    int8_t* codes = scratch(code_memory, size_t(w.n_cols) + 63);
    codes += -reinterpret_cast<uintptr_t>(codes) % 64;
    float* scales = scratch(scale_memory, groups);
    // The rows after one follow as one stream, or two.
    auto prefetch = [](const uint8_t* from, size_t n) {
        for (size_t b = 0; b < n; b += 64) __builtin_prefetch(from + prefetch_distance + b);
    };
    for (int i = begin; i < end; i++) {
        const uint8_t* stored = w.codes + size_t(i) * row_bytes;
        Int8Row row{codes, scales};
        if (has_codes) {
            row.codes = reinterpret_cast<const int8_t*>(stored);
        } else {
            prefetch(stored, row_bytes);
            if (w.mask != nullptr) prefetch(w.mask + size_t(i) * mask_row, mask_row);
            expand_columns(codes, w, i, 0, w.n_cols);
        }
        if (has_scales) {
            row.scales = static_cast<const float*>(w.scales) + size_t(i) * groups;
        } else {
            expand_scales(scales, w, i);
        }
        for (int t = 0; t < x.n_rows; t++) {
            out[size_t(t) * w.n_rows + i] =
                x.group_size == 64 ? dot_row<Isa, 64>(x, t, row) : dot_row<Isa>(x, t, row);
        }
    }
}
