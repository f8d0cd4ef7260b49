// Packed matrices of few bits: what kernels need of an instruction set for them beside int8.h's list, and the
// words of their codes, with masks. Blocks of them are lowbit_paths.h's. What codes mean stands in the
// programs, as plain loops: expand(), and with experts dot_by_digits(), int8 codes as two digits of 4 bits
// (MSD).
//
//   dot(acc, w, x)     acc[lane] += w[lane][0..3] . x[lane][0..3], w unsigned: where dot4 takes flipped bytes
//                      any, otherwise up to 127
//   widened(p)         as many bytes as there are lanes, unsigned, as int32
//   sparse_places(m)   the lowest 4 bits of each lane of m are the mask of four columns; a byte for each of
//                      them: 0 or 1, which of two codes it takes, or 0x80, none
//   shuffle(a, c)      for each byte of c, if it is below 16, that byte of the 16 of a in the same quarter of
//                      the vector; 0 if it is 0x80 or more
//   wide_tables        look_up_wide(a, c): the byte of a, 64, that the lowest 6 bits of each byte of c say
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine/cpu/instructions.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/vector.h"

template <class Isa>
struct LowbitOps;

// For each of the six masks with two ones: a byte per column, 0 for the first code, 1 for the second, 0x80
// for none. Found by the mask's lowest three bits, which tell the six apart.
constexpr std::array<uint32_t, 8> sparse_places_of = [] {
    std::array<uint32_t, 8> table{};
    table.fill(0x80808080);  // of other masks
    for (const unsigned mask : {0b0011u, 0b0101u, 0b0110u, 0b1001u, 0b1010u, 0b1100u}) {
        uint32_t places = 0, rank = 0;
        for (unsigned k = 0; k < 4; k++) places |= ((mask >> k & 1) != 0 ? rank++ : 0x80) << 8 * k;
        table[mask & 7] = places;
    }
    return table;
}();

#ifdef __AVX2__
template <>
struct LowbitOps<Avx2> {
    static constexpr bool wide_tables = false;
    static __m256i widened(const uint8_t* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static __m256i dot(__m256i acc, __m256i w, __m256i x) {
        const __m256i pairs = _mm256_maddubs_epi16(w, x);  // 2 * 15 * 127 at most
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static __m256i sparse_places(__m256i masks) {
        const auto* table = reinterpret_cast<const __m256i*>(sparse_places_of.data());
        return _mm256_permutevar8x32_epi32(_mm256_loadu_si256(table), masks);
    }
    static __m256i shuffle(__m256i bytes, __m256i from) { return _mm256_shuffle_epi8(bytes, from); }
};
template <class Isa>
struct VnniOps : LowbitOps<Avx2> {
    using Ints = typename Isa::Ints;
    static Ints dot(Ints acc, Ints w, Ints x) { return Isa::dot4(acc, w, x); }
};
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) || defined(__AVXVNNI__)
template <>
struct LowbitOps<AvxVnni> : VnniOps<AvxVnni> {};
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
template <>
struct LowbitOps<Avx512Vnni> : VnniOps<Avx512Vnni> {
    static __m512i widened(const uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static __m512i sparse_places(__m512i masks) {
        const auto* half = reinterpret_cast<const __m256i*>(sparse_places_of.data());
        return _mm512_permutexvar_epi32(masks, _mm512_broadcast_i64x4(_mm256_loadu_si256(half)));
    }
    static __m512i shuffle(__m512i bytes, __m512i from) { return _mm512_shuffle_epi8(bytes, from); }
#ifdef __AVX512VBMI__
    static constexpr bool wide_tables = true;
    static __m512i look_up_wide(__m512i table, __m512i codes) {
        return _mm512_permutexvar_epi8(codes, table);
    }
#endif
};
#endif

#ifdef __aarch64__
template <class Isa>
requires std::is_base_of_v<Neon, Isa>
struct LowbitOps<Isa> {
    static constexpr bool wide_tables = false;
    static int32x4_t widened(const uint8_t* p) {
        uint32_t four;
        std::memcpy(&four, p, sizeof four);
        const uint16x8_t pairs = vmovl_u8(vcreate_u8(four));
        return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(pairs)));
    }
    static int32x4_t dot(int32x4_t acc, int32x4_t w, int32x4_t x) { return Isa::dot4(acc, w, x); }
    static int32x4_t sparse_places(int32x4_t masks) {
        const auto* table = reinterpret_cast<const uint8_t*>(sparse_places_of.data());
        const uint32x4_t entry = vandq_u32(vreinterpretq_u32_s32(masks), vdupq_n_u32(7));
        const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), entry, 0x04040404);
        const uint8x16x2_t both = {vld1q_u8(table), vld1q_u8(table + 16)};
        return vreinterpretq_s32_u8(vqtbl2q_u8(both, vreinterpretq_u8_u32(bytes)));
    }
    static int32x4_t shuffle(int32x4_t bytes, int32x4_t from) {
        return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(bytes), vreinterpretq_u8_s32(from)));
    }
};
#endif

