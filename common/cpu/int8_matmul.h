// Fast int8: quantizing rows, and products of int8 matrices, by the best path that this build has.
//
// Every function here says whether it has a path for a group size, and does nothing where it has none: the
// caller's plain loop is then what runs. Which instructions there are is known when this is compiled
// (-march).
#pragma once

#include <algorithm>
#include <initializer_list>
#include <span>
#include <vector>

#include "common/cpu/int8_avx512.h"
#include "common/cpu/int8_i8mm.h"
#include "common/cpu/int8_neon.h"
#include "common/cpu/int8_panels.h"
#include "common/cpu/int8_rows.h"
#include "common/cpu/rows.h"
#include "common/os/clock.h"
#include "common/os/threads.h"

// Calls use(Isa{}) with the best instruction set for groups of this size. False if there is none.
template <class Use>
inline bool with_best_isa([[maybe_unused]] int group_size, [[maybe_unused]] Use use) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    if (group_size % 64 == 0) return use(Avx512Vnni{}), true;
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
    if (group_size % 32 == 0) return use(AvxVnni{}), true;
#elif defined(__AVX2__)
    if (group_size % 32 == 0) return use(Avx2{}), true;
#elif defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
    if (group_size % 32 == 0) return use(NeonI8mm{}), true;
#elif defined(__ARM_FEATURE_DOTPROD)
    if (group_size % 32 == 0) return use(NeonDot{}), true;
#elif defined(__aarch64__)
    if (group_size % 32 == 0) return use(Neon{}), true;
#endif
    return false;
}

// Name of the path that int8_matmul takes for a group size; "portable" if the plain loop runs.
inline const char* int8_kernel_name(int group_size) {
    const char* name = "portable";
    with_best_isa(group_size, [&](auto isa) { name = isa.name; });
    return name;
}

// Quantizes x (n,) fp32: codes (n,), scales and sums of codes (n / group_size,). If fixed_scale is not null,
// every scale is that one. False, and nothing written, if there is no path for the group size.
inline bool int8_quantize([[maybe_unused]] int8_t* codes, [[maybe_unused]] float* scales,
                          [[maybe_unused]] int32_t* sums, [[maybe_unused]] const float* x,
                          [[maybe_unused]] int n, [[maybe_unused]] int group_size,
                          [[maybe_unused]] const float* fixed_scale = nullptr) {
#if defined(__AVX2__)
    if (group_size % 32 != 0) return false;
    quantize_avx2(codes, scales, x, n, group_size, fixed_scale);
#elif defined(__aarch64__)
    if (group_size % 32 != 0) return false;
    quantize_neon(codes, scales, x, n, group_size, fixed_scale);
#else
    return false;
#endif
    for (int g = 0; g < n / group_size; g++) {
        int32_t sum = 0;
        for (int i = 0; i < group_size; i++) sum += codes[g * group_size + i];
        sums[g] = sum;
    }
    return true;
}

// Packs weights in their own memory, which nobody else reads or writes, so that products read them as one
// stream (int8_pack.h). Returns what `packed` is from then on: false, and nothing has changed, if there is no
// path for the group size.
inline bool int8_pack(const Int8Matrix& w) {
    return with_best_isa(w.group_size, [&](auto isa) { pack_in_place<decltype(isa)>(w); });
}

// Copies row i of w, packed or not: codes (n_cols,), and scales (n_groups,) unless that is null.
inline void int8_row(int8_t* codes, float* scales, const Int8Matrix& w, int i) {
    if (with_best_isa(w.group_size, [&](auto isa) { copy_row<decltype(isa)>(codes, scales, w, i); })) return;
    std::copy_n(w.row_codes(i), w.n_cols, codes);
    if (scales != nullptr) std::copy_n(w.row_scales(i), w.n_groups(), scales);
}

// Of weights that are not packed, so many tokens at most go by rows; more are worth packing them for.
constexpr int max_tokens_by_rows = 4;

// The products of x with several matrices, by one instruction set.
template <class Isa>
inline void int8_products(const Int8Matrix& x, std::span<const Int8Product> list) {
    const bool packed = std::ranges::any_of(list, [](const Int8Product& p) { return p.w.packed; });
    if (packed || x.n_rows > max_tokens_by_rows) return products_by_panels<Isa>(x, list);
    if (x.group_size == 64)
        return products_by_rows(x, list, [](auto&... row) { return dot_row<Isa, 64>(row...); });
    products_by_rows(x, list, [](auto&... row) { return dot_row<Isa>(row...); });
}

// The products of x with several matrices that have its n_cols and group_size. Every output is computed with
// the same roundings whatever the number of threads or tokens, so results do not depend on either. False,
// and nothing written, if there is no path for the group size.
inline bool int8_matmul(const Int8Matrix& x, std::span<const Int8Product> list) {
    return with_best_isa(x.group_size, [&](auto isa) { int8_products<decltype(isa)>(x, list); });
}

// The products of one input with several matrices: q, k and v; gate and up. By far the most time is spent
// here. A matrix's view() is what the kernels take. Where there is no fast path, output (t, i) is dot(x, t,
// w, i), the program's plain loop.
template <class Matrix, class Dot>
inline void int8_matmul(const Int8Rows& x, std::initializer_list<MatrixProduct<Matrix>> products, Dot dot) {
    const Stopwatch time(phase_seconds.matmul);
    std::vector<Int8Product> list;
    for (const MatrixProduct<Matrix>& p : products) {
        p.out.n_rows = x.n_rows;
        list.push_back({p.out.row(0), p.w.view()});
    }
    if (int8_matmul(x.view(), list)) return;
    for (const MatrixProduct<Matrix>& p : products) {
        parallel_for(p.w.n_rows, [&](int i) {
            for (int t = 0; t < x.n_rows; t++) p.out.row(t)[i] = dot(x, t, p.w, i);
        });
    }
}
