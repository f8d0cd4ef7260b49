// What goes with the codes of a packed matrix: scales, zero points, masks. And blocks of its codes expanded
// to int8, for many tokens: everything from there on is tile_kernel.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/cpu/lowbit_ops.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/vector.h"

// The scales and zero points of some rows of a packed matrix that lie side by side, as many as Isa has lanes.
template <class Isa>
struct BlockGroups {
    static constexpr int lanes = Isa::lanes, n = block_rows<Isa>;
    typedef int32_t Whole __attribute__((vector_size(4 * lanes)));

    // The tables of the block, from the first of these rows on.
    const Half* halfs = nullptr;
    const float* floats = nullptr;
    size_t float_step = 0;  // to the scales of the next group; 0: they are those of the whole rows
    const uint8_t *zeros = nullptr, *levels = nullptr, *int8_scales = nullptr;
    int same_zero;  // of all groups, where `zeros` is null

    // Rows i, i + 1, ... of a matrix with so many groups in a row. Inlined, so that products have the
    // pointers in registers.
    __attribute__((always_inline)) BlockGroups(const QuantMatrix& w, int i, int n_groups)
        : same_zero(w.zero_point) {
        const size_t first = size_t(i) / n * n, row = size_t(i) - first, groups = size_t(n_groups);
        if (w.scale_type == QUANT_GEMM_GROUP_FP16) {
            halfs = static_cast<const Half*>(w.scales) + first * groups + row;
        } else {
            if (w.scale_type == QUANT_GEMM_GROUP_FP32) float_step = n;
            floats = static_cast<const float*>(w.scales) + first * (float_step > 0 ? groups : 1) + row;
        }
        if (w.zeros != nullptr) zeros = w.zeros + first * zero_bytes(w) + row;
        if (w.levels != nullptr)
            (w.kind == QUANT_GEMM_TWO_LEVEL ? levels : int8_scales) = w.levels + first * groups + row;
    }

    static Whole bytes(const uint8_t* from) { return Whole(LowbitOps<Isa>::widened(from)); }
    // What is taken off the codes of group s; with two levels, off five times the codes.
    Whole zero(int s) const {
        if (levels != nullptr) return bytes(levels + s * n) >> 4;
        return zeros != nullptr ? bytes(zeros + s / 2 * n) >> s % 2 * 4 & 15 : Whole{} + same_zero;
    }
    typename Isa::Floats scale(int s) const {
        if (halfs != nullptr) {
            float wide[lanes];
            widen(wide, halfs + s * n, lanes);
            return Isa::load_floats(wide);
        }
        const auto row_scales = Isa::load_floats(floats + size_t(s) * float_step);
        if (levels == nullptr && int8_scales == nullptr) return row_scales;
        const Whole level =
            levels != nullptr ? bytes(levels + s * n) & 15 : bytes(int8_scales + s * n) << 24 >> 24;
        return Isa::add_scaled(Isa::zero(), typename Isa::Ints(level), row_scales);
    }
};

// Masks of some rows of a block that lie side by side, each word 32 columns of a row; the lowest bits are
// column k's, a multiple of 4.
template <class Isa>
inline auto mask_words(const uint8_t* masks, int k) {
    typedef uint32_t Words __attribute__((vector_size(4 * Isa::lanes)));
    Words words;
    std::memcpy(&words, masks + size_t(k / 32 * 4 * block_rows<Isa>), sizeof words);
    return words >> uint32_t(k % 32);
}

// Rows i, i + 1, ..., as many as Isa has lanes, of a packed low-bit matrix: n_cols columns from k on, whole
// groups, as the int8 codes that are multiplied, flipped. Column k + j of the r-th is in word
// to[j / 4 * block_rows<Isa> + r].
template <class Format>
inline void expand_block(uint32_t* to, const QuantMatrix& w, int i, int k, int n_cols) {
    using Isa = typename Format::Isa;
    constexpr int columns = 4 * Format::fours, unit_bytes = 4 * Format::unit * block_rows<Isa>;
    const int first = i / block_rows<Isa> * block_rows<Isa>;
    const uint8_t* from =
        w.codes + size_t(first) * code_bytes(w) + 4 * size_t(i - first) + size_t(k / columns) * unit_bytes;
    const uint8_t* masks =
        Format::sparse ? w.mask + size_t(first) * mask_bytes(w) + 4 * (i - first) : nullptr;
    const BlockGroups<Isa> groups(w, i, n_scales(w));
    const typename Format::Table table(w.table);
    for (int end = k + n_cols; k < end;) {
        const auto zeros = typename Format::Words(groups.zero(k / w.group)) * 0x01010101u;
        const int group_end = std::min(end, (k / w.group + 1) * w.group);
        UNROLL_BY(4)
        for (; k < group_end; k += columns) {
            typename Format::Words words[Format::unit], mask{};
            for (int u = 0; u < Format::unit; u++)
                std::memcpy(&words[u], from + 4 * u * block_rows<Isa>, sizeof words[u]);
            if (Format::sparse) mask = mask_words<Isa>(masks, k);
            UNROLL(8)
            for (int f = 0; f < Format::fours; f++, to += block_rows<Isa>) {
                const auto codes = Format::weights(words, f, zeros, mask, table);
                std::memcpy(to, &codes, sizeof codes);
            }
            from += unit_bytes;
        }
    }
}
