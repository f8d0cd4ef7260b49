// Weights that are not packed, times one token or a few: they stream past once, a row at a time, and the
// speed is that of memory. Codes of 2 to 6 bits are first brought into bytes, in the first-level cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "engine/cpu/int8.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/vector.h"

// How far ahead of use a row is asked for, in bytes: in a file's memory that is the next page of 4 KiB, at
// whose beginning the hardware does not know that the stream goes on. With int8 codes on a Zen 4 this was the
// best of 2, 3, 4, 6, 8 and 16 KiB.
constexpr int row_prefetch_distance = 4096;

// A row of weights. Value k of group g is (times * codes[k] - zeros[g]) * scales[g]; of int8 codes, which are
// read in place, codes[k] * scales[g].
struct CodeRow {
    const int8_t* codes;   // (n_cols,)
    const float* scales;   // a group of activations has one, (n_groups,)
    const int32_t* zeros;  // (n_groups,)
    int times;             // 5 with two levels, otherwise 1
};

// The accumulator of one group, with what Isa::offset has added still in it. Four vectors in turns, each into
// an accumulator of its own, since an addition waits for the one before it.
template <class Isa>
inline int32_t dot_group(const int8_t* x, const int8_t* w, int n) {
    constexpr int line = 64, step = 4 * Isa::lanes;  // bytes, the second of a vector
    typename Isa::Ints acc[4] = {Isa::splat(0), Isa::splat(0), Isa::splat(0), Isa::splat(0)};
    auto add = [&](int j, int k) {
        acc[j] = Isa::dot4(acc[j], Isa::flipped(Isa::load(w + k)), Isa::load(x + k));
    };
    int k = 0;
    for (; k + 4 * step <= n; k += 4 * step) {
        for (int b = 0; b < 4 * step; b += line) __builtin_prefetch(w + k + b + row_prefetch_distance);
        for (int j = 0; j < 4; j++) add(j, k + j * step);
    }
    for (; k < n; k += step) {
        __builtin_prefetch(w + k + row_prefetch_distance);
        add(0, k);
    }
    const Int4 sums = Isa::add_lanes(acc[0], acc[1], acc[2], acc[3]);
    return sums[0] + sums[1] + sums[2] + sums[3];
}

// out[j * stride] = row t + j of x times a row of weights. group_size is a multiple of 4 * Isa::lanes. Adding
// up the lanes of a vector takes several instructions, so four groups share them; the fp32 additions of a
// token wait for each other, so two tokens go side by side. A zero point is the same for a whole group, so it
// is taken off the sum of products, times the sum of x, rather than off each code.
template <class Isa, int n_tokens, bool in_place, int known_group_size>
inline void dot_row(float* out, size_t stride, const QuantRows& x, int t, const CodeRow& w) {
    const int8_t *xr = row_codes(x, t), *wr = w.codes;
    const float *xs = row_scales(x, t), *ws = w.scales;
    const int32_t* x_sums = row_sums(x, t);
    const int group_size = known_group_size > 0 ? known_group_size : x.group_size, n = x.n_cols / group_size;
    const int groups_ahead = row_prefetch_distance / group_size + 1;
    // Memory keeps up only if the next lines are already on their way; what was brought into bytes is near.
    auto prefetch = [](const void* p) {
        if (in_place) __builtin_prefetch(p);
    };
    float outputs[n_tokens] = {};
    int g = 0;
    for (; g + 4 <= n; g += 4) {
        typename Isa::Ints acc[n_tokens][4];
        UNROLL(4)
        for (int q = 0; q < 4; q++) {
            for (int j = 0; j < n_tokens; j++) acc[j][q] = Isa::splat(0);
            const size_t begin = size_t(g + q) * group_size, end = begin + group_size;
            for (size_t k = begin; k < end; k += 4 * Isa::lanes) {
                if (k % 64 == 0) prefetch(wr + k + row_prefetch_distance);
                const auto codes = Isa::flipped(Isa::load(wr + k));
                for (int j = 0; j < n_tokens; j++)
                    acc[j][q] = Isa::dot4(acc[j][q], codes, Isa::load(xr + size_t(j) * x.n_cols + k));
            }
        }
        prefetch(ws + g + groups_ahead);  // after the codes: before them, all is 2 % slower
        for (int j = 0; j < n_tokens; j++) {
            const Int4 x_sum = load_as<Int4>(x_sums + j * n + g);
            Int4 totals = Isa::add_lanes(acc[j][0], acc[j][1], acc[j][2], acc[j][3]) - Isa::offset * x_sum;
            if (!in_place) totals = w.times * totals - load_as<Int4>(w.zeros + g) * x_sum;
            const Float4 products = __builtin_convertvector(totals, Float4);
            const Float4 scales = load_as<Float4>(ws + g) * load_as<Float4>(xs + j * n + g);
            for (int q = 0; q < 4; q++) outputs[j] = fused_multiply_add(products[q], scales[q], outputs[j]);
        }
    }
    for (; g < n; g++) {  // what is left; or the only one, a group as long as the row
        prefetch(ws + g + groups_ahead);
        const size_t k = size_t(g) * group_size;
        for (int j = 0; j < n_tokens; j++) {
            const int32_t x_sum = x_sums[j * n + g];
            int32_t total =
                dot_group<Isa>(xr + size_t(j) * x.n_cols + k, wr + k, group_size) - Isa::offset * x_sum;
            if (!in_place) total = w.times * total - w.zeros[g] * x_sum;
            outputs[j] = fused_multiply_add(static_cast<float>(total), ws[g] * xs[j * n + g], outputs[j]);
        }
    }
    for (int j = 0; j < n_tokens; j++) out[size_t(j) * stride] = outputs[j];
}

// out[t * stride] = row t of x times a row of weights, for all tokens.
template <class Isa, bool in_place>
inline void multiply_row(float* out, size_t stride, const QuantRows& x, const CodeRow& w) {
    auto multiply = [&]<int known_group_size>(std::integral_constant<int, known_group_size>) {
        int t = 0;
        for (; t + 2 <= x.n_rows; t += 2)
            dot_row<Isa, 2, in_place, known_group_size>(out + size_t(t) * stride, stride, x, t, w);
        if (t < x.n_rows)
            dot_row<Isa, 1, in_place, known_group_size>(out + size_t(t) * stride, stride, x, t, w);
    };
    x.group_size == 64 ? multiply(std::integral_constant<int, 64>())
                       : multiply(std::integral_constant<int, 0>());
}
