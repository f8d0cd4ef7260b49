// Low-bit weights times one token, or a few: the weights stream past once, and the speed is that of memory.
//
// Four rows go together. Each group of each row gives one exact int32, the sum of unsigned codes times those
// of the activations; what the zero point adds to it is the zero point times the sum of the activations'
// codes, and is taken off. The four rows are then the lanes of one vector, to which each group is added with
// one fused multiply-add, as in int8_panels.h: so an output is the same to the bit either way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "common/cpu/int8_pack.h"
#include "common/cpu/int8_rows.h"
#include "common/cpu/lowbit.h"
#include "common/cpu/lowbit_ops.h"

typedef uint32_t Uint4 __attribute__((vector_size(16)));

template <class Vector>
inline void store4(void* p, Vector v) {
    static_assert(sizeof v == 16);
    std::memcpy(p, &v, sizeof v);
}

// What four rows have for each group of activations, [group][row].
struct RowTables {
    float* scales;   // of the weights times that of the activations
    int32_t* zeros;  // what is taken off the group's sum
};

// The tables of four rows for token t of x. `offset`: what was added to codes of 8 bits.
inline void make_tables(const RowTables& to, const Int8Matrix& x, int t, const LowbitMatrix& w,
                        const int (&rows)[4], int offset) {
    const float* x_scales = x.row_scales(t);
    const int32_t* x_sums = x.row_sums(t);
    const int times = w.group / w.group_size, n_scales = w.n_scales();
    auto put = [&](int s, Float4 scales, Int4 zeros) {
        for (int g = s * times; g < (s + 1) * times; g++) {
            store4(to.scales + 4 * g, scales * x_scales[g]);
            store4(to.zeros + 4 * g, zeros * x_sums[g]);
        }
    };
    int s = 0;
    if (w.levels != nullptr) {
        const Float4 row_scales{w.row_scales[rows[0]], w.row_scales[rows[1]], w.row_scales[rows[2]],
                                w.row_scales[rows[3]]};
        for (; s + 4 <= n_scales; s += 4) {
            Uint4 v;  // four groups of each row
            for (int r = 0; r < 4; r++) {
                uint32_t four;
                std::memcpy(&four, w.row_levels(rows[r]) + s, sizeof four);
                v[r] = four;
            }
            for (int j = 0; j < 4; j++, v >>= 8)
                put(s + j, __builtin_convertvector(Int4(v & 15), Float4) * row_scales, Int4(v >> 4 & 15));
        }
    } else if (w.scales != nullptr) {
        for (; s + 4 <= n_scales; s += 4) {
            Uint4 scales[4], zeros{};
            for (int r = 0; r < 4; r++) {
                scales[r] = Uint4(widen4(w.row_halfs(rows[r]) + s));
                uint16_t four = 0;
                if (w.zeros != nullptr) std::memcpy(&four, w.row_zeros(rows[r]) + s / 2, sizeof four);
                zeros[r] = four;
            }
            transpose<4>(scales);
            for (int j = 0; j < 4; j++, zeros >>= 4)
                put(s + j, Float4(scales[j]), Int4(zeros & 15) + (w.bits == 8 ? offset : 0));
        }
    }
    for (; s < n_scales; s++) {
        Float4 scales;
        Int4 zeros;
        for (int r = 0; r < 4; r++) {
            scales[r] = w.scale(rows[r], s);
            zeros[r] = w.bits == 8 ? offset : w.zero(rows[r], s);
        }
        put(s, scales, zeros);
    }
}

// What a kernel is compiled for.
template <int bits_, bool is_sparse_, bool two_level_, int group_size_>
struct LowbitFormat {
    static constexpr int bits = bits_, group_size = group_size_;
    static constexpr bool is_sparse = is_sparse_, two_level = two_level_;
};

// Adds a group to four rows' sums. load(r, v) is vector v of row r's codes, each times 2^left.
template <class Isa, class Format, int left, class Load>
inline Float4 add_group(Float4 sums, const int8_t* x, const float* scales, const int32_t* zeros, Load load) {
    constexpr int step = 4 * Isa::lanes;
    typename Isa::Ints acc[4] = {Isa::splat(0), Isa::splat(0), Isa::splat(0), Isa::splat(0)};
#pragma GCC unroll 4
    for (int v = 0; v < Format::group_size / step; v++) {
        const auto from = Isa::load(x + v * step);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            if constexpr (Format::bits == 8) {
                acc[r] = Isa::dot4(acc[r], load(r, v), from);
            } else {
                acc[r] = LowbitOps<Isa>::dot(acc[r], load(r, v), from);
            }
        }
    }
    Int4 total = Isa::add_lanes(acc[0], acc[1], acc[2], acc[3]) >> left;
    if (Format::two_level) total += total << 2;
    total -= load4<Int4>(zeros);
    return LowbitOps<Isa>::fused(sums, __builtin_convertvector(total, Float4), load4<Float4>(scales));
}

constexpr int columns_per_step = 256;  // one line of 2-bit codes, two of 4-bit codes

