// Low-bit weights packed when a model is loaded, in the place of its rows.
//
// 16 rows make a row block. In it, all that rows have lies side by side, row next to row: words of 4 bytes of
// the codes (with all the codes that share these bytes) and of the mask, scales, zero points, levels. Table t
// of a block, which had t[row][i], has t[i][row]. So 64 bytes hold one word of each row, whatever the
// instruction set, and a block is one stream of memory, or two with a mask. The last rows, fewer than 16,
// stay as they are.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/cpu/int8_pack.h"
#include "common/cpu/lowbit.h"
#include "common/cpu/lowbit_ops.h"
#include "common/cpu/unroll.h"

// Turns a block's table of n values a row, in place. `copy` has room for it.
template <class T>
inline void turn_table(const T* table, size_t n, std::vector<uint8_t>& copy) {
    if (table == nullptr) return;
    auto* to = const_cast<T*>(table);
    const auto* from = reinterpret_cast<const T*>(scratch(copy, row_block * n * sizeof(T)));
    std::memcpy(copy.data(), table, row_block * n * sizeof(T));
    if constexpr (sizeof(T) == 4) {
        for (int r = 0; r < row_block; r += 4)
            pack_words<4>(to + r, row_block, from + r * n, n, 4, int(n), 0);
    } else {
        for (size_t i = 0; i < n; i++) {
            for (int r = 0; r < row_block; r++) to[i * row_block + r] = from[r * n + i];
        }
    }
}

// Whether a mask keeps two of each four columns; true without a mask. What a row is with another mask depends
// on all of the row, so such a matrix is not packed.
inline bool is_two_of_four(const LowbitMatrix& w) {
    if (w.mask == nullptr) return true;
    std::atomic<bool> good = true;
    parallel_ranges(int64_t(size_t(w.n_rows) * w.n_mask_bytes()), [&](size_t begin, size_t end) {
        int all = 1;
        for (size_t i = begin; i < end; i++)
            all &=
                std::popcount(unsigned(w.mask[i] & 15)) == 2 && std::popcount(unsigned(w.mask[i] >> 4)) == 2;
        if (all == 0) good = false;
    });
    return good;
}

// Packs w in its own memory, which nobody else reads or writes; from then on w.packed has to be true.
// Precondition: is_two_of_four(w).
inline void pack_in_place(const LowbitMatrix& w) {
    parallel_ranges(w.n_rows / row_block, [&](int begin, int end) {
        std::vector<uint8_t> copy;
        for (int i = begin; i < end; i++) {
            const int row = i * row_block;
            turn_table(reinterpret_cast<const uint32_t*>(w.row_codes(row)), w.n_code_bytes() / 4, copy);
            if (w.mask != nullptr)
                turn_table(reinterpret_cast<const uint32_t*>(w.row_mask(row)), w.n_mask_bytes() / 4, copy);
            if (w.scales != nullptr) turn_table(w.row_halfs(row), size_t(w.n_scales()), copy);
            if (w.zeros != nullptr) turn_table(w.row_zeros(row), w.n_zero_bytes(), copy);
            if (w.levels != nullptr) turn_table(w.row_levels(row), size_t(w.n_scales()), copy);
        }
    });
}

// What the groups of some neighbouring rows of a block have, as many as Isa has lanes: scales, and what is
// taken off the codes.
template <class Isa>
struct BlockGroups {
    static constexpr int lanes = Isa::lanes;
    typedef int32_t Whole __attribute__((vector_size(4 * lanes)));

    // The tables of the block, from the first of these rows on.
    const Half* scales = nullptr;
    const uint8_t *zeros = nullptr, *levels = nullptr;
    const float* row_scales = nullptr;
    int zero_point;

    // Rows i, i + 1, ..., which are in a block of w. Inlined, so that products have the pointers in
    // registers.
    __attribute__((always_inline)) BlockGroups(const LowbitMatrix& w, int i) : zero_point(w.zero_point) {
        const int first = i / row_block * row_block, row = i - first;
        if (w.scales != nullptr) scales = w.row_halfs(first) + row;
        if (w.zeros != nullptr) zeros = w.row_zeros(first) + row;
        if (w.levels != nullptr) levels = w.row_levels(first) + row;
        if (w.row_scales != nullptr) row_scales = w.row_scales + i;
    }

