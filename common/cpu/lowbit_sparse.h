// 2:4 sparsity: the kept codes of 64 columns to where the mask has them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#if (defined(__AVX2__) || defined(__SSE4_1__)) && !defined(RUNQ_SIMDE)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For each byte of a mask, where its eight columns take their codes from: one of four, or none (128).
constexpr std::array<uint64_t, 256> sparse_sources = [] {
    std::array<uint64_t, 256> table{};
    for (unsigned mask = 0; mask < 256; mask++) {
        uint64_t rank = 0;
        for (unsigned k = 0; k < 8; k++)
            table[mask] |= ((mask >> k & 1) != 0 ? rank++ : uint64_t{128}) << 8 * k;
    }
    return table;
}();

// to (64,): where the mask has a 1, the next of 32 codes; elsewhere `fill`. A mask with another number of
// ones than 32 gives other codes, and reads nothing else.
inline void expand_sparse(uint8_t* to, const uint8_t* codes, const uint8_t* mask, uint8_t fill) {
#if defined(__AVX512VBMI2__) && !defined(RUNQ_SIMDE)
    uint64_t ones;
    std::memcpy(&ones, mask, sizeof ones);
    const __m256i kept = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m512i filled = _mm512_set1_epi8(char(fill));
    _mm512_storeu_si512(to, _mm512_mask_expand_epi8(filled, ones, _mm512_castsi256_si512(kept)));
#else
    for (int b = 0; b < 4; b++, to += 16, codes += 8, mask += 2) {  // 16 columns, 8 codes
        const uint64_t sources[2] = {sparse_sources[mask[0]], sparse_sources[mask[1]] + 0x0404040404040404};
#if defined(__AVX2__) || defined(__SSE4_1__)
        const __m128i from = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
        const __m128i order = _mm_loadu_si128(reinterpret_cast<const __m128i*>(sources));
        const __m128i placed =
            _mm_blendv_epi8(_mm_shuffle_epi8(from, order), _mm_set1_epi8(char(fill)), order);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), placed);
#elif defined(__aarch64__)
        const uint8x16_t from = vcombine_u8(vld1_u8(codes), vdup_n_u8(0));
        const uint8x16_t order = vreinterpretq_u8_u64(vld1q_u64(sources));
        vst1q_u8(to, vqtbx1q_u8(vdupq_n_u8(fill), from, order));
#else
        uint8_t order[16];
        std::memcpy(order, sources, sizeof order);
        for (int k = 0; k < 16; k++) to[k] = order[k] < 8 ? codes[order[k]] : fill;
#endif
    }
#endif
}
