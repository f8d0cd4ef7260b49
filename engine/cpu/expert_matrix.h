// Matrices of experts for the kernels, described as runq_moe.cpp has them (MoeMatrix).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/quantize.h"
#include "engine/cpu/rows.h"
#include "engine/os/files.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"

// A type with the members of MoeMatrix.
template <class Matrix>
concept ExpertMatrix = requires(const Matrix& w) {
    w.format.kind, w.mx_scales, w.assist;
};

// The columns that go through the kernels under one scale of each side: all of A8W8, a group of activations
// of the ladder, or a part of a group of A8W4. 0: no kernel takes the matrix.
template <ExpertMatrix Matrix>
int kernel_group(const Matrix& w) {
    using Kind = std::remove_cvref_t<decltype(w.format.kind)>;
    if (w.format.kind == Kind::a8w8 || w.format.kind == Kind::ladder) return w.group_size;
    if (w.format.kind == Kind::mxfp8 || w.format.group == 0 || w.n_cols % 64 != 0) return 0;
    return w.format.group == 32 ? 32 : 64;
}
// One for the kernel that it has.
template <ExpertMatrix Matrix>
QuantMatrix view_of(const Matrix& w) {
    QuantMatrix to = lowbit_matrix(w);
    to.group_size = kernel_group(w);
    return to;
}

// Rows that have one scale each, as kernels for groups of columns take them: the scale and the sum of codes
// stand once for each group. They are in memory that the next call uses again.
inline QuantRows in_groups(const Int8Rows& x, int group) {
    static thread_local std::vector<float> all_scales;
    static thread_local std::vector<int32_t> all_sums;
    const int n = x.n_cols / group;
    float* scales = scratch(all_scales, size_t(x.n_rows) * size_t(n));
    int32_t* sums = scratch(all_sums, size_t(x.n_rows) * size_t(n));
    parallel_for(x.n_rows, [&](int t) {
        std::fill_n(scales + size_t(t) * size_t(n), n, x.row_scales(t)[0]);
        sum_groups(sums + size_t(t) * size_t(n), x.row_codes(t), x.n_cols, group);
    });
    return {x.codes.data(), scales, sums, x.n_rows, x.n_cols, group};
}

// Of a model that is read where the file lies: all pages of the experts that have tokens, in rising order,
// are asked for at once. A product would wait for them one after the other. Asking for what is in memory
// costs 2 to 8 % of a pass, so that it ends after 64 layers without a read, until the disk is read again.
template <class Experts, class Routing>
void will_read(const Experts& experts, const Routing& r) {
    if (experts.down[0].packed != nullptr) return;
    static long seen = 0, calm_layers = 0;
    const long reads = disk_reads();
    calm_layers = std::exchange(seen, reads) == reads ? calm_layers + 1 : 0;
    if (calm_layers > 64) return;
    for (const auto* matrices : {&experts.gate_up, &experts.down}) {
        int last = -1;
        for (const int pair : r.by_expert) {
            if (r.experts[size_t(pair)] == last) continue;
            const auto& w = (*matrices)[size_t(last = r.experts[size_t(pair)])];
            want_mapped(w.codes, size_t(w.n_rows) * size_t(w.row_bytes()));
            const size_t n_groups = size_t(w.n_rows) * size_t(w.n_groups());
            if (w.mask != nullptr) want_mapped(w.mask, size_t(w.n_rows) * size_t(w.n_cols) / 8);
            if (w.levels != nullptr) want_mapped(w.levels, n_groups);
            if (w.scales != nullptr) want_mapped(w.scales, sizeof(*w.scales) * n_groups);
            if (w.zeros != nullptr) want_mapped(w.zeros, size_t(w.n_rows) * ((size_t(w.n_groups()) + 1) / 2));
        }
    }
}

// matmul() of runq_moe.cpp by the best path of this build. False, and nothing written, if there is none.
template <ExpertMatrix Matrix>
bool fast_matmul(const Int8Rows& x, const std::vector<MatrixProduct<Matrix>>& products, bool row_each) {
    const int group = kernel_group(products[0].w);
    if (group == 0) return false;
    const Stopwatch time(phase_seconds.matmul);
    std::vector<QuantProduct> list;
    for (const auto& p : products) {
        p.out.n_rows = row_each ? 1 : x.n_rows;
        list.push_back({p.out.row(0), view_of(p.w), p.w.packed});
    }
    return quant_matmul(group == x.group_size ? x.view() : in_groups(x, group), list, row_each);
}
