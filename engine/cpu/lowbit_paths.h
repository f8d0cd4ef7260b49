// As quant_paths.h, with matrices of 2 to 6 bits, and int8 codes under other scales: their codes packed;
// scales and zero points of a block; blocks expanded to int8, for many tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/cpu/expand_rows.h"
#include "engine/cpu/half.h"
#include "engine/cpu/lowbit_ops.h"
#include "engine/cpu/quant_paths.h"
#include "engine/cpu/row_kernel.h"
#include "engine/cpu/tile_kernel.h"

// The codes of a plane of a row, n_words words, with the columns of each word one behind the other: four in
// the lowest bits of its bytes, the next four above them, and so on. Each `run` words are followed by `gap`
// words of another plane.
template <int bits>
inline void order_codes(uint32_t* to, const uint8_t* from, size_t n_words, size_t run = 1, size_t gap = 0) {
    constexpr int parts = 8 / bits;
    static thread_local std::vector<uint8_t> unpacked;
    const uint8_t* codes = scratch(unpacked, 4 * parts * n_words);
    unpack_codes<bits>(unpacked.data(), from, int(4 * parts * n_words));
    for (size_t i = 0; i < n_words; i++) {
        uint32_t& word = to[i + i / run * gap];
        word = 0;
        for (int part = 0; part < parts; part++, codes += 4) {
            uint32_t four;
            std::memcpy(&four, codes, sizeof four);
            word |= four << part * bits;
        }
    }
}

// Codes of less than 8 bits in blocks, the columns of a word one behind the other.
template <class Isa, int bits>
inline const uint8_t* packed_codes(PackedMatrices& to_memory, const QuantMatrix& w) {
    constexpr int n = block_rows<Isa>;
    const size_t row_bytes = code_bytes(w), row_words = row_bytes / 4;
    auto* to = static_cast<uint32_t*>(to_memory.memory(row_bytes * n * size_t((w.n_rows + n - 1) / n)));
    pack_blocks(w.codes, w.n_rows, row_bytes, n, [&](int b) {
        static thread_local std::vector<uint32_t> words;
        uint32_t* rows = scratch(words, row_words * n);
        const int n_rows = std::min(n, w.n_rows - b * n);
        for (int r = 0; r < n_rows; r++) {
            uint32_t* row = rows + row_words * size_t(r);
            const uint8_t* stored = w.codes + row_bytes * size_t(b * n + r);
            if constexpr (bits <= 4) {
                order_codes<bits>(row, stored, row_words);
            } else {  // a word of upper bits, then those of the low bits
                constexpr size_t n_low = bits == 5 ? 4 : 2, unit = n_low + 1;
                const size_t low_words = row_words / unit * n_low;
                order_codes<bits - 4>(row, stored + 4 * low_words, row_words / unit, 1, n_low);
                order_codes<4>(row + 1, stored, low_words, n_low, 1);
            }
        }
        pack_block<Isa>(to + row_words * n * size_t(b), rows, row_words, n_rows, int(row_words), 0);
    });
    return reinterpret_cast<const uint8_t*>(to);
}

// The scales and zero points of some rows of a packed matrix that lie side by side, as many as Isa has lanes.
template <class Isa>
struct BlockGroups {
    static constexpr int lanes = Isa::lanes, n = block_rows<Isa>;
    typedef int32_t Whole __attribute__((vector_size(4 * lanes)));

    // The tables of the block, from the first of these rows on.
    const Half* halfs = nullptr;
    const float* floats = nullptr;
    size_t float_step = 0;  // to the scales of the next group; 0: they are those of the whole rows
    const uint8_t *zeros = nullptr, *levels = nullptr;
    bool two_level;  // what `levels` are; otherwise int8 scales
    int same_zero;   // of all groups, where `zeros` is null
    int shift;       // from a group that is asked for to its group of weights

    // Rows i, i + 1, ... of a matrix with so many groups in a row. Inlined, so that products have the
    // pointers in registers.
    __attribute__((always_inline)) BlockGroups(const QuantMatrix& w, int i, int n_groups, int group_shift = 0)
        : two_level(w.kind == QUANT_GEMM_TWO_LEVEL), same_zero(w.zero_point), shift(group_shift) {
        const size_t first = size_t(i) / n * n, row = size_t(i) - first, groups = size_t(n_groups);
        if (w.scale_type == QUANT_GEMM_GROUP_FP16) {
            halfs = static_cast<const Half*>(w.scales) + first * groups + row;
        } else {
            if (w.scale_type == QUANT_GEMM_GROUP_FP32) float_step = n;
            floats = static_cast<const float*>(w.scales) + first * (float_step > 0 ? groups : 1) + row;
        }
        if (w.zeros != nullptr) zeros = w.zeros + first * zero_bytes(w) + row;
        if (w.levels != nullptr) levels = w.levels + first * groups + row;
    }
    // Those of vector v of a tile, by groups of activations.
    __attribute__((always_inline)) BlockGroups(const BlockColumns& w, int v)
        : BlockGroups(*w.w, w.row + v * lanes, w.n_scales, w.shift) {}