#ifdef __wasm_simd128__
template <>
struct LowbitOps<WasmSimd> {
    static constexpr bool wide_tables = false;
    static Int4 widened(const uint8_t* p) {
        return Int4(wasm_u32x4_extend_low_u16x8(wasm_u16x8_extend_low_u8x16(wasm_v128_load32_zero(p))));
    }
    static Int4 dot(Int4 acc, Int4 w, Int4 x) { return WasmSimd::dot4(acc, w, x); }
    static Int4 sparse_places(Int4 masks) {
        // A byte's place in the table; a swizzle gives 0 for what is past its half.
        const Int4 bytes = (masks & 7) * 0x04040404 + 0x03020100;
        const auto* table = reinterpret_cast<const uint8_t*>(sparse_places_of.data());
        const v128_t first = wasm_i8x16_swizzle(wasm_v128_load(table), v128_t(bytes));
        const v128_t second = wasm_i8x16_swizzle(wasm_v128_load(table + 16), v128_t(bytes ^ 0x10101010));
        return Int4(wasm_v128_or(first, second));
    }
    static Int4 shuffle(Int4 bytes, Int4 from) {
        return Int4(wasm_i8x16_swizzle(v128_t(bytes), v128_t(from)));
    }
};
#endif

template <class Isa>
struct BlockGroups;  // lowbit_paths.h

// Each lane's number in its quarter of a vector, times 4, in all of its bytes: the place of its first byte.
constexpr uint32_t lane_places[16] = {0,          0x04040404, 0x08080808, 0x0c0c0c0c, 0,          0x04040404,
                                      0x08080808, 0x0c0c0c0c, 0,          0x04040404, 0x08080808, 0x0c0c0c0c,
                                      0,          0x04040404, 0x08080808, 0x0c0c0c0c};

// What a word of a packed matrix holds: the codes of 8 (4 bits) or 16 (2 bits, or 4 bits that are 2:4 sparse)
// columns, four of them in each part of the word's bytes, one behind the other. Of 5 and 6 bits one word has
// the upper 1 or 2 bits of 32 or 16 columns, and 4 or 2 words behind it the low 4.
template <class Isa_, int bits_, QuantGemmKind kind_>
struct WordFormat {
    using Isa = Isa_;
    using Ints = typename Isa::Ints;
    using Groups = BlockGroups<Isa>;
    static constexpr int bits = bits_, lanes = Isa::lanes;
    static constexpr QuantGemmKind kind = kind_;
    static constexpr bool is_int8 = false, two_level = kind == QUANT_GEMM_TWO_LEVEL;
    static constexpr bool sparse = kind == QUANT_GEMM_SPARSE;
    // Whether what is multiplied are int8 weights, flipped; otherwise they are codes, and what the zero point
    // has added comes off the sum.
    static constexpr bool has_table = kind == QUANT_GEMM_TABLE, two_planes = bits == 5 || bits == 6;
    static constexpr bool zero_is_off = sparse || has_table;
    static constexpr int high_bits = two_planes ? bits - 4 : bits;  // of a code in the first word
    static constexpr int fours = 8 / high_bits * (sparse ? 2 : 1);  // columns of a unit, in fours
    static constexpr int unit = two_planes ? 1 + fours / 2 : 1;     // words of it
    typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
    typedef uint16_t Pairs __attribute__((vector_size(4 * lanes)));
    typedef int32_t Whole __attribute__((vector_size(4 * lanes)));
    typedef uint8_t Bytes __attribute__((vector_size(4 * lanes)));

    // What codes stand for, flipped: 16 of them to a part, or all, as often as they fit.
    struct Table {
        static constexpr int n_values = LowbitOps<Isa>::wide_tables ? 1 << bits : 16,
                             n = bits == 5 ? 32 / n_values : 1;
        Ints parts[n];
        explicit Table(const int8_t* table) {
            for (int i = 0; has_table && i < n; i++) {
                int8_t part[4 * lanes];
                for (int j = 0; j < 4 * lanes; j += n_values)
                    std::memcpy(part + j, table + i * n_values, n_values);
                parts[i] = Isa::flipped(Isa::load(part));
            }
        }
    };

