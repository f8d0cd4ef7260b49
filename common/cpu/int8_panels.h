// Weights in panels, times any number of tokens. With one token the speed is that of memory, with many, which
// use each weight again and again, that of the multipliers.
//
// The weights of some rows, a panel, are packed side by side, so that one vector holds the same four columns
// of each row; so are the tokens, tile_tokens at a time. A tile is a panel times that many tokens. Four
// columns of a token are broadcast against a vector of weights, and every lane adds up its own row: no sums
// across lanes, and one vector of scales serves all rows. A row is added up group by group, with a fused
// multiply-add each, as in int8_rows.h, so an output is the same to the bit either way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "common/cpu/int8.h"
#include "common/cpu/int8_pack.h"
#include "common/cpu/pin_register.h"
#include "common/cpu/scratch.h"
#include "common/cpu/unroll.h"
#include "common/os/threads.h"

// Bytes of a panel that are worked on at a time: they stay in or near the first-level cache for all tokens.
constexpr int panel_block_bytes = 1 << 14;

// Which columns a tile works on: n_groups whole groups; or, where a row is a single group, part of it. In the
// second case the accumulators, and not the fp32 sums, go on from block to block.
struct Block {
    int n_groups;
    int group_size;         // columns of a group, or of the part
    bool first = true;      // of the row: sums begin with 0
    bool last = true;       // of the row
    bool resumes = false;   // the accumulators lie in `out`
    bool suspends = false;  // and are to be left there
};

// Memory that is asked for while something else is worked on, a little with every four columns: asked for all
// at once, it would hold up the loads of the work itself.
struct Ahead {
    const char* at;
    size_t step;        // bytes
    bool once = false;  // what is asked for will be read once, and soon

    // n_bytes from `from` on, for n_columns columns.
    Ahead(const void* from, size_t n_bytes, size_t n_columns)
        : at(static_cast<const char*>(from)), step((4 * n_bytes + n_columns - 1) / n_columns) {}
    // So many lines of 64 bytes: into the second-level cache, or past it, if they will be read once.
    template <int n_lines = 1, bool read_once = false>
    void prefetch() {
        for (int i = 0; i < n_lines; i++) __builtin_prefetch(at + 64 * i, 0, read_once ? 0 : 2);
        at += step;
    }
};

// out[token][row] = what was there (0 in the first block) + n_tokens tokens times a panel. The accumulators
// of all tokens stay in registers, so a vector of weights is loaded once for n_tokens multiplications. once:
// no other tile reads the panel. Inlined, g++ 12 would run out of registers.
template <class Isa, int n_tokens, bool once>
__attribute__((noinline)) void tile(float* out, PackedTokens x, PackedPanel w, const Block& block,
                                    Ahead& next) {
    Ahead ahead = next;  // a copy, so that it stays in registers
    constexpr int lanes = Isa::lanes, vectors = Isa::panel_vectors;
    constexpr int n_lines = once ? (4 * lanes * vectors + 63) / 64 : 1;
    auto at = [&](int j, int v) { return out + (j * vectors + v) * lanes; };
    typename Isa::Floats sums[n_tokens][vectors];
    for (int j = 0; j < n_tokens; j++) {
        for (int v = 0; v < vectors; v++) sums[j][v] = block.first ? Isa::zero() : Isa::load_floats(at(j, v));
    }
    for (int g = 0; g < block.n_groups; g++) {
        typename Isa::Ints acc[n_tokens][vectors];
        for (int j = 0; j < n_tokens; j++) {
            for (int v = 0; v < vectors; v++) acc[j][v] = Isa::splat(x.starts[j]);
        }
        for (int j = 0; j < n_tokens && block.resumes; j++) {
            for (int v = 0; v < vectors; v++) acc[j][v] = Isa::load(at(j, v));
        }
        UNROLL(4)
        for (int k = 0; k < block.group_size; k += 4) {
            ahead.prefetch<n_lines, once>();
            typename Isa::Ints codes[vectors];
            for (int v = 0; v < vectors; v++) codes[v] = Isa::load(w.codes + v * lanes);
            for (int j = 0; j < n_tokens; j++) {
                const auto four = Isa::splat(static_cast<int32_t>(x.codes[j]));
                for (int v = 0; v < vectors; v++) {
                    acc[j][v] = Isa::dot4(acc[j][v], codes[v], four);
                    pin_register(acc[j][v]);
                }
            }
            x.codes += x.width;
            w.codes += lanes * vectors;
        }
        if (block.suspends) {
            next = ahead;
            // Without the request to unroll, g++ 12 would keep acc in memory all the time.
            UNROLL(8)
            for (int j = 0; j < n_tokens; j++) {
                UNROLL(2)
                for (int v = 0; v < vectors; v++) {
                    Isa::store(at(j, v), acc[j][v]);
                }
            }
            return;
        }
        for (int j = 0; j < n_tokens; j++) {
            for (int v = 0; v < vectors; v++) {
                sums[j][v] =
                    Isa::add_scaled(sums[j][v], acc[j][v], Isa::scales(w.scales + v * lanes, x.scales[j]));
            }
        }
        x.scales += x.width;
        x.starts += x.width;
        w.scales += lanes * vectors;
    }
    next = ahead;
    for (int j = 0; j < n_tokens; j++) {
        for (int v = 0; v < vectors; v++) Isa::store(at(j, v), sums[j][v]);
    }
}

