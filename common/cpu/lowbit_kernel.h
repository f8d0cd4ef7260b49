// Packed weights of 2 and 4 bits, as they are, times one token or a few: the weights stream past once, and
// the speed is that of memory.
//
// A vector holds a word of each of some rows, with codes of several groups in each of its bytes. A mask takes
// the codes of one group out of it, the activations of that group are broadcast against them, and every lane
// adds up its own row. What the zero point has added to the sum is the zero point times the sum of the
// activations' codes, and is taken off.
//
// In a 2:4 sparse row two codes stand for four columns. The zero point is taken off them first, and a shuffle
// puts them where the row's mask has ones, between zeros; from there on they are int8 weights.
//
// As in tile_kernel.h a group is one exact int32, and the groups of a row are added with a fused multiply-add
// each. So an output is the same to the bit either way.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/cpu/block_groups.h"
#include "common/cpu/lowbit_ops.h"
#include "common/cpu/packed_matrix.h"
#include "common/cpu/pin_register.h"
#include "common/cpu/quant_matrix.h"
#include "common/cpu/unroll.h"

// Some tokens of x, by row pointers.
template <int n_tokens>
struct TokenRows {
    const int8_t* codes[n_tokens];
    const float* scales[n_tokens];
    const int32_t* sums[n_tokens];

    TokenRows(const QuantRows& x, int first) {
        for (int t = 0; t < n_tokens; t++) {
            codes[t] = row_codes(x, first + t);
            scales[t] = row_scales(x, first + t);
            sums[t] = row_sums(x, first + t);
        }
    }
};

// What a kernel is compiled for: codes of so many bits, of one kind, times groups of so many activations;
template <class Isa_, int bits_, QuantGemmKind kind, int group_size_>
struct LowbitFormat {
    using Isa = Isa_;
    using Ints = typename Isa::Ints;
    static constexpr int bits = bits_, group_size = group_size_, per_byte = 8 / bits;
    static constexpr bool two_level = kind == QUANT_GEMM_TWO_LEVEL, sparse = kind == QUANT_GEMM_SPARSE;
    static constexpr int step = sparse ? 2 : 1;  // columns for each code
    typedef uint32_t Words __attribute__((vector_size(4 * Isa::lanes)));
    typedef uint16_t Pairs __attribute__((vector_size(4 * Isa::lanes)));
    typedef int32_t Whole __attribute__((vector_size(4 * Isa::lanes)));
    typedef uint8_t Codes __attribute__((vector_size(4 * Isa::lanes)));

    // Where dot takes any byte, codes stay where they are in it, and their sum is so many bits too high.
    static constexpr int left(int part) { return LowbitOps<Isa>::takes_bytes && !sparse ? part * bits : 0; }

    // acc + the codes of one part of each byte times their activations.
    static Ints add_product(Ints acc, Words v, int part, Ints x) {
        const int l = left(part);
        const auto shift = uint16_t(part * bits - l), keep = uint16_t((((1 << bits) - 1) << l) * 0x0101);
        return LowbitOps<Isa>::dot(acc, Ints(Pairs(v) >> shift & keep), x);
    }

    // The codes of one part of each byte, less the zero points, of which each byte of `zeros` has one.
    static Ints less_zeros(Words v, int part, Words zeros) {
        const Pairs codes = Pairs(v) >> uint16_t(part * bits) & uint16_t(0x0f0f);
        return Ints(Codes(codes) - Codes(zeros));
    }
    // The weights of four columns: of such codes the first or the last two, where the lowest bits of `masks`
    // have ones.
    static Ints sparse_weights(Ints codes, Words masks, int pair) {
        return Isa::flipped(LowbitOps<Isa>::placed(codes, LowbitOps<Isa>::sparse_places(Ints(masks)), pair));
    }
};

// ... and for n_tokens tokens, and n_vectors times as many rows as Isa has lanes.
template <class Format, int n_tokens_, int n_vectors_>
struct LowbitTile : Format {
    static constexpr int n_tokens = n_tokens_, n_vectors = n_vectors_;
};

