// Low-bit weights times one token, or a few: the weights stream past once, and the speed is that of memory.
//
// As many rows go together as a vector has lanes. 64 bytes of each are turned into columns (int8_pack.h)
// while several codes still share a byte: so this costs least where there are most codes. A vector then holds
// the same columns of each row. A mask takes the codes of one group out of it, the activations of that group
// are broadcast against them, and every lane adds up its own row. What the zero point has added to the sum is
// the zero point times the sum of the activations' codes, and is taken off.
//
// As in int8_panels.h a group is one exact int32, and the groups of a row are added with a fused multiply-add
// each. So an output is the same to the bit either way.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "common/cpu/int8_pack.h"
#include "common/cpu/int8_rows.h"
#include "common/cpu/lowbit.h"
#include "common/cpu/lowbit_ops.h"
#include "common/cpu/unroll.h"

// Rows of weights that are multiplied together, first, first + 1, ... Those past the last repeat it.
template <class Isa>
struct RowBlock {
    int first;
    float* scales;     // [s][row], s a group of weights; with two levels [row], the row's
    int32_t* zeros;    // [s][row], what is taken off each code; not with two levels
    uint32_t* levels;  // [s / 4][row], four groups' bytes, with two levels
};

inline int row_of(const LowbitMatrix& w, int i) { return std::min(i, w.n_rows - 1); }

// [i][row] = bytes 4 * i and on of each row's n_bytes of `table`, 0 past their end.
template <class Isa>
inline void gather_words(uint32_t* to, const LowbitMatrix& w, int first, const uint8_t* table,
                         size_t n_bytes) {
    constexpr int n = Isa::lanes;
    size_t at = 0;
    if (n_bytes % 16 == 0 && first + n <= w.n_rows) {  // by squares of four rows and four words
        for (int r = 0; r < n; r += 4)
            pack_words<4>(to + r, n, table + (first + r) * n_bytes, n_bytes / 4, 4, int(n_bytes / 4), 0);
        return;
    }
    const uint8_t* from[n];
    for (int r = 0; r < n; r++) from[r] = table + row_of(w, first + r) * n_bytes;
    for (; at + 4 <= n_bytes; at += 4, to += n) {
        UNROLL(16)
        for (int r = 0; r < n; r++) std::memcpy(to + r, from[r] + at, 4);
    }
    if (at == n_bytes) return;
    std::fill_n(to, n, 0u);
    for (size_t b = at; b < n_bytes; b++) {
        for (int r = 0; r < n; r++) to[r] |= uint32_t{from[r][b]} << 8 * (b - at);
    }
}

// Fills in the tables of a block. `offset`: what is added to codes of 8 bits before they are multiplied.
template <class Isa>
inline void make_tables(const RowBlock<Isa>& block, const LowbitMatrix& w, int offset) {
    constexpr int n = Isa::lanes;
    typedef uint32_t Words __attribute__((vector_size(4 * n)));
    const int n_scales = w.n_scales();
    // The next block's lie behind this one's.
    auto prefetch_next = [&](const void* table, size_t row_bytes) {
        if (table == nullptr) return;
        const char* next = static_cast<const char*>(table) + (block.first + n) * row_bytes;
        for (size_t b = 0; b < n * row_bytes; b += 64) __builtin_prefetch(next + b, 0, 2);
    };
    prefetch_next(w.scales, n_scales * sizeof(Half));
    prefetch_next(w.zeros, w.n_zero_bytes());
    prefetch_next(w.levels, size_t(n_scales));
    if (w.scales != nullptr) {
        static thread_local std::vector<float> buffer;
        float* widened = scratch(buffer, size_t(n) * n_scales);
        for (int r = 0; r < n; r++)
            widen(widened + r * n_scales, w.row_halfs(row_of(w, block.first + r)), size_t(n_scales));
        pack_words<n>(block.scales, n, widened, size_t(n_scales), n, n_scales, 0);
    } else {
        for (int r = 0; r < n; r++) block.scales[r] = w.row_scales[row_of(w, block.first + r)];
    }
    if (w.levels != nullptr)
        return gather_words<Isa>(block.levels, w, block.first, w.levels, size_t(n_scales));
    if (w.zeros == nullptr) return void(std::fill_n(block.zeros, size_t(n_scales) * n, offset));
    gather_words<Isa>(block.levels, w, block.first, w.zeros, w.n_zero_bytes());
    for (int s = 0; s < n_scales; s += 8) {
        Words v;
        std::memcpy(&v, block.levels + s / 8 * n, sizeof v);
        for (int j = s; j < std::min(s + 8, n_scales); j++, v >>= 4) {
            const Words zeros = v & 15;
            std::memcpy(block.zeros + j * n, &zeros, sizeof zeros);
        }
    }
}

