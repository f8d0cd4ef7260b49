// Rows of a matrix as a file has it, as int8 codes with an fp32 scale for each group of activations: what the
// int8 kernels multiply. The plain loop that says what every format means is expand(), in the program that
// multiplies codes of 2 to 8 bits.
//
// A row of 2- or 4-bit codes is cut into blocks of 64 bytes, what is left at its end into a block of 32, then
// of 16. Of 5 and 6 bits it is two such rows, of the low 4 bits and of the others (1 bit ends in blocks of
// 8). In a block of B bytes, byte j holds codes j, j + B, j + 2B, ... from its lowest bits up.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/cpu/half.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/vector.h"
#include "engine/os/threads.h"

#if (defined(__AVX2__) || defined(__SSE4_1__)) && !defined(RUNQ_SIMDE)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// A program's matrix of few bits as the kernels take it: the tables that there are say what its codes mean.
template <class Matrix>
requires has_few_bits<Matrix> QuantMatrix view_of(const Matrix& m) {
    QuantMatrix w{};
    w.codes = m.codes, w.mask = m.mask, w.zeros = m.zeros, w.levels = m.levels, w.table = m.table;
    w.scales = m.scales, w.scale_type = QUANT_GEMM_GROUP_FP16;
    if (m.row_scales != nullptr) w.scales = m.row_scales, w.scale_type = QUANT_GEMM_ROW_FP32;
    if (m.levels != nullptr && m.bits > 2) w.scale_type = QUANT_GEMM_GROUP_INT8;
    w.kind = m.mask != nullptr                    ? QUANT_GEMM_SPARSE
             : m.table != nullptr                 ? QUANT_GEMM_TABLE
             : m.levels != nullptr && m.bits == 2 ? QUANT_GEMM_TWO_LEVEL
             : m.bits == 8                        ? QUANT_GEMM_SIGNED
                                                  : QUANT_GEMM_UNSIGNED;
    w.bits = m.bits, w.zero_point = m.zero_point, w.n_rows = m.n_rows, w.n_cols = m.n_cols;
    w.group = m.group, w.group_size = m.group_size;
    if constexpr (requires { kernel_group(m); }) w.group_size = kernel_group(m);  // program_experts.h
    return w;
}

// ----------------------------------------------------------------------------
// 2:4 sparsity: the kept codes of 64 columns to where the mask has them.

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

