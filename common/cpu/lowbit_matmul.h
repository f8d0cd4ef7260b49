// Products of low-bit matrices by the best path that this build has. With many tokens, codes are expanded to
// int8 while they are packed, and everything from there on is int8_panels.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "common/cpu/int8_matmul.h"
#include "common/cpu/lowbit.h"
#include "common/cpu/lowbit_blocks.h"
#include "common/cpu/lowbit_pack.h"
#include "common/cpu/lowbit_rows.h"
#include "common/os/threads.h"

// Rows i .. i + n_rows - 1 of w, as far as they are there.
inline int valid_rows(const LowbitMatrix& w, int i, int n_rows) {
    return std::clamp(w.n_rows - i, 0, n_rows);
}

// As pack_codes of int8_pack.h: n_cols columns from k on, expanded.
template <class Isa>
inline void pack_codes(uint32_t* to, const LowbitMatrix& w, int i, int k, int n_cols) {
    static thread_local std::vector<int8_t> expanded;
    constexpr int n_rows = panel_rows<Isa>;
    if (packs_blocks<Isa> && w.in_block(i + n_rows - 1)) {
        for (int r = 0; r < n_rows; r += Isa::lanes)
            pack_block_codes<Isa>(to + r, n_rows, w, i + r, k, n_cols);
        return;
    }
    const int n = valid_rows(w, i, n_rows);
    int8_t* rows = scratch(expanded, size_t(n) * n_cols);
    for (int r = 0; r < n; r++) expand_columns(rows + size_t(r) * n_cols, w, i + r, k, n_cols);
    pack_codes<Isa>(to, Int8Matrix{rows, nullptr, nullptr, n, n_cols, w.group_size}, 0, 0, n_cols);
}
template <class Isa>
inline void pack_scales(float* to, const LowbitMatrix& w, int i) {
    static thread_local std::vector<float> expanded;
    constexpr int n_rows = panel_rows<Isa>;
    if (w.in_block(i + n_rows - 1)) {
        const int times = w.group / w.group_size;
        for (int r = 0; r < n_rows; r += Isa::lanes) {
            const BlockGroups<Isa> groups(w, i + r);
            for (int g = 0; g < w.n_groups(); g++) Isa::store(to + g * n_rows + r, groups.scale(g / times));
        }
        return;
    }
    const int n = valid_rows(w, i, n_rows);
    float* rows = scratch(expanded, size_t(n) * w.n_groups());
    for (int r = 0; r < n; r++) expand_scales(rows + size_t(r) * w.n_groups(), w, i + r);
    pack_scales<Isa>(to, Int8Matrix{nullptr, rows, nullptr, n, w.n_cols, w.group_size}, 0);
}
// A panel of int8 codes is made anew each time.
template <class Isa>
inline PackedPanel packed_panel(const LowbitMatrix&, int) {
    return {};
}
inline size_t bytes_of_row(const LowbitMatrix& w) { return w.n_code_bytes(); }

// Packs weights in their own memory, which nobody else reads or writes, so that products read them as one
// stream (lowbit_pack.h). Returns what `packed` is from then on: false, and nothing has changed, for a mask
// that does not keep two of each four, and if this build has no fast path.
inline bool lowbit_pack(const LowbitMatrix& w) {
    if (int8_kernel_name(w.group_size) == std::string_view("portable") || !is_two_of_four(w)) return false;
    pack_in_place(w);
    return true;
}

// So many tokens at most are multiplied by codes as they are; more are worth expanding them to int8.
inline int max_tokens_of(const LowbitMatrix& w) { return w.packed ? 32 : 4; }

// The products of few tokens.
template <class Isa>
inline void lowbit_of_few(const Int8Matrix& x, std::span<const LowbitProduct> list) {
    auto n_blocks = [](const LowbitProduct& p) { return (p.w.n_rows + row_block - 1) / row_block; };
    parallel_lists(list, n_blocks, [&](const LowbitProduct& p, int begin, int end) {
        const int n_packed = p.w.packed ? std::clamp(p.w.n_rows / row_block, begin, end) : begin;
        multiply_blocks<Isa>(x, p, begin, n_packed);
        multiply_rows<Isa>(x, p, n_packed * row_block, std::min(end * row_block, p.w.n_rows));
    });
}

// The products of x with several matrices, by one instruction set.
template <class Isa>
inline void lowbit_products(const Int8Matrix& x, std::span<const LowbitProduct> list) {
    if (std::ranges::all_of(list, [&](const LowbitProduct& p) { return x.n_rows <= max_tokens_of(p.w); })) {
        lowbit_of_few<Isa>(x, list);
    } else {
        products_by_panels<Isa>(x, list);
    }
}

// The products of x with several matrices that have its n_cols and group_size, 32 or 64. Every output is
// computed with the same roundings whatever the number of threads or tokens. False, and nothing written, if
// this build has no fast path.
inline bool lowbit_matmul(const Int8Matrix& x, std::span<const LowbitProduct> list) {
    return with_best_isa(x.group_size, [&](auto isa) { lowbit_products<decltype(isa)>(x, list); });
}
