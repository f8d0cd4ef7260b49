// Matrices of 2, 4 and 8 bits, and their rows as int8 codes with a scale for each group of activations: what
// Q8 has, so that the int8 kernels multiply them. docs/gptq.md has the formats.
//
// A row of 2- or 4-bit codes is cut into blocks of 64 bytes, what is left at its end into a block of 32, then
// of 16. In a block of B bytes, byte j holds codes j, j + B, j + 2B, ... from its lowest bits up.
//
// The plain loops of runq_gptq.cpp specify all this; tests/lowbit_matmul_test.cpp holds it equal to the same
// arithmetic written down once more.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/cpu/half.h"
#include "common/cpu/int8.h"
#include "common/cpu/lowbit_sparse.h"
#include "common/cpu/vector.h"

// Rows that are packed together.
constexpr int row_block = 16;

// A matrix of a GPTQ file. Of the pointers a format has some; the others are null.
//
//   8 bits           weight = code * scale
//   4 bits, 2 bits   weight = (code - zero) * scale
//   two levels       weight = (5 * code - high nibble) * (low nibble * row_scale)
//   2:4 sparse       weight = (code - zero) * scale where the mask has a 1, otherwise 0
struct LowbitMatrix {
    const uint8_t* codes = nullptr;  // (n_rows, n_code_bytes()); 8 bits: signed
    const uint8_t* mask = nullptr;  // (n_rows, n_cols / 8), bit k % 8 of byte k / 8 for column k; sparse only
    const Half* scales = nullptr;   // (n_rows, n_scales())
    const uint8_t* zeros = nullptr;     // (n_rows, n_zero_bytes()), two in a byte, the first in the low half
    int zero_point = 0;                 // of all groups, where `zeros` is null
    const uint8_t* levels = nullptr;    // (n_rows, n_scales()), two levels only
    const float* row_scales = nullptr;  // (n_rows,), two levels, or 8 bits without groups
    int bits = 0;
    int n_rows = 0, n_cols = 0;  // output channels, input channels; n_cols is a multiple of 64
    int group = 0;               // columns that share a scale, a multiple of group_size
    int group_size = 0;          // activations that share a scale, 32 or 64
    bool packed = false;  // in row blocks (lowbit_pack.h), where row_codes(i) and so on are of the first row

    int n_groups() const { return n_cols / group_size; }
    int n_scales() const { return n_cols / group; }
    int n_codes() const { return mask != nullptr ? n_cols / 2 : n_cols; }
    size_t n_code_bytes() const { return size_t(n_codes()) * bits / 8; }
    size_t n_mask_bytes() const { return size_t(n_cols) / 8; }
    size_t n_zero_bytes() const { return size_t(n_scales() + 1) / 2; }
    const uint8_t* row_codes(int i) const { return codes + size_t(i) * n_code_bytes(); }
    const uint8_t* row_mask(int i) const { return mask + size_t(i) * n_mask_bytes(); }
    const Half* row_halfs(int i) const { return scales + size_t(i) * n_scales(); }
    const uint8_t* row_zeros(int i) const { return zeros + size_t(i) * n_zero_bytes(); }
    const uint8_t* row_levels(int i) const { return levels + size_t(i) * n_scales(); }
    // Whether row i lies in a row block.
    bool in_block(int i) const { return packed && i < n_rows / row_block * row_block; }
    // Value j of row i in one of the tables, which has n values a row.
    template <class T>
    const T& at(const T* table, int i, size_t n, size_t j) const {
        if (!in_block(i)) return table[size_t(i) * n + j];
        return table[size_t(i / row_block * row_block) * n + j * row_block + size_t(i % row_block)];
    }