// Looks through all masks in one loop: threads do not meet between one and the next. Of the first that does
// not keep two of each four columns, the program's own check_mask() says why.
template <class Weights>
void check_masks(const Weights& w) {
    auto masks = w.file.all();
    std::erase_if(masks, [](const auto& t) { return !t.name.ends_with(".mask"); });
    const auto n_rows = [](const auto& t) { return int64_t(t.n_bytes) / t.shape.back(); };
    const auto rows = [&](const auto& t, int64_t i) {
        return reinterpret_cast<const uint8_t*>(w.file.data(t)) + i * t.shape.back();
    };
    std::atomic<bool> good = true;
    parallel_lists(masks, n_rows, [&](const auto& t, int64_t begin, int64_t end) {
        if (!is_two_of_four(rows(t, begin), size_t(end - begin) * size_t(t.shape.back()))) good = false;
    });
    if (good) return;
    for (const auto& t : masks) Weights::check_mask(t.name, rows(t, 0), int(n_rows(t)), 8 * t.shape.back());
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

// ----------------------------------------------------------------------------
// Codes of 2 to 8 bits

// Codes of 1, 2 or 4 bits, one to a byte: n codes of `from`, which begins with a block, and ends with smaller
// ones. above: they are the upper bits of codes whose low 4 bits `to` has.
template <int bits, bool above = false, int block = 64>
inline void unpack_codes(uint8_t* to, const uint8_t* from, int n) {
    constexpr int per_byte = 8 / bits, width = std::min(block, 4 * vector_lanes);
    typedef uint8_t Bytes __attribute__((vector_size(width)));
    typedef uint16_t Words __attribute__((vector_size(width)));
    for (; n >= block * per_byte; n -= block * per_byte, from += block) {
        UNROLL(4)
        for (int i = 0; i < per_byte; i++, to += block) {
            for (int j = 0; j < block; j += width) {
                Words words;  // their shift is one instruction, and what it brings in is masked
                std::memcpy(&words, from + j, sizeof words);
                Bytes codes = Bytes(words >> uint16_t(i * bits)) & uint8_t((1 << bits) - 1), low{};
                if (above) std::memcpy(&low, to + j, sizeof low);
                if (above) codes = codes << 4 | low;
                std::memcpy(to + j, &codes, sizeof codes);
            }
        }
    }
    if constexpr (block > 8) unpack_codes<bits, above, block / 2>(to, from, n);
}

// What is taken off the codes of each group of row i; with two levels, off five times the codes.
struct RowZeros {
    const uint8_t *levels = nullptr, *zeros = nullptr;  // the row's, if the matrix has such
    int zero_point;                                     // otherwise this, for all groups

    RowZeros(const QuantMatrix& w, int i) : zero_point(w.zero_point) {
        if (w.kind == QUANT_GEMM_TWO_LEVEL) levels = w.levels + size_t(i) * n_scales(w);
        if (w.zeros != nullptr) zeros = w.zeros + size_t(i) * zero_bytes(w);
    }
    int operator[](int s) const {
        if (levels != nullptr) return levels[s] >> 4;
        return zeros == nullptr ? zero_point : zeros[s / 2] >> s % 2 * 4 & 15;
    }
};

// n columns from k on of row i of a sparse matrix as int8 codes; k is a multiple of 256, n of 64.
inline void expand_sparse_columns(int8_t* to, const QuantMatrix& w, int i, int k, int n) {
    const uint8_t* codes = w.codes + size_t(i) * code_bytes(w) + k / 4;
    const uint8_t* mask = w.mask + size_t(i) * mask_bytes(w) + k / 8;
    const int shift = w.group == w.n_cols ? 31 : std::countr_zero(unsigned(w.group));
    const RowZeros zeros(w, i);
    auto zero = [&](int j) { return uint8_t(zeros[(k + j) >> shift]); };
    int j = 0;
    for (; j + 256 <= n; j += 256) {
        const uint8_t of_groups[4] = {zero(j), zero(j + 64), zero(j + 128), zero(j + 192)};
        expand_sparse_block(to + j, codes + j / 4, mask + j / 8, of_groups);
    }
    if (j == n) return;
    uint8_t kept[128];
    unpack_codes<4>(kept, codes + j / 4, (n - j) / 2);
    for (int b = 0; j + b < n; b += 64)
        expand_sparse(to + j + b, kept + b / 2, mask + (j + b) / 8, zero(j + b));
}

// n codes from column k on of row i, one to a byte, of a matrix that is not sparse; k is a multiple of 256
// (of 5 bits: of 512), n of 64 (any, for codes of 8 bits).
inline void unpack_columns(uint8_t* to, const QuantMatrix& w, int i, int k, int n) {
    const uint8_t* row = w.codes + size_t(i) * code_bytes(w);
    if (w.bits == 8) return void(std::memcpy(to, row + k, size_t(n)));
    if (w.bits == 2) return unpack_codes<2>(to, row + k / 4, n);
    unpack_codes<4>(to, row + k / 2, n);
    if (w.bits == 5) unpack_codes<1, true>(to, row + w.n_cols / 2 + k / 8, n);
    if (w.bits == 6) unpack_codes<2, true>(to, row + w.n_cols / 2 + k / 4, n);
}

// Codes become what a table of 2^bits has for them, in place; n is a multiple of 64.
inline void look_up(int8_t* codes, int n, const int8_t* table, int bits) {
    int j = 0;
#if defined(__AVX2__) && !defined(RUNQ_SIMDE)
    const auto* parts = reinterpret_cast<const __m128i*>(table);
    const __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128(parts));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128(parts + (bits == 5 ? 1 : 0)));
    for (; j < n; j += 32) {
        auto* at = reinterpret_cast<__m256i*>(codes + j);
        const __m256i code = _mm256_loadu_si256(at), is_high = _mm256_slli_epi16(code, 3);
        _mm256_storeu_si256(
            at, _mm256_blendv_epi8(_mm256_shuffle_epi8(low, code), _mm256_shuffle_epi8(high, code), is_high));
    }
