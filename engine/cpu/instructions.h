// The instruction sets: what each brings for the kernels (int8.h), how it quantizes, and which one is taken.
// What there is is known when this is compiled (-march).
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "engine/cpu/int8.h"
#include "engine/cpu/vector.h"

// ----------------------------------------------------------------------------
// x86 with AVX2, and with the VNNI instructions on vectors of 256 and 512 bits

#if defined(__AVX2__) && !defined(RUNQ_SIMDE)  // tests/int8_simde_test.cpp brings its own intrinsics
#include <immintrin.h>
#endif

#ifdef __AVX2__
// Codes and scales of x (n,), 32 values at a time; group_size is a multiple of 32. cvtps2dq rounds half to
// even (Intel SDM, MXCSR's default).
inline void quantize_avx2(int8_t* codes, float* scales, const float* x, int n, int group_size,
                          const float* fixed_scale) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 low = _mm256_set1_ps(-127), high = _mm256_set1_ps(127);
    // The two packs below work within 128-bit halves; this permutation puts the eight quads back in order.
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        __m256 m = _mm256_setzero_ps();
        for (int i = 0; i < group_size && fixed_scale == nullptr; i += 8) {
            m = _mm256_max_ps(_mm256_and_ps(_mm256_loadu_ps(xg + i), magnitude), m);  // NaN: keeps m
        }
        __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
        h = _mm_max_ps(h, _mm_movehl_ps(h, h));
        const float amax = _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
        const float inv = choose_scale(scales + g, amax, fixed_scale);
        const __m256 inv8 = _mm256_set1_ps(inv);
        auto rounded = [&](const float* p) {
            const __m256 r = _mm256_mul_ps(_mm256_loadu_ps(p), inv8);
            return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(r, low), high));  // NaN: takes `low`
        };
        for (int i = 0; i < group_size; i += 32) {
            const __m256i ab = _mm256_packs_epi32(rounded(xg + i), rounded(xg + i + 8));
            const __m256i cd = _mm256_packs_epi32(rounded(xg + i + 16), rounded(xg + i + 24));
            const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), in_order);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + g * group_size + i), all);
        }
    }
}

struct EightLanes {
    using Ints = __m256i;
    using Floats = __m256;
};

// AVX2 multiplies bytes only as unsigned times signed (vpmaddubsw), so |w| is multiplied by x carrying w's
// sign. It adds two neighbouring products in int16 and would saturate above 32767; 2 * 127 * 128 = 32512
// stays below, because a code of x is never -128.
struct Avx2 : VectorOps<EightLanes> {
    static constexpr const char* name = "avx2";
    static constexpr int panel_vectors = 1, tile_tokens = 4;
    static Ints dot4(Ints acc, Ints w, Ints x) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        const __m256i ab = _mm256_hadd_epi32(a, b), cd = _mm256_hadd_epi32(c, d);
        const __m256i v = _mm256_hadd_epi32(ab, cd);  // a, b, c and d of the lower half, then of the upper
        const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        return load_as<Int4>(&sums);
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc), scales, sums);
    }
};
#endif

// VNNI multiplies four unsigned by four signed bytes and adds them to an int32 lane, without saturation
// (vpdpbusd). To make w unsigned, 128 is added to each code: the sign bit flipped. That adds 128 * sum(x) to
// the group, which is known from quantizing x and taken off where the accumulator starts.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
struct AvxVnni : FlippedOps<Avx2> {
    static constexpr const char* name = "avx-vnni";
    static constexpr int tile_tokens = 8;
    static Ints dot4(Ints acc, Ints w, Ints x) {
#ifdef __AVX512VNNI__
        return _mm256_dpbusd_epi32(acc, w, x);
#else
        return _mm256_dpbusd_avx_epi32(acc, w, x);
#endif
    }
};
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
struct SixteenLanes {
    using Ints = __m512i;
    using Floats = __m512;
};
struct Avx512Vnni : FlippedOps<VectorOps<SixteenLanes>> {
    static constexpr const char* name = "avx512-vnni";
    static constexpr int panel_vectors = 2, tile_tokens = 8;
    static Ints dot4(Ints acc, Ints w, Ints x) { return _mm512_dpbusd_epi32(acc, w, x); }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        const __m512i v = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i halves =  // v has a, b, c and d in each quarter
            _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
        const __m128i sums =
            _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        return load_as<Int4>(&sums);
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), scales, sums);
    }
};
#endif

// ----------------------------------------------------------------------------
// Arm: Armv8.0, and with the dot products of Armv8.2

#ifdef __aarch64__
#include <arm_neon.h>

