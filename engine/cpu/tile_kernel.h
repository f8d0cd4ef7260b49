// Packed weights times any number of tokens. With one token the speed is that of memory, with many, which use
// each weight again and again, that of the multipliers.
//
// The rows of a block lie side by side (packed_matrix.h), so that one vector holds the same word of several
// rows; so do the tokens, tile_tokens at a time. A tile is some vectors of a block times that many tokens.
// Four columns of a token are broadcast against four columns of the weights, and every lane adds up its own
// row: no sums across lanes, and one vector of scales serves all its rows. What zero points have added to the
// sum of a group is the zero point times the sum of the activations' codes, and is taken off. A row is added
// up group by group, with a fused multiply-add each, as in row_kernel.h, so an output is the same to the bit
// either way.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "engine/cpu/instructions.h"
#include "engine/cpu/int8.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/transpose.h"
#include "engine/cpu/vector.h"

// Activations of some tokens side by side, for a row of weights, or part of it.
struct PackedTokens {
    const int8_t* codes;  // [k / 4][token][k % 4] (NeonI8mm: [k / 8][token][k % 8])
    const float* scales;  // [group][token]
    const int32_t* sums;  // [group][token], of the group's codes
    int width;            // tokens side by side, at most tile_tokens
};

// Weights of a block, from one of its rows and one of its columns on.
struct BlockColumns {
    const uint32_t* codes;  // [word][row]
    const float* scales;    // [group][row], of int8 weights; otherwise null
    const QuantMatrix* w;   // packed, 2 to 6 bits: scales and zero points are its
    int row;                // that row's number in the matrix
    // Of w, what would take a division: its groups in a row, and the shift from a group of activations to the
    // group of weights, which is 1, 2 or 4 of them, or the whole row.
    int n_scales, shift;

    // From r rows later on.
    BlockColumns from(int r) const {
        return {codes + r, scales + (scales != nullptr ? r : 0), w, row + r, n_scales, shift};
    }
};

// Whether packed weights that are read once are asked for into the second-level cache. AMD's cores decode
// fastest with them in the first. Intel's ask for no more than 16 lines at once there, half of what memory
// could bring, and for 48 in the second (Golden Cove; Intel's optimization manual).
inline bool asks_second_level() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel") != 0;
#else
    return false;
#endif
}

// Asks for n_bytes that will be read once, soon. What lies in other streams than codes needs that as much:
// software asks for the codes, so the hardware does not foresee the rest.
template <size_t n_bytes>
inline void prefetch_once(const void* at, bool second_level) {
    for (size_t i = 0; i < n_bytes; i += 64) {
        const char* line = static_cast<const char*>(at) + i;
        second_level ? __builtin_prefetch(line, 0, 2) : __builtin_prefetch(line, 0, 0);
    }
}

// Keeps the compiler from moving memory accesses past this place. Without it g++ gathers what several turns
// of a loop ask for, out of its order in memory: decode is up to 9 % slower.
inline void keep_order() { asm volatile("" ::: "memory"); }

// Words of int8 codes as tiles take them, four columns each. WordFormat (lowbit_ops.h) has those of 2 to 6
// bits.
template <class Isa_>
struct Int8Format {
    using Isa = Isa_;
    using Ints = typename Isa::Ints;
    static constexpr int bits = 8, lanes = Isa::lanes, fours = 1, unit = 1;
    static constexpr bool is_int8 = true, sparse = false, two_level = false, has_table = false;
    static constexpr bool zero_is_off = true;
    typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
    typedef int32_t Whole __attribute__((vector_size(4 * lanes)));
    struct Table {
        explicit Table(const int8_t*) {}
    };
    // The scales of a vector of rows.
    struct Groups {
        static constexpr int n = block_rows<Isa>;
        const float* scales;
        Groups(const BlockColumns& w, int v) : scales(w.scales + v * lanes) {}
        auto scale(int g) const { return Isa::load_floats(scales + g * n); }
        // Asks for what group g has.
        void prefetch(int g, bool second_level) const {
            prefetch_once<n * sizeof(float)>(scales + size_t(g) * n, second_level);
        }
    };
    static constexpr int left(int, int) { return 0; }
    static Ints operand(const Words (&v)[1], int, int, Words, Words, const Table&) { return Ints(v[0]); }
    static Ints dot(Ints acc, Ints w, Ints x) { return Isa::dot4(acc, w, x); }
};

// Which columns a tile works on: n_groups whole groups; or, where a row is a single group, part of it. In the
// second case the accumulators, and not the fp32 sums, go on from one part to the next.
struct RowPart {
    int n_groups;
    int group_size;         // columns of a group, or of the part
    bool first = true;      // the fp32 sums begin with 0
    bool last = true;       // of the row; the tiles of i8mm ask
    bool resumes = false;   // the tile's `out` holds int32 accumulators, left by the part before
    bool suspends = false;  // and are to be left there
};

// Memory that is asked for while something else is worked on, a little with every four columns: asked for all
// at once, it would hold up the loads of the work itself.
struct Prefetcher {
    const char* at;
    size_t step;  // bytes
    void prefetch() {
        __builtin_prefetch(at, 0, 2);  // into the second-level cache
        at += step;
    }
};

