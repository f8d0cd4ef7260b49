// Int8 weights in blocks of rows, times any number of tokens. With one token the speed is that of memory,
// with many, which use each weight again and again, that of the multipliers.
//
// The rows of a block lie side by side (packed_matrix.h), so that one vector holds the same four columns of
// several rows; so do the tokens, tile_tokens at a time. A tile is some vectors of a block times that many
// tokens. Four columns of a token are broadcast against a vector of weights, and every lane adds up its own
// row: no sums across lanes, and one vector of scales serves all its rows. A row is added up group by group,
// with a fused multiply-add each, as in row_kernel.h, so an output is the same to the bit either way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/cpu/int8.h"
#include "common/cpu/pin_register.h"
#include "common/cpu/quant_matrix.h"
#include "common/cpu/transpose.h"
#include "common/cpu/unroll.h"

// Activations of some tokens side by side, for a row of weights, or part of it.
struct PackedTokens {
    uint32_t* codes;  // [k / 4][token][k % 4] (eight columns, and no starts, for NeonI8mm)
    float* scales;    // [group][token]
    int32_t* starts;  // [group][token], where an accumulator starts: -offset * the sum of the group's codes
    int width;        // tokens side by side, at most tile_tokens
};

// Int8 weights of a block, from some of its rows and columns on.
struct BlockColumns {
    const uint32_t* codes;  // [k / 4][row][k % 4], flipped
    const float* scales;    // [group][row]
};

// Which columns a tile works on: n_groups whole groups; or, where a row is a single group, part of it. In the
// second case the accumulators, and not the fp32 sums, go on from one part to the next.
struct RowPart {
    int n_groups;
    int group_size;         // columns of a group, or of the part
    bool first = true;      // of the row: sums begin with 0
    bool last = true;       // of the row
    bool resumes = false;   // the accumulators lie in `out`
    bool suspends = false;  // and are to be left there
};

// Memory that is asked for while something else is worked on, a little with every four columns: asked for all
// at once, it would hold up the loads of the work itself.
struct Prefetcher {
    const char* at;
    size_t step;  // bytes

    // n_bytes from `from` on, for n_columns columns.
    Prefetcher(const void* from, size_t n_bytes, size_t n_columns)
        : at(static_cast<const char*>(from)), step((4 * n_bytes + n_columns - 1) / n_columns) {}
    void prefetch() {
        __builtin_prefetch(at, 0, 2);  // into the second-level cache
        at += step;
    }
};

// Asks for the weights of four columns of n_rows rows that will be read once, soon.
template <int n_rows>
inline void prefetch_weights(const uint32_t* codes) {
    const auto* at = reinterpret_cast<const char*>(codes) + prefetch_distance;
    for (int i = 0; i < 4 * n_rows; i += 64) __builtin_prefetch(at + i, 0, 0);
}

// out[token][row] = what was there (0 in the first part) + n_tokens tokens times n_vectors vectors of rows of
// a block of n_rows. The accumulators of all tokens stay in registers, so a vector of weights is loaded once
// for n_tokens multiplications. once: no other token reads these weights, which come from memory. Inlined,
// g++ 12 would run out of registers.
template <class Isa, int n_rows, int n_vectors, int n_tokens, bool once>
__attribute__((noinline)) void tile(float* out, PackedTokens x, BlockColumns w, const RowPart& part,
                                    Prefetcher& next) {
    Prefetcher ahead = next;  // a copy, so that it stays in registers
    constexpr int lanes = Isa::lanes;
    auto at = [&](int j, int v) { return out + (j * n_vectors + v) * lanes; };
    typename Isa::Floats sums[n_tokens][n_vectors];
    for (int j = 0; j < n_tokens; j++) {
        for (int v = 0; v < n_vectors; v++)
            sums[j][v] = part.first ? Isa::zero() : Isa::load_floats(at(j, v));
    }
    for (int g = 0; g < part.n_groups; g++) {
        typename Isa::Ints acc[n_tokens][n_vectors];
        for (int j = 0; j < n_tokens; j++) {
            for (int v = 0; v < n_vectors; v++) acc[j][v] = Isa::splat(x.starts[j]);
        }
        for (int j = 0; j < n_tokens && part.resumes; j++) {
            for (int v = 0; v < n_vectors; v++) acc[j][v] = Isa::load(at(j, v));
        }
        UNROLL(4)
        for (int k = 0; k < part.group_size; k += 4) {
            if constexpr (once) {
                prefetch_weights<n_rows>(w.codes);
            } else {
                ahead.prefetch();
            }
            typename Isa::Ints codes[n_vectors];
            for (int v = 0; v < n_vectors; v++) codes[v] = Isa::load(w.codes + v * lanes);
            for (int j = 0; j < n_tokens; j++) {
                const auto four = Isa::splat(static_cast<int32_t>(x.codes[j]));
                for (int v = 0; v < n_vectors; v++) {
                    acc[j][v] = Isa::dot4(acc[j][v], codes[v], four);
                    pin_register(acc[j][v]);
                }
            }
            x.codes += x.width;
            w.codes += n_rows;
        }
        if (part.suspends) {
            next = ahead;
            // Without the request to unroll, g++ 12 would keep acc in memory all the time.
            UNROLL(8)
            for (int j = 0; j < n_tokens; j++) {
                UNROLL(4)
                for (int v = 0; v < n_vectors; v++) {
                    Isa::store(at(j, v), acc[j][v]);
                }
            }
            return;
        }
        for (int j = 0; j < n_tokens; j++) {
            for (int v = 0; v < n_vectors; v++) {
                sums[j][v] =
                    Isa::add_scaled(sums[j][v], acc[j][v], Isa::scales(w.scales + v * lanes, x.scales[j]));
            }
        }
        x.scales += x.width;
        x.starts += x.width;
        w.scales += n_rows;
    }
    next = ahead;
    for (int j = 0; j < n_tokens; j++) {
        for (int v = 0; v < n_vectors; v++) Isa::store(at(j, v), sums[j][v]);
    }
}