// The groups of activations that one block of a row holds: `bytes` of each row, 64, or at its end 32 or 16.
template <class S, int bytes>
struct LineGroups {
    static constexpr int columns = bytes * S::per_byte * S::step, n_groups = columns / S::group_size;
    // A part of each byte has `bytes` codes: of a group, of several, or of a part of one.
    static constexpr int run = std::min(bytes, S::group_size / S::step);
    using Isa = typename S::Isa;
    using Groups = std::array<BlockGroups<Isa, lowbit_block_rows>, S::n_vectors>;
    typename S::Whole totals[n_groups][S::n_tokens][S::n_vectors];

    // acc += one word of each row, of a 2:4 sparse matrix: codes b .. b + 3 of a run that begins with column
    // k, of each part. `masks` are the run's.
    __attribute__((always_inline)) static void add_sparse(
        typename S::Ints (&acc)[S::per_byte][S::n_tokens][S::n_vectors],
        const typename S::Words (&v)[S::n_vectors],
        const typename S::Words (&zeros)[S::per_byte][S::n_vectors], const uint8_t* masks,
        const TokenRows<S::n_tokens>& x, int k, int b) {
        constexpr int T = S::n_tokens, V = S::n_vectors;
        UNROLL(4)
        for (int part = 0; part < S::per_byte; part++) {
            typename S::Ints codes[V], weights[V];
            UNROLL(4)
            for (int i = 0; i < V; i++) codes[i] = S::less_zeros(v[i], part, zeros[part][i]);
            UNROLL(2)
            for (int pair = 0; pair < 2; pair++) {
                const int column = 2 * (part * bytes + b) + 4 * pair;
                UNROLL(4)
                for (int i = 0; i < V; i++) {
                    const auto mask = mask_words<Isa>(masks + 4 * Isa::lanes * i, unsigned(column));
                    weights[i] = S::sparse_weights(codes[i], typename S::Words(mask), pair);
                }
                UNROLL(8)
                for (int t = 0; t < T; t++) {
                    int32_t four;
                    std::memcpy(&four, x.codes[t] + k + column, sizeof four);
                    UNROLL(4)
                    for (int i = 0; i < V; i++) {
                        acc[part][t][i] = Isa::dot4(acc[part][t][i], weights[i], Isa::splat(four));
                        pin_register(acc[part][t][i]);
                    }
                }
            }
        }
    }

    // `lines`: the words of these rows, lowbit_block_rows apart, and `masks` of all columns; k: the first
    // column.
    __attribute__((always_inline)) void multiply(const uint8_t*& lines, const uint8_t* masks,
                                                 const Groups& groups, int scale_shift,
                                                 const TokenRows<S::n_tokens>& x, int k) {
        constexpr int T = S::n_tokens, V = S::n_vectors;
        for (int begin = 0; begin < bytes; begin += run) {
            typename S::Ints acc[S::per_byte][T][V];
            UNROLL(4)
            for (int part = 0; part < S::per_byte; part++) {
                UNROLL(8)
                for (int t = 0; t < T; t++) {
                    UNROLL(4)
                    for (int i = 0; i < V; i++) acc[part][t][i] = Isa::splat(0);
                }
            }
            typename S::Words zeros[S::per_byte][V];
            const uint8_t* of_run = masks;
            if constexpr (S::sparse) {
                of_run += size_t(k + 2 * begin) / 8 * lowbit_block_rows;
                for (int part = 0; part < S::per_byte; part++) {
                    const int group = (k + S::step * (part * bytes + begin)) / S::group_size;
                    for (int i = 0; i < V; i++)
                        zeros[part][i] =
                            typename S::Words(groups[i].zero(group >> scale_shift)) * 0x01010101u;
                }
            }
            UNROLL(16)
            for (int b = begin; b < begin + run; b += 4, lines += 4 * lowbit_block_rows) {
                __builtin_prefetch(lines + prefetch_distance, 0, 0);  // each word is read once
                typename S::Words v[V];
                UNROLL(4)
                for (int i = 0; i < V; i++) {
                    std::memcpy(&v[i], lines + 4 * Isa::lanes * i, sizeof v[i]);
                    pin_register(v[i]);  // its codes are taken out of it one after the other
                }
                if constexpr (S::sparse) {
                    if (b % 8 == 0)  // a line of masks goes with two of codes
                        __builtin_prefetch(
                            masks + size_t(k) / 8 * lowbit_block_rows + 8 * b + prefetch_distance / 2, 0, 0);
                    add_sparse(acc, v, zeros, of_run, x, k + 2 * begin, b - begin);
                    continue;
                }
                UNROLL(4)
                for (int part = 0; part < S::per_byte; part++) {
                    UNROLL(8)
                    for (int t = 0; t < T; t++) {
                        int32_t four;
                        std::memcpy(&four, x.codes[t] + k + part * bytes + b, sizeof four);
                        UNROLL(4)
                        for (int i = 0; i < V; i++) {
                            acc[part][t][i] = S::add_product(acc[part][t][i], v[i], part, Isa::splat(four));
                            pin_register(acc[part][t][i]);
                        }
                    }
                }
            }
            UNROLL(4)
            for (int part = 0; part < S::per_byte; part++) {
                const int column = S::step * (part * bytes + begin), group = column / S::group_size;
                UNROLL(8)
                for (int t = 0; t < T; t++) {
                    UNROLL(4)
                    for (int i = 0; i < V; i++) {
                        const auto sum = typename S::Whole(acc[part][t][i]) >> S::left(part);
                        auto& total = totals[group][t][i];
                        total = column % S::group_size == 0 ? sum : total + sum;
                    }
                }
            }
        }
    }

