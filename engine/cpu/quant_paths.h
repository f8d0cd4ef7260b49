// The paths that a product of activations with quantized matrices can take: the place that decides by the
// number of tokens and the form of the weights.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "engine/cpu/instructions.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/row_kernel.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/tile_kernel.h"
#include "engine/os/threads.h"
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_DOTPROD)
#include "engine/cpu/tile_i8mm.h"
#endif

// How a product is computed.
//
//   rows    a matrix that is not packed, one row after the other
//   words   packed codes of 2 to 6 bits as they are, by tiles
//   int8    int8 blocks, by tiles
//
// For `int8`, what is not packed, or not int8, is first brought into this form, some columns at a time: these
// stay in the first-level cache for all tokens.
enum class ProductKernel { rows, words, int8 };

// Up to max_tokens_by_rows tokens, weights that are not packed are multiplied row by row (codes of 2 to 6
// bits are brought into bytes first). Up to max_tokens_by_words, packed codes of 2 to 6 bits are multiplied
// as they are. With more tokens it pays to bring them into int8 blocks.
constexpr int max_tokens_by_rows = 4, max_tokens_by_words = 32;

inline ProductKernel choose_kernel(const QuantProduct& p, int n_tokens) {
    if (p.packed == nullptr)
        return n_tokens <= max_tokens_by_rows ? ProductKernel::rows : ProductKernel::int8;
    return p.w.bits == 8 || n_tokens > max_tokens_by_words ? ProductKernel::int8 : ProductKernel::words;
}

// Bytes of a block that are worked on at a time: they stay in or near the first-level cache for all tokens.
constexpr int part_bytes = 1 << 14;

// Room for what a block has to be brought into: int8 codes of some columns, and scales of all.
struct BlockMemory {
    std::vector<uint32_t> codes;
    std::vector<float> scales, outputs;
    std::vector<int8_t> expanded;
};

// What matrices a program has, and how their codes and scales come into blocks. Here all are int8, with an
// fp32 scale for each group of activations: packed, they lie as tiles take them. AllForms (lowbit_paths.h)
// has those of few bits, too.
struct Int8Forms {
    // w with its tables in blocks, in memory of `to`.
    template <class Isa>
    static QuantMatrix pack(PackedMatrices& to, const QuantMatrix& w) {
        QuantMatrix p = w;
        p.codes = to.packed<Isa, uint32_t>(w.codes, w.n_rows, code_bytes(w), Isa::flip * 0x01010101u);
        p.scales = to.packed<Isa, uint32_t>(w.scales, w.n_rows, size_t(n_scales(w)) * sizeof(float));
        return p;
    }

    // The int8 codes of block b of p's weights, n_cols columns from k on, as tiles take them.
    template <class Isa>
    static const uint32_t* block_codes(BlockMemory& memory, const QuantProduct& p, int b, int k, int n_cols) {
        constexpr int n = block_rows<Isa>;
        const size_t row_bytes = size_t(p.w.n_cols);
        if (p.packed != nullptr) {
            const auto* codes = reinterpret_cast<const uint32_t*>(p.packed->w.codes);
            return codes + (size_t(b) * row_bytes + size_t(k)) / 4 * n;
        }
        const uint8_t* rows = p.w.codes + size_t(b) * n * row_bytes + k;
        return pack_rows<Isa>(memory, rows, row_bytes, std::min(n, p.w.n_rows - b * n), n_cols);
    }
    // Of n_rows rows of codes that lie n_bytes apart.
    template <class Isa>
    static const uint32_t* pack_rows(BlockMemory& memory, const void* rows, size_t n_bytes, int n_rows,
                                     int n_cols) {
        uint32_t* to = scratch(memory.codes, size_t(block_rows<Isa>) * n_cols / 4);
        pack_block<Isa>(to, rows, n_bytes / 4, n_rows, n_cols / 4, Isa::flip * 0x01010101u);
        return to;
    }

