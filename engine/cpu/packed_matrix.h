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
#include <deque>
#include <stdexcept>
#include <vector>

#include "engine/cpu/quant_matrix.h"
#include "engine/os/memory.h"

struct PackedMatrix {
    QuantMatrix w;                 // its tables are packed
    const void* loaded = nullptr;  // instead: the matrix as OtherKernels have it
};

// Rows of a block: as many as a tile multiplies, and at least a cache line of words.
template <class Isa>
constexpr int block_rows = std::max(16, Isa::lanes* Isa::panel_vectors);

// The packed matrices of a model, and their memory.
class PackedMatrices {
  public:
    // Packs w, whose memory is only read. Null if this build has no kernels for it. Throws
    // std::runtime_error if there is no memory.
    const PackedMatrix* add(const QuantMatrix& w);

    // The same for one instruction set (pack_matrix.h).
    template <class Isa>
    const PackedMatrix* add(const QuantMatrix& w);

  private:
    template <class Isa, class Value, class T>
    const T* packed(const T* table, int n_rows, size_t row_bytes, uint32_t flip = 0);
    template <class Isa, int bits>
    const uint8_t* packed_codes(const QuantMatrix& w);

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
