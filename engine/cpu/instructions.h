// Which instruction set the kernels take. What each brings (int8.h) is in x86.h, arm.h and wasm.h; which
// there are is known when this is compiled (-march).
#pragma once

#include <algorithm>
#include <tuple>
#include <type_traits>

#include "engine/cpu/int8.h"
#ifdef __AVX2__
#include "engine/cpu/x86.h"
#endif
#ifdef __aarch64__
#include "engine/cpu/arm.h"
#endif
#ifdef __wasm_simd128__
#include "engine/cpu/wasm.h"
#endif

template <class... Isa>
struct IsaList {
    using Best = std::tuple_element_t<0, std::tuple<Isa..., PlainInt8>>;  // for any number of codes

    // Calls use(Isa{}) with the first that takes groups of this size, whole vectors and at least 32 codes.
    // False if there is none.
    template <class Use>
    static bool with_best_isa(int group_size, [[maybe_unused]] Use use) {
        return group_size > 0 &&
               ((group_size % std::max(32, 4 * Isa::lanes) == 0 && (use(Isa{}), true)) || ...);
    }
};

// The best first.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
using BuildIsas = IsaList<Avx512Vnni, AvxVnni>;
#elif defined(__AVXVNNI__) || defined(__AVX512VNNI__) && defined(__AVX512VL__)
using BuildIsas = IsaList<AvxVnni>;
#elif defined(__AVX2__)
using BuildIsas = IsaList<Avx2>;
#elif defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
using BuildIsas = IsaList<NeonI8mm>;
#elif defined(__ARM_FEATURE_DOTPROD)
using BuildIsas = IsaList<NeonDot>;
#elif defined(__aarch64__)
using BuildIsas = IsaList<Neon>;
#elif defined(__wasm_simd128__)
using BuildIsas = IsaList<WasmSimd>;
#else
using BuildIsas = IsaList<>;
#endif

// The instruction set that multiplies words of 2- to 6-bit codes, and one token: the same, but for NeonI8mm.
struct NeonDot;
struct NeonI8mm;
template <class Isa>
using ByWords = std::conditional_t<std::is_same_v<Isa, NeonI8mm>, NeonDot, Isa>;

// And the one of attention in int8.
using AttentionIsa = ByWords<BuildIsas::Best>;