// Accumulators for each vector of a tile. A dot product waits for the one before it in the same accumulator,
// some four cycles. With one token there are too few others to fill that time, and registers are free: each
// four columns of a word have an accumulator of their own.
template <class Format>
constexpr int n_chains(int n_tokens, int n_vectors) {
    if (n_tokens > 1 || n_vectors > 2) return 1;
    return std::min(Format::fours, Format::lanes == 16 ? 4 : 2);
}

// How a tile takes what it multiplies. Int8 tiles by reference: a copy made for the call would be read in
// larger parts than it was written in just before, which processors cannot forward, and hold up the first
// loads of every block (decode in A8W8: 5 %). Tiles of codes by value: by reference, g++ 12 keeps the
// pointers to their tables in memory (2 bits: a third slower).
template <class Format, class T>
using TileInput = std::conditional_t<Format::is_int8, const T&, T>;

// out[token][row], tokens block_rows apart, = what was there (0 in the first part) + n_tokens tokens times
// n_vectors vectors of rows of a block. The accumulators of all tokens stay in registers, so a vector of
// weights is loaded once for n_tokens multiplications. once: no other token reads these weights, which come
// from memory. Inlined, g++ 12 would run out of registers.
template <class Format, int n_vectors, int n_tokens, bool once>
__attribute__((noinline)) void tile(float* out, TileInput<Format, PackedTokens> tokens,
                                    TileInput<Format, BlockColumns> columns, const RowPart& part,
                                    Prefetcher& next) {
    using Isa = typename Format::Isa;
    using Ints = typename Isa::Ints;
    using Words = typename Format::Words;
    using Whole = typename Format::Whole;
    using Groups = typename Format::Groups;
    // Copies, so that they stay in registers.
    Prefetcher ahead = next;
    PackedTokens x = tokens;
    BlockColumns w = columns;
    const bool second_level = once && asks_second_level();
    constexpr int lanes = Isa::lanes, n_rows = block_rows<Isa>;
    constexpr int chains = n_chains<Format>(n_tokens, n_vectors);
    auto at = [&](int j, int v) { return out + j * n_rows + v * lanes; };
    const auto groups = [&]<size_t... v>(std::index_sequence<v...>) {
        return std::array<Groups, n_vectors>{Groups(w, int(v))...};
    }
    (std::make_index_sequence<n_vectors>());
    // Groups of 64 columns whose codes are as many bytes as codes are asked for ahead.
    constexpr int groups_ahead = prefetch_distance / (n_rows * 8 * Format::bits / (Format::sparse ? 2 : 1));
    const uint8_t* masks = nullptr;
    if constexpr (Format::sparse)
        masks = w.w->mask + size_t(w.row / n_rows * n_rows) * mask_bytes(*w.w) + 4 * (w.row % n_rows);
    const typename Format::Table table(Format::has_table ? w.w->table : nullptr);
    typename Isa::Floats sums[n_tokens][n_vectors];
    for (int j = 0; j < n_tokens; j++)
        for (int v = 0; v < n_vectors; v++)
            sums[j][v] = part.first ? Isa::zero() : Isa::load_floats(at(j, v));
    for (int g = 0, column = 0; g < part.n_groups; g++) {
        Ints acc[n_tokens][n_vectors][chains];
        for (int j = 0; j < n_tokens; j++) {
            const int32_t start = Format::zero_is_off ? -Isa::offset * x.sums[j] : 0;
            for (int v = 0; v < n_vectors; v++)
                for (int c = 0; c < chains; c++) acc[j][v][c] = Isa::splat(c == 0 ? start : 0);
        }
        for (int j = 0; j < n_tokens && part.resumes; j++)
            for (int v = 0; v < n_vectors; v++) acc[j][v][0] = Isa::load(at(j, v));
        Words zeros[n_vectors] = {};
        if constexpr (Format::sparse) {
            for (int v = 0; v < n_vectors; v++) zeros[v] = Words(groups[v].zero(g)) * 0x01010101u;
        }
        UNROLL_BY(4)
        for (int k = 0; k < part.group_size; k += 4 * Format::fours) {
            if constexpr (once) {
                constexpr int n_bytes = 4 * n_rows * Format::unit;
                const auto* codes = reinterpret_cast<const char*>(w.codes);
                prefetch_once<n_bytes>(codes + prefetch_distance, second_level);
                if (!Format::is_int8 && second_level)
                    prefetch_once<n_bytes>(codes + first_level_distance, false);
                if constexpr (Format::sparse)
                    prefetch_once<2 * n_rows>(masks + column * n_rows / 8 + prefetch_distance / 2,
                                              second_level);
                keep_order();
            } else {
                ahead.prefetch();
            }
            Words words[n_vectors][Format::unit], mask[n_vectors] = {};
            for (int v = 0; v < n_vectors; v++) {
                UNROLL(8)
                for (int u = 0; u < Format::unit; u++) {
                    std::memcpy(&words[v][u], w.codes + u * n_rows + v * lanes, sizeof words[v][u]);
                    if constexpr (!Format::is_int8)
                        pin_register(words[v][u]);  // codes are taken out one by one
                }
                if constexpr (Format::sparse) mask[v] = Format::mask(masks + 4 * v * lanes, column);
            }
            UNROLL(8)
            for (int f = 0; f < Format::fours; f++) {
                Ints codes[n_vectors];
                for (int v = 0; v < n_vectors; v++)
                    codes[v] = Format::operand(words[v], f, chains, zeros[v], mask[v], table);
                for (int j = 0; j < n_tokens; j++) {
                    const auto four = Isa::splat(load_as<int32_t>(x.codes + 4 * j));
                    for (int v = 0; v < n_vectors; v++) {
                        Ints& sum = acc[j][v][f % chains];
                        sum = Format::dot(sum, codes[v], four);
                        pin_register(sum);
                    }
                }
                x.codes += 4 * x.width;
            }
            w.codes += Format::unit * n_rows;
            if constexpr (Format::sparse) column += 4 * Format::fours;
        }
        if (part.suspends) {
            next = ahead;
            // Without the request to unroll, g++ 12 would keep acc in memory all the time.
            UNROLL(8)
            for (int j = 0; j < n_tokens; j++) {
                UNROLL(4)
                for (int v = 0; v < n_vectors; v++) Isa::store(at(j, v), acc[j][v][0]);
            }
            return;
        }
        UNROLL(4)
        for (int v = 0; v < n_vectors; v++) {
            const auto scale = groups[v].scale(g);
            Whole zero{};
            if constexpr (!Format::zero_is_off) zero = groups[v].zero(g);
            UNROLL(8)
            for (int j = 0; j < n_tokens; j++) {
                auto total = Whole(acc[j][v][0]);
                for (int c = 1; c < chains; c++) total += Whole(acc[j][v][c]) >> Format::left(c, chains);
                if constexpr (Format::two_level) total += total << 2;
                if constexpr (!Format::zero_is_off) total -= zero * x.sums[j];
                sums[j][v] = Isa::add_scaled(sums[j][v], Ints(total), scale * x.scales[j]);
            }
        }
        if constexpr (once) groups[0].prefetch(g + groups_ahead, second_level);
        x.scales += x.width;
        x.sums += x.width;
    }
    next = ahead;
    for (int j = 0; j < n_tokens; j++)
        for (int v = 0; v < n_vectors; v++) Isa::store(at(j, v), sums[j][v]);
}

