// 2:4 sparsity: the kept codes of 64 columns to where the mask has them. The plain loop of it is expand(), in
// the program that multiplies codes of 2, 4 and 8 bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if (defined(__AVX2__) || defined(__SSE4_1__)) && !defined(RUNQ_SIMDE)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For each byte of a mask, where its eight columns take their codes from: one of four, or none (128, of which
// x86's pshufb and Arm's tbl make 0).
constexpr std::array<uint64_t, 256> sparse_sources = [] {
    std::array<uint64_t, 256> table{};
    for (unsigned mask = 0; mask < 256; mask++) {
        uint64_t rank = 0;
        for (unsigned k = 0; k < 8; k++)
            table[mask] |= ((mask >> k & 1) != 0 ? rank++ : uint64_t{128}) << 8 * k;
    }
    return table;
}();

// Whether a mask keeps two of each four columns; n_bytes: a multiple of 8. All others here take such masks
// alone: with another one results depend on the instructions, though nothing else is read.
inline bool is_two_of_four(const uint8_t* mask, size_t n_bytes) {
    constexpr uint64_t ones = 0x1111111111111111;
    uint64_t wrong = 0;
    for (size_t i = 0; i < n_bytes; i += 8) {
        uint64_t bits;
        std::memcpy(&bits, mask + i, sizeof bits);
        const uint64_t pairs = bits - (bits >> 1 & 5 * ones);  // in each two bits, how many ones they had
        wrong |= ((pairs & 3 * ones) + (pairs >> 2 & 3 * ones)) ^ 2 * ones;
    }
    return wrong == 0;
}

// to (64,): where the mask has a 1, the next of 32 codes, less `zero`; elsewhere 0.
inline void expand_sparse(int8_t* to, const uint8_t* codes, const uint8_t* mask, uint8_t zero) {
#if defined(__AVX512VBMI2__) && !defined(RUNQ_SIMDE)
    uint64_t ones;
    std::memcpy(&ones, mask, sizeof ones);
    const __m256i kept = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i taken_off = _mm256_sub_epi8(kept, _mm256_set1_epi8(char(zero)));
    _mm512_storeu_si512(to, _mm512_maskz_expand_epi8(ones, _mm512_zextsi256_si512(taken_off)));
#else
    for (int b = 0; b < 4; b++, to += 16, codes += 8, mask += 2) {  // 16 columns, 8 codes
        const uint64_t sources[2] = {sparse_sources[mask[0]], sparse_sources[mask[1]] + 0x0404040404040404};
#if defined(__AVX2__) || defined(__SSE4_1__)
        const __m128i from = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
        const __m128i order = _mm_loadu_si128(reinterpret_cast<const __m128i*>(sources));
        const __m128i taken_off = _mm_sub_epi8(from, _mm_set1_epi8(char(zero)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(taken_off, order));
#elif defined(__aarch64__)
        const uint8x16_t from = vsubq_u8(vcombine_u8(vld1_u8(codes), vdup_n_u8(0)), vdupq_n_u8(zero));
        const uint8x16_t order = vreinterpretq_u8_u64(vld1q_u64(sources));
        vst1q_s8(to, vreinterpretq_s8_u8(vqtbl1q_u8(from, order)));
#else
        uint8_t order[16];
        std::memcpy(order, sources, sizeof order);
        for (int k = 0; k < 16; k++) to[k] = int8_t(order[k] < 8 ? codes[order[k]] - zero : 0);
#endif
    }
#endif
}

// to (256,): the columns of a whole block of 128 codes of 4 bits, by 64 with zero points of their own.
inline void expand_sparse_block(int8_t* to, const uint8_t* block, const uint8_t* mask,
                                const uint8_t (&zeros)[4]) {
#if defined(__AVX512VBMI2__) && !defined(RUNQ_SIMDE)
    const __m512i bytes = _mm512_loadu_si512(block), low_half = _mm512_set1_epi8(15);
    const __m512i low = _mm512_and_si512(bytes, low_half),
                  high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_half);
    const __m512i kept[4] = {low, _mm512_shuffle_i64x2(low, low, 0xee), high,
                             _mm512_shuffle_i64x2(high, high, 0xee)};
    for (int g = 0; g < 4; g++) {
        uint64_t ones;
        std::memcpy(&ones, mask + 8 * g, sizeof ones);
        const __m512i taken_off = _mm512_sub_epi8(kept[g], _mm512_set1_epi8(char(zeros[g])));
        _mm512_storeu_si512(to + 64 * g, _mm512_maskz_expand_epi8(ones, taken_off));
    }
#else
    uint8_t kept[128];
    for (int j = 0; j < 64; j++) kept[j] = block[j] & 15, kept[64 + j] = block[j] >> 4;
    for (int g = 0; g < 4; g++) expand_sparse(to + 64 * g, kept + 32 * g, mask + 8 * g, zeros[g]);
#endif
}