// What a kernel is compiled for.
template <int bits_, bool is_sparse_, bool two_level_, int group_size_>
struct LowbitFormat {
    static constexpr int bits = bits_, group_size = group_size_;  // of activations
    static constexpr bool is_sparse = is_sparse_, two_level = two_level_;
};

// The sums of the groups of one line: 64 bytes of each row, which hold 64 * 8 / bits columns, as a block of
// the file does.
template <class Isa, int bits, int group_size, int n_tokens>
struct Line {
    static constexpr int per_byte = 8 / bits, columns = 64 * per_byte, n_groups = columns / group_size;
    using Ints = typename Isa::Ints;

    // Where dot takes any byte, codes stay where they are in it.
    static constexpr int left(int part) { return LowbitOps<Isa>::takes_bytes && bits < 8 ? part * bits : 0; }

    using Sums = Ints[n_tokens][n_groups];
    static constexpr int n = Isa::lanes, bytes = 4 * n, group_bytes = group_size < 64 ? group_size : 64;
    typedef uint32_t Words __attribute__((vector_size(bytes)));
    typedef int32_t Whole __attribute__((vector_size(bytes)));
    typedef uint16_t Pairs __attribute__((vector_size(bytes)));

    // The codes of one part of each byte, times their activations. is_signed: codes of 8 bits.
    template <bool is_signed>
    static Ints add_product(Ints acc, Words v, int part, Ints x) {
        if constexpr (is_signed) return Isa::dot4(acc, Isa::flipped(Ints(v)), x);
        const int l = left(part);
        const auto shift = uint16_t(part * bits - l), keep = uint16_t((((1 << bits) - 1) << l) * 0x0101);
        return LowbitOps<Isa>::dot(acc, Ints(Pairs(v) >> shift & keep), x);
    }

    // from(r) is where the line begins in row r, x[t] + k where its columns begin in token t.
    template <bool is_signed, class From>
    static void multiply(Sums& sums, const int8_t* const (&x)[n_tokens], int k, From from) {
        for (int b = 0; b < 64; b += group_bytes) {
            Ints parts[per_byte][n_tokens];
            if constexpr (n_tokens == 1) {
                by_quads<is_signed>(parts, x[0] + k, b, from);
            } else {
                by_words<is_signed>(parts, x, k, b, from);
            }
            for (int part = 0; part < per_byte; part++) {
                for (int t = 0; t < n_tokens; t++) {
                    const Whole sum = Whole(parts[part][t]) >> left(part);
                    sums[t][part * (64 / group_bytes) + b / group_bytes] = Ints(sum);
                }
            }
        }
    }