    // What is taken off the codes of row i's group s; off five times the codes with two levels.
    int zero(int i, int s) const {
        if (levels != nullptr) return at(levels, i, size_t(n_scales()), size_t(s)) >> 4;
        return zeros != nullptr ? at(zeros, i, n_zero_bytes(), size_t(s / 2)) >> s % 2 * 4 & 15 : zero_point;
    }
    // The scale of row i's group s.
    float scale(int i, int s) const {
        const auto n = size_t(n_scales()), j = size_t(s);
        if (levels != nullptr) return float(at(levels, i, n, j) & 15) * row_scales[i];
        return scales != nullptr ? to_float(at(scales, i, n, j)) : row_scales[i];
    }
};

// out (x.n_rows, w.n_rows) fp32 = x times w transposed.
struct LowbitProduct {
    float* out;
    LowbitMatrix w;
};

// Bytes as wide as the machine's registers.
typedef uint8_t Bytes __attribute__((vector_size(4 * vector_lanes)));
typedef uint16_t Words16 __attribute__((vector_size(4 * vector_lanes)));
#if defined(__AVX512BW__) && !defined(RUNQ_SIMDE)
// The 64 codes of a block of 16 or 32 bytes: each part of the register shifts its own copy of the block.
template <int bits>
inline void store_codes(uint8_t* to, const uint8_t* from) {
    __m512i copies, shifts;
    if constexpr (bits == 4) {
        copies = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    } else {
        copies = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        shifts = _mm512_set_epi64(0x0006000600060006, 0x0006000600060006, 0x0004000400040004,
                                  0x0004000400040004, 0x0002000200020002, 0x0002000200020002, 0, 0);
    }
    const __m512i codes = _mm512_srlv_epi16(copies, shifts);
    _mm512_storeu_si512(to, _mm512_and_si512(codes, _mm512_set1_epi8((1 << bits) - 1)));
}
#endif
// Codes of 2 or 4 bits, one to a byte: n codes of `from`, which begins with a block.
template <int bits>
inline void unpack_codes(uint8_t* to, const uint8_t* from, int n) {
    constexpr int per_byte = 8 / bits, mask = (1 << bits) - 1;
    for (int block = 64; block >= 16; block /= 2) {
#if defined(__AVX512BW__) && !defined(RUNQ_SIMDE)
        if (block * per_byte == 64) {  // codes for one register, of which all have to be stored at once
            for (; n >= 64; n -= 64, from += block, to += 64) store_codes<bits>(to, from);
            continue;
        }
#endif
        for (; n >= block * per_byte; n -= block * per_byte, from += block, to += block * per_byte) {
            for (int i = 0; i < per_byte; i++) {
                constexpr int width = sizeof(Bytes);
                int j = 0;
                for (; j + width <= block; j += width) {
                    Words16 v;  // a shift of words is one instruction, and what it brings in is masked
                    std::memcpy(&v, from + j, sizeof v);
                    const Bytes codes = Bytes(v >> uint16_t(i * bits)) & uint8_t(mask);
                    std::memcpy(to + i * block + j, &codes, sizeof codes);
                }
                for (; j < block; j++) to[i * block + j] = from[j] >> i * bits & mask;
            }
        }
    }
}

// The zero points of row i, as LowbitMatrix::zero has them.
struct RowZeros {
    const uint8_t* bytes = nullptr;  // of its first groups
    size_t step;                     // to the next ones
    uint8_t same;                    // that of all groups, if `bytes` is null
    bool two_level;

    RowZeros(const LowbitMatrix& w, int i)
        : step(w.in_block(i) ? row_block : 1), same(uint8_t(w.zero_point)), two_level(w.levels != nullptr) {
        if (two_level) bytes = &w.at(w.levels, i, size_t(w.n_scales()), 0);
        if (w.zeros != nullptr) bytes = &w.at(w.zeros, i, w.n_zero_bytes(), 0);
    }
    uint8_t operator[](int s) const {
        if (bytes == nullptr) return same;
        return two_level ? bytes[size_t(s) * step] >> 4 : bytes[size_t(s / 2) * step] >> s % 2 * 4 & 15;
    }
};