    static Whole bytes(const uint8_t* from) { return Whole(LowbitOps<Isa>::widened(from)); }
    // Of group s: off the codes; with two levels, off five times the codes.
    Whole zero(int s) const {
        if (levels != nullptr) return bytes(levels + s * row_block) >> 4;
        return zeros != nullptr ? bytes(zeros + s / 2 * row_block) >> s % 2 * 4 & 15 : Whole{} + zero_point;
    }
    typename Isa::Floats scale(int s) const {
        if (levels != nullptr) {
            const Whole level = bytes(levels + s * row_block) & 15;
            return Isa::add_scaled(Isa::zero(), typename Isa::Ints(level), Isa::load_floats(row_scales));
        }
        if (scales == nullptr) return Isa::load_floats(row_scales);
        float wide[lanes];
        widen(wide, scales + s * row_block, lanes);
        return Isa::load_floats(wide);
    }
};

// Whether panels have words of four columns, as blocks have them; NeonI8mm's have eight.
template <class Isa>
constexpr bool packs_blocks = packed_place<Isa>(1, 0) == 4;

// Words of masks, each 32 columns of one of some rows of a block, shifted so that the lowest bits are column
// k's.
template <class Isa>
inline typename Isa::Ints mask_words(const uint8_t* masks, unsigned k) {
    typedef uint32_t Words __attribute__((vector_size(4 * Isa::lanes)));
    Words words;
    std::memcpy(&words, masks + size_t(k / 32 * 4 * row_block), sizeof words);
    return typename Isa::Ints(words >> k % 32);
}

// As pack_codes of int8_pack.h, of rows i and on that are in a block: n_cols columns from k on, a multiple of
// 256.
template <class Isa, int bits, bool sparse>
inline void pack_block_codes(uint32_t* to, int to_columns, const LowbitMatrix& w, int i, int k, int n_cols) {
    constexpr int lanes = Isa::lanes, per_byte = 8 / bits;
    constexpr int step = sparse ? 2 : 1;  // columns for each code
    typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
    const int first = i / row_block * row_block;
    const uint8_t* from = w.row_codes(first) + (size_t(k) / (per_byte * step) * row_block + 4 * (i - first));
    // In each byte of a word: what is kept of the codes, and the group's zero point.
    constexpr uint32_t keep = (0xffu >> (8 - bits)) * 0x01010101u;
    using Ops = LowbitOps<Isa>;
    const uint8_t* masks = sparse ? w.row_mask(first) + 4 * (i - first) : nullptr;
    const bool two_level = w.levels != nullptr;
    static thread_local std::vector<uint32_t> table;
    const BlockGroups<Isa> groups(w, i);
    const int shift = w.group == w.n_cols ? 31 : std::countr_zero(unsigned(w.group));
    const int first_group = k >> shift, n_groups = ((k + n_cols - 1) >> shift) - first_group + 1;
    uint32_t* zeros = scratch(table, size_t(n_groups) * lanes);
    for (int s = 0; s < n_groups; s++) {
        const Words four = Words(groups.zero(first_group + s)) * 0x01010101u;
        std::memcpy(zeros + s * lanes, &four, sizeof four);
    }
    typedef uint8_t Codes __attribute__((vector_size(4 * lanes)));
    for (int column = 0, block = 64; column < n_cols; block /= 2) {
        for (; column + block * per_byte * step <= n_cols; column += block * per_byte * step) {
            for (int b = 0; b < block; b += 4, from += 4 * row_block) {
                Words word;
                std::memcpy(&word, from, sizeof word);
                UNROLL(4)
                for (int part = 0; part < per_byte; part++) {
                    const int at = column + step * (part * block + b);
                    Codes zero, code = Codes(word >> uint32_t(part * bits) & keep);
                    std::memcpy(&zero, zeros + (((k + at) >> shift) - first_group) * lanes, sizeof zero);
                    if (two_level) code += code << 2;
                    code -= zero;
                    for (int pair = 0; pair < step; pair++) {
                        auto result = typename Isa::Ints(code);
                        if constexpr (sparse) {
                            const auto c = unsigned(k + at + 4 * pair);
                            const auto places = Ops::sparse_places(mask_words<Isa>(masks, c));
                            result = Ops::placed(result, places, pair);
                        }
                        result = Isa::flipped(result);
                        std::memcpy(to + size_t(at / 4 + pair) * to_columns, &result, sizeof result);
                    }
                }
            }
        }
    }
}
template <class Isa>
inline void pack_block_codes(uint32_t* to, int to_columns, const LowbitMatrix& w, int i, int k, int n_cols) {
    if (w.mask != nullptr) return pack_block_codes<Isa, 4, true>(to, to_columns, w, i, k, n_cols);
    if (w.bits == 8) return pack_block_codes<Isa, 8, false>(to, to_columns, w, i, k, n_cols);
    if (w.bits == 4) return pack_block_codes<Isa, 4, false>(to, to_columns, w, i, k, n_cols);
    pack_block_codes<Isa, 2, false>(to, to_columns, w, i, k, n_cols);
}
