// A few tokens: the weights still stream past once, and serve all of them.
//
// As many rows go together as a vector has lanes. 4 * lanes bytes of each are turned in registers
// (int8_pack.h), and every lane adds up its own row, as in int8_panels.h. Turning costs the same for one
// token as for ten; nothing is written back. There are two ways:
//
//   by words   until a vector holds the same four columns of each row, to multiply with four columns of a
//              token, and a lane has its row's sum;
//   by quads   until it holds the same 16 columns of a fourth of the rows, with half the instructions. A lane
//              has a fourth of its row's sum then, and at the end of a group these are turned for each token.
//              Better where there are few tokens, or few groups.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "common/cpu/int8_pack.h"
#include "common/cpu/pin_register.h"
#include "common/cpu/scratch.h"
#include "common/cpu/unroll.h"

// Some tokens side by side, as multiply_few reads them.
struct FewTokens {
    int8_t* codes;  // [part][token][column], a part being four columns or 16
    float* scales;  // [group][token]
    int32_t* sums;  // [group][token]
};

// Some columns of Isa::lanes rows and of n_tokens tokens, and what is prefetched meanwhile.
struct FewColumns {
    const int8_t* rows;
    size_t row_bytes;
    int n;
    const int8_t* codes;
    const int8_t* next;  // moved on by as many bytes as are read
};