// n bytes of row i in a table of codes or masks, which has row_bytes of each row, from byte b on: where they
// lie, or, if the row is in a block, in `copy`.
inline const uint8_t* table_bytes(const LowbitMatrix& w, const uint8_t* table, int i, size_t row_bytes, int b,
                                  int n, std::vector<uint32_t>& copy) {
    if (!w.in_block(i)) return table + size_t(i) * row_bytes + b;
    const auto* words = reinterpret_cast<const uint32_t*>(table);
    uint32_t* to = scratch(copy, size_t(n) / 4);
    for (int j = 0; j < n / 4; j++) to[j] = w.at(words, i, row_bytes / 4, size_t(b) / 4 + size_t(j));
    return reinterpret_cast<const uint8_t*>(to);
}
inline const uint8_t* code_bytes(const LowbitMatrix& w, int i, int b, int n) {
    static thread_local std::vector<uint32_t> copy;
    return table_bytes(w, w.codes, i, w.n_code_bytes(), b, n, copy);
}
inline const uint8_t* mask_bytes(const LowbitMatrix& w, int i, int b, int n) {
    static thread_local std::vector<uint32_t> copy;
    return table_bytes(w, w.mask, i, w.n_mask_bytes(), b, n, copy);
}

// Columns k .. k + n - 1 of row i of a sparse matrix as int8 codes. k is a multiple of 256, n of 64.
inline void expand_sparse_columns(int8_t* to, const LowbitMatrix& w, int i, int k, int n) {
    const uint8_t *codes = code_bytes(w, i, k / 4, n / 4), *mask = mask_bytes(w, i, k / 8, n / 8);
    const RowZeros zeros(w, i);
    const int shift = w.group == w.n_cols ? 31 : std::countr_zero(unsigned(w.group));
    auto zero = [&](int j) { return zeros[(k + j) >> shift]; };
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

// Columns k .. k + n - 1 of row i as the int8 codes that are multiplied. k is a multiple of 256, n of 64.
inline void expand_columns(int8_t* to, const LowbitMatrix& w, int i, int k, int n) {
    if (w.mask != nullptr) return expand_sparse_columns(to, w, i, k, n);
    auto* stored = reinterpret_cast<uint8_t*>(to);
    if (w.bits == 8) return void(std::memcpy(stored, code_bytes(w, i, k, n), size_t(n)));
    if (w.bits == 4) {
        unpack_codes<4>(stored, code_bytes(w, i, k / 2, n / 2), n);
    } else {
        unpack_codes<2>(stored, code_bytes(w, i, k / 4, n / 4), n);
    }
    const uint8_t multiple = w.levels != nullptr ? 5 : 1;
    auto finish = [&](auto width, int8_t* p, uint8_t zero) {
        typedef uint8_t Some __attribute__((vector_size(decltype(width)::value)));
        Some codes;
        std::memcpy(&codes, p, sizeof codes);
        const Some result = (multiple == 5 ? codes + (codes << 2) : codes) - zero;
        std::memcpy(p, &result, sizeof result);
    };
    const RowZeros zeros(w, i);
    for (int s = k / w.group, j = 0; j < n; s++) {
        const uint8_t zero = zeros[s];
        const int end = std::min(n, (s + 1) * w.group - k);
        for (; j + int(sizeof(Bytes)) <= end; j += sizeof(Bytes))
            finish(std::integral_constant<int, sizeof(Bytes)>(), to + j, zero);
        for (; j < end; j += 16) finish(std::integral_constant<int, 16>(), to + j, zero);
    }
}

// The scales of row i, one for each group of activations: (n_groups(),).
inline void expand_scales(float* to, const LowbitMatrix& w, int i) {
    const int n_scales = w.n_scales(), times = w.group / w.group_size;
    if (w.scales != nullptr && !w.in_block(i)) {
        widen(to, w.row_halfs(i), size_t(n_scales));
    } else {
        for (int s = 0; s < n_scales; s++) to[s] = w.scale(i, s);
    }
    for (int s = n_scales; s-- > 0 && times > 1;) std::fill_n(to + s * times, times, to[s]);
}