    // The scales of all groups of block b, [group][row].
    template <class Isa>
    static const float* block_scales(BlockMemory& memory, const QuantProduct& p, int b) {
        constexpr int n = block_rows<Isa>;
        const int groups = n_groups(p.w), i = b * n;
        if (p.packed != nullptr) return static_cast<const float*>(p.packed->w.scales) + size_t(i) * groups;
        float* to = scratch(memory.scales, size_t(groups) * n);
        const float* scales = static_cast<const float*>(p.w.scales) + size_t(i) * groups;
        for (int r = 0; r < n; r++)
            for (int g = 0; g < groups; g++)
                to[g * n + r] = i + r < p.w.n_rows ? scales[size_t(r) * groups + g] : 0.0f;
        return to;
    }

    // Rows begin .. end - 1 of w times all tokens of x: out[t * w.n_rows + i].
    template <class Isa>
    static void multiply_rows(float* out, const QuantRows& x, const QuantMatrix& w, int begin, int end) {
        for (int i = begin; i < end; i++) {
            const CodeRow row{reinterpret_cast<const int8_t*>(w.codes) + size_t(i) * w.n_cols,
                              static_cast<const float*>(w.scales) + size_t(i) * n_groups(w), nullptr, 1};
            multiply_row<Isa, true>(out + i, size_t(w.n_rows), x, row);
        }
    }
    // There are no words of fewer bits.
    template <class Isa>
    static void with_format(const QuantMatrix&, auto) {}
};

// Blocks begin .. end - 1 of p's weights times all tokens, some columns after the other. With one token and
// 2 bits a block takes half a microsecond, so what is the same for all blocks is worked out before them.
template <class Format, class Forms>
inline void multiply_blocks(BlockMemory& memory, int n_tokens, const PackedTokens& x, const QuantProduct& p,
                            int begin, int end) {
    using Isa = typename Format::Isa;
    constexpr int n = block_rows<Isa>;
    const QuantMatrix& w = p.w;
    const int n_tiles = (n_tokens + x.width - 1) / x.width, groups = n_groups(w);
    float* outputs = scratch(memory.outputs, size_t(n_tiles) * x.width * n);
    // Weights that are read where they lie, once or a few times, need no parts.
    const bool in_place = !Format::is_int8 || (p.packed != nullptr && w.bits == 8 && n_tiles == 1);
    const int max_cols = in_place ? w.n_cols : part_bytes / n;
    // As many whole groups as fit into a part; or a part of one, if the row is one long group.
    const bool cut = groups == 1 && w.n_cols > max_cols;
    const int part_groups = cut ? 0 : std::max(1, max_cols / w.group_size);
    const int width = cut ? max_cols : part_groups * w.group_size;
    // The blocks of a matrix lie one behind the other. While its tiles work on one block, together they ask
    // for the next; if no whole block follows, for nothing new. The columns are those of all tiles together.
    const QuantMatrix& stored = p.packed != nullptr ? p.packed->w : w;
    const size_t bytes = code_bytes(w) * n;
    const size_t n_columns = size_t(n_tiles) * w.n_cols * n / (tile_vectors<Isa>(x.width) * Isa::lanes);
    const size_t step = (4 * bytes + n_columns - 1) / n_columns;
    const int n_scales = ::n_scales(w);
    const int shift = n_scales == 1 ? 31 : std::countr_zero(unsigned(w.group / w.group_size));
    for (int b = begin; b < end; b++) {
        const bool has_next = (b + 2) * n <= w.n_rows;
        const uint8_t* block = stored.codes + size_t(b) * bytes;
        Prefetcher next{reinterpret_cast<const char*>(has_next ? block + bytes : block), has_next ? step : 0};
        const bool is_whole = x.width == 1 && (b + 1) * n <= w.n_rows;  // of one token
        float* out = is_whole ? p.out + b * n : outputs;                // where the block's (n_tokens, n) go
        const float* scales = Format::is_int8 ? Forms::template block_scales<Isa>(memory, p, b) : nullptr;
        for (int k = 0, g = 0; k < w.n_cols; k += width, g += part_groups) {
            const int n_cols = std::min(width, w.n_cols - k);
            const bool first = k == 0, last = k + n_cols == w.n_cols;
            const RowPart part = cut ? RowPart{1, n_cols, true, last, !first, !last}
                                     : RowPart{std::min(part_groups, groups - g), w.group_size, first, last};
            const auto* codes = reinterpret_cast<const uint32_t*>(block);
            if (Format::is_int8) codes = Forms::template block_codes<Isa>(memory, p, b, k, n_cols);
            const float* group_scales = Format::is_int8 ? scales + g * n : nullptr;
            for (int tile = 0; tile < n_tiles; tile++) {
                const int token = tile * x.width;
                const size_t code = size_t(token) * w.n_cols + size_t(k) * x.width;
                const size_t group = size_t(token) * groups + size_t(g) * x.width;
                multiply_columns<Format>(std::min(x.width, n_tokens - token), out + size_t(token) * n,
                                         {x.codes + code, x.scales + group, x.sums + group, x.width},
                                         {codes, group_scales, &stored, b * n, n_scales, shift}, part,
                                         in_place, next);
            }
        }
        if (is_whole) continue;
        // The last block may have rows that the matrix has not.
        const int n_valid = std::min(n, w.n_rows - b * n);
        for (int t = 0; t < n_tokens; t++)
            std::copy_n(outputs + size_t(t) * n, n_valid, p.out + size_t(t) * w.n_rows + b * n);
    }
}

