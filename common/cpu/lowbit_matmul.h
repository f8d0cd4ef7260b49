// Products of low-bit matrices by the best path that this build has. With many tokens, codes are expanded to
// int8 while they are packed, and everything from there on is int8_panels.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/cpu/int8_matmul.h"
#include "common/cpu/lowbit.h"
#include "common/cpu/lowbit_rows.h"

// Rows i .. i + n_rows - 1 of w, as far as they are there.
inline int valid_rows(const LowbitMatrix& w, int i, int n_rows) {
    return std::clamp(w.n_rows - i, 0, n_rows);
}

// As pack_codes of int8_pack.h: n_cols columns from k on, expanded.
template <class Isa>
inline void pack_codes(uint32_t* to, const LowbitMatrix& w, int i, int k, int n_cols) {
    static thread_local std::vector<int8_t> expanded;
    const int n = valid_rows(w, i, panel_rows<Isa>);
    int8_t* rows = scratch(expanded, size_t(n) * n_cols);
    for (int r = 0; r < n; r++) expand_columns(rows + size_t(r) * n_cols, w, i + r, k, n_cols);
    pack_codes<Isa>(to, Int8Matrix{rows, nullptr, nullptr, n, n_cols, w.group_size}, 0, 0, n_cols);
}
template <class Isa>
inline void pack_scales(float* to, const LowbitMatrix& w, int i) {
    static thread_local std::vector<float> expanded;
    const int n = valid_rows(w, i, panel_rows<Isa>);
    float* rows = scratch(expanded, size_t(n) * w.n_groups());
    for (int r = 0; r < n; r++) expand_scales(rows + size_t(r) * w.n_groups(), w, i + r);
    pack_scales<Isa>(to, Int8Matrix{nullptr, rows, nullptr, n, w.n_cols, w.group_size}, 0);
}
template <class Isa>
inline PackedPanel packed_panel(const LowbitMatrix&, int) {
    return {};
}
inline size_t bytes_of_row(const LowbitMatrix& w) { return w.n_code_bytes(); }

// So many tokens at most go by rows: turning the rows of w again for the next few tokens still costs less
// than expanding them for a panel. Sparse rows are expanded either way.
inline int max_tokens_of(const LowbitMatrix& w) { return w.bits < 8 && w.mask == nullptr ? 24 : 12; }

// The products of x with several matrices, by one instruction set.
template <class Isa>
inline void lowbit_products(const Int8Matrix& x, std::span<const LowbitProduct> list) {
    if (std::ranges::all_of(list, [&](const LowbitProduct& p) { return x.n_rows <= max_tokens_of(p.w); })) {
        lowbit_by_rows<Isa>(x, list);
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