    static Whole bytes(const uint8_t* from) { return Whole(LowbitOps<Isa>::widened(from)); }
    // What is taken off the codes of group g; with two levels, off five times the codes.
    Whole zero(int g) const {
        const int s = g >> shift;
        if (two_level) return bytes(levels + s * n) >> 4;
        return zeros != nullptr ? bytes(zeros + s / 2 * n) >> s % 2 * 4 & 15 : Whole{} + same_zero;
    }
    typename Isa::Floats scale(int g) const {
        const int s = g >> shift;
        if (halfs != nullptr) {
            float wide[lanes];
            widen(wide, halfs + s * n, lanes);
            return Isa::load_floats(wide);
        }
        const auto row_scales = Isa::load_floats(floats + size_t(s) * float_step);
        if (levels == nullptr) return row_scales;
        const Whole level = bytes(levels + s * n), value = two_level ? level & 15 : level << 24 >> 24;
        return Isa::add_scaled(Isa::zero(), typename Isa::Ints(value), row_scales);
    }
    // Asks for the largest part of what group g has.
    void prefetch(int g, bool second_level) const {
        const size_t at = size_t(g >> shift) * n;
        if (levels != nullptr) {
            prefetch_once<n>(levels + at, second_level);
        } else if (halfs != nullptr) {
            prefetch_once<n * sizeof(Half)>(halfs + at, second_level);
        }
    }
};

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
            if (Format::sparse) mask = Format::mask(masks, k);
            UNROLL(8)
            for (int f = 0; f < Format::fours; f++, to += block_rows<Isa>) {
                const auto codes = Format::weights(words, f, zeros, mask, table);
                std::memcpy(to, &codes, sizeof codes);
            }
            from += unit_bytes;
        }
    }
}

struct AllForms {
    template <class Isa>
    static QuantMatrix pack(PackedMatrices& to, const QuantMatrix& w) {
        QuantMatrix p = w;
        const size_t groups = size_t(n_scales(w));
        if (w.bits == 8) {
            p.codes = to.packed<Isa, uint32_t>(w.codes, w.n_rows, code_bytes(w), Isa::flip * 0x01010101u);
        } else {
            with_format<Isa>(w, [&](auto format) { p.codes = packed_codes<Isa, format.bits>(to, w); });
        }
        p.mask = to.packed<Isa, uint32_t>(w.mask, w.n_rows, mask_bytes(w));
        p.zeros = to.packed<Isa, uint8_t>(w.zeros, w.n_rows, zero_bytes(w));
        p.levels = to.packed<Isa, uint8_t>(w.levels, w.n_rows, groups);
        if (w.scale_type == QUANT_GEMM_GROUP_FP16) {
            p.scales = to.packed<Isa, uint16_t>(w.scales, w.n_rows, groups * sizeof(uint16_t));
        } else {
            const size_t n_values = w.scale_type == QUANT_GEMM_GROUP_FP32 ? groups : 1;
            p.scales = to.packed<Isa, uint32_t>(w.scales, w.n_rows, n_values * sizeof(float));
        }
        return p;
    }

    template <class Isa>
    static const uint32_t* block_codes(BlockMemory& memory, const QuantProduct& p, int b, int k, int n_cols) {
        if (p.w.bits == 8) return Int8Forms::block_codes<Isa>(memory, p, b, k, n_cols);
        constexpr int n = block_rows<Isa>;
        const int i = b * n, n_rows = std::min(n, p.w.n_rows - i);
        if (p.packed != nullptr) {
            uint32_t* to = scratch(memory.codes, size_t(n) * n_cols / 4);
            with_format<Isa>(p.w, [&](auto format) {
                for (int r = 0; r < n; r += Isa::lanes)
                    expand_block<decltype(format)>(to + r, p.packed->w, i + r, k, n_cols);
            });
            return to;
        }
        int8_t* rows = scratch(memory.expanded, size_t(n_rows) * n_cols);
        for (int r = 0; r < n_rows; r++) expand_columns(rows + size_t(r) * n_cols, p.w, i + r, k, n_cols);
        return Int8Forms::pack_rows<Isa>(memory, rows, size_t(n_cols), n_rows, n_cols);
    }