    // Bytes b and on of each row, turned: a vector holds one word of each row.
    template <bool is_signed, class From>
    static void by_words(Ints (&sums)[per_byte][n_tokens], const int8_t* const (&x)[n_tokens], int k, int b,
                         From from) {
        // An addition waits for the one before it: with few sums at a time, several accumulators for each.
        constexpr int n_sums = per_byte * n_tokens, n_accumulators = n_sums < 4 ? 4 / n_sums : 1;
        Ints acc[per_byte][n_tokens][n_accumulators];
        for (auto& part : acc) {
            for (auto& token : part) {
                for (Ints& a : token) a = Isa::splat(0);
            }
        }
        for (int byte = b; byte < b + group_bytes; byte += bytes) {
            Words v[n];
            UNROLL(16)
            for (int r = 0; r < n; r++) std::memcpy(&v[place<n>(r)], from(r) + byte, sizeof v[0]);
            transpose<n>(v);
            UNROLL(16)
            for (int i = 0; i < n; i++) {
                UNROLL(4)
                for (int part = 0; part < per_byte; part++) {
                    UNROLL(8)
                    for (int t = 0; t < n_tokens; t++) {
                        int32_t four;
                        std::memcpy(&four, x[t] + k + part * 64 + byte + 4 * i, sizeof four);
                        Ints& a = acc[part][t][i % n_accumulators];
                        a = add_product<is_signed>(a, v[place<n>(i)], part, Isa::splat(four));
                        pin_register(a);
                    }
                }
            }
        }
        for (int part = 0; part < per_byte; part++) {
            for (int t = 0; t < n_tokens; t++) {
                Whole sum = Whole(acc[part][t][0]);
                for (int j = 1; j < n_accumulators; j++) sum += Whole(acc[part][t][j]);
                sums[part][t] = Ints(sum);
            }
        }
    }

    // The same for one token, with half the turning: quads of words from n / 4 rows, four times. A lane then
    // holds a fourth of its row's sum, and only sums are turned further.
    template <bool is_signed, class From>
    static void by_quads(Ints (&sums)[per_byte][1], const int8_t* x, int b, From from) {
        Whole fourths[4][per_byte];
        UNROLL(4)
        for (int i = 0; i < 4; i++) {  // rows i, i + 4, ...
            Ints acc[per_byte];
            for (Ints& a : acc) a = Isa::splat(0);
            UNROLL(4)
            for (int byte = b; byte < b + group_bytes; byte += bytes) {
                constexpr int m = n / 4;
                Words v[m];
                UNROLL(4)
                for (int q = 0; q < m; q++)
                    std::memcpy(&v[quad_place<m>(q)], from(i + 4 * q) + byte, sizeof v[0]);
                transpose_quads<m>(v);
                UNROLL(4)
                for (int q = 0; q < m; q++) {
                    UNROLL(4)
                    for (int part = 0; part < per_byte; part++) {
                        Ints four = Isa::quads(x + part * 64 + byte + 16 * q);
                        pin_register(four);  // not kept for the next rows
                        acc[part] = add_product<is_signed>(acc[part], v[quad_place<m>(q)], part, four);
                        pin_register(acc[part]);
                    }
                }
            }
            for (int part = 0; part < per_byte; part++) fourths[i][part] = Whole(acc[part]);
        }
        UNROLL(4)
        for (int part = 0; part < per_byte; part++)
            sums[part][0] = Ints(add_pairs(add_pairs(fourths[0][part], fourths[2][part]),
                                           add_pairs(fourths[1][part], fourths[3][part])));
    }
};

// Some tokens of x, by row pointers.
template <int n_tokens>
struct TokenRows {
    const int8_t* codes[n_tokens];
    const float* scales[n_tokens];
    const int32_t* sums[n_tokens];

    TokenRows(const Int8Matrix& x, int first) {
        for (int t = 0; t < n_tokens; t++) {
            codes[t] = x.row_codes(first + t);
            scales[t] = x.row_scales(first + t);
            sums[t] = x.row_sums(first + t);
        }
    }
};

