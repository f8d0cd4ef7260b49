// Int8 on x86 with AVX-512 VNNI.
#pragma once

#include <cstdint>

#include "engine/cpu/int8_avx2.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
struct Avx512Vnni {
    static constexpr const char* name = "avx512-vnni";
    static constexpr int lanes = 16, panel_vectors = 2, tile_tokens = 8, offset = 128;
    static constexpr uint8_t flip = 0x80;
    using Ints = __m512i;
    using Floats = __m512;

    static Ints splat(int32_t v) { return _mm512_set1_epi32(v); }
    static Ints load(const void* p) { return _mm512_loadu_si512(p); }
    static Ints flipped(Ints w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(flip))); }
    static Ints dot4(Ints acc, Ints w, Ints x) { return _mm512_dpbusd_epi32(acc, w, x); }
    static Int4 add_lanes(Ints a, Ints b, Ints c, Ints d) {
        const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        const __m512i v = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i halves =  // v has a, b, c and d in each quarter
            _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
        const __m128i sums =
            _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        return load4<Int4>(reinterpret_cast<const int32_t*>(&sums));
    }
    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
    static Floats scales(const float* w_scales, float x_scale) {
        return _mm512_mul_ps(_mm512_loadu_ps(w_scales), _mm512_set1_ps(x_scale));
    }
    static Floats add_scaled(Floats sums, Ints acc, Floats scales) {
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), scales, sums);
    }
    static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
    static void store(float* p, Ints v) { _mm512_storeu_si512(p, v); }
};
#endif
