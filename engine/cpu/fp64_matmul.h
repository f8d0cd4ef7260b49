// A product of fp32 matrices added up in fp64: where the result decides something, and rounding must not.
#pragma once

#include <cstddef>
#include <cstring>

#include "engine/cpu/rows.h"
#include "engine/cpu/vector.h"
#include "engine/os/threads.h"

// A vector of doubles, as wide as the machine's registers.
typedef double Doubles __attribute__((vector_size(4 * vector_lanes)));
constexpr int double_lanes = vector_lanes / 2;

// out[t][i] = sum over k of x[t][k] * w[i][k], in fp64 and rounded once: x (n_tokens, n), w (n_rows, n), rows
// of out n_out apart. Each lane adds up every double_lanes-th column, whatever n_tokens and n_rows are. All
// sums stay in registers, so that a number is read and widened once for several products.
template <int n_tokens, int n_rows>
void fp64_tile(float* out, int n_out, const float* x, const float* w, int n) {
    typedef float HalfFloats __attribute__((vector_size(2 * vector_lanes)));
    auto widen = [](const float* p) {
        HalfFloats v;
        std::memcpy(&v, p, sizeof v);
        return __builtin_convertvector(v, Doubles);
    };
    Doubles sums[n_tokens][n_rows] = {};
    const int end = n / double_lanes * double_lanes;
    for (int k = 0; k < end; k += double_lanes) {
        // One token reads the rows once, in a file's memory, whose pages are small: the next rows are asked
        // for into the second-level cache, and a KiB ahead into the first.
        for (int i = 0; i < n_rows && n_tokens == 1 && k % 16 == 0; i++)
            __builtin_prefetch(w + size_t(n_rows + i) * n + k, 0, 2),
                __builtin_prefetch(w + size_t(i) * n + k + 256, 0, 3);
        Doubles tokens[n_tokens];
        UNROLL(4)
        for (int t = 0; t < n_tokens; t++) tokens[t] = widen(x + size_t(t) * n + k);
        UNROLL(4)
        for (int i = 0; i < n_rows; i++) {
            const Doubles weights = widen(w + size_t(i) * n + k);
            UNROLL(4)
            for (int t = 0; t < n_tokens; t++) sums[t][i] += tokens[t] * weights;
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        for (int i = 0; i < n_rows; i++) {
            double sum = 0;
            for (int lane = 0; lane < double_lanes; lane++) sum += sums[t][i][lane];
            for (int k = end; k < n; k++) sum += double(x[size_t(t) * n + k]) * double(w[size_t(i) * n + k]);
            out[t * n_out + i] = float(sum);
        }
    }
}

// Some tokens times up to max_rows rows of w, four at a time or one.
template <int n_tokens, int max_rows>
void fp64_rows(float* out, int n_out, const float* x, const float* w, int n, int n_rows) {
    if (n_rows >= max_rows) return fp64_tile<n_tokens, max_rows>(out, n_out, x, w, n);
    for (int i = 0; i < n_rows; i++) fp64_tile<n_tokens, 1>(out + i, n_out, x, w + size_t(i) * n, n);
}

// out (n_tokens, n_rows) = x (n_tokens, n) times w (n_rows, n) transposed, added up in fp64; out.n_cols is
// n_rows.
inline void fp64_matmul(Rows& out, const Rows& x, const float* w) {
    constexpr int max_tokens = vector_lanes == 16 ? 4 : 2, max_rows = 4;  // as registers allow
    const int n = x.n_cols, n_rows = out.n_cols;
    out.n_rows = x.n_rows;
    const int n_tiles = (n_rows + max_rows - 1) / max_rows;
    parallel_for((x.n_rows + max_tokens - 1) / max_tokens * n_tiles, [&](int tile) {
        const int t = tile / n_tiles * max_tokens, i = tile % n_tiles * max_rows;
        const float* from = w + size_t(i) * n;
        if (t + max_tokens <= x.n_rows)
            return fp64_rows<max_tokens, max_rows>(out.row(t) + i, n_rows, x.row(t), from, n, n_rows - i);
        for (int j = t; j < x.n_rows; j++)
            fp64_rows<1, max_rows>(out.row(j) + i, n_rows, x.row(j), from, n, n_rows - i);
    });
}