// Group g of a step, from `codes`, where the step begins in each row. Lines are blocks of 64 bytes.
template <class Isa, class Format, int g>
inline Float4 add_packed_group(Float4 sums, const uint8_t* const (&codes)[4], const int8_t* x,
                               const float* scales, const int32_t* zeros) {
    using Ints = typename Isa::Ints;
    constexpr int per_byte = 8 / Format::bits, step = 4 * Isa::lanes;
    // A group lies in one part of the bytes, in 64 bytes or half of them.
    constexpr int line = g * Format::group_size / (64 * per_byte),
                  part = g * Format::group_size / 64 % per_byte, byte = g * Format::group_size % 64;
    // Where dot takes any byte, codes stay where they are in it, as multiples of 2^left.
    constexpr int shift = part * Format::bits, left = LowbitOps<Isa>::takes_bytes ? shift : 0;
    constexpr int mask = ((1 << Format::bits) - 1) << left;
    return add_group < Isa, Format,
           Format::bits == 8
               ? 0
               : left > (sums, x + g * Format::group_size, scales + 4 * g, zeros + 4 * g, [&](int r, int v) {
                     const uint8_t* from = codes[r] + line * 64 + byte + v * step;
                     if constexpr (Format::bits == 8) {
                         return Isa::flipped(Isa::load(from));
                     } else {
                         typedef uint16_t Words __attribute__((vector_size(sizeof(Ints))));
                         Words words;
                         std::memcpy(&words, from, sizeof words);
                         return Ints((left > 0 ? words : words >> shift) & uint16_t(mask * 0x0101));
                     }
                 });
}

// Rows `rows` of w times token t of x.
template <class Isa, class Format>
__attribute__((noinline)) Float4 dot_four_rows(const Int8Matrix& x, int t, const LowbitMatrix& w,
                                               const int (&rows)[4], const RowTables& tables) {
    constexpr int group_size = Format::group_size, n_groups = columns_per_step / group_size,
                  step_bytes = columns_per_step * Format::bits / 8;
    const uint8_t* codes[4];
    for (int r = 0; r < 4; r++) codes[r] = w.row_codes(rows[r]);
    const int8_t* x_codes = x.row_codes(t);
    const float* scales = tables.scales;
    const int32_t* zeros = tables.zeros;
    // Rows lie one behind the other: the same places of the four that come so much later.
    const size_t four = 4 * w.n_code_bytes(), ahead = (prefetch_distance + four - 1) / four * four;
    Float4 sums{};
    int k = 0;
    for (; !Format::is_sparse && k + columns_per_step <= w.n_cols; k += columns_per_step) {
        for (int r = 0; r < 4; r++) {
            for (int line = 0; line < step_bytes; line += 64) __builtin_prefetch(codes[r] + line + ahead);
        }
        [&]<int... g>(std::integer_sequence<int, g...>) {
            ((sums = add_packed_group<Isa, Format, g>(sums, codes, x_codes, scales, zeros)), ...);
        }
        (std::make_integer_sequence<int, n_groups>());
        for (int r = 0; r < 4; r++) codes[r] += step_bytes;
        x_codes += columns_per_step, scales += 4 * n_groups, zeros += 4 * n_groups;
    }
    alignas(64) uint8_t unpacked[4][columns_per_step];
    for (; k < w.n_cols; k += columns_per_step) {
        const int n = std::min(columns_per_step, w.n_cols - k);
        for (int r = 0; r < 4; r++) {
            if (Format::is_sparse) __builtin_prefetch(w.row_codes(rows[r]) + k / 4 + ahead);
            unpack_columns(unpacked[r], w, rows[r], k, n, Isa::flip);
        }
        for (int j = 0; j < n; j += group_size, x_codes += group_size, scales += 4, zeros += 4)
            sums = add_group<Isa, Format, 0>(sums, x_codes, scales, zeros, [&](int r, int v) {
                return Isa::load(unpacked[r] + j + v * 4 * Isa::lanes);
            });
    }
    return sums;
}

using DotFourRows = Float4 (*)(const Int8Matrix&, int, const LowbitMatrix&, const int (&)[4],
                               const RowTables&);

// dot_four_rows for a matrix of w's format.
template <class Isa, int group_size>
inline DotFourRows dot_of(const LowbitMatrix& w) {
    if (w.bits == 8) return dot_four_rows<Isa, LowbitFormat<8, false, false, group_size>>;
    if (w.mask != nullptr) return dot_four_rows<Isa, LowbitFormat<4, true, false, group_size>>;
    if (w.bits == 4) return dot_four_rows<Isa, LowbitFormat<4, false, false, group_size>>;
    if (w.levels != nullptr) return dot_four_rows<Isa, LowbitFormat<2, false, true, group_size>>;
    return dot_four_rows<Isa, LowbitFormat<2, false, false, group_size>>;
}

// Each row of the weights is read from memory once, whatever the number of tokens.
template <class Isa>
inline void lowbit_by_rows(const Int8Matrix& x, std::span<const LowbitProduct> list) {
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> zeros;
#pragma omp parallel
    for (const LowbitProduct& p : list) {
        const RowTables tables{scratch(scales, 4 * size_t(x.n_groups())),
                               scratch(zeros, 4 * size_t(x.n_groups()))};
        DotFourRows dot = nullptr;
        if constexpr (4 * Isa::lanes <= 32) {
            dot = x.group_size == 32 ? dot_of<Isa, 32>(p.w) : dot_of<Isa, 64>(p.w);
        } else {
            dot = dot_of<Isa, 64>(p.w);
        }
        const int n_rows = p.w.n_rows, last = n_rows - 1;
#pragma omp for schedule(static) nowait
        for (int i = 0; i < n_rows; i += 4) {
            const int rows[4] = {i, std::min(i + 1, last), std::min(i + 2, last), std::min(i + 3, last)};
            for (int t = 0; t < x.n_rows; t++) {
                make_tables(tables, x, t, p.w, rows, Isa::offset);
                const Float4 four = dot(x, t, p.w, rows, tables);
                for (int r = 0; r < std::min(4, n_rows - i); r++) p.out[size_t(t) * n_rows + i + r] = four[r];
            }
        }
    }
}
