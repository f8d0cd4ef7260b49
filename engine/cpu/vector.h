// A vector of floats as wide as the machine's registers.
//
// GCC's and Clang's vector types (GCC manual, "Using Vector Instructions through Built-in Functions") take
// operators on every lane. g++ 12 keeps one wider than a register in memory, which made attention seven times
// slower; so this one is exactly as wide.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int vector_lanes = 16;
#elif defined(__AVX__)
constexpr int vector_lanes = 8;
#else
constexpr int vector_lanes = 4;  // SSE, NEON
#endif
typedef float Floats __attribute__((vector_size(4 * vector_lanes)));
typedef int32_t Int32s __attribute__((vector_size(4 * vector_lanes)));
typedef uint32_t Uint32s __attribute__((vector_size(4 * vector_lanes)));

inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, const Floats& v) { std::memcpy(p, &v, sizeof v); }
// x - 0 is x, and compilers know it; x + 0 is not, for -0.
inline Floats splat(float x) { return x - Floats{}; }

// Whether none of n values is infinite or NaN.
inline bool all_finite(const float* x, size_t n) {
    uint32_t largest = 0;  // of their bits without the signs, which are in the order of the magnitudes
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    return largest < 0x7f800000;
}

inline float add_lanes(const Floats& v) {
    float sum = 0;
    for (int i = 0; i < vector_lanes; i++) sum += v[i];
    return sum;
}

// e^x of every lane, within 1 unit in the last place; below -87 it is e^-87, above 88 it is e^88, NaN stays
// NaN.
//
// x = n ln 2 + r with n whole and |r| <= ln 2 / 2, so e^x = 2^n e^r. e^r is its Taylor series, whose next
// term is below 2^-27; 2^n is made by adding n to the exponent bits. ln 2 is subtracted in two parts, the
// first short enough that n times it is exact (Cody and Waite 1980).
inline Floats exp(Floats x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    const Floats round = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for a fraction
    const Floats shifted = x * 1.44269504f + round;
    const Floats n = shifted - round;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Uint32s bits, exponent;                             // unsigned: a NaN's may leave int32
    std::memcpy(&exponent, &shifted, sizeof exponent);  // the low bits of `shifted` are n
    std::memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;
    std::memcpy(&p, &bits, sizeof p);
    // Of a NaN, those bits may be any number. NOLINTNEXTLINE(misc-redundant-expression)
    return x == x ? p : x;
}
