// A matrix packed for the kernels, when a model is loaded: a copy in which rows lie side by side.
//
// Some rows make a block. In it, all that a row has lies next to the same of the other rows: words of 4 bytes
// of codes and of the mask; scales, zero points, levels. [row][j] of a table becomes [j][row] of the block.
// So one vector holds the same word of several rows, and a block is one stream of memory, or two with a mask.
// The last block is filled up with rows of zeros. docs/cpu-kernels.md has a picture.
//
// A word of int8 codes is four columns, flipped as the instruction set wants them (int8.h). Codes of 2 and 4
// bits are put into another order first (order_codes): a word of 4 bits is eight columns, sixteen if it is
// 2:4 sparse, four codes in the low halves of its bytes and the next four in the high halves; one of 2 bits
// is sixteen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <vector>

#include "engine/cpu/expand_rows.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/transpose.h"
#include "engine/os/files.h"
#include "engine/os/memory.h"
#include "engine/os/threads.h"

struct PackedMatrix {
    QuantMatrix w;                 // its tables are packed
    const void* loaded = nullptr;  // instead: the matrix as OtherKernels have it
};

// Rows of a block: as many as a tile multiplies, and at least a cache line of words.
template <class Isa>
constexpr int block_rows = std::max(16, Isa::lanes* Isa::panel_vectors);

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

// Transposes rows i .. i + n - 1 of a table of n_rows rows of n_values: value j of the r-th goes to to[j * n
// + r]. Rows past the last are zeros. Words of 4 bytes are xor-ed with flip.
template <class Isa, int n>
inline void pack_block(uint32_t* to, const uint32_t* table, int i, int n_rows, size_t n_values,
                       uint32_t flip) {
    for (int r = 0; r < n; r += Isa::lanes) {
        const int row = std::min(i + r, n_rows);
        pack_words<Isa::lanes>(to + r, n, table + size_t(row) * n_values, n_values, n_rows - row,
                               int(n_values), flip);
    }
}
template <class Isa, int n, class T>
inline void pack_block(T* to, const T* table, int i, int n_rows, size_t n_values, uint32_t) {
    for (size_t j = 0; j < n_values; j++) {
        for (int r = 0; r < n; r++)
            to[j * n + r] = i + r < n_rows ? table[size_t(i + r) * n_values + j] : T{};
    }
}

// Calls pack(b) for each block of `rows` rows of a table of n_rows, in all threads. What was read of a mapped
// file need not stay in memory beside the copy. It is given back while nobody reads beside it: with a page
// that is read come those around it.
inline void pack_blocks(const void* table, int n_rows, size_t row_bytes, int rows, auto pack) {
    const auto* from = static_cast<const uint8_t*>(table);
    const int n_blocks = (n_rows + rows - 1) / rows;
    const int part = int(std::max<size_t>(1, (1 << 20) / (row_bytes * size_t(rows))));
    for (int first = 0; first < n_blocks; first += part) {
        const int n = std::min(part, n_blocks - first), n_read = std::min(n * rows, n_rows - first * rows);
        parallel_for(n, [&](int b) { pack(first + b); });
        drop_mapped(from,
                    row_bytes * (size_t(first) * size_t(rows) + size_t(n_read)));  // and what came again
    }
}

// The packed matrices of a model, and their memory.
class PackedMatrices {
  public:
    // Packs w, whose memory is only read. Null if this build has no kernels for it. Throws
    // std::runtime_error if there is no memory.
    const PackedMatrix* add(const QuantMatrix& w);

    // The same for one instruction set.
    template <class Isa>
    const PackedMatrix* add(const QuantMatrix& w) {
        QuantMatrix p = w;
        const size_t groups = size_t(n_scales(w));
        if (w.bits == 8) {
            p.codes = packed<Isa, uint32_t>(w.codes, w.n_rows, code_bytes(w), Isa::flip * 0x01010101u);
        } else {
            p.codes = w.bits == 2   ? packed_codes<Isa, 2>(w)
                      : w.bits == 4 ? packed_codes<Isa, 4>(w)
                      : w.bits == 5 ? packed_codes<Isa, 5>(w)
                                    : packed_codes<Isa, 6>(w);
        }
        p.mask = packed<Isa, uint32_t>(w.mask, w.n_rows, mask_bytes(w));
        p.zeros = packed<Isa, uint8_t>(w.zeros, w.n_rows, zero_bytes(w));
        p.levels = packed<Isa, uint8_t>(w.levels, w.n_rows, groups);
        if (w.scale_type == QUANT_GEMM_GROUP_FP16) {
            p.scales = packed<Isa, uint16_t>(w.scales, w.n_rows, groups * sizeof(uint16_t));
        } else {
            const size_t n_values = w.scale_type == QUANT_GEMM_GROUP_FP32 ? groups : 1;
            p.scales = packed<Isa, uint32_t>(w.scales, w.n_rows, n_values * sizeof(float));
        }
        return &matrices_.emplace_back(PackedMatrix{p});
    }

  private:
    // A table of n_rows rows of row_bytes in blocks, value by value; null if there is none.
    template <class Isa, class Value, class T>
    const T* packed(const T* table, int n_rows, size_t row_bytes, uint32_t flip = 0) {
        if (table == nullptr) return nullptr;
        constexpr int n = block_rows<Isa>;
        const auto* from = reinterpret_cast<const Value*>(table);
        auto* to = static_cast<Value*>(memory(row_bytes * n * size_t((n_rows + n - 1) / n)));
        const size_t n_values = row_bytes / sizeof(Value);
        pack_blocks(table, n_rows, row_bytes, n, [&](int b) {
            pack_block<Isa, n>(to + n_values * n * size_t(b), from, b * n, n_rows, n_values, flip);
        });
        return reinterpret_cast<const T*>(to);
    }

    // Codes of less than 8 bits in blocks, the columns of a word one behind the other.
    template <class Isa, int bits>
    const uint8_t* packed_codes(const QuantMatrix& w) {
        constexpr int n = block_rows<Isa>;
        const size_t row_bytes = code_bytes(w), row_words = row_bytes / 4;
        auto* to = static_cast<uint32_t*>(memory(row_bytes * n * size_t((w.n_rows + n - 1) / n)));
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
            pack_block<Isa, n>(to + row_words * n * size_t(b), rows, 0, n_rows, row_words, 0);
        });
        return reinterpret_cast<const uint8_t*>(to);
    }

    // Room for n bytes at the beginning of a cache line, in huge pages.
    void* memory(size_t n) {
        n = (n + 63) / 64 * 64;
        if (n > left_) {
            // A chunk is address space: what is not used of it takes no memory. Few chunks have few edges,
            // where pages are not huge.
            left_ = std::max(n, size_t{64} << 20 << std::min<size_t>(chunks_.size(), 4));
            try {
                chunks_.emplace_back(left_, "packed weights");
            } catch (const std::runtime_error&) {  // address space is limited (ulimit -v)
                left_ = n;
                chunks_.emplace_back(left_, "packed weights");
            }
            next_ = chunks_.back().as<uint8_t>();
        }
        next_ += n, left_ -= n;
        return next_ - n;
    }

    std::vector<LazyMemory> chunks_;
    uint8_t* next_ = nullptr;  // in the last chunk
    size_t left_ = 0;          // bytes from there on
    std::deque<PackedMatrix> matrices_;
};