// Codes and scales of x (n,), 16 values at a time; group_size is a multiple of 16. fcvtns rounds half to even
// (Arm ARM, FCVTNS). The comparisons are written so that NaN loses where it does in the programs' plain
// loops: fmax would hand it on, and fmaxnm does for a signalling one.
inline void quantize_neon(int8_t* codes, float* scales, const float* x, int n, int group_size,
                          const float* fixed_scale) {
    const float32x4_t low = vdupq_n_f32(-127), high = vdupq_n_f32(127);
    for (int g = 0; g < n / group_size; g++) {
        const float* xg = x + g * group_size;
        float32x4_t m = vdupq_n_f32(0);
        for (int i = 0; i < group_size && fixed_scale == nullptr; i += 4) {
            const float32x4_t magnitude = vabsq_f32(vld1q_f32(xg + i));
            m = vbslq_f32(vcgtq_f32(magnitude, m), magnitude, m);  // NaN: keeps m
        }
        const float inv = choose_scale(scales + g, vmaxvq_f32(m), fixed_scale);
        auto rounded = [&](const float* p) {
            const float32x4_t r = vmulq_n_f32(vld1q_f32(p), inv);
            const float32x4_t at_least = vbslq_f32(vcgtq_f32(r, low), r, low);  // NaN: takes `low`
            return vmovn_s32(vcvtnq_s32_f32(vminq_f32(at_least, high)));
        };
        for (int i = 0; i < group_size; i += 16) {
            const int16x8_t ab = vcombine_s16(rounded(xg + i), rounded(xg + i + 4));
            const int16x8_t cd = vcombine_s16(rounded(xg + i + 8), rounded(xg + i + 12));
            vst1q_s8(codes + g * group_size + i, vcombine_s8(vmovn_s16(ab), vmovn_s16(cd)));
        }
    }
}

// NEON multiplies signed by signed bytes, so w stays as it is. A vector holds only four int32, and a panel is
// two of them, so that a token's four codes, once loaded, serve twice.
struct Neon : VectorOps<FourLanes> {
    static constexpr const char* name = "neon";
    static constexpr int panel_vectors = 2, tile_tokens = 8;
    // Armv8.0: products in int16 (smull), two neighbours added in int16 (addp), two of these in int32
    // (sadalp). As with AVX2, two products stay within int16: 2 * 127 * 128 = 32512.
    static Ints dot4(Ints acc, Ints w, Ints x) {
        const int8x16_t wb = vreinterpretq_s8_s32(w), xb = vreinterpretq_s8_s32(x);
        const int16x8_t low = vmull_s8(vget_low_s8(wb), vget_low_s8(xb));
        return vpadalq_s16(acc, vpaddq_s16(low, vmull_high_s8(wb, xb)));
    }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return vfmaq_f32(sums, vcvtq_f32_s32(acc), scales);
    }
};
#endif

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
// One instruction for all of dot4 (sdot): signed by signed, straight into int32.
struct NeonDot : Neon {
    static constexpr const char* name = "neon-dotprod";
    static Ints dot4(Ints acc, Ints w, Ints x) {
        return vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
    }
};
#endif

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
// With the matrix products of Armv8.6, which tile_kernel.h takes for several tokens; one goes by sdot.
struct NeonI8mm : NeonDot {
    static constexpr const char* name = "neon-i8mm";
};
#endif

// ----------------------------------------------------------------------------
// WebAssembly, with its vectors of 128 bits (the SIMD proposal, in the standard since 2.0)

#if defined(__wasm_simd128__) && !defined(RUNQ_SIMDE)  // tests/int8_wasm_test.cpp brings its own intrinsics
#include <wasm_simd128.h>
#endif

#ifdef __wasm_simd128__
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
#endif

// ----------------------------------------------------------------------------
// Those of this build

template <class... Isa>
struct IsaList {
    using Best = std::tuple_element_t<0, std::tuple<Isa..., PlainInt8>>;  // for any number of codes

    // Calls use(Isa{}) with the first that takes groups of this size, whole vectors and at least 32 codes.
    // False if there is none.
    template <class Use>
    static bool with_best_isa(int group_size, [[maybe_unused]] Use use) {
        return group_size > 0 &&
               ((group_size % std::max(32, 4 * Isa::lanes) == 0 && (use(Isa{}), true)) || ...);
    }
};

// The best first.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
using BuildIsas = IsaList<Avx512Vnni, AvxVnni>;
#elif defined(__AVXVNNI__) || defined(__AVX512VNNI__) && defined(__AVX512VL__)
using BuildIsas = IsaList<AvxVnni>;
#elif defined(__AVX2__)
using BuildIsas = IsaList<Avx2>;
#elif defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
using BuildIsas = IsaList<NeonI8mm>;
#elif defined(__ARM_FEATURE_DOTPROD)
using BuildIsas = IsaList<NeonDot>;
#elif defined(__aarch64__)
using BuildIsas = IsaList<Neon>;
#elif defined(__wasm_simd128__)
using BuildIsas = IsaList<WasmSimd>;
#else
using BuildIsas = IsaList<>;
#endif

// The instruction set that multiplies words of 2- to 6-bit codes: the same, but for NeonI8mm.
struct NeonDot;
struct NeonI8mm;
template <class Isa>
using ByWords = std::conditional_t<std::is_same_v<Isa, NeonI8mm>, NeonDot, Isa>;

// And the one of attention in int8.
using AttentionIsa = ByWords<BuildIsas::Best>;
