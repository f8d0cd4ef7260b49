// Blocks of packed low-bit weights expanded to int8, for many tokens: everything from there on is
// tile_kernel.h.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/cpu/block_groups.h"
#include "common/cpu/lowbit_ops.h"
#include "common/cpu/packed_matrix.h"
#include "common/cpu/scratch.h"
#include "common/cpu/unroll.h"

// Rows i, i + 1, ..., as many as Isa has lanes, of a packed low-bit matrix: n_cols columns from k on, a
// multiple of 256, as the int8 codes that are multiplied, flipped. Column k + j of the r-th is in word to[j /
// 4 * to_rows + r].
template <class Isa, int bits, bool sparse>
inline void expand_block(uint32_t* to, int to_rows, const QuantMatrix& w, int i, int k, int n_cols) {
    constexpr int lanes = Isa::lanes, per_byte = 8 / bits;
    constexpr int step = sparse ? 2 : 1;  // columns for each code
    typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
    const int first = i / lowbit_block_rows * lowbit_block_rows;
    const uint8_t* from = w.codes + size_t(first) * code_bytes(w) +
                          (size_t(k) / (per_byte * step) * lowbit_block_rows + 4 * size_t(i - first));
    // In each byte of a word: what is kept of the codes, and the group's zero point.
    constexpr uint32_t keep = (0xffu >> (8 - bits)) * 0x01010101u;
    using Ops = LowbitOps<Isa>;
    const uint8_t* masks = sparse ? w.mask + size_t(first) * mask_bytes(w) + 4 * (i - first) : nullptr;
    const bool two_level = w.kind == QUANT_GEMM_TWO_LEVEL;
    static thread_local std::vector<uint32_t> table;
    const BlockGroups<Isa, lowbit_block_rows> groups(w, i);
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
            for (int b = 0; b < block; b += 4, from += 4 * lowbit_block_rows) {
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
                        std::memcpy(to + size_t(at / 4 + pair) * to_rows, &result, sizeof result);
                    }
                }
            }
        }
    }
}
template <class Isa>
inline void expand_block(uint32_t* to, int to_rows, const QuantMatrix& w, int i, int k, int n_cols) {
    if (w.kind == QUANT_GEMM_SPARSE) return expand_block<Isa, 4, true>(to, to_rows, w, i, k, n_cols);
    if (w.bits == 4) return expand_block<Isa, 4, false>(to, to_rows, w, i, k, n_cols);
    expand_block<Isa, 2, false>(to, to_rows, w, i, k, n_cols);
}