// sums[t] += the groups of a line times token t, of which the first is group g.
template <class Isa, class Format, int n_tokens, int n_groups>
inline void add_groups(typename Isa::Floats (&sums)[n_tokens],
                       const typename Isa::Ints (&groups)[n_tokens][n_groups], const RowBlock<Isa>& block,
                       const TokenRows<n_tokens>& x, int g, int scale_shift) {
    typedef int32_t Whole __attribute__((vector_size(4 * Isa::lanes)));
    constexpr int lanes = Isa::lanes;
    UNROLL(8)
    for (int j = 0; j < n_groups; j++) {
        Whole v;
        if constexpr (Format::two_level) {
            constexpr int times = 64 / Format::group_size;  // groups of activations in one of weights
            const int s = (g + j) / times;
            std::memcpy(&v, block.levels + s / 4 * lanes, sizeof v);
            v >>= (n_groups == 4 * times ? j / times : s % 4) * 8;  // four groups begin with the word
            const Whole zeros = v >> 4 & 15;
            const auto scales =
                Isa::add_scaled(Isa::zero(), typename Isa::Ints(v & 15), Isa::load_floats(block.scales));
            for (int t = 0; t < n_tokens; t++) {
                Whole total = Whole(groups[t][j]);
                total += (total << 2) - zeros * x.sums[t][g + j];
                sums[t] = Isa::add_scaled(sums[t], typename Isa::Ints(total), scales * x.scales[t][g + j]);
            }
        } else {
            const size_t row = size_t((g + j) >> scale_shift) * lanes;
            std::memcpy(&v, block.zeros + row, sizeof v);
            for (int t = 0; t < n_tokens; t++) {
                const Whole total = Whole(groups[t][j]) - v * x.sums[t][g + j];
                sums[t] = Isa::add_scaled(sums[t], typename Isa::Ints(total),
                                          Isa::scales(block.scales + row, x.scales[t][g + j]));
            }
        }
    }
}

// Asks for n_bytes from `from` on, into the second-level cache.
inline void prefetch_lines(const uint8_t* from, size_t n_bytes) {
    for (size_t b = 0; b < n_bytes; b += 64) __builtin_prefetch(from + b, 0, 2);
}

// out[t * Isa::lanes + r] = row block.first + r of w times token first_token + t of x.
template <class Isa, class Format, int n_tokens>
__attribute__((noinline)) void multiply_rows(float* out, const Int8Matrix& x, int first_token,
                                             const LowbitMatrix& w, const RowBlock<Isa>& block) {
    constexpr int n = Isa::lanes, group_size = Format::group_size;
    using Packed = Line<Isa, Format::bits, group_size, n_tokens>;
    using Unpacked = Line<Isa, 8, group_size, n_tokens>;
    const TokenRows<n_tokens> tokens(x, first_token);
    // A weight group is 1, 2 or 4 groups of activations, or the whole row.
    const int scale_shift = w.group == w.n_cols ? 31 : std::countr_zero(unsigned(w.group / group_size));
    const size_t row_bytes = w.n_code_bytes();
    typename Isa::Floats sums[n_tokens];
    for (auto& sum : sums) sum = Isa::zero();
    int k = 0;
    if (!Format::is_sparse && block.first + n <= w.n_rows) {
        const uint8_t* line = w.row_codes(block.first);
        for (; k + Packed::columns <= w.n_cols; k += Packed::columns, line += 64) {
            // The next block lies behind this one. It is fetched as one stream, in the time of as many lines.
            const uint8_t* next = w.row_codes(block.first + n) + size_t(k / Packed::columns) * 64 * n;
            prefetch_lines(next, 64 * n);
            typename Packed::Sums groups;
            Packed::template multiply<Format::bits == 8>(groups, tokens.codes, k,
                                                         [&](int r) { return line + r * row_bytes; });
            add_groups<Isa, Format>(sums, groups, block, tokens, k / group_size, scale_shift);
        }
    }
    // What is left of a row, and sparse rows: a byte for each code, 256 columns at a time.
    constexpr int width = 256;
    alignas(64) uint8_t bytes[n][width];
    for (; k < w.n_cols; k += width) {
        const int n_cols = std::min(width, w.n_cols - k);
        if (Format::is_sparse && block.first + 2 * n <= w.n_rows) {  // two streams here
            prefetch_lines(w.row_codes(block.first + n) + size_t(k) / 4 * n, size_t(n_cols) / 4 * n);
            prefetch_lines(w.row_mask(block.first + n) + size_t(k) / 8 * n, size_t(n_cols) / 8 * n);
        }
        for (int r = 0; r < n; r++) {
            const int row = row_of(w, block.first + r);
            if constexpr (Format::is_sparse) {
                unpack_sparse(bytes[r], w, row, k, n_cols, [&](int j) {
                    return uint8_t(block.zeros[(unsigned(k + j) / group_size >> scale_shift) * n + r]);
                });
            } else if constexpr (Format::bits == 8) {
                unpack_columns(bytes[r], w, row, k, n_cols, 0);
            } else {
                unpack_codes<Format::bits>(bytes[r], w.row_codes(row) + k * Format::bits / 8, n_cols);
            }
        }
        for (int j = 0; j < n_cols; j += 64) {
            typename Unpacked::Sums groups;
            Unpacked::template multiply<Format::bits == 8>(groups, tokens.codes, k + j,
                                                           [&](int r) { return bytes[r] + j; });
            add_groups<Isa, Format>(sums, groups, block, tokens, (k + j) / group_size, scale_shift);
        }
    }
    for (int t = 0; t < n_tokens; t++) Isa::store(out + t * n, sums[t]);
}