// The tile for 1 .. tile_tokens tokens.
template <class Isa, int n = Isa::tile_tokens>
inline void tile_of(int n_tokens, float* out, const PackedTokens& x, const PackedPanel& w, const Block& block,
                    Ahead& next) {
    if (n_tokens == n) {
        if (next.once) return tile<Isa, n, true>(out, x, w, block, next);
        return tile<Isa, n, false>(out, x, w, block, next);
    }
    if constexpr (n > 1) tile_of<Isa, n - 1>(n_tokens, out, x, w, block, next);
}

// Bytes of a row's codes.
inline size_t bytes_of_row(const Int8Matrix& w) { return size_t(w.n_cols); }

// Where a panel is packed that is not packed yet: codes of some columns, and scales of whole rows.
struct PanelMemory {
    uint32_t* codes;
    float* scales;
};

// out[token][row] = rows i .. i + panel_rows - 1 of w times all tokens, a block of columns after the other.
// W has Int8Matrix's n_rows, n_cols, group_size, n_groups() and row_codes(), and functions of its own for the
// bytes of a row, for a panel that is packed, and to pack one that is not.
template <class Isa, class W>
inline void panel_product(float* out, int n_tokens, const PackedTokens& x, const PanelMemory& memory,
                          const W& w, int i) {
    constexpr int n_rows = panel_rows<Isa>;
    const PackedPanel packed = packed_panel<Isa>(w, i);
    const int n_tiles = (n_tokens + x.width - 1) / x.width;
    // A packed panel that is read once needs no blocks.
    const int max_cols = packed.codes != nullptr && n_tiles == 1 ? w.n_cols : panel_block_bytes / n_rows;
    // Panels are one stream. A tile that reads it alone asks for what comes a little later; tiles that read a
    // panel in turns, all together for the next one, and at the end of the matrix for nothing new.
    const bool has_next = i + 2 * n_rows <= w.n_rows;
    Ahead next(w.row_codes(has_next ? i + n_rows : i), has_next ? n_rows * bytes_of_row(w) : 0,
               size_t(n_tiles) * w.n_cols);
    if (packed.codes != nullptr && n_tiles == 1) {
        next = Ahead(reinterpret_cast<const char*>(packed.codes) + prefetch_distance,
                     size_t(n_rows) * w.n_cols, size_t(w.n_cols));
        next.once = true;
    }
    // As many whole groups as fit into a block; or a part, if the row is one long group.
    const bool parts = w.n_groups() == 1 && w.n_cols > max_cols;
    const int width = parts ? max_cols : std::max(1, max_cols / w.group_size) * w.group_size;
    const size_t n_blocks = (w.n_cols + width - 1) / width;
    if (packed.codes == nullptr) pack_scales<Isa>(memory.scales, w, i);
    for (size_t b = 0; b < n_blocks; b++) {
        const int k = int(b) * width, n_cols = std::min(width, w.n_cols - k);
        const bool first = b == 0, last = b + 1 == n_blocks;
        const Block block = parts ? Block{1, n_cols, true, last, !first, !last}
                                  : Block{n_cols / w.group_size, w.group_size, first, last};
        PackedPanel columns = packed;
        if (packed.codes != nullptr) {
            columns.codes += size_t(k) / 4 * n_rows;
        } else {
            pack_codes<Isa>(memory.codes, w, i, k, n_cols);
            columns = {memory.codes, memory.scales};
        }
        columns.scales += size_t(k / w.group_size) * n_rows;
        for (int tile = 0; tile < n_tiles; tile++) {
            const int token = tile * x.width;
            const size_t codes = (size_t(token) * w.n_cols + size_t(k) * x.width) / 4;
            const size_t group = size_t(token) * w.n_groups() + size_t(k / w.group_size) * x.width;
            tile_of<Isa>(std::min(x.width, n_tokens - token), out + size_t(token) * n_rows,
                         {x.codes + codes, x.scales + group, x.starts + group, x.width}, columns, block,
                         next);
        }
    }
}

