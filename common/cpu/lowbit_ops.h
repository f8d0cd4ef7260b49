// What the low-bit kernels need of an instruction set beside int8.h's list.
//
//   takes_bytes        dot takes any unsigned byte; otherwise codes up to 127
//   dot(acc, w, x)     acc[lane] += w[lane][0..3] . x[lane][0..3], w unsigned
//   widened(p)         as many bytes as there are lanes, unsigned, as int32
#pragma once

#include "common/cpu/int8_avx512.h"
#include "common/cpu/int8_i8mm.h"
#include "common/cpu/int8_neon.h"

template <class Isa>
struct LowbitOps;

#ifdef __AVX2__
template <>
struct LowbitOps<Avx2> {
    static constexpr bool takes_bytes = false;
    static __m256i widened(const uint8_t* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static __m256i dot(__m256i acc, __m256i w, __m256i x) {
        const __m256i pairs = _mm256_maddubs_epi16(w, x);  // 2 * 15 * 127 at most
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};
template <class Isa>
struct VnniOps : LowbitOps<Avx2> {
    static constexpr bool takes_bytes = true;
    using Ints = typename Isa::Ints;
    static Ints dot(Ints acc, Ints w, Ints x) { return Isa::dot4(acc, w, x); }
};
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
template <>
struct LowbitOps<AvxVnni> : VnniOps<AvxVnni> {};
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
template <>
struct LowbitOps<Avx512Vnni> : VnniOps<Avx512Vnni> {
    static __m512i widened(const uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
};
#endif

#ifdef __aarch64__
template <class Isa>
struct NeonOps {
    static constexpr bool takes_bytes = false;
    static int32x4_t widened(const uint8_t* p) {
        uint32_t four;
        std::memcpy(&four, p, sizeof four);
        const uint16x8_t pairs = vmovl_u8(vcreate_u8(four));
        return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(pairs)));
    }
    static int32x4_t dot(int32x4_t acc, int32x4_t w, int32x4_t x) { return Isa::dot4(acc, w, x); }
};
template <>
struct LowbitOps<Neon> : NeonOps<Neon> {};
#ifdef __ARM_FEATURE_DOTPROD
template <>
struct LowbitOps<NeonDot> : NeonOps<NeonDot> {};
#ifdef __ARM_FEATURE_MATMUL_INT8
template <>
struct LowbitOps<NeonI8mm> : NeonOps<NeonI8mm> {};
#endif
#endif
#endif
