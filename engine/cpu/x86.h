// Instruction sets of x86 (instructions.h): AVX2, and the VNNI instructions on vectors of 256 and 512 bits.
#pragma once

#include "engine/cpu/int8.h"
#ifndef RUNQ_SIMDE  // tests/int8_simde_test.cpp brings its own intrinsics
#include <immintrin.h>
#endif

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
    // cvtps2dq rounds half to even (Intel SDM, MXCSR's default). The packs work within 128-bit halves; the
    // permutation puts the eight quads back in order.
    static void store_codes(int8_t* codes, Floats a, Floats b, Floats c, Floats d) {
        const auto rounded = [](Floats v) {
            const __m256 at_least = _mm256_max_ps(v, _mm256_set1_ps(-127));  // NaN: becomes -127
            return _mm256_cvtps_epi32(_mm256_min_ps(at_least, _mm256_set1_ps(127)));
        };
        const __m256i ab = _mm256_packs_epi32(rounded(a), rounded(b));
        const __m256i cd = _mm256_packs_epi32(rounded(c), rounded(d));
        const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        store(codes, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), in_order));
    }
};

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
    static void store_codes(int8_t* codes, Floats a, Floats b, Floats c, Floats d) {
        for (const Floats& v : {a, b, c, d}) {
            const __m512 at_least = _mm512_max_ps(v, _mm512_set1_ps(-127));  // NaN: becomes -127
            const __m512i whole = _mm512_cvtps_epi32(_mm512_min_ps(at_least, _mm512_set1_ps(127)));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtsepi32_epi8(whole));
            codes += lanes;
        }
    }
};
#endif
