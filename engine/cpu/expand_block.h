// Blocks of packed low-bit weights expanded to int8, for many tokens: everything from there on is
// tile_kernel.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine/cpu/block_groups.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/unroll.h"
#include "engine/cpu/word_format.h"

// Rows i, i + 1, ..., as many as Isa has lanes, of a packed low-bit matrix: n_cols columns from k on, whole
// groups, as the int8 codes that are multiplied, flipped. Column k + j of the r-th is in word
// to[j / 4 * block_rows<Isa> + r].
template <class Format>
inline void expand_block(uint32_t* to, const QuantMatrix& w, int i, int k, int n_cols) {
    using Isa = typename Format::Isa;
    constexpr int columns = 4 * Format::fours;  // of a word
    const int first = i / block_rows<Isa> * block_rows<Isa>;
    const uint8_t* from = w.codes + size_t(first) * code_bytes(w) + 4 * size_t(i - first) +
                          size_t(k / columns) * 4 * block_rows<Isa>;
    const uint8_t* masks =
        Format::sparse ? w.mask + size_t(first) * mask_bytes(w) + 4 * (i - first) : nullptr;
    const BlockGroups<Isa> groups(w, i, n_scales(w));
    for (int end = k + n_cols; k < end;) {
        const auto zeros = typename Format::Words(groups.zero(k / w.group)) * 0x01010101u;
        const int group_end = std::min(end, (k / w.group + 1) * w.group);
        UNROLL_BY(4)
        for (; k < group_end; k += columns) {
            typename Format::Words word, mask{};
            std::memcpy(&word, from, sizeof word);
            if (Format::sparse) mask = mask_words<Isa>(masks, k);
            UNROLL(4)
            for (int f = 0; f < Format::fours; f++, to += block_rows<Isa>) {
                const auto codes = Format::weights(word, f, zeros, mask);
                std::memcpy(to, &codes, sizeof codes);
            }
            from += 4 * block_rows<Isa>;
        }
    }
}
