// As program.h, for a program whose feed-forward networks are experts: which kernels take their matrices, and
// what is asked of the disk early.
#pragma once

#include <cstddef>
#include <numeric>
#include <type_traits>
#include <utility>

#include "engine/os/files.h"
#include "engine/os/system.h"
#include "engine/program.h"

// The columns that go through the kernels under one scale of each side: all of A8W8, a group of activations
// of the ladder, or a part of a group of A8W4. 0: no kernel takes the matrix. Matrix has what MoeMatrix has.
template <class Matrix>
requires requires(const Matrix& w) { w.format.kind, w.mx_scales, w.assist; }
int kernel_group(const Matrix& w) {
    using Kind = std::remove_cvref_t<decltype(w.format.kind)>;
    if (w.format.kind == Kind::a8w8 || w.format.kind == Kind::ladder) return w.group_size;
    if (w.format.kind == Kind::mxfp8 || w.format.group == 0 || w.n_cols % 64 != 0) return 0;
    return w.format.group == 32 ? 32 : 64;
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
