// fp16 arithmetic as a GPU does it: round to nearest even, subnormal numbers kept, overflow to infinity,
// every NaN 0x7fff. The names are those of CUDA's cuda_fp16.h.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace simt {

// Conversions as a CPU without fp16 does them.
inline float half_to_float_portable(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, bits = uint32_t(h & 0x7fff) << 13;
    const uint32_t rebias = 112u << 23;  // between the exponents of fp16 and fp32
    float magnitude;
    if (bits >= 0x7c00u << 13) {  // infinity, NaN
        magnitude = std::bit_cast<float>(bits + 2 * rebias);
    } else if (bits >= 0x0400u << 13) {
        magnitude = std::bit_cast<float>(bits + rebias);
    } else {  // subnormal: with an exponent, it is 2^-14 too large
        magnitude = std::bit_cast<float>(bits + rebias + (1u << 23)) - 0x1p-14f;
    }
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}
inline uint16_t float_to_half_portable(float f) {
    const uint32_t all = std::bit_cast<uint32_t>(f), bits = all & 0x7fffffff;
    const uint16_t sign = uint16_t(all >> 16 & 0x8000);
    if (bits > 0x7f800000) return 0x7fff;
    if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520, halfway to 2^16, rounds to infinity
    if (bits < 0x38800000) {  // below 2^-14, in units of 2^-24, as the last place of 0.5 is in fp32
        return sign | uint16_t(std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000);
    }
    // Round to nearest even: add half a unit in the last place, or one bit less than that if the last place
    // is even, and truncate.
    return sign | uint16_t((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

inline float half_to_float(uint16_t h) {
#ifdef __F16C__
    return _cvtsh_ss(h);
#else
    return half_to_float_portable(h);
#endif
}
inline uint16_t float_to_half(float f) {
#ifdef __F16C__
    return f != f ? 0x7fff : _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
    return float_to_half_portable(f);
#endif
}

// a * b + c, rounded once. In fp64 the product is exact. So is the sum, unless it is out of fp16's range or
// within 2^-30 of c, which it then rounds to anyway. Rounding it to fp32 and then to fp16 would be wrong
// where the first rounding produces a tie for the second. So the sum is first rounded to odd: the last bit
// kept is set if any bit that is cut off was (Boldo and Melquiond 2008).
inline uint16_t half_fma(float a, float b, float c) {
    uint64_t bits = std::bit_cast<uint64_t>(double(a) * b + c);
    const uint64_t last = uint64_t(1) << 29;  // of fp32's places
    if (bits % last != 0) bits = (bits - bits % last) | last;
    return float_to_half(float(std::bit_cast<double>(bits)));
}

}  // namespace simt

struct half {
    half() = default;
    half(float f) : bits(simt::float_to_half(f)) {}
    operator float() const { return simt::half_to_float(bits); }

    uint16_t bits;
};

struct alignas(4) half2 {
    half2() = default;
    half2(half low, half high) : x(low), y(high) {}

    half x, y;
};

using __half = half;
using __half2 = half2;

inline half __ushort_as_half(unsigned short bits) { return std::bit_cast<half>(bits); }
inline unsigned short __half_as_ushort(half h) { return h.bits; }
inline half __float2half(float f) { return half(f); }
inline half __float2half_rn(float f) { return half(f); }
inline float __half2float(half h) { return float(h); }

// A product of two fp16 numbers is exact in fp32. A sum may not be; but fp32 has 24 bits, and with 2 * 11 + 2
// of them rounding twice gives what rounding once would (Figueroa 1995).
inline half __hadd(half a, half b) { return half(float(a) + float(b)); }
inline half __hsub(half a, half b) { return half(float(a) - float(b)); }
inline half __hmul(half a, half b) { return half(float(a) * float(b)); }
inline half __hfma(half a, half b, half c) {
    return __ushort_as_half(simt::half_fma(float(a), float(b), float(c)));
}
inline half __hneg(half a) { return __ushort_as_half(a.bits ^ 0x8000); }

inline half2 __halves2half2(half low, half high) { return {low, high}; }
inline half2 __half2half2(half h) { return {h, h}; }
inline half2 __float2half2_rn(float f) { return {half(f), half(f)}; }
inline half2 __floats2half2_rn(float low, float high) { return {half(low), half(high)}; }
inline half __low2half(half2 h) { return h.x; }
inline half __high2half(half2 h) { return h.y; }
inline float __low2float(half2 h) { return float(h.x); }
inline float __high2float(half2 h) { return float(h.y); }

inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline half2 __hsub2(half2 a, half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
