// Rows into columns, in words of 4 bytes: rows lie side by side afterwards, so that one vector holds the same
// word of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "engine/cpu/vector.h"

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
// bytes, for n rows. Rows from n_valid on, which are not there, count as 0.
inline void pack_each_word(void* packed, int columns, const void* rows, size_t stride, int n, int n_valid,
                           int n_words, uint32_t flip) {
    const char* from = static_cast<const char*>(rows);
    char* to = static_cast<char*>(packed);
    for (int row = 0; row < n; row++) {
        for (int word = 0; word < n_words; word++) {
            uint32_t value = 0;
            if (row < n_valid) std::memcpy(&value, from + 4 * (row * stride + word), 4);
            value ^= flip;
            std::memcpy(to + 4 * (size_t(word) * columns + row), &value, 4);
        }
    }
}

// The same by squares of n words, a power of two, as far as there are whole ones.
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
    pack_each_word(to + 4 * size_t(word) * columns, columns, from + 4 * word, stride, n, n_valid,
                   n_words - word, flip);
}
