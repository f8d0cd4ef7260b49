// As program.h, for a program whose feed-forward networks are experts: which kernels take their matrices,
// what is asked of the disk early, and a product of fp32 matrices added up in fp64, for the router, whose
// result decides something, so that rounding must not.
#pragma once

#include <cstddef>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include "engine/cpu/expand_rows.h"
#include "engine/os/files.h"
#include "engine/os/system.h"
#include "engine/program.h"

// The columns that go through the kernels under one scale of each side: all of A8W8, a group of activations
// of the ladder, or a part of a group of A8W4. 0: no kernel takes the matrix. Matrix has what MoeMatrix has.
template <class Matrix>
requires requires(const Matrix& w) { w.format.kind, w.mx_scales, w.assist; }
int kernel_group(const Matrix& w) {
    using Kind = std::remove_cvref_t<decltype(w.format.kind)>;
    if (w.format.kind == Kind::a8w8 || w.format.kind == Kind::ladder) return w.group_size;
    if (w.format.kind == Kind::mxfp8 || w.format.group == 0 || w.n_cols % 64 != 0) return 0;
    return w.format.group == 32 ? 32 : 64;
}

// Of a model that is read where the file lies: all pages of the experts that have tokens, in rising order,
// are asked for at once. A product would wait for them one after the other. Asking for what is in memory
// costs 2 to 8 % of a pass, so that it ends after 64 layers without a read, until the disk is read again.
template <class Experts, class Routing>
void will_read(const Experts& experts, const Routing& r) {
    if (experts.down[0].packed != nullptr) return;
    static long seen = 0, calm_layers = 0;
    const long reads = disk_reads();
    calm_layers = std::exchange(seen, reads) == reads ? calm_layers + 1 : 0;
    if (calm_layers > 64) return;
    for (const auto* matrices : {&experts.gate_up, &experts.down}) {
        int last = -1;
        for (const int pair : r.by_expert) {
            if (r.experts[size_t(pair)] == last) continue;
            const auto& w = (*matrices)[size_t(last = r.experts[size_t(pair)])];
            want_mapped(w.codes, size_t(w.n_rows) * size_t(w.row_bytes()));
            const size_t n_groups = size_t(w.n_rows) * size_t(w.n_groups());
            if (w.mask != nullptr) want_mapped(w.mask, size_t(w.n_rows) * size_t(w.n_cols) / 8);
            if (w.levels != nullptr) want_mapped(w.levels, n_groups);
            if (w.scales != nullptr) want_mapped(w.scales, sizeof(*w.scales) * n_groups);
            if (w.zeros != nullptr) want_mapped(w.zeros, size_t(w.n_rows) * ((size_t(w.n_groups()) + 1) / 2));
        }
    }
}

// A vector of doubles, as wide as the machine's registers. Eight lanes of sums are one or more of them.
typedef double Doubles __attribute__((vector_size(4 * vector_lanes)));
constexpr int double_lanes = vector_lanes / 2, sum_vectors = 8 / double_lanes;

// Of fp64_matmul(), the products of tokens from first_token on and rows of w from first_row on. Each of
// eight lanes adds up every eighth column, whatever n_tokens and n_rows are. All sums stay in registers, so
// that a number is read and widened once for several products.
template <int n_tokens, int n_rows>
void fp64_tile(Rows& out, const Rows& all_x, const float* all_w, int first_token, int first_row) {
    typedef float HalfFloats __attribute__((vector_size(2 * vector_lanes)));
    auto widen = [](const float* p) {
        HalfFloats v;
        std::memcpy(&v, p, sizeof v);
        return __builtin_convertvector(v, Doubles);
    };
    const int n = all_x.n_cols;
    const float *x = all_x.row(first_token), *w = all_w + size_t(first_row) * n;
    Doubles sums[n_tokens][n_rows][sum_vectors] = {};
    const int end = n / 8 * 8;
    for (int k = 0; k < end; k += 8) {
        // One token reads the rows once, in a file's memory, whose pages are small: the next rows are asked
        // for into the second-level cache, and a KiB ahead into the first.
        for (int i = 0; i < n_rows && n_tokens == 1 && k % 16 == 0; i++)
            __builtin_prefetch(w + size_t(n_rows + i) * n + k, 0, 2),
                __builtin_prefetch(w + size_t(i) * n + k + 256, 0, 3);
        UNROLL(4)
        for (int j = 0; j < sum_vectors; j++) {
            Doubles tokens[n_tokens];
            UNROLL(4)
            for (int t = 0; t < n_tokens; t++) tokens[t] = widen(x + size_t(t) * n + k + j * double_lanes);
            UNROLL(4)
            for (int i = 0; i < n_rows; i++) {
                const Doubles weights = widen(w + size_t(i) * n + k + j * double_lanes);
                UNROLL(4)
                for (int t = 0; t < n_tokens; t++) sums[t][i][j] += tokens[t] * weights;
            }
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        for (int i = 0; i < n_rows; i++) {
            double lanes[8], sum = 0;
            std::memcpy(lanes, sums[t][i], sizeof lanes);
            for (int k = end; k < n; k++)
                lanes[k - end] += double(x[size_t(t) * n + k]) * double(w[size_t(i) * n + k]);
            for (const double lane : lanes) sum += lane;
            out.row(first_token + t)[first_row + i] = float(sum);
        }
    }
}

// out (n_tokens, n_rows) = x (n_tokens, n) times w (n_rows, n) transposed, added up in fp64 and rounded once;
// out.n_cols is n_rows.
inline void fp64_matmul(Rows& out, const Rows& x, const float* w) {
    constexpr int max_tokens = vector_lanes == 16 ? 4 : 2, max_rows = max_tokens;  // as registers allow
    out.n_rows = x.n_rows;
    const int n_tiles = (out.n_cols + max_rows - 1) / max_rows;
    parallel_for((x.n_rows + max_tokens - 1) / max_tokens * n_tiles, [&](int tile) {
        const int t = tile / n_tiles * max_tokens, i = tile % n_tiles * max_rows;
        const bool all_rows = i + max_rows <= out.n_cols;
        if (t + max_tokens <= x.n_rows && all_rows) return fp64_tile<max_tokens, max_rows>(out, x, w, t, i);
        for (int j = t; j < std::min(t + max_tokens, x.n_rows); j++) {
            if (all_rows) {
                fp64_tile<1, max_rows>(out, x, w, j, i);
            } else {
                for (int k = i; k < out.n_cols; k++) fp64_tile<1, 1>(out, x, w, j, k);
            }
        }
    });
}
