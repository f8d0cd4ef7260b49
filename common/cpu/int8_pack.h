// Packing: rows of weights, and tokens, side by side, so that one vector holds the same four columns of each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "common/cpu/int8.h"
#include "common/cpu/unroll.h"

// Rows of weights that are packed side by side: a panel.
template <class Isa>
constexpr int panel_rows = Isa::lanes* Isa::panel_vectors;

// Turning n vectors of n words into columns takes log2(n) steps. Each makes two vectors of two, and moves a
// bit of the lane's number into the vector's number: first within quads of words (x86's unpack, Arm's zip),
// then quads as a whole. In the end vector place<n>(i) holds word i of every row, if row i began as
// vector place<n>(i).
template <int n>
constexpr int place(int i) {
    const int quad = n == 16 ? i / 4 % 2 * 2 + i / 8 : i / 4;  // of four quads, 1 and 2 change places
    return i % 4 * (n / 4) + quad;
}
template <bool quads, class Words, uint32_t... i>
inline void transpose_step(Words& low, Words& high, Words a, Words b, std::integer_sequence<uint32_t, i...>) {
    constexpr uint32_t n = sizeof...(i);
    // Lane j of `low`, counted on from a's n lanes to b's. `high` is one quad, or half a quad, further on.
    constexpr auto from = [](uint32_t j) {
        return quads ? j / 4 * 8 + j % 4 : j / 4 * 4 + j % 4 / 2 + j % 2 * n;
    };
    constexpr uint32_t step = quads ? 4 : 2;
#ifdef __clang__
    low = __builtin_shufflevector(a, b, from(i)...);
    high = __builtin_shufflevector(a, b, (from(i) + step)...);
#else
    low = __builtin_shuffle(a, b, Words{from(i)...});
    high = __builtin_shuffle(a, b, Words{(from(i) + step)...});
#endif
}
// Always inlined: called, it would pass its vectors through memory.
template <int n, int columns = 1, class Words>
__attribute__((always_inline)) inline void transpose(Words (&v)[n]) {
    if constexpr (columns < n) {
        Words next[n];
        UNROLL(8)
        for (int i = 0; i < n / 2; i++) {
            transpose_step<(columns >= 4)>(next[2 * i], next[2 * i + 1], v[i], v[i + n / 2],
                                           std::make_integer_sequence<uint32_t, n>());
        }
        transpose<n, 2 * columns>(next);
        UNROLL(16)
        for (int i = 0; i < n; i++) v[i] = next[i];
    }
}

// Turns rows into columns: packed[word * columns + row] = rows[row * stride + word] ^ flip, in words of 4
// bytes, for n rows (a power of two). Rows from n_valid on, which are not there, count as 0.
template <int n>
inline void pack_words(void* packed, int columns, const void* rows, size_t stride, int n_valid, int n_words,
                       uint32_t flip) {
    typedef uint32_t Words __attribute__((vector_size(4 * n)));
    const char* from = static_cast<const char*>(rows);
    char* to = static_cast<char*>(packed);
    int word = 0;
    for (; n_valid >= n && word + n <= n_words; word += n) {
        Words v[n];
        UNROLL(16)
        for (int row = 0; row < n; row++)
            std::memcpy(&v[place<n>(row)], from + 4 * (row * stride + word), sizeof v[0]);
        transpose<n>(v);
        UNROLL(16)
        for (int i = 0; i < n; i++) {
            const Words column = v[place<n>(i)] ^ flip;
            std::memcpy(to + size_t(word + i) * columns * 4, &column, sizeof column);
        }
    }
    if constexpr (n > 4) {  // what is left over by smaller squares
        const int n_more = (n_words - word) / 4 * 4;
        if (n_valid >= n && n_more > 0) {
            for (int row = 0; row < n; row += 4) {
                pack_words<4>(to + 4 * (size_t(word) * columns + row), columns,
                              from + 4 * (row * stride + word), stride, 4, n_more, flip);
            }
            word += n_more;
        }
    }
    for (; word < n_words; word++) {  // the specification, for the rest
        for (int row = 0; row < n; row++) {
            uint32_t value = 0;
            if (row < n_valid) std::memcpy(&value, from + 4 * (row * stride + word), 4);
            value ^= flip;
            std::memcpy(to + 4 * (size_t(word) * columns + row), &value, 4);
        }
    }
}

// What a tile is made of, for some of the columns: activations of tile_tokens tokens, and weights of
// panel_rows rows, each four columns at a time side by side (eight, and no sums, for NeonI8mm).
struct PackedTokens {
    uint32_t* codes;  // [k / 4][token][k % 4]
    float* scales;    // [group][token]
    int32_t* starts;  // [group][token], where an accumulator starts: -offset * the sum of the group's codes
    int width;        // tokens side by side, at most tile_tokens
};
struct PackedPanel {
    const uint32_t* codes = nullptr;  // [k / 4][row][k % 4], flipped
    const float* scales = nullptr;    // [group][row]
};

