// The instruction sets that this build has.
#pragma once

#include "engine/cpu/instructions.h"

namespace {

// Calls check(Isa{}) for each instruction set that this build has, the ones quant_matmul would not choose
// included.
template <class Check>
void for_each_isa([[maybe_unused]] Check check) {
#ifdef __AVX2__
    check(Avx2{});
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
    check(AvxVnni{});
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    check(Avx512Vnni{});
#endif
#ifdef __aarch64__
    check(Neon{});
#ifdef __ARM_FEATURE_DOTPROD
    check(NeonDot{});
#ifdef __ARM_FEATURE_MATMUL_INT8
    check(NeonI8mm{});
#endif
#endif
#endif
#ifdef __wasm_simd128__
    check(WasmSimd{});
#endif
}

}  // namespace