    // sums[t] += the groups times token t's scales; the first is group g of the row.
    __attribute__((always_inline)) void add_to(typename Isa::Floats (&sums)[S::n_tokens][S::n_vectors],
                                               const Groups& groups, const TokenRows<S::n_tokens>& x, int g,
                                               int scale_shift) const {
        UNROLL(8)
        for (int j = 0; j < n_groups; j++, g++) {
            const int s = g >> scale_shift;
            UNROLL(4)
            for (int i = 0; i < S::n_vectors; i++) {
                const auto scale = groups[i].scale(s);
                const auto zero = S::sparse ? typename S::Whole{} + Isa::offset : groups[i].zero(s);
                UNROLL(8)
                for (int t = 0; t < S::n_tokens; t++) {
                    typename S::Whole total = totals[j][t][i];
                    if constexpr (S::two_level) total += total << 2;
                    if constexpr (!S::sparse || Isa::offset != 0) total -= zero * x.sums[t][g];
                    sums[t][i] =
                        Isa::add_scaled(sums[t][i], typename Isa::Ints(total), scale * x.scales[t][g]);
                }
            }
        }
    }
};

// out[t * lowbit_block_rows + r] = row i + r of w times token first_token + t of x. The rows are in one
// block.
template <class S>
__attribute__((noinline)) void multiply_block(float* out, const QuantRows& x, int first_token,
                                              const QuantMatrix& w, int i) {
    using Isa = typename S::Isa;
    constexpr int T = S::n_tokens, V = S::n_vectors;
    const TokenRows<T> tokens(x, first_token);
    // A weight group is 1, 2 or 4 groups of activations, or the whole row.
    const int scale_shift = w.group == w.n_cols ? 31 : std::countr_zero(unsigned(w.group / S::group_size));
    const int first = i / lowbit_block_rows * lowbit_block_rows;
    const uint8_t* lines = w.codes + size_t(first) * code_bytes(w) + 4 * (i - first);
    const uint8_t* masks = S::sparse ? w.mask + size_t(first) * mask_bytes(w) + 4 * (i - first) : nullptr;
    const auto groups = [&]<size_t... v>(std::index_sequence<v...>) {
        using Groups = BlockGroups<Isa, lowbit_block_rows>;
        return std::array<Groups, V>{Groups(w, i + int(v) * Isa::lanes)...};
    }
    (std::make_index_sequence<V>());
    typename Isa::Floats sums[T][V];
    for (auto& token : sums) {
        for (auto& sum : token) sum = Isa::zero();
    }
    int k = 0;
    auto multiply = [&](auto bytes) {
        using Groups = LineGroups<S, decltype(bytes)::value>;
        if constexpr (Groups::columns % S::group_size == 0) {
            for (; k + Groups::columns <= w.n_cols; k += Groups::columns) {
                Groups line;
                line.multiply(lines, masks, groups, scale_shift, tokens, k);
                line.add_to(sums, groups, tokens, k / S::group_size, scale_shift);
            }
        }
    };
    multiply(std::integral_constant<int, 64>());
    multiply(std::integral_constant<int, 32>());
    multiply(std::integral_constant<int, 16>());
    for (int t = 0; t < T; t++) {
        for (int j = 0; j < V; j++) Isa::store(out + t * lowbit_block_rows + j * Isa::lanes, sums[t][j]);
    }
}

