// Half: fp16 as model files hold it, and a KV cache may, on a CPU. Widening it to fp32 is exact.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "engine/cpu/int8.h"
#include "engine/cpu/vector.h"
#include "engine/model/config.h"

#ifdef __F16C__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

struct Half {
    uint16_t bits;
};
template <>
inline constexpr const char* tensor_type<Half> = "F16";

inline namespace VECTORS {
// IEEE 754 binary16: a sign, 5 bits of exponent, 10 of fraction. The specification of `widen` below.
inline float to_float(Half h) {
    // As fp32 the exponent's bias is 127 in place of 15; multiplying by 2^112 also makes subnormals right.
    auto bits = std::bit_cast<uint32_t>(std::bit_cast<float>(uint32_t(h.bits & 0x7fff) << 13) * 0x1p112f);
    if ((h.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000;  // infinity, NaN
    return std::bit_cast<float>(bits | uint32_t(h.bits & 0x8000) << 16);
}

// x rounded to nearest even; from 65520 on that is infinity. The specification of `to_half` below.
inline Half round_to_half(float x) {
    auto bits = std::bit_cast<uint32_t>(x);
    const auto sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return {uint16_t(sign | 0x7e00 | (bits >> 13 & 0x1ff))};  // NaN
    // Below 2^-14, a subnormal: fp32 numbers around 0.5 are 2^-24 apart, as these are.
    if (bits < 0x38800000)
        return {uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000))};
    // Half of the last place that is kept, less a bit if that place is even.
    bits += 0xfff + (bits >> 13 & 1);
    const uint32_t rounded = (bits >> 13) - (112u << 10);  // the exponent's bias is 15, not 127
    return {uint16_t(sign | (rounded < 0x7c00 ? rounded : 0x7c00))};
}

inline Half to_half(float x) {
#ifdef __F16C__
    return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)};
#elif defined(__aarch64__)
    return {vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0)};
#else
    return round_to_half(x);
#endif
}

// Four lanes of fp32.
inline Float4 widen4(const Half* from) {
#ifdef __F16C__
    return Float4(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
#else
    return Float4{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
#endif
}

// A vector of them in fp32.
inline Floats load(const Half* from) {
#ifdef __AVX512F__
    return Floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
    return Floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    Floats v;
    for (int i = 0; i < vector_lanes; i += 4)
        VectorOps<FourLanes>::store(reinterpret_cast<float*>(&v) + i, widen4(from + i));
    return v;
#endif
}

// n values of `from` in fp32.
inline void widen(float* to, const Half* from, size_t n) {
    size_t i = 0;
    for (; i + vector_lanes <= n; i += vector_lanes) store(to + i, load(from + i));
    for (; i + 4 <= n; i += 4) VectorOps<FourLanes>::store(to + i, widen4(from + i));
    for (; i < n; i++) to[i] = to_float(from[i]);
}
}  // namespace VECTORS
