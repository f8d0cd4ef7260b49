// fp32 values of some tokens, a row per token: what the forward pass hands from one operation to the next.
// And what attention makes of each position, which traces keep.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/os/memory.h"

// Gives a buffer that stays from call to call more room. Happens once in a run: no part of the loops that
// ask.
template <class T>
[[gnu::noinline, gnu::cold]] void grow_scratch(std::vector<T>& buffer, size_t n) {
    if (!MemoryCount::counts_at_once(n * sizeof(T))) buffer.resize(n);
}

// Room for n values in `buffer`, which grows if it has to. What was there is lost or not: do not read it.
// Null, and no room, where memory is counted (MemoryCount).
template <class T>
inline T* scratch(std::vector<T>& buffer, size_t n) {
    if (buffer.size() < n) grow_scratch(buffer, n);
    return buffer.data();
}

// (n_rows, n_cols) fp32, one row after another. Memory for max_rows rows is allocated once; operations set
// n_rows of what they write to the number of tokens that they were given.
struct Rows {
    int n_rows = 0, n_cols = 0;
    std::vector<float> values;  // (max_rows, n_cols)

    Rows() = default;
    Rows(int max_rows, int columns) : n_cols(columns) { scratch(values, size_t(max_rows) * size_t(columns)); }

    float* row(int i) { return values.data() + size_t(i) * size_t(n_cols); }
    const float* row(int i) const { return values.data() + size_t(i) * size_t(n_cols); }

    // Makes room for at least `rows` rows.
    void reserve(int rows) { scratch(values, size_t(rows) * size_t(n_cols)); }

    // Drops all rows but the last n.
    void keep_last(int n) {
        std::copy(row(n_rows - n), row(n_rows), row(0));
        n_rows = n;
    }
};

// One of the products that read the same input: out (n_tokens, w.n_rows) = x times w transposed. Matrix is a
// program's own type, (n_rows, n_cols).
template <class Matrix>
struct MatrixProduct {
    Rows& out;
    const Matrix& w;
};

// What each query head makes of each position, before or after softmax, or times the scale of its value:
// (n_tokens, n_heads, width), where token t sees the first pos + t + 1 of `width` positions, and the others
// are 0. Only traces want it kept.
struct HeadScores {
    bool wanted = false;
    int n_tokens = 0, n_heads = 0, pos = 0;
    size_t width = 0;
    std::vector<float> values;

    HeadScores() = default;
    // For chunks of up to max_tokens tokens. Where memory is counted, what they take with n_positions.
    HeadScores(bool is_wanted, int max_tokens, int heads, int n_positions) : wanted(is_wanted) {
        if (wanted)
            MemoryCount::counts_as_used(uint64_t(max_tokens) * uint64_t(heads) * uint64_t(n_positions) *
                                        sizeof(float));
    }
    // Makes room for the scores of a chunk, if they are wanted.
    void resize(int tokens, int heads, int first_pos, size_t columns) {
        n_tokens = tokens, n_heads = heads, pos = first_pos, width = columns;
        if (!wanted) return;
        const size_t n = size_t(tokens) * size_t(heads) * columns;
        if (values.capacity() < n) values = {};  // first, so that there are never two of them
        values.assign(n, 0.0f);
    }
    // Row token * n_heads + head; null if not wanted.
    float* row(int i) { return wanted ? values.data() + size_t(i) * width : nullptr; }
    const float* row(int i) const { return wanted ? values.data() + size_t(i) * width : nullptr; }
};
