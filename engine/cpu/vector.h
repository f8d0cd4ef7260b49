// What kernels are made of: vectors of floats as wide as the machine's registers, and what keeps compilers
// from undoing that.
//
// GCC's and Clang's vector types (GCC manual, "Using Vector Instructions through Built-in Functions") take
// operators on every lane. g++ 12 keeps one wider than a register in memory, which made attention seven times
// slower; so this one is exactly as wide.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
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
    for (size_t i = 0; i < n; i++) largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffff);
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
    // The low bits of `shifted` are n. Unsigned: a NaN's may leave int32.
    p = Floats(Uint32s(p) + (Uint32s(shifted) << 23));
    // Of a NaN, those bits may be any number. NOLINTNEXTLINE(misc-redundant-expression)
    return x == x ? p : x;
}

// UNROLL(n) before a loop: all of its n passes one after the other. Without it, g++ would keep an array of
// vectors that the loop goes through in memory. UNROLL_BY(n) before a loop of any number of passes: n of them
// at a time. Neither where instructions are emulated, which would take the compiler minutes, nor for nvcc,
// which does not know them. And no UNROLL_BY in WebAssembly: a browser's compiler has 16 registers on x86,
// and keeps a short loop in them.
#if defined(RUNQ_SIMDE) || defined(__CUDACC__)
#define UNROLL(n)
#define UNROLL_BY(n)
#else
#define UNROLL_PRAGMA(text) _Pragma(#text)
#define UNROLL(n) UNROLL_PRAGMA(GCC unroll n)
#ifdef __wasm__
#define UNROLL_BY(n) UNROLL(1)
#else
#define UNROLL_BY(n) UNROLL(n)
#endif
#endif

// No-op that pins a vector in a register: the compiler has to have v there, and must take its value as new.
//
// g++ 12 otherwise loads a value again for each use, or copies an accumulator before and after each
// instruction that adds to it.
template <class Vector>
inline void pin_register([[maybe_unused]] Vector& v) {
#if defined(RUNQ_SIMDE)  // emulated vectors are no registers: tests/int8_simde_test.cpp
#elif defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
}

// The lowest 29 of a double's 52 bits of fraction are those that a float has not. Half of its last place is
// this.
constexpr uint64_t below_float = (uint64_t{1} << 29) - 1, half_of_float = uint64_t{1} << 28;

// By doubles, for processors that have no such instruction: the product is exact, and so is rounding the sum
// to a double and then to a float, but where the double lies halfway between two floats. There, what the
// first rounding has lost (Knuth's TwoSum) decides. For results that are normal numbers, or that are a
// multiple of 2^-149 to begin with, as sums of whole numbers times fp32 scales are.
inline float fused_by_doubles(float a, float b, float c) {
    const double product = double(a) * b, sum = product + c;
    auto bits = std::bit_cast<uint64_t>(sum);
    if ((bits & below_float) == half_of_float) {
        const double added = sum - product, lost = (product - (sum - added)) + (c - added);
        if (lost != 0) bits += (lost > 0) == (sum > 0) ? 1 : uint64_t(-1);
    }
    return float(std::bit_cast<double>(bits));
}

// a * b + c, rounded once, as the kernels' sums of groups are.
inline float fused_multiply_add(float a, float b, float c) {
#ifdef __wasm__  // std::fma is a function there, which musl gets wrong where rounding modes cannot be set
    return fused_by_doubles(a, b, c);
#else
    return std::fma(a, b, c);
#endif
}

// out[i] = silu(gate[i]) * up[i], silu(z) = z / (1 + exp(-z)) (Shazeer 2020, arXiv 2002.05202)
inline void swiglu(float* out, const float* gate, const float* up, int n) {
    int i = 0;
    for (; i + vector_lanes <= n; i += vector_lanes) {
        const Floats z = load(gate + i);
        store(out + i, z / (1.0f + exp(-z)) * load(up + i));
    }
    for (; i < n; i++) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}
