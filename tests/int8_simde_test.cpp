// The cases of quant_matmul_test.cpp and lowbit_matmul_test.cpp with the x86 intrinsics that the machine
// lacks emulated by SIMDe, in place of <immintrin.h>. Compiled without -march, so that none of AVX2, AVX-512
// and VNNI is the machine's own.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cmath>
#include <cstdint>

namespace {

// SIMDe (0.7.4) multiplies and adds with two roundings where the machine has no fused instruction.
simde__m256 fused_256(simde__m256 a, simde__m256 b, simde__m256 c) {
    float av[8], bv[8], cv[8];
    simde_mm256_storeu_ps(av, a), simde_mm256_storeu_ps(bv, b), simde_mm256_storeu_ps(cv, c);
    for (int i = 0; i < 8; i++) cv[i] = std::fma(av[i], bv[i], cv[i]);
    return simde_mm256_loadu_ps(cv);
}

simde__m512 fused_512(simde__m512 a, simde__m512 b, simde__m512 c) {
    float av[16], bv[16], cv[16];
    simde_mm512_storeu_ps(av, a), simde_mm512_storeu_ps(bv, b), simde_mm512_storeu_ps(cv, c);
    for (int i = 0; i < 16; i++) cv[i] = std::fma(av[i], bv[i], cv[i]);
    return simde_mm512_loadu_ps(cv);
}

// And these it does not have.
simde__m512i to_int32_512(simde__m128i bytes) {
    uint8_t from[16];
    int32_t to[16];
    simde_mm_storeu_si128(reinterpret_cast<simde__m128i*>(from), bytes);
    for (int i = 0; i < 16; i++) to[i] = from[i];
    return simde_mm512_loadu_si512(to);
}

simde__m512 to_floats_512(simde__m512i v) {
    int32_t lanes[16];
    float values[16];
    simde_mm512_storeu_si512(lanes, v);
    for (int i = 0; i < 16; i++) values[i] = static_cast<float>(lanes[i]);
    return simde_mm512_loadu_ps(values);
}

simde__m512i to_whole_512(simde__m512 v) {
    float values[16];
    int32_t lanes[16];
    simde_mm512_storeu_ps(values, v);
    for (int i = 0; i < 16; i++) lanes[i] = static_cast<int32_t>(std::nearbyintf(values[i]));
    return simde_mm512_loadu_si512(lanes);
}

}  // namespace

#undef _mm256_fmadd_ps
#undef _mm512_fmadd_ps
#undef _mm512_cvtepi32_ps  // of some versions of SIMDe, as the next
#undef _mm512_cvtps_epi32
#undef _mm512_cvtepu8_epi32
#define _mm256_fmadd_ps fused_256
#define _mm512_fmadd_ps fused_512
#define _mm512_cvtepi32_ps to_floats_512
#define _mm512_cvtps_epi32 to_whole_512
#define _mm512_cvtepu8_epi32 to_int32_512

// Now the kernels may believe that this is a machine with AVX-512 VNNI.
#define RUNQ_SIMDE
#define __AVX2__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1
#include "engine/cpu/quant_matmul.cpp"
#include "lowbit_matmul_test.cpp"
#include "quant_matmul_test.cpp"