// Vectors of rows that tiles of `width` tokens multiply at once: twice as many where half the accumulators
// would be free.
template <class Isa, int n_rows>
constexpr int tile_vectors(int width) {
    return 2 * width <= Isa::tile_tokens && 2 * Isa::panel_vectors * Isa::lanes <= n_rows
               ? 2 * Isa::panel_vectors
               : Isa::panel_vectors;
}

// The tile for 1 .. n tokens.
template <class Isa, int n_rows, int n_vectors, int n>
inline void tile_of(int n_tokens, float* out, const PackedTokens& x, const BlockColumns& w,
                    const RowPart& part, bool once, Prefetcher& next) {
    if (n_tokens == n) {
        if (once) return tile<Isa, n_rows, n_vectors, n, true>(out, x, w, part, next);
        return tile<Isa, n_rows, n_vectors, n, false>(out, x, w, part, next);
    }
    if constexpr (n > 1) tile_of<Isa, n_rows, n_vectors, n - 1>(n_tokens, out, x, w, part, once, next);
}

// out = n_tokens tokens times all rows of a block of n_rows, a few vectors after the other: (n_rows / rows of
// a tile, x.width, rows of a tile).
template <class Isa, int n_rows>
inline void multiply_columns(int n_tokens, float* out, const PackedTokens& x, const BlockColumns& w,
                             const RowPart& part, bool once, Prefetcher& next) {
    constexpr int few = tile_vectors<Isa, n_rows>(1), many = Isa::panel_vectors;
    const int rows = tile_vectors<Isa, n_rows>(x.width) * Isa::lanes;
    for (int r = 0; r < n_rows; r += rows, out += x.width * rows) {
        const BlockColumns from{w.codes + r, w.scales + r};
        if (rows == many * Isa::lanes) {
            tile_of<Isa, n_rows, many, Isa::tile_tokens>(n_tokens, out, x, from, part, once, next);
        } else if constexpr (few != many) {
            tile_of<Isa, n_rows, few, Isa::tile_tokens / 2>(n_tokens, out, x, from, part, once, next);
        }
    }
}

// Tokens that lie side by side: tiles of the same size.
template <class Isa>
constexpr int tile_width(int n_tokens) {
    const int n_tiles = (n_tokens + Isa::tile_tokens - 1) / Isa::tile_tokens;
    return (n_tokens + n_tiles - 1) / n_tiles;
}

// Packs tokens t .. t + to.width - 1 of x. Those past the last get zeros.
template <class Isa>
inline void pack_tokens(const PackedTokens& to, const QuantRows& x, int t) {
    const int n_valid = std::min(to.width, x.n_rows - t), groups = n_groups(x);
    auto pack = [&](auto* packed, const auto* rows, int n_words) {
        if (to.width == Isa::tile_tokens)
            return pack_words<Isa::tile_tokens>(packed, to.width, rows, n_words, n_valid, n_words, 0);
        const auto* from = reinterpret_cast<const char*>(rows);
        for (int j = 0; j < to.width; j++) {
            for (int word = 0; word < n_words; word++) {
                auto* place = packed + size_t(word) * to.width + j;
                *place = 0;
                if (j < n_valid) std::memcpy(place, from + 4 * (size_t(j) * n_words + word), 4);
            }
        }
    };
    pack(to.codes, row_codes(x, t), x.n_cols / 4);
    pack(to.scales, row_scales(x, t), groups);
    pack(to.starts, row_sums(x, t), groups);
    for (int i = 0; i < groups * to.width; i++) to.starts[i] *= -Isa::offset;
}
