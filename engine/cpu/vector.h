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

#if defined(__FAST_MATH__) || __FLT_EVAL_METHOD__ == 2
#error "runq needs fp32 as IEEE 754 has it: compile without -Ofast, -ffast-math and -mfpmath=387"
#endif

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__x86_64__) && !defined(__FMA__)
#include "engine/cpu/processor.h"
#define ASKS_FOR_FMA  // of the processor, when the program runs
static const bool has_avx2 = processor_has(avx2);
#endif

// Functions are in a namespace for each width: of one name in two (attention.cpp) the linker would keep one.
#if defined(__AVX512F__)
constexpr int vector_lanes = 16;
#define VECTORS vectors_of_16
#elif defined(__AVX__)
constexpr int vector_lanes = 8;
#define VECTORS vectors_of_8
#else
constexpr int vector_lanes = 4;  // SSE, NEON
#define VECTORS vectors_of_4
#endif
typedef float Floats __attribute__((vector_size(4 * vector_lanes)));
typedef int32_t Int32s __attribute__((vector_size(4 * vector_lanes)));
typedef uint32_t Uint32s __attribute__((vector_size(4 * vector_lanes)));

inline namespace VECTORS {
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

// a * b + c, rounded once (IEEE 754-2019, fusedMultiplyAdd), by doubles: the product is exact, and rounding
// its sum with c, then that to a float, is rounding once, but where the first result lies halfway between two
// floats. There, what the first rounding has lost (Knuth's TwoSum) decides.
inline float fused_by_doubles(float a, float b, float c) {
    const double product = double(a) * b;
    double sum = product + c;
    const double part = sum - product, lost = (product - (sum - part)) + (c - part);
    const double mirrored = sum + (sum - float(sum));  // if halfway, the fp32 number on the other side
    if (lost != 0 && mirrored == float(mirrored)) sum = std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
    return float(sum);
}

// c = a * b + c by the instruction, where an x86 processor has it that need not.
template <class T>
inline bool fused_by_instruction([[maybe_unused]] T& c, [[maybe_unused]] T a, [[maybe_unused]] T b) {
#ifdef ASKS_FOR_FMA
    if (!has_avx2) return false;
    asm("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));  // of a float, the first lane counts
    return true;
#else
    return false;
#endif
}

// The same by the processor's instruction. WebAssembly has none; musl's std::fma is wrong there, as rounding
// modes cannot be set.
inline float fused_multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fma(a, b, c);
#else
    return fused_by_instruction(c, a, b) ? c : fused_by_doubles(a, b, c);
#endif
}

// Whether a product is rounded before something is added to it, as the text says: -ffp-contract=off.
inline bool rounds_products() {
    volatile float a = 1 + 0x1p-12f, c = 1 + 0x1p-11f;
    const float product = a * a;
    return product - c == 0;
}
constexpr const char* unrounded_products =
    ": products are fused with sums, so results are others; compile with -ffp-contract=off\n";

// Of every lane. g++ 12 has no such function for vectors, and may fuse none by itself (-ffp-contract=off).
inline Floats fused_multiply_add(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    // By doubles, without the last bit: that decides only where a sum lies halfway between two floats, or is
    // no normal number. A product alone is exact.
    static_assert(vector_lanes == 4 || vector_lanes == 8);
    Floats out = c;
    if (fused_by_instruction(out, a, b)) return out;
    Int32s doubtful{};
    for (int i = 0; i < vector_lanes; i += 2) {
        typedef double Doubles __attribute__((vector_size(16)));
        typedef int32_t Words __attribute__((vector_size(16)));
        const auto pair = [i](const Floats& v) { return Doubles{double(v[i]), double(v[i + 1])}; };
        const Doubles sum = pair(a) * pair(b) + pair(c);
        out[i] = float(sum[0]), out[i + 1] = float(sum[1]);
        doubtful[i] = Words(sum)[0], doubtful[i + 1] = Words(sum)[2];  // the low halves of their bits
    }
    const Floats magnitude = Floats(Int32s(out) & 0x7fffffff);
    doubtful = ((doubtful & 0x1fffffff) == 0x10000000) | ((magnitude <= 0x1p-126f) & (c != 0.0f));
    uint64_t any[vector_lanes / 2];
    std::memcpy(any, &doubtful, sizeof any);
    if ((any[0] | any[1] | any[vector_lanes / 2 - 2] | any[vector_lanes / 2 - 1]) == 0) return out;
    float of[4][vector_lanes];  // through memory: g++ 12 at -O3 gets lanes that are taken one by one wrong
    store(of[0], a), store(of[1], b), store(of[2], c);
    for (int i = 0; i < vector_lanes; i++) of[3][i] = fused_by_doubles(of[0][i], of[1][i], of[2][i]);
    return load(of[3]);
#endif
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
    const Floats shifted = fused_multiply_add(x, splat(1.44269504f), round);
    const Floats n = shifted - round;
    const Floats high = fused_multiply_add(-n, splat(0.693359375f), x);
    const Floats r = fused_multiply_add(n, splat(2.12194440e-4f), high);
    Floats p = splat(1.0f / 5040);
    for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = fused_multiply_add(p, r, splat(term));
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

// e^x of a number, the same.
inline float exp_fp32(float x) { return exp(splat(x))[0]; }

// out[i] = silu(gate[i]) * up[i], silu(z) = z / (1 + exp(-z)) (Shazeer 2020, arXiv 2002.05202)
inline void swiglu(float* out, const float* gate, const float* up, int n) {
    int i = 0;
    for (; i + vector_lanes <= n; i += vector_lanes) {
        const Floats z = load(gate + i);
        store(out + i, z / (1.0f + exp(-z)) * load(up + i));
    }
    for (; i < n; i++) out[i] = gate[i] / (1.0f + exp_fp32(-gate[i])) * up[i];
}
}  // namespace VECTORS