// sums[token] = the products of these columns, by words.
template <class Isa, int n_tokens>
__attribute__((always_inline)) inline void add_by_words(typename Isa::Ints (&sums)[n_tokens],
                                                        FewColumns& columns) {
    constexpr int n = Isa::lanes, bytes = 4 * n;
    typedef uint32_t Words __attribute__((vector_size(bytes)));
    typedef int32_t Whole __attribute__((vector_size(bytes)));
    using Ints = typename Isa::Ints;
    // An addition waits for the one before it: with few tokens, several accumulators for each.
    constexpr int parts = n_tokens >= 4 ? 1 : 2;
    Ints acc[n_tokens][parts];
    for (auto& token : acc) {
        for (Ints& a : token) a = Isa::splat(0);
    }
    for (int k = 0; k < columns.n; k += bytes, columns.next += n * bytes) {
        for (int b = 0; b < n * bytes; b += 64) __builtin_prefetch(columns.next + b, 0, 2);
        Words v[n];
        UNROLL(16)
        for (int r = 0; r < n; r++)
            std::memcpy(&v[place<n>(r)], columns.rows + r * columns.row_bytes + k, sizeof v[0]);
        transpose<n>(v);
        UNROLL(16)
        for (int i = 0; i < n; i++) {
            const Ints codes = Isa::flipped(Ints(v[place<n>(i)]));
            UNROLL(16)
            for (int t = 0; t < n_tokens; t++) {
                int32_t four;
                std::memcpy(&four, columns.codes + size_t(k) * n_tokens + 4 * (i * n_tokens + t),
                            sizeof four);
                Ints& a = acc[t][i % parts];
                a = Isa::dot4(a, codes, Isa::splat(four));
                pin_register(a);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        sums[t] = acc[t][0];
        if constexpr (parts == 2) sums[t] = Ints(Whole(acc[t][0]) + Whole(acc[t][1]));
    }
}

// The same by quads. Rows i, i + 4, ... and i + 2, i + 6, ... share the loads of a token's columns.
template <class Isa, int n_tokens>
__attribute__((always_inline)) inline void add_by_quads(typename Isa::Ints (&sums)[n_tokens],
                                                        FewColumns& columns) {
    constexpr int n = Isa::lanes, bytes = 4 * n, m = n / 4;
    typedef uint32_t Words __attribute__((vector_size(bytes)));
    typedef int32_t Whole __attribute__((vector_size(bytes)));
    using Ints = typename Isa::Ints;
    Whole halves[2][n_tokens];
    UNROLL(2)
    for (int i = 0; i < 2; i++) {
        Whole acc[2][n_tokens] = {};
        const int8_t* codes = columns.codes;
        const int8_t* from = columns.rows + i * columns.row_bytes;
        for (const int8_t* end = from + columns.n; from < end; from += bytes, codes += bytes * n_tokens) {
            for (int b = 0; b < 2 * m * bytes; b += 64) __builtin_prefetch(columns.next + b, 0, 2);
            columns.next += 2 * m * bytes;
            Words v[2][m];
            UNROLL(2)
            for (int j = 0; j < 2; j++) {
                UNROLL(4)
                for (int q = 0; q < m; q++)
                    std::memcpy(&v[j][quad_place<m>(q)], from + (4 * q + 2 * j) * columns.row_bytes, bytes);
                transpose_quads<m>(v[j]);
            }
            UNROLL(4)
            for (int q = 0; q < m; q++) {
                const Ints some = Isa::flipped(Ints(v[0][quad_place<m>(q)])),
                           others = Isa::flipped(Ints(v[1][quad_place<m>(q)]));
                UNROLL(16)
                for (int t = 0; t < n_tokens; t++) {
                    const Ints x = Isa::quads(codes + 16 * (q * n_tokens + t));
                    acc[0][t] = Whole(Isa::dot4(Ints(acc[0][t]), some, x));
                    acc[1][t] = Whole(Isa::dot4(Ints(acc[1][t]), others, x));
                    pin_register(acc[0][t]), pin_register(acc[1][t]);
                }
            }
        }
        UNROLL(16)
        for (int t = 0; t < n_tokens; t++) halves[i][t] = add_pairs(acc[0][t], acc[1][t]);
    }
    UNROLL(16)
    for (int t = 0; t < n_tokens; t++) sums[t] = Ints(add_pairs(halves[0][t], halves[1][t]));
}

// Which of the two: quads take two accumulators for a token, and there are 16 registers of 32 bytes,
// otherwise 32.
template <class Isa>
constexpr bool takes_quads(int n_tokens, int known_group_size) {
    return n_tokens <= (known_group_size > 0 ? 2 : Isa::lanes == 8 ? 4 : 12);
}

// out[token * Isa::lanes + row] = Isa::lanes rows of w, from `first` on, times n_tokens tokens. w_scales:
// [group][row].
template <class Isa, int n_tokens, int known_group_size>
__attribute__((noinline)) void multiply_few(float* out, const FewTokens& x, const Int8Matrix& w, int first,
                                            const float* w_scales) {
    constexpr int n = Isa::lanes;
    typedef int32_t Whole __attribute__((vector_size(4 * n)));
    using Ints = typename Isa::Ints;
    const int group_size = known_group_size > 0 ? known_group_size : w.group_size, n_groups = w.n_groups();
    const int8_t* rows = w.row_codes(first);
    FewColumns columns{rows, size_t(w.n_cols), group_size, x.codes, rows + size_t(n) * w.n_cols};
    typename Isa::Floats sums[n_tokens];
    for (auto& sum : sums) sum = Isa::zero();
    for (int g = 0; g < n_groups; g++) {
        Ints group[n_tokens];
        if constexpr (takes_quads<Isa>(n_tokens, known_group_size)) {
            add_by_quads<Isa, n_tokens>(group, columns);
        } else {
            add_by_words<Isa, n_tokens>(group, columns);
        }
        columns.rows += group_size, columns.codes += size_t(group_size) * n_tokens;
        UNROLL(16)
        for (int t = 0; t < n_tokens; t++) {
            const Whole total = Whole(group[t]) - Isa::offset * x.sums[g * n_tokens + t];
            sums[t] = Isa::add_scaled(sums[t], Ints(total),
                                      Isa::scales(w_scales + size_t(g) * n, x.scales[g * n_tokens + t]));
        }
    }
    for (int t = 0; t < n_tokens; t++) Isa::store(out + t * n, sums[t]);
}

// So many tokens at most share what is in registers.
#ifdef RUNQ_SIMDE
template <class Isa>
constexpr int few_tokens = 4;  // emulated instructions take minutes to compile
#else
template <class Isa>
constexpr int few_tokens = Isa::few_tokens;
#endif

// multiply_few for one token, or an even number.
template <class Isa>
using FewKernel = void (*)(float* out, const FewTokens& x, const Int8Matrix& w, int first,
                           const float* w_scales);
template <class Isa, int n = few_tokens<Isa>>
inline FewKernel<Isa> kernel_of_few(int n_tokens, int group_size) {
    if (n_tokens == 1) return group_size == 64 ? multiply_few<Isa, 1, 64> : multiply_few<Isa, 1, 0>;
    if (n_tokens == n) return group_size == 64 ? multiply_few<Isa, n, 64> : multiply_few<Isa, n, 0>;
    if constexpr (n > 2) return kernel_of_few<Isa, n - 2>(n_tokens, group_size);
    return nullptr;
}

// The products with matrices of Isa::lanes rows or more. Tokens go in chunks of the same even size, for which
// a block of rows is turned again, from the cache: up to some dozens of tokens that is still faster than
// panels, which are packed while memory waits.
template <class Isa>
inline void products_of_few(const Int8Matrix& x, std::span<const Int8Product> list) {
    constexpr int n = Isa::lanes;
    const int n_groups = x.n_groups(), n_chunks = (x.n_rows + few_tokens<Isa> - 1) / few_tokens<Isa>;
    const int n_tokens = x.n_rows == 1 ? 1 : (x.n_rows + 2 * n_chunks - 1) / (2 * n_chunks) * 2;
    static thread_local std::vector<int8_t> token_codes;
    static thread_local std::vector<float> token_scales;
    static thread_local std::vector<int32_t> token_sums;
    const size_t n_padded = size_t(n_chunks) * n_tokens;
    const FewTokens tokens{scratch(token_codes, n_padded * x.n_cols),
                           scratch(token_scales, n_padded * n_groups),
                           scratch(token_sums, n_padded * n_groups)};
    // [token][part] to [chunk][part][token], parts of `width` values; a token that is not there is zeros.
    auto interleave = [&](auto* to, const auto* from, int n_parts, auto width) {
        for (int first = 0; first < n_chunks * n_tokens; first += n_tokens) {
            for (int part = 0; part < n_parts; part++) {
                for (int t = first; t < first + n_tokens; t++, to += width()) {
                    std::fill_n(to, width(), 0);
                    if (t < x.n_rows) std::copy_n(from + (size_t(t) * n_parts + part) * width(), width(), to);
                }
            }
        }
    };
    if (takes_quads<Isa>(n_tokens, x.group_size == 64 ? 64 : 0)) {
        interleave(tokens.codes, x.codes, x.n_cols / 16, std::integral_constant<int, 16>());
    } else {
        interleave(tokens.codes, x.codes, x.n_cols / 4, std::integral_constant<int, 4>());
    }
    interleave(tokens.scales, x.scales, n_groups, std::integral_constant<int, 1>());
    interleave(tokens.sums, x.sums, n_groups, std::integral_constant<int, 1>());
    const FewKernel<Isa> multiply = kernel_of_few<Isa>(n_tokens, x.group_size);
#pragma omp parallel
    for (const Int8Product& p : list) {
        static thread_local std::vector<float> scales;
        float* w_scales = scratch(scales, size_t(n) * n_groups);
        const int n_rows = p.w.n_rows;
#pragma omp for schedule(static) nowait
        for (int i = 0; i < n_rows; i += n) {
            // The last block may begin within the one before it.
            const int first = std::min(i, n_rows - n);
            float out[few_tokens<Isa> * n];
            pack_words<n>(w_scales, n, p.w.row_scales(first), n_groups, n, n_groups, 0);
            for (int begin = 0; begin < x.n_rows; begin += n_tokens) {
                const size_t at = size_t(begin) * n_groups;
                multiply(out, {tokens.codes + size_t(begin) * x.n_cols, tokens.scales + at, tokens.sums + at},
                         p.w, first, w_scales);
                for (int t = begin; t < std::min(begin + n_tokens, x.n_rows); t++) {
                    const float* from = out + (t - begin) * n;
                    std::copy(from + (i - first), from + n, p.out + size_t(t) * n_rows + i);
                }
            }
        }
    }
}
