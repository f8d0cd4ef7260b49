// What a program's file has before its scheme when it is compiled alone, under the same names: rows,
// operations, attention and its cache, a file's header and tensors, options and trace. And what its
// quantize() and matmul() ask first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numbers>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/cpu/half.h"
#include "engine/cpu/kv_cache.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/quantize.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/vector.h"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"

// The choices of an option that is given without a value.
const std::vector<const char*> no_value;

// x (n_cols,) becomes row t of `out`, by the best instructions of this build, under a fixed scale if that is
// not null. False if it has none for such rows.
inline bool fast_quantize(Int8Rows& out, int t, const float* x, const float* fixed_scale = nullptr) {
    if (!int8_quantize(out.row_codes(t), out.row_scales(t), out.row_sums(t), x, out.n_cols, out.group_size,
                       fixed_scale))
        return false;
    keep_nan(out, t, x);
    return true;
}
// quantize() of all rows, likewise.
inline bool fast_quantize(Int8Rows& out, const Rows& x, int group_size, const float* fixed_scale = nullptr) {
    if (out.kernels != nullptr) return out.kernels->quantize(out, x, group_size), true;
    out.resize(x.n_rows, x.n_cols, group_size);
    if (x.n_rows > 0 && !fast_quantize(out, 0, x.row(0), fixed_scale)) return false;  // nor will the others
    parallel_for(x.n_rows - 1, [&](int i) { fast_quantize(out, i + 1, x.row(i + 1), fixed_scale); });
    return true;
}

// The rows of x as kernels for groups of so many columns take them: where rows have one scale each, it and
// the sum of codes stand once for each group, in memory that the next call uses again. 0: no kernel takes
// them.
inline QuantRows in_groups(const Int8Rows& x, int group) {
    QuantRows rows = x.view();
    rows.group_size = group;
    if (group == x.group_size || group == 0) return rows;
    static thread_local std::vector<float> all_scales;
    static thread_local std::vector<int32_t> all_sums;
    const int n = n_groups(rows);
    float* scales = scratch(all_scales, size_t(x.n_rows) * size_t(n));
    int32_t* sums = scratch(all_sums, size_t(x.n_rows) * size_t(n));
    parallel_for(x.n_rows, [&](int t) {
        std::fill_n(scales + size_t(t) * size_t(n), n, x.row_scales(t)[0]);
        sum_groups(sums + size_t(t) * size_t(n), x.row_codes(t), x.n_cols, group);
    });
    rows.scales = scales, rows.sums = sums;
    return rows;
}

// matmul() likewise, of a list of MatrixProduct, each with view_of(), and `packed`. With row_each row i of x
// is multiplied by the i-th matrix alone. Sets n_rows of every `out` in any case.
template <class Products>
bool fast_matmul(const Int8Rows& x, const Products& products, bool row_each = false) {
    const Stopwatch time(phase_seconds.matmul);
    std::vector<QuantProduct> list;
    for (const auto& p : products) {
        p.out.n_rows = row_each ? 1 : x.n_rows;
        list.push_back({p.out.row(0), view_of(p.w), p.w.packed});
    }
    if (x.kernels == nullptr) return quant_matmul(in_groups(x, list[0].w.group_size), list, row_each);
    x.kernels->multiply(x.view(), list);
    return true;
}

// A program need not look at a mask where it finds it: check_masks() (cpu_model.h) comes later, if at all.
inline bool fast_check_mask(const uint8_t*) { return true; }

// A loaded model, and all that a run of it needs: what forward() is given. Weights and RunState are the
// program's own, and so may be Config.
template <class Config, class Weights, class RunState>
struct TransformerOf {
    ModelFileOf<Config> file;
    Weights weights;
    RunState state;
    Trace* trace = nullptr;      // not null: record every step
    PackedMatrices packed = {};  // the weights, as the kernels read them fastest; the program may do without
};
