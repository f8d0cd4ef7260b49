// A few tokens: the weights still stream past once, and serve all of them.
//
// As many rows go together as a vector has lanes. 4 * lanes bytes of each are turned into columns
// (int8_pack.h) in registers, so that a vector holds the same four columns of each row; four columns of a
// token are broadcast against it, and every lane adds up its own row, as in int8_panels.h. Turning costs the
// same for one token as for ten; nothing is written back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "common/cpu/int8_pack.h"
#include "common/cpu/pin_register.h"
#include "common/cpu/scratch.h"
#include "common/cpu/unroll.h"

// out[token * Isa::lanes + row] = Isa::lanes rows of w, from `first` on, times n_tokens tokens. w_scales:
// [group][row].
template <class Isa, int n_tokens, int known_group_size>
__attribute__((noinline)) void multiply_few(float* out, const PackedTokens& x, const Int8Matrix& w, int first,
                                            const float* w_scales) {
    constexpr int n = Isa::lanes, bytes = 4 * n;
    typedef uint32_t Words __attribute__((vector_size(bytes)));
    using Ints = typename Isa::Ints;
    const int group_size = known_group_size > 0 ? known_group_size : w.group_size, n_groups = w.n_groups();
    const size_t row_bytes = size_t(w.n_cols);
    const int8_t* rows = w.row_codes(first);
    const int8_t* next = rows + n * row_bytes;
    // An addition waits for the one before it: with few tokens, several accumulators for each.
    constexpr int parts = n_tokens >= 4 ? 1 : 2;
    typename Isa::Floats sums[n_tokens];
    for (auto& sum : sums) sum = Isa::zero();
    for (int g = 0, k = 0; g < n_groups; g++) {
        Ints acc[n_tokens][parts];
        for (int t = 0; t < n_tokens; t++) {
            acc[t][0] = Isa::splat(-Isa::offset * x.sums[g * n_tokens + t]);
            if constexpr (parts == 2) acc[t][1] = Isa::splat(0);
        }
        for (const int end = k + group_size; k < end; k += bytes) {
            for (int b = 0; b < bytes * n; b += 64) __builtin_prefetch(next + size_t(k) * n + b, 0, 2);
            Words v[n];
            UNROLL(16)
            for (int r = 0; r < n; r++) std::memcpy(&v[place<n>(r)], rows + r * row_bytes + k, sizeof v[0]);
            transpose<n>(v);
            const uint32_t* four = x.codes + size_t(k) / 4 * n_tokens;
            UNROLL(16)
            for (int i = 0; i < n; i++) {
                const Ints codes = Isa::flipped(Ints(v[place<n>(i)]));
                UNROLL(16)
                for (int t = 0; t < n_tokens; t++) {
                    Ints& a = acc[t][i % parts];
                    a = Isa::dot4(a, codes, Isa::splat(int32_t(four[i * n_tokens + t])));
                    pin_register(a);
                }
            }
        }
        typedef int32_t Whole __attribute__((vector_size(bytes)));
        for (int t = 0; t < n_tokens; t++) {
            Ints total = acc[t][0];
            if constexpr (parts == 2) total = Ints(Whole(total) + Whole(acc[t][1]));
            sums[t] = Isa::add_scaled(sums[t], total,
                                      Isa::scales(w_scales + size_t(g) * n, x.scales[g * n_tokens + t]));
        }
    }
    for (int t = 0; t < n_tokens; t++) Isa::store(out + t * n, sums[t]);
}

// So many tokens at most go this way.
#ifdef RUNQ_SIMDE
template <class Isa>
constexpr int few_tokens = 4;  // emulated instructions take minutes to compile
#else
template <class Isa>
constexpr int few_tokens = Isa::few_tokens;
#endif

// multiply_few for an even number of tokens.
template <class Isa>
using FewKernel = void (*)(float* out, const PackedTokens& x, const Int8Matrix& w, int first,
                           const float* w_scales);
template <class Isa, int n = few_tokens<Isa>>
inline FewKernel<Isa> kernel_of_few(int n_tokens, int group_size) {
    if (n_tokens == n) return group_size == 64 ? multiply_few<Isa, n, 64> : multiply_few<Isa, n, 0>;
    if constexpr (n > 2) return kernel_of_few<Isa, n - 2>(n_tokens, group_size);
    return nullptr;
}

// The products of 1 .. few_tokens tokens with matrices of Isa::lanes rows or more.
template <class Isa>
inline void products_of_few(const Int8Matrix& x, std::span<const Int8Product> list) {
    constexpr int n = Isa::lanes;
    const int n_groups = x.n_groups(), n_tokens = (x.n_rows + 1) / 2 * 2;  // the last may be zeros
    static thread_local std::vector<uint32_t> token_codes;
    static thread_local std::vector<float> token_scales;
    static thread_local std::vector<int32_t> token_sums;
    const PackedTokens tokens{scratch(token_codes, size_t(n_tokens) * x.n_cols / 4),
                              scratch(token_scales, size_t(n_tokens) * n_groups),
                              scratch(token_sums, size_t(n_tokens) * n_groups)};
    auto interleave = [&](auto* to, const void* from, int n_words) {  // [token][word] to [word][token]
        for (int i = 0; i < n_words; i++) {
            for (int t = 0; t < x.n_rows; t++)
                std::memcpy(to + i * n_tokens + t,
                            static_cast<const char*>(from) + 4 * (size_t(t) * n_words + i), 4);
            if (n_tokens > x.n_rows) to[i * n_tokens + x.n_rows] = 0;
        }
    };
    interleave(tokens.codes, x.codes, x.n_cols / 4);
    interleave(tokens.scales, x.scales, n_groups);
    interleave(tokens.sums, x.sums, n_groups);
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
            multiply(out, tokens, p.w, first, w_scales);
            for (int t = 0; t < x.n_rows; t++)
                std::copy(out + t * n + (i - first), out + (t + 1) * n, p.out + size_t(t) * n_rows + i);
        }
    }
}