// So many tokens share what is in registers. Their accumulators, one for each code of a byte, have to fit in.
template <class Isa>
constexpr int tokens_of_block(int bits) {
    return Isa::lanes == 16 && bits >= 4 ? 8 : 4;
}

// All rows of a block times n_tokens tokens, 1, 2, 4 or 8: rows i and on, tokens first_token and on. One
// token leaves registers for more vectors of rows.
using BlockKernel = void (*)(float* out, const QuantRows& x, int first_token, const QuantMatrix& w, int i);
template <class Format, int n_tokens>
inline void multiply_whole_block(float* out, const QuantRows& x, int first_token, const QuantMatrix& w,
                                 int i) {
    constexpr int lanes = Format::Isa::lanes, n_rows = lowbit_block_rows;
    constexpr int n_vectors = n_tokens == 1 ? std::min(n_rows / lanes, lanes == 8 ? 2 : 4) : 1;
    for (int r = 0; r < n_rows; r += n_vectors * lanes)
        multiply_block<LowbitTile<Format, n_tokens, n_vectors>>(out + r, x, first_token, w, i + r);
}
template <class Isa, int bits, QuantGemmKind kind, int group_size>
inline BlockKernel block_kernel_for(int n_tokens) {
    using Format = LowbitFormat<Isa, bits, kind, group_size>;
    if constexpr (tokens_of_block<Isa>(bits) == 8) {
        if (n_tokens == 8) return multiply_whole_block<Format, 8>;
    }
    if (n_tokens == 4) return multiply_whole_block<Format, 4>;
    if (n_tokens == 2) return multiply_whole_block<Format, 2>;
    return multiply_whole_block<Format, 1>;
}
template <class Isa, int group_size>
inline BlockKernel block_kernel(const QuantMatrix& w, int n_tokens) {
    if (w.kind == QUANT_GEMM_SPARSE) return block_kernel_for<Isa, 4, QUANT_GEMM_SPARSE, group_size>(n_tokens);
    if (w.kind == QUANT_GEMM_TWO_LEVEL)
        return block_kernel_for<Isa, 2, QUANT_GEMM_TWO_LEVEL, group_size>(n_tokens);
    if (w.bits == 4) return block_kernel_for<Isa, 4, QUANT_GEMM_UNSIGNED, group_size>(n_tokens);
    return block_kernel_for<Isa, 2, QUANT_GEMM_UNSIGNED, group_size>(n_tokens);
}

// Blocks begin .. end - 1 of w times x: out[t * w.n_rows + i].
template <class Isa>
inline void multiply_blocks(float* out, const QuantRows& x, const PackedMatrix& packed, int begin, int end) {
    const QuantMatrix& w = packed.w;
    for (int block = begin; block < end; block++) {
        const int i = block * lowbit_block_rows, n_valid = std::min(lowbit_block_rows, w.n_rows - i);
        for (int t = 0, n_tokens; t < x.n_rows; t += n_tokens) {
            n_tokens = tokens_of_block<Isa>(w.bits);
            while (n_tokens > x.n_rows - t) n_tokens /= 2;
            BlockKernel multiply = block_kernel<Isa, 64>(w, n_tokens);
            if constexpr (4 * Isa::lanes <= 32) {
                if (x.group_size == 32) multiply = block_kernel<Isa, 32>(w, n_tokens);
            }
            float outputs[8 * lowbit_block_rows];
            multiply(outputs, x, t, w, i);
            for (int j = 0; j < n_tokens; j++)
                std::copy_n(outputs + j * lowbit_block_rows, n_valid, out + size_t(t + j) * w.n_rows + i);
        }
    }
}