#endif
    for (; j < n; j++) codes[j] = table[codes[j] & ((1 << bits) - 1)];
}

// n columns from k on of row i as the int8 codes that are multiplied; k and n as for unpack_columns.
inline void expand_columns(int8_t* to, const QuantMatrix& w, int i, int k, int n) {
    if (w.kind == QUANT_GEMM_SPARSE) return expand_sparse_columns(to, w, i, k, n);
    unpack_columns(reinterpret_cast<uint8_t*>(to), w, i, k, n);
    if (w.bits == 8) return;
    if (w.kind == QUANT_GEMM_TABLE) return look_up(to, n, w.table, w.bits);
    const RowZeros zeros(w, i);
    const bool two_level = w.kind == QUANT_GEMM_TWO_LEVEL;
    for (int s = k / w.group, j = 0; j < n; s++) {
        const auto zero = uint8_t(zeros[s]);
        for (const int end = std::min(n, (s + 1) * w.group - k); j < end; j++)
            to[j] = int8_t((two_level ? 5 * to[j] : to[j]) - zero);
    }
}

// What groups of weights have, for each of their groups of activations: the n values in `to` become n *
// times. The usual number, 2, has a loop of its own, since fill_n takes longer than two stores.
template <class T>
inline void repeat_each(T* to, int n, int times) {
    if (times == 2) {
        for (int s = n; s-- > 0;) to[2 * s + 1] = to[2 * s] = to[s];
    } else if (times > 1) {
        for (int s = n; s-- > 0;) std::fill_n(to + s * times, times, to[s]);
    }
}

// The zero points of row i, one for each group of activations: (n_groups,). The plain loop is RowZeros.
inline void expand_zeros(int32_t* to, const QuantMatrix& w, int i) {
    const int n = n_scales(w);
    const RowZeros row(w, i);
    if (row.levels != nullptr) {
        for (int s = 0; s < n; s++) to[s] = row.levels[s] >> 4;
    } else if (row.zeros != nullptr) {
        for (int s = 0; s + 1 < n; s += 2) to[s] = row.zeros[s / 2] & 15, to[s + 1] = row.zeros[s / 2] >> 4;
        if (n % 2 != 0) to[n - 1] = row.zeros[n / 2] & 15;
    } else {
        std::fill_n(to, n, row.zero_point);
    }
    repeat_each(to, n, w.group / w.group_size);
}

// Likewise scales. Inlined, it would slow products of other formats.
[[gnu::noinline]] inline void expand_scales(float* to, const QuantMatrix& w, int i) {
    const int n = n_scales(w);
    const size_t first = size_t(i) * n;
    const auto* floats = static_cast<const float*>(w.scales);
    if (w.scale_type == QUANT_GEMM_GROUP_FP16) {
        widen(to, static_cast<const Half*>(w.scales) + first, size_t(n));
    } else if (w.scale_type == QUANT_GEMM_GROUP_FP32) {
        std::copy_n(floats + first, n, to);
    } else if (w.levels == nullptr) {
        std::fill_n(to, n, floats[i]);
    } else {
        const bool two = w.kind == QUANT_GEMM_TWO_LEVEL;
        const float row_scale = floats[i];
        for (int s = 0; s < n; s++)
            to[s] = float(two ? w.levels[first + s] & 15 : int8_t(w.levels[first + s])) * row_scale;
    }
    repeat_each(to, n, w.group / w.group_size);
}