// Tokens that lie side by side: tiles of the same size.
template <class Isa>
constexpr int tile_width(int n_tokens) {
    const int n_tiles = (n_tokens + Isa::tile_tokens - 1) / Isa::tile_tokens;
    return (n_tokens + n_tiles - 1) / n_tiles;
}
// Packs tokens t .. t + to.width - 1 of x. Those past the last get zeros.
template <class Isa>
inline void pack_tokens(const PackedTokens& to, const Int8Matrix& x, int t) {
    const int n_valid = std::min(to.width, x.n_rows - t), n_groups = x.n_groups();
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
    pack(to.codes, x.row_codes(t), x.n_cols / 4);
    pack(to.scales, x.row_scales(t), n_groups);
    pack(to.starts, x.row_sums(t), n_groups);
    for (int i = 0; i < n_groups * to.width; i++) to.starts[i] *= -Isa::offset;
}

// Packs rows i .. i + panel_rows - 1 of w: n_cols columns of codes from k on. Rows past the last get zeros.
template <class Isa>
inline void pack_codes(uint32_t* to, const Int8Matrix& w, int i, int k, int n_cols) {
    constexpr int n = Isa::lanes, columns = panel_rows<Isa>;
    for (int row = 0; row < columns; row += n) {
        const int n_valid = w.n_rows - i - row, first = std::min(i + row, w.n_rows);
        pack_words<n>(to + row, columns, w.row_codes(first) + k, w.n_cols / 4, n_valid, n_cols / 4,
                      Isa::flip * 0x01010101u);
    }
}
// The same rows' scales, of all columns.
template <class Isa>
inline void pack_scales(float* to, const Int8Matrix& w, int i) {
    constexpr int n = Isa::lanes, columns = panel_rows<Isa>;
    for (int row = 0; row < columns; row += n) {
        const int n_valid = w.n_rows - i - row, first = std::min(i + row, w.n_rows);
        pack_words<n>(to + row, columns, w.row_scales(first), w.n_groups(), n_valid, w.n_groups(), 0);
    }
}

// ----------------------------------------------------------------------------
// Weights that are packed once, when a model is loaded, where they lie: whole panels, one behind the other,
// each in the place of its rows. They are then read as one stream, and no row is turned again. Rows that fill
// no panel, the last ones, stay as they are.

// Where column k of a panel's row lies in its codes, in bytes.
template <class Isa>
constexpr size_t packed_place(int row, int k) {
    return (size_t(k / 4) * panel_rows<Isa> + row) * 4 + k % 4;
}

// The panel that begins with row i, if it is packed; otherwise null.
template <class Isa>
inline PackedPanel packed_panel(const Int8Matrix& w, int i) {
    if (!w.packed || i + panel_rows < Isa >> w.n_rows) return {};
    return {reinterpret_cast<const uint32_t*>(w.row_codes(i)), w.row_scales(i)};
}

// Packs w in its own memory, codes and scales, which nobody else reads or writes. From then on w.packed has
// to be true.
template <class Isa>
inline void pack_in_place(const Int8Matrix& w) {
    constexpr int n = panel_rows<Isa>;
    const size_t n_codes = size_t(n) * w.n_cols, n_scales = size_t(n) * w.n_groups();
    parallel_ranges(w.n_rows / n, [&](int begin, int end) {
        std::vector<uint32_t> codes(n_codes / 4);
        std::vector<float> scales(n_scales);
        for (int panel = begin; panel < end; panel++) {
            pack_codes<Isa>(codes.data(), w, panel * n, 0, w.n_cols);
            pack_scales<Isa>(scales.data(), w, panel * n);
            std::memcpy(const_cast<int8_t*>(w.row_codes(panel * n)), codes.data(), n_codes);
            std::copy_n(scales.data(), n_scales, const_cast<float*>(w.row_scales(panel * n)));
        }
    });
}

// Copies row i of w, packed or not: codes (n_cols,), and scales (n_groups,) unless that is null.
template <class Isa>
inline void copy_row(int8_t* codes, float* scales, const Int8Matrix& w, int i) {
    constexpr int n = panel_rows<Isa>;
    const int row = i % n, n_scales = scales != nullptr ? w.n_groups() : 0;
    const PackedPanel panel = packed_panel<Isa>(w, i - row);
    if (panel.codes == nullptr) {
        std::copy_n(w.row_codes(i), w.n_cols, codes);
        if (n_scales > 0) std::copy_n(w.row_scales(i), n_scales, scales);
        return;
    }
    const auto* from = reinterpret_cast<const uint8_t*>(panel.codes);
    for (int k = 0; k < w.n_cols; k++) codes[k] = int8_t(from[packed_place<Isa>(row, k)] ^ Isa::flip);
    for (int g = 0; g < n_scales; g++) scales[g] = panel.scales[size_t(g) * n + row];
}