// Vectors of rows that n_tokens tokens multiply at once: twice as many where half the accumulators would be
// free.
template <class Isa>
constexpr int tile_vectors(int n_tokens) {
    const int few = std::min(block_rows<Isa> / Isa::lanes, 2 * Isa::panel_vectors);
    return 2 * n_tokens <= Isa::tile_tokens ? few : Isa::panel_vectors;
}

// out (n_tokens, block_rows): as tile(), for all rows of a block, some vectors of them after the other. n
// counts down from tile_tokens to n_tokens, since tile() takes the number of tokens as a template parameter.
template <class Format, int n = Format::Isa::tile_tokens>
inline void multiply_columns(int n_tokens, float* out, PackedTokens x, BlockColumns w, const RowPart& part,
                             bool once, Prefetcher& next) {
    if constexpr (n > 1) {
        if (n_tokens < n) return multiply_columns<Format, n - 1>(n_tokens, out, x, w, part, once, next);
    }
    constexpr int n_vectors = tile_vectors<typename Format::Isa>(n), step = n_vectors * Format::lanes;
    for (int r = 0; r < block_rows<typename Format::Isa>; r += step) {
        const BlockColumns from = w.from(r);
        if (once || !Format::is_int8) {
            tile<Format, n_vectors, n, true>(out + r, x, from, part, next);
        } else {
            tile<Format, n_vectors, n, false>(out + r, x, from, part, next);
        }
    }
}

// Tokens that lie side by side: tiles of the same size.
template <class Isa>
constexpr int tile_width(int n_tokens) {
    const int n_tiles = (n_tokens + Isa::tile_tokens - 1) / Isa::tile_tokens;
    return (n_tokens + n_tiles - 1) / n_tiles;
}

// Packs `width` tokens of x from token t on. Those past the last get zeros.
template <class Isa>
inline void pack_tokens(int8_t* codes, float* scales, int32_t* sums, int width, const QuantRows& x, int t) {
    const int n_valid = std::min(width, x.n_rows - t), groups = n_groups(x);
    auto pack = [&](void* to, const void* rows, int n_words) {
        if (width == Isa::tile_tokens)
            return pack_words<Isa::tile_tokens>(to, width, rows, n_words, n_valid, n_words, 0);
        pack_each_word(to, width, rows, n_words, width, n_valid, n_words, 0);
    };
    pack(codes, row_codes(x, t), x.n_cols / 4);
    pack(scales, row_scales(x, t), groups);
    pack(sums, row_sums(x, t), groups);
}
