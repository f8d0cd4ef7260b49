// The instruction set of WebAssembly (instructions.h): vectors of 128 bits (the SIMD proposal, in the
// standard since 2.0).
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/cpu/int8.h"
#include "engine/cpu/vector.h"
#ifndef RUNQ_SIMDE  // tests/int8_wasm_test.cpp brings its own intrinsics
#include <wasm_simd128.h>
#endif

// Codes and scales of x (n,), 16 values at a time; group_size is a multiple of 16. f32x4.nearest rounds half
// to even. pmax(a, b) is a < b ? b : a, and pmin(a, b) is b < a ? b : a, whatever is NaN: written in this
// order, NaN loses where it does in the programs' plain loops.
inline void quantize_wasm(int8_t* codes, float* scales, const float* x, int n, int group_size,
                          const float* fixed_scale) {
    const v128_t low = wasm_f32x4_splat(-127), high = wasm_f32x4_splat(127);
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        v128_t m = wasm_f32x4_splat(0);
        for (int i = 0; i < group_size && fixed_scale == nullptr; i += 4)
            m = wasm_f32x4_pmax(m, wasm_f32x4_abs(wasm_v128_load(xg + i)));  // NaN: keeps m
        float lanes[4];
        wasm_v128_store(lanes, m);
        const float amax = std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3]));
        const v128_t inv = wasm_f32x4_splat(choose_scale(scales + g, amax, fixed_scale));
        auto rounded = [&](const float* p) {
            const v128_t r = wasm_f32x4_nearest(wasm_f32x4_mul(wasm_v128_load(p), inv));
            const v128_t at_least = wasm_f32x4_pmax(low, r);  // NaN: takes `low`
            return wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_pmin(high, at_least));
        };
        for (int i = 0; i < group_size; i += 16) {
            const v128_t ab = wasm_i16x8_narrow_i32x4(rounded(xg + i), rounded(xg + i + 4));
            const v128_t cd = wasm_i16x8_narrow_i32x4(rounded(xg + i + 8), rounded(xg + i + 12));
            wasm_v128_store(codes + g * group_size + i, wasm_i8x16_narrow_i16x8(ab, cd));
        }
    }
}

// There is no product of bytes that adds up neighbours, but one of int16 (i32x4.dot_i16x8_s: pmaddwd on x86,
// two smull and an addp on Arm). So the even and the odd bytes of each lane are multiplied apart. With 128
// added to them, as for VNNI, bytes of w become int16 by one instruction each: a mask, and a shift.
struct WasmSimd : FlippedOps<VectorOps<FourLanes>> {
    static constexpr const char* name = "wasm-simd128";
    static constexpr int panel_vectors = 2, tile_tokens = 4;
    static Ints dot4(Ints acc, Ints w, Ints x) {
        const auto wv = v128_t(w), xv = v128_t(x);
        const v128_t even = wasm_i32x4_dot_i16x8(wasm_v128_and(wv, wasm_i16x8_splat(255)),
                                                 wasm_i16x8_shr(wasm_i16x8_shl(xv, 8), 8));
        const v128_t odd = wasm_i32x4_dot_i16x8(wasm_u16x8_shr(wv, 8), wasm_i16x8_shr(xv, 8));
        return acc + Ints(even) + Ints(odd);
    }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        const auto low = [](Ints p, Ints q) {
            return Ints(wasm_i32x4_shuffle(v128_t(p), v128_t(q), 0, 4, 1, 5));
        };
        const auto high = [](Ints p, Ints q) {
            return Ints(wasm_i32x4_shuffle(v128_t(p), v128_t(q), 2, 6, 3, 7));
        };
        const Ints ac = low(a, c) + high(a, c), bd = low(b, d) + high(b, d);
        return low(ac, bd) + high(ac, bd);
    }
    // As fused_by_doubles, two lanes at a time.
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        const v128_t totals = wasm_f32x4_convert_i32x4(v128_t(acc));
        const auto doubles = [](v128_t v) { return wasm_f64x2_promote_low_f32x4(v); };
        const auto last = [](v128_t v) { return wasm_i32x4_shuffle(v, v, 2, 3, 2, 3); };
        const auto sum = [&](v128_t a, v128_t b, v128_t c) {
            return wasm_f64x2_add(wasm_f64x2_mul(doubles(a), doubles(b)), doubles(c));
        };
        const auto is_half = [](v128_t v) {
            return wasm_i64x2_eq(wasm_v128_and(v, wasm_i64x2_splat(int64_t(below_float))),
                                 wasm_i64x2_splat(int64_t(half_of_float)));
        };
        const auto factors = v128_t(scales), start = v128_t(sums);
        const v128_t low = sum(totals, factors, start), high = sum(last(totals), last(factors), last(start));
        if (wasm_v128_any_true(wasm_v128_or(is_half(low), is_half(high)))) {
            for (int i = 0; i < lanes; i++) sums[i] = fused_by_doubles(float(acc[i]), scales[i], sums[i]);
            return sums;
        }
        return Floats(wasm_i32x4_shuffle(wasm_f32x4_demote_f64x2_zero(low),
                                         wasm_f32x4_demote_f64x2_zero(high), 0, 1, 4, 5));
    }
};
