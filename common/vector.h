// Sixteen floats at a time, in any instruction set.
//
// GCC's and Clang's vector types (GCC manual, "Using Vector Instructions through Built-in Functions") compile
// to whatever the target has: one AVX-512 register, two of AVX, four of SSE or NEON. Operators work on every
// lane.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int vector_lanes = 16;
typedef float Float16 __attribute__((vector_size(64)));
typedef int32_t Int16 __attribute__((vector_size(64)));

inline Float16 load16(const float* p) {
    Float16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store16(float* p, Float16 v) { std::memcpy(p, &v, sizeof v); }
inline Float16 splat16(float x) { return Float16{} + x; }

// e^x of every lane, within 1 unit in the last place; below -87 it is e^-87, above 88 it is e^88, NaN stays
// NaN.
//
// x = n ln 2 + r with n whole and |r| <= ln 2 / 2, so e^x = 2^n e^r. e^r is its Taylor series, whose next
// term is below 2^-27; 2^n is made by adding n to the exponent bits. ln 2 is subtracted in two parts, the
// first short enough that n times it is exact (Cody and Waite 1980).
inline Float16 exp16(Float16 x) {
    x = x < -87.0f ? splat16(-87.0f) : x;
    x = x > 88.0f ? splat16(88.0f) : x;
    const Float16 round = splat16(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for a fraction
    const Float16 shifted = x * 1.44269504f + round;
    const Float16 n = shifted - round;
    const Float16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Float16 p = splat16(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Int16 bits, exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);  // the low bits of `shifted` are n
    std::memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;
    std::memcpy(&p, &bits, sizeof p);
    return p;
}
