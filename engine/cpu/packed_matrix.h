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

// Some words of each row of a block, in columns: word j of row r goes to to[j * block_rows + r], xor-ed with
// flip. `rows` are n_valid rows, `stride` words apart; those that are missing are zeros.
template <class Isa>
inline void pack_block(uint32_t* to, const void* rows, size_t stride, int n_valid, int n_words,
                       uint32_t flip) {
    for (int r = 0; r < block_rows<Isa>; r += Isa::lanes) {
        const int first = std::min(r, n_valid);
        pack_words<Isa::lanes>(to + r, block_rows<Isa>,
                               static_cast<const char*>(rows) + 4 * size_t(first) * stride, stride,
                               n_valid - first, n_words, flip);
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

    // The same for one instruction set. Forms packs its tables (quant_paths.h).
    template <class Isa, class Forms>
    const PackedMatrix* add(const QuantMatrix& w) {
        return &matrices_.emplace_back(PackedMatrix{Forms::template pack<Isa>(*this, w)});
    }

    // A table of n_rows rows of row_bytes in blocks, value by value; null if there is none.
    template <class Isa, class Value, class T>
    const T* packed(const T* table, int n_rows, size_t row_bytes, uint32_t flip = 0) {
        if (table == nullptr) return nullptr;
        constexpr int n = block_rows<Isa>;
        const auto* from = reinterpret_cast<const Value*>(table);
        auto* to = static_cast<Value*>(memory(row_bytes * n * size_t((n_rows + n - 1) / n)));
        const size_t n_values = row_bytes / sizeof(Value);
        pack_blocks(table, n_rows, row_bytes, n, [&](int b) {
            Value* block = to + n_values * n * size_t(b);
            const Value* rows = from + n_values * n * size_t(b);
            const int n_valid = std::min(n, n_rows - b * n);
            if constexpr (sizeof(Value) == 4) {
                pack_block<Isa>(block, rows, n_values, n_valid, int(n_values), flip);
            } else {
                for (size_t j = 0; j < n_values; j++)
                    for (int r = 0; r < n; r++)
                        block[j * n + r] = r < n_valid ? rows[size_t(r) * n_values + j] : Value{};
            }
        });
        return reinterpret_cast<const T*>(to);
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

  private:
    std::vector<LazyMemory> chunks_;
    uint8_t* next_ = nullptr;  // in the last chunk
    size_t left_ = 0;          // bytes from there on
    std::deque<PackedMatrix> matrices_;
};
