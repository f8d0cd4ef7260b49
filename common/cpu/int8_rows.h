// Weights that are not packed, times one token or a few: they stream past once, a row at a time, and the
// speed is that of memory.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "common/cpu/int8.h"
#include "common/os/threads.h"

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

// One output, row t of x times row i of w. group_size is a multiple of 4 * Isa::lanes. Adding up the lanes of
// a vector takes several instructions, so four groups share them.
template <class Isa, int known_group_size = 0>
inline float dot_row(const Int8Matrix& x, int t, const Int8Matrix& w, int i) {
    const int8_t *xr = x.row_codes(t), *wr = w.row_codes(i);
    const float *xs = x.row_scales(t), *ws = w.row_scales(i);
    const int32_t* x_sums = x.row_sums(t);
    const int group_size = known_group_size > 0 ? known_group_size : w.group_size, n_groups = w.n_groups();
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
    for (; g + 4 <= n_groups; g += 4) {
        __builtin_prefetch(ws + g + groups_ahead);
        const auto a = multiply_group(g), b = multiply_group(g + 1);
        const auto c = multiply_group(g + 2), d = multiply_group(g + 3);
        const Int4 totals = Isa::add_lanes(a, b, c, d) - Isa::offset * load4<Int4>(x_sums + g);
        const Float4 products = __builtin_convertvector(totals, Float4);
        const Float4 scales = load4<Float4>(ws + g) * load4<Float4>(xs + g);
        for (int j = 0; j < 4; j++) sum = std::fma(products[j], scales[j], sum);
    }
    for (; g < n_groups; g++) {  // what is left; or the only one, a group as long as the row
        __builtin_prefetch(ws + g + groups_ahead);
        const size_t k = size_t(g) * group_size;
        const int32_t total = dot_group<Isa>(xr + k, wr + k, group_size) - Isa::offset * x_sums[g];
        sum = std::fma(static_cast<float>(total), ws[g] * xs[g], sum);
    }
    return sum;
}

// Each row of the weights is read once, whatever the number of tokens. `output` computes one output.
template <class Dot>
inline void products_by_rows(const Int8Matrix& x, std::span<const Int8Product> list, Dot output) {
    auto n_rows = [](const Int8Product& p) { return p.w.n_rows; };
    parallel_lists(list, n_rows, [&](const Int8Product& p, int begin, int end) {
        for (int i = begin; i < end; i++) {
            for (int t = 0; t < x.n_rows; t++) p.out[size_t(t) * p.w.n_rows + i] = output(x, t, p.w, i);
        }
    });
}
