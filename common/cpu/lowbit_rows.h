// Low-bit weights that are not packed (lowbit_pack.h), times one token, or a few: each row is expanded to
// int8 codes, in the first-level cache, and multiplied by all of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/cpu/int8_rows.h"
#include "common/cpu/lowbit.h"

// Rows begin .. end - 1 of p.w times x.
template <class Isa>
inline void multiply_rows(const Int8Matrix& x, const LowbitProduct& p, int begin, int end) {
    static thread_local std::vector<int8_t> code_memory;
    static thread_local std::vector<float> scale_memory;
    const LowbitMatrix& w = p.w;
    const int n_cols = w.n_cols;
    // At the beginning of a cache line, so that no store goes into two.
    int8_t* codes = scratch(code_memory, size_t(n_cols) + 63);
    codes += -reinterpret_cast<uintptr_t>(codes) % 64;
    float* scales = scratch(scale_memory, size_t(w.n_groups()));
    const Int8Matrix row{codes, scales, nullptr, 1, n_cols, w.group_size};
    for (int i = begin; i < end; i++) {
        // The next rows follow as one stream, or two.
        auto prefetch = [](const uint8_t* from, size_t n) {
            for (size_t b = 0; b < n; b += 64) __builtin_prefetch(from + prefetch_distance + b);
        };
        prefetch(w.row_codes(i), w.n_code_bytes());
        if (w.mask != nullptr) prefetch(w.row_mask(i), size_t(n_cols) / 8);
        expand_columns(codes, w, i, 0, n_cols);
        expand_scales(scales, w, i);
        for (int t = 0; t < x.n_rows; t++) {
            const float out =
                w.group_size == 64 ? dot_row<Isa, 64>(x, t, row, 0) : dot_row<Isa>(x, t, row, 0);
            p.out[size_t(t) * w.n_rows + i] = out;
        }
    }
}