    template <class Isa>
    static const float* block_scales(BlockMemory& memory, const QuantProduct& p, int b) {
        constexpr int n = block_rows<Isa>;
        const int groups = n_groups(p.w), times = p.w.group / p.w.group_size, i = b * n;
        if (p.packed != nullptr && p.w.bits == 8 && p.w.scale_type != QUANT_GEMM_GROUP_FP16 && times == 1)
            return Int8Forms::block_scales<Isa>(memory, p, b);
        float* to = scratch(memory.scales, size_t(groups) * n);
        if (p.packed != nullptr) {
            for (int r = 0; r < n; r += Isa::lanes) {
                const BlockGroups<Isa> rows(p.packed->w, i + r, n_scales(p.w));
                for (int g = 0; g < groups; g++) Isa::store(to + g * n + r, rows.scale(g / times));
            }
            return to;
        }
        static thread_local std::vector<float> row_memory;
        float* row = scratch(row_memory, size_t(groups));
        for (int r = 0; r < n; r++) {
            if (i + r < p.w.n_rows) expand_scales(row, p.w, i + r);
            for (int g = 0; g < groups; g++) to[g * n + r] = i + r < p.w.n_rows ? row[g] : 0.0f;
        }
        return to;
    }

    // A row's codes and scales are read where they lie if they are int8, and fp32 for each group of
    // activations; otherwise they are expanded first.
    template <class Isa>
    static void multiply_rows(float* out, const QuantRows& x, const QuantMatrix& w, int begin, int end) {
        static thread_local std::vector<int8_t> code_memory;
        static thread_local std::vector<float> scale_memory;
        static thread_local std::vector<int32_t> zero_memory;
        const size_t row_bytes = code_bytes(w), mask_row = mask_bytes(w), groups = size_t(n_groups(w));
        const bool in_place = w.bits == 8, is_sparse = w.kind == QUANT_GEMM_SPARSE;
        const bool has_scales =
            w.scale_type != QUANT_GEMM_GROUP_FP16 && w.levels == nullptr && size_t(n_scales(w)) == groups;
        const bool has_zeros = !is_sparse && w.kind != QUANT_GEMM_TABLE;
        // At the beginning of a cache line, so that no store goes into two.
        int8_t* codes = scratch(code_memory, size_t(w.n_cols) + 63);
        codes += -reinterpret_cast<uintptr_t>(codes) % 64;
        float* scales = scratch(scale_memory, groups);
        int32_t* zeros = scratch(zero_memory, groups);
        if (!has_zeros) std::fill_n(zeros, groups, 0);
        // The rows after one follow as one stream, or two.
        auto prefetch = [](const uint8_t* from, size_t n) {
            for (size_t b = 0; b < n; b += 64) __builtin_prefetch(from + row_prefetch_distance + b);
        };
        for (int i = begin; i < end; i++) {
            const uint8_t* stored = w.codes + size_t(i) * row_bytes;
            CodeRow row{codes, scales, zeros, w.kind == QUANT_GEMM_TWO_LEVEL ? 5 : 1};
            if (in_place) {
                row.codes = reinterpret_cast<const int8_t*>(stored);
            } else {
                prefetch(stored, row_bytes);
                if (is_sparse) prefetch(w.mask + size_t(i) * mask_row, mask_row);
                if (has_zeros) {
                    unpack_columns(reinterpret_cast<uint8_t*>(codes), w, i, 0, w.n_cols);
                    expand_zeros(zeros, w, i);
                } else {  // what a mask leaves out has no zero point
                    expand_columns(codes, w, i, 0, w.n_cols);
                }
            }
            if (has_scales) {
                row.scales = static_cast<const float*>(w.scales) + size_t(i) * groups;
            } else {
                expand_scales(scales, w, i);
            }
            in_place ? multiply_row<Isa, true>(out + i, size_t(w.n_rows), x, row)
                     : multiply_row<Isa, false>(out + i, size_t(w.n_rows), x, row);
        }
    }

    // Calls use(Format{}) with the format of w's packed words.
    template <class Isa>
    static void with_format(const QuantMatrix& w, auto use) {
        if (w.kind == QUANT_GEMM_SPARSE) return use(WordFormat<Isa, 4, QUANT_GEMM_SPARSE>());
        if (w.kind == QUANT_GEMM_TWO_LEVEL) return use(WordFormat<Isa, 2, QUANT_GEMM_TWO_LEVEL>());
        if (w.kind == QUANT_GEMM_TABLE && w.bits == 4) return use(WordFormat<Isa, 4, QUANT_GEMM_TABLE>());
        if (w.kind == QUANT_GEMM_TABLE) return use(WordFormat<Isa, 5, QUANT_GEMM_TABLE>());
        if (w.bits == 6) return use(WordFormat<Isa, 6, QUANT_GEMM_UNSIGNED>());
        if (w.bits == 4) return use(WordFormat<Isa, 4, QUANT_GEMM_UNSIGNED>());
        use(WordFormat<Isa, 2, QUANT_GEMM_UNSIGNED>());
    }
};
