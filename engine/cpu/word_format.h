// What a word of a packed matrix holds: four columns of int8, or the codes of 8 (4 bits), 16 (2 bits, or 4
// bits that are 2:4 sparse) columns, four of them in each part of the word's bytes, one behind the other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cpu/lowbit_ops.h"
#include "engine/cpu/quant_matrix.h"

template <class Isa_, int bits_, QuantGemmKind kind_>
struct WordFormat {
    using Isa = Isa_;
    using Ints = typename Isa::Ints;
    static constexpr int bits = bits_, lanes = Isa::lanes;
    static constexpr QuantGemmKind kind = kind_;
    static constexpr bool is_int8 = bits == 8, two_level = kind == QUANT_GEMM_TWO_LEVEL;
    static constexpr bool sparse = kind == QUANT_GEMM_SPARSE;
    // Whether what is multiplied are int8 weights, flipped; otherwise they are codes, and what the zero point
    // has added comes off the sum.
    static constexpr bool zero_is_off = is_int8 || sparse;
    static constexpr int fours = 8 / bits * (sparse ? 2 : 1);  // columns of a word, in fours
    typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
    typedef uint16_t Pairs __attribute__((vector_size(4 * lanes)));
    typedef int32_t Whole __attribute__((vector_size(4 * lanes)));
    typedef uint8_t Bytes __attribute__((vector_size(4 * lanes)));

    // The codes in one part of each byte, unsigned.
    static Pairs codes(Words v, int part) {
        return Pairs(v) >> uint16_t(part * bits) & uint16_t(((1 << bits) - 1) * 0x0101);
    }
    // Columns 4f .. 4f + 3 of a word as int8 weights, flipped. `zeros`: the zero points, in each byte;
    // sparse: the word's masks are the lowest bits of `masks`.
    static Ints weights(Words v, int f, Words zeros, Words masks) {
        if constexpr (is_int8) return Ints(v);
        if constexpr (sparse) {
            const auto kept = Ints(Bytes(codes(v, f / 2)) - Bytes(zeros));
            const auto places = LowbitOps<Isa>::sparse_places(Ints(masks >> uint32_t(4 * f)));
            return Isa::flipped(LowbitOps<Isa>::placed(kept, places, f % 2));
        }
        Bytes code = Bytes(codes(v, f));
        if (two_level) code += code << 2;
        return Isa::flipped(Ints(code - Bytes(zeros)));
    }
    // How far to the left the codes of column 4f of a word stand when they are multiplied, and their sum with
    // them, where `chains` neighbouring fours have an accumulator each: if bytes are not too large for it, in
    // their place in the word, which saves a shift for each word.
    static constexpr int left(int f, int chains) {
        const bool fits = LowbitOps<Isa>::takes_bytes || ((1 << bits) - 1) << (chains - 1) * bits <= 127;
        return !zero_is_off && fits ? f % chains * bits : 0;
    }
    // Such columns as they are multiplied, and the product.
    static Ints operand(Words v, int f, int chains, Words zeros, Words masks) {
        if constexpr (zero_is_off) return weights(v, f, zeros, masks);
        const int places = left(f, chains);
        const auto shift = uint16_t(f * bits - places), mask = uint16_t(((1 << bits) - 1) * 0x0101 << places);
        return Ints(Pairs(v) >> shift & mask);
    }
    static Ints dot(Ints acc, Ints w, Ints x) {
        if constexpr (zero_is_off) return Isa::dot4(acc, w, x);
        return LowbitOps<Isa>::dot(acc, w, x);
    }
};
