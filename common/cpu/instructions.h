// The instruction sets of this build, and which one is taken. What there is is known when this is compiled
// (-march).
#pragma once

#include <type_traits>

#include "common/cpu/int8_avx2.h"
#include "common/cpu/int8_avx512.h"
#include "common/cpu/int8_neon.h"

// Calls use(Isa{}) with the best instruction set for groups of this size. False if there is none.
template <class Use>
inline bool with_best_isa([[maybe_unused]] int group_size, [[maybe_unused]] Use use) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    if (group_size % 64 == 0) return use(Avx512Vnni{}), true;
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
    if (group_size % 32 == 0) return use(AvxVnni{}), true;
#elif defined(__AVX2__)
    if (group_size % 32 == 0) return use(Avx2{}), true;
#elif defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
    if (group_size % 32 == 0) return use(NeonI8mm{}), true;
#elif defined(__ARM_FEATURE_DOTPROD)
    if (group_size % 32 == 0) return use(NeonDot{}), true;
#elif defined(__aarch64__)
    if (group_size % 32 == 0) return use(Neon{}), true;
#endif
    return false;
}

// The instruction set that multiplies words of 2- and 4-bit codes: the same, but for NeonI8mm.
#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
template <class Isa>
using ByWords = std::conditional_t<std::is_same_v<Isa, NeonI8mm>, NeonDot, Isa>;
#else
template <class Isa>
using ByWords = Isa;
#endif