// The tokens of x side by side; all threads share the work.
template <class Isa>
inline PackedTokens pack_all_tokens(const QuantRows& x) {
    const int width = tile_width<Isa>(x.n_rows), n_tiles = (x.n_rows + width - 1) / width;
    const size_t tile_groups = size_t(n_groups(x)) * width, tile_codes = size_t(x.n_cols) * width;
    static thread_local std::vector<int8_t> code_memory;
    static thread_local std::vector<float> scale_memory;
    static thread_local std::vector<int32_t> sum_memory;
    int8_t* codes = scratch(code_memory, n_tiles * tile_codes);
    float* scales = scratch(scale_memory, n_tiles * tile_groups);
    int32_t* sums = scratch(sum_memory, n_tiles * tile_groups);
    parallel_for(n_tiles, [&](int tile) {
        pack_tokens<Isa>(codes + tile * tile_codes, scales + tile * tile_groups, sums + tile * tile_groups,
                         width, x, tile * width);
    });
    return {codes, scales, sums, width};
}

// The products of x with several matrices, or with row_each of row i with the i-th, by one instruction set;
// choose(product, n_tokens) is a ProductKernel.
template <class Isa, class Forms, class Choose>
inline void multiply_by(const QuantRows& x, std::span<const QuantProduct> list, Choose choose,
                        bool row_each = false) {
    const int n_tokens = row_each ? 1 : x.n_rows;
    auto path = [&](const QuantProduct& p) { return choose(p, n_tokens); };
    if constexpr (!std::is_same_v<Isa, ByWords<Isa>>) {  // i8mm takes pairs of tokens, and no words
        const auto is_words = [&](const QuantProduct& p) { return path(p) == ProductKernel::words; };
        if (n_tokens == 1 || std::ranges::any_of(list, is_words))
            return multiply_by<ByWords<Isa>, Forms>(x, list, choose, row_each);
    }
    PackedTokens tokens{};
    if (n_tokens > 1 &&
        std::ranges::any_of(list, [&](const QuantProduct& p) { return path(p) != ProductKernel::rows; }))
        tokens = pack_all_tokens<Isa>(x);
    constexpr int n = block_rows<Isa>;
    auto n_blocks = [](const QuantProduct& p) { return (p.w.n_rows + n - 1) / n; };
    // Threads take blocks in long runs, one stream for each, and few at a time near the end.
    parallel_lists(list, n_blocks, [&](const QuantProduct& p, int begin, int end) {
        static thread_local BlockMemory memory;
        const QuantRows rows = row_each ? one_row(x, int(&p - list.data())) : x;
        // One token lies as packed ones do.
        const PackedTokens packed =
            n_tokens == 1 ? PackedTokens{rows.codes, rows.scales, rows.sums, 1} : tokens;
        auto multiply = [&](auto format) {
            multiply_blocks<decltype(format), Forms>(memory, n_tokens, packed, p, begin, end);
        };
        if (path(p) == ProductKernel::int8) return multiply(Int8Format<Isa>());
        if (path(p) == ProductKernel::words) return Forms::template with_format<Isa>(p.w, multiply);
        Forms::template multiply_rows<Isa>(p.out, rows, p.w, begin * n, std::min(end * n, p.w.n_rows));
    });
}