template <class Isa, class Product = Int8Product>
inline void products_by_panels(const Int8Matrix& x, std::span<const Product> list) {
    constexpr int n_rows = panel_rows<Isa>;
    const int width = tile_width<Isa>(x.n_rows), n_tiles = (x.n_rows + width - 1) / width;
    const size_t tile_groups = size_t(x.n_groups()) * width, tile_codes = size_t(x.n_cols) / 4 * width;
    static thread_local std::vector<uint32_t> token_codes;
    static thread_local std::vector<float> token_scales;
    static thread_local std::vector<int32_t> token_starts;
    const PackedTokens tokens{scratch(token_codes, n_tiles * tile_codes),
                              scratch(token_scales, n_tiles * tile_groups),
                              scratch(token_starts, n_tiles * tile_groups), width};
    auto pack = [&](int tile) {
        pack_tokens<Isa>({tokens.codes + tile * tile_codes, tokens.scales + tile * tile_groups,
                          tokens.starts + tile * tile_groups, width},
                         x, tile * width);
    };
    if (n_tiles == 1) pack(0);  // threads need not meet for that
    if (n_tiles > 1) parallel_for(n_tiles, pack);
    auto n_panels = [](const Product& p) { return (p.w.n_rows + n_rows - 1) / n_rows; };
    // Threads take panels in long runs, one stream for each, and few at a time near the end.
    parallel_lists(list, n_panels, [&](const Product& p, int begin, int end) {
        static thread_local std::vector<uint32_t> codes;
        static thread_local std::vector<float> scales, sums;
        const size_t block_bytes = std::max<size_t>(panel_block_bytes, size_t(n_rows) * x.group_size);
        const PanelMemory memory{scratch(codes, block_bytes / 4),
                                 scratch(scales, size_t(x.n_groups()) * n_rows)};
        // A panel's outputs, token after token. The last panel may have rows that the matrix has not.
        float* outputs = scratch(sums, size_t(n_tiles) * width * n_rows);
        for (int i = begin; i < end; i++) {
            const int n_out = p.w.n_rows, first = i * n_rows, n_valid = std::min(n_rows, n_out - first);
            panel_product<Isa>(outputs, x.n_rows, tokens, memory, p.w, first);
            for (int t = 0; t < x.n_rows; t++) {
                const float* from = outputs + t * n_rows;
                float* to = p.out + size_t(t) * n_out + first;
                if (n_valid == n_rows) {
                    std::memcpy(to, from, n_rows * sizeof(float));  // a few stores, no call
                } else {
                    std::copy_n(from, n_valid, to);
                }
            }
        }
    });
}
