// The instruction set of WebAssembly (instructions.h): vectors of 128 bits (the SIMD proposal, in the
// standard since 2.0).
#pragma once

#include <cstdint>

#include "engine/cpu/int8.h"
#include "engine/cpu/vector.h"
#ifndef RUNQ_SIMDE  // tests/int8_wasm_test.cpp brings its own intrinsics
#include <wasm_simd128.h>
#endif

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
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
#ifdef __wasm__
        return fused_multiply_add(Floats(wasm_f32x4_convert_i32x4(v128_t(acc))), scales, sums);
#else  // tests bring these intrinsics to machines whose vectors are wider
        for (int i = 0; i < lanes; i++) sums[i] = fused_multiply_add(float(acc[i]), scales[i], sums[i]);
        return sums;
#endif
    }
    // f32x4.nearest rounds half to even. pmax(a, b) is a < b ? b : a, whatever is NaN.
    static void store_codes(int8_t* codes, Floats a, Floats b, Floats c, Floats d) {
        const auto rounded = [](Floats v) {
            const v128_t at_least = wasm_f32x4_pmax(wasm_f32x4_splat(-127), v128_t(v));  // NaN: becomes -127
            const v128_t in_range = wasm_f32x4_pmin(wasm_f32x4_splat(127), at_least);
            return wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(in_range));
        };
        const v128_t ab = wasm_i16x8_narrow_i32x4(rounded(a), rounded(b));
        const v128_t cd = wasm_i16x8_narrow_i32x4(rounded(c), rounded(d));
        wasm_v128_store(codes, wasm_i8x16_narrow_i16x8(ab, cd));
    }
};