    // Masks of some rows of a block that lie side by side, each word 32 columns of a row; the lowest bits are
    // column k's, a multiple of 4.
    static Words mask(const uint8_t* masks, int k) {
        Words words;
        std::memcpy(&words, masks + size_t(k / 32 * 4 * block_rows<Isa>), sizeof words);
        return words >> uint32_t(k % 32);
    }
    // Of codes of 4 bits and more, the low 4 bits; of 5 and 6 bits the upper ones, above these. In the other
    // bits is anything.
    static Pairs low(const Words (&v)[unit], int part) {
        return Pairs(v[two_planes + part / 2]) >> uint16_t(part % 2 * 4);
    }
    static Pairs high(const Words (&v)[unit], int part) {
        const int right = part * high_bits - 4;
        return right >= 0 ? Pairs(v[0]) >> uint16_t(right) : Pairs(v[0]) << uint16_t(-right);
    }
    // The codes in one part of each byte, unsigned.
    static Pairs codes(const Words (&v)[unit], int part) {
        if constexpr (two_planes) {
            constexpr auto high_mask = uint16_t(((1 << high_bits) - 1) * 0x1010);
            return (low(v, part) & uint16_t(0x0f0f)) | (high(v, part) & high_mask);
        }
        return Pairs(v[0]) >> uint16_t(part * bits) & uint16_t(((1 << bits) - 1) * 0x0101);
    }
    // Columns 4f .. 4f + 3 of a unit as int8 weights, flipped. `zeros`: the zero points, in each byte;
    // sparse: the word's masks are the lowest bits of `masks`.
    static Ints weights(const Words (&v)[unit], int f, Words zeros, Words masks, const Table& table) {
        if constexpr (has_table && LowbitOps<Isa>::wide_tables) {
            // What lies above a code chooses among copies of the table, or is not looked at.
            Pairs code = low(v, f);
            if (bits == 5) code ^= (code ^ high(v, f)) & uint16_t(0xf0f0);
            return LowbitOps<Isa>::look_up_wide(table.parts[0], Ints(code));
        }
        if constexpr (has_table) {
            const auto code = Ints(low(v, f) & uint16_t(0x0f0f));
            const Ints first = LowbitOps<Isa>::shuffle(table.parts[0], code);
            if constexpr (bits == 4) return first;
            const Ints second = LowbitOps<Isa>::shuffle(table.parts[bits - 4], code);
            return Ints((Bytes(high(v, f)) & uint8_t(16)) != 0 ? Bytes(second) : Bytes(first));
        }
        if constexpr (sparse) {
            // The first or last two bytes of each lane of `kept` go where the mask has them, between zeros.
            const auto kept = Ints(Bytes(codes(v, f / 2)) - Bytes(zeros));
            const Ints places = LowbitOps<Isa>::sparse_places(Ints(masks >> uint32_t(4 * f)));
            Words in_vector;
            std::memcpy(&in_vector, lane_places, sizeof in_vector);
            in_vector += uint32_t(f % 2) * 0x02020202u;
            return Isa::flipped(LowbitOps<Isa>::shuffle(kept, Ints(Words(places) | in_vector)));
        }
        Bytes code = Bytes(codes(v, f));
        if (two_level) code += code << 2;
        return Isa::flipped(Ints(code - Bytes(zeros)));
    }
    // How far to the left the codes of column 4f of a word stand when they are multiplied, and their sum with
    // them, where `chains` neighbouring fours have an accumulator each: if bytes are not too large for it, in
    // their place in the word, which saves a shift for each word.
    static constexpr int left(int f, int chains) {
        const bool fits = Isa::flip != 0 || ((1 << bits) - 1) << (chains - 1) * bits <= 127;
        return !zero_is_off && !two_planes && fits ? f % chains * bits : 0;
    }
    // Such columns as they are multiplied, and the product.
    static Ints operand(const Words (&v)[unit], int f, int chains, Words zeros, Words masks,
                        const Table& table) {
        if constexpr (zero_is_off) return weights(v, f, zeros, masks, table);
        if constexpr (two_planes) return Ints(codes(v, f));
        const int places = left(f, chains);
        const auto shift = uint16_t(f * bits - places), mask = uint16_t(((1 << bits) - 1) * 0x0101 << places);
        return Ints(Pairs(v[0]) >> shift & mask);
    }
    static Ints dot(Ints acc, Ints w, Ints x) {
        if constexpr (zero_is_off) return Isa::dot4(acc, w, x);
        return LowbitOps<Isa>::dot(acc, w, x);
    }
};