// So many tokens share what is in registers. Their accumulators, one for each code of a byte, have to fit in.
template <class Isa>
constexpr int tokens_by_rows(int bits) {
    return Isa::lanes == 16 && bits >= 4 ? 8 : 4;
}

// The kernels of a matrix's format, for 1, 2, 4 and perhaps 8 tokens.
template <class Isa>
using RowsKernel = void (*)(float* out, const Int8Matrix& x, int first_token, const LowbitMatrix& w,
                            const RowBlock<Isa>& block);
template <class Isa, class Format>
inline RowsKernel<Isa> kernel_for(int n_tokens) {
    if constexpr (tokens_by_rows<Isa>(Format::bits) == 8) {
        if (n_tokens == 8) return multiply_rows<Isa, Format, 8>;
    }
    if (n_tokens == 4) return multiply_rows<Isa, Format, 4>;
    return n_tokens == 2 ? multiply_rows<Isa, Format, 2> : multiply_rows<Isa, Format, 1>;
}
template <class Isa, int group_size>
inline RowsKernel<Isa> kernel_of(const LowbitMatrix& w, int n_tokens) {
    if (w.bits == 8) return kernel_for<Isa, LowbitFormat<8, false, false, group_size>>(n_tokens);
    if (w.mask != nullptr) return kernel_for<Isa, LowbitFormat<4, true, false, group_size>>(n_tokens);
    if (w.bits == 4) return kernel_for<Isa, LowbitFormat<4, false, false, group_size>>(n_tokens);
    if (w.levels != nullptr) return kernel_for<Isa, LowbitFormat<2, false, true, group_size>>(n_tokens);
    return kernel_for<Isa, LowbitFormat<2, false, false, group_size>>(n_tokens);
}

// Each row of the weights is read from memory once, whatever the number of tokens, and turned once for as
// many as share the registers.
template <class Isa>
inline void lowbit_by_rows(const Int8Matrix& x, std::span<const LowbitProduct> list) {
    constexpr int n = Isa::lanes;
#pragma omp parallel
    for (const LowbitProduct& p : list) {
        static thread_local std::vector<float> scales;
        static thread_local std::vector<int32_t> zeros;
        static thread_local std::vector<uint32_t> words;
        const size_t table = size_t(n) * p.w.n_scales();
        RowBlock<Isa> block{0, scratch(scales, table), scratch(zeros, table), scratch(words, table)};
        const int n_rows = p.w.n_rows;
#pragma omp for schedule(static) nowait
        for (int i = 0; i < n_rows; i += n) {
            // The last block may begin within the one before it.
            block.first = std::max(0, std::min(i, n_rows - n));
            make_tables(block, p.w, p.w.bits == 8 ? Isa::offset : 0);
            for (int t = 0, n_tokens; t < x.n_rows; t += n_tokens) {
                n_tokens = tokens_by_rows<Isa>(p.w.bits);
                while (n_tokens > x.n_rows - t) n_tokens /= 2;
                auto* multiply = kernel_of<Isa, 64>(p.w, n_tokens);
                if constexpr (4 * n <= 32) {
                    if (x.group_size == 32) multiply = kernel_of<Isa, 32>(p.w, n_tokens);
                }
                float out[8 * n];
                multiply(out, x, t, p.w, block);
                for (int j = 0; j < n_tokens; j++) {
                    const float* from = out + j * n - block.first;
                    std::copy(from + i, from + std::min(i + n, n_rows), p.out + size_t(t + j) * n_rows + i);
                }
            }
        }
    }
}
