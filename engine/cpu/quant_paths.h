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

#include "engine/cpu/expand_rows.h"
#include "engine/cpu/instructions.h"
#include "engine/cpu/lowbit_ops.h"
#include "engine/cpu/packed_matrix.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/row_kernel.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/tile_kernel.h"
#include "engine/os/threads.h"

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

// Calls use(Format{}) with the format of w's packed words.
template <class Isa, class Use>
inline void with_format(const QuantMatrix& w, Use use) {
    if (w.kind == QUANT_GEMM_SPARSE) return use(WordFormat<Isa, 4, QUANT_GEMM_SPARSE>());
    if (w.kind == QUANT_GEMM_TWO_LEVEL) return use(WordFormat<Isa, 2, QUANT_GEMM_TWO_LEVEL>());
    if (w.kind == QUANT_GEMM_TABLE && w.bits == 4) return use(WordFormat<Isa, 4, QUANT_GEMM_TABLE>());
    if (w.kind == QUANT_GEMM_TABLE) return use(WordFormat<Isa, 5, QUANT_GEMM_TABLE>());
    if (w.bits == 6) return use(WordFormat<Isa, 6, QUANT_GEMM_UNSIGNED>());
    if (w.bits == 4) return use(WordFormat<Isa, 4, QUANT_GEMM_UNSIGNED>());
    use(WordFormat<Isa, 2, QUANT_GEMM_UNSIGNED>());
}

// Bytes of a block that are worked on at a time: they stay in or near the first-level cache for all tokens.
constexpr int part_bytes = 1 << 14;

// Room for what a block has to be brought into: int8 codes of some columns, and scales of all.
struct BlockMemory {
    std::vector<uint32_t> codes;
    std::vector<float> scales, outputs;
    std::vector<int8_t> expanded;
};

// The int8 codes of block b of p's weights, n_cols columns from k on, as tiles take them.
template <class Isa>
inline const uint32_t* block_codes(BlockMemory& memory, const QuantProduct& p, int b, int k, int n_cols) {
    constexpr int n = block_rows<Isa>;
    if (p.packed != nullptr && p.w.bits == 8) {
        const auto* codes = reinterpret_cast<const uint32_t*>(p.packed->w.codes);
        return codes + (size_t(b) * size_t(p.w.n_cols) + size_t(k)) / 4 * n;
    }
    uint32_t* to = scratch(memory.codes, size_t(n) * n_cols / 4);
    const int i = b * n, n_rows = std::min(n, p.w.n_rows - i);
    if (p.packed != nullptr) {
        with_format<Isa>(p.w, [&](auto format) {
            for (int r = 0; r < n; r += Isa::lanes)
                expand_block<decltype(format)>(to + r, p.packed->w, i + r, k, n_cols);
        });
        return to;
    }
    const auto* rows = reinterpret_cast<const char*>(p.w.codes) + size_t(i) * p.w.n_cols + k;
    size_t stride = size_t(p.w.n_cols);
    if (p.w.bits != 8) {
        int8_t* expanded = scratch(memory.expanded, size_t(n_rows) * n_cols);
        for (int r = 0; r < n_rows; r++) expand_columns(expanded + size_t(r) * n_cols, p.w, i + r, k, n_cols);
        rows = reinterpret_cast<const char*>(expanded), stride = size_t(n_cols);
    }
    for (int r = 0; r < n; r += Isa::lanes) {
        const int first = std::min(r, n_rows);
        pack_words<Isa::lanes>(to + r, n, rows + size_t(first) * stride, stride / 4, n_rows - first,
                               n_cols / 4, Isa::flip * 0x01010101u);
    }
    return to;
}

// The scales of all groups of block b, [group][row].
template <class Isa>
inline const float* block_scales(BlockMemory& memory, const QuantProduct& p, int b) {
    constexpr int n = block_rows<Isa>;
    const int groups = n_groups(p.w), times = p.w.group / p.w.group_size, i = b * n;
    if (p.packed != nullptr && p.w.bits == 8 && p.w.scale_type != QUANT_GEMM_GROUP_FP16 && times == 1)
        return static_cast<const float*>(p.packed->w.scales) + size_t(i) * groups;
    float* to = scratch(memory.scales, size_t(groups) * n);
    if (p.packed != nullptr) {
        for (int r = 0; r < n; r += Isa::lanes) {
            const BlockGroups<Isa> rows(p.packed->w, i + r, n_scales(p.w));
            for (int g = 0; g < groups; g++) Isa::store(to + g * n + r, rows.scale(g / times));
        }
        return to;
    }
    static thread_local std::vector<float> row_memory;
    float* row = scratch(row_memory, size_t(groups));
    for (int r = 0; r < n; r++) {
        if (i + r < p.w.n_rows) expand_scales(row, p.w, i + r);
        for (int g = 0; g < groups; g++) to[g * n + r] = i + r < p.w.n_rows ? row[g] : 0.0f;
    }
    return to;
}

// Blocks begin .. end - 1 of p's weights times all tokens, some columns after the other. With one token and
// 2 bits a block takes half a microsecond, so what is the same for all blocks is worked out before them.
template <class Format>
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
        const float* scales = Format::is_int8 ? block_scales<Isa>(memory, p, b) : nullptr;
        for (int k = 0, g = 0; k < w.n_cols; k += width, g += part_groups) {
            const int n_cols = std::min(width, w.n_cols - k);
            const bool first = k == 0, last = k + n_cols == w.n_cols;
            const RowPart part = cut ? RowPart{1, n_cols, true, last, !first, !last}
                                     : RowPart{std::min(part_groups, groups - g), w.group_size, first, last};
            const auto* codes = reinterpret_cast<const uint32_t*>(block);
            if (Format::is_int8) codes = block_codes<Isa>(memory, p, b, k, n_cols);
            const float* group_scales = Format::is_int8 ? scales + g * n : nullptr;
            for (int tile = 0; tile < n_tiles; tile++) {
                const int token = tile * x.width;
                const size_t word = (size_t(token) * w.n_cols + size_t(k) * x.width) / 4;
                const size_t group = size_t(token) * groups + size_t(g) * x.width;
                multiply_columns<Format>(std::min(x.width, n_tokens - token), out + size_t(token) * n,
                                         {x.codes + word, x.scales + group, x.sums + group, x.width},
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

// The tokens of x side by side, or each alone; all threads share the work.
template <class Isa>
inline PackedTokens pack_all_tokens(const QuantRows& x, bool each_alone) {
    const int width = tile_width<Isa>(each_alone ? 1 : x.n_rows), step = each_alone ? 1 : width;
    const int n_tiles = (x.n_rows + step - 1) / step;
    const size_t tile_groups = size_t(n_groups(x)) * width, tile_codes = size_t(x.n_cols) / 4 * width;
    static thread_local std::vector<uint32_t> codes;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> sums;
    const PackedTokens tokens{scratch(codes, n_tiles * tile_codes), scratch(scales, n_tiles * tile_groups),
                              scratch(sums, n_tiles * tile_groups), width};
    auto pack = [&](int tile) {
        pack_tokens<Isa>({tokens.codes + tile * tile_codes, tokens.scales + tile * tile_groups,
                          tokens.sums + tile * tile_groups, width},
                         x, tile * step);
    };
    if (n_tiles == 1 || each_alone) {  // threads need not meet for that
        for (int tile = 0; tile < n_tiles; tile++) pack(tile);
    } else {
        parallel_for(n_tiles, pack);
    }
    return tokens;
}

// The products of x with several matrices, or with row_each of row i with the i-th, by one instruction set;
// choose(product, n_tokens) is a ProductKernel.
template <class Isa, class Choose>
inline void multiply_by(const QuantRows& x, std::span<const QuantProduct> list, Choose choose,
                        bool row_each = false) {
    const int n_tokens = row_each ? 1 : x.n_rows;
    auto path = [&](const QuantProduct& p) { return choose(p, n_tokens); };
    if constexpr (!std::is_same_v<Isa, ByWords<Isa>>) {  // tokens lie otherwise for words
        if (std::ranges::any_of(list, [&](const QuantProduct& p) { return path(p) == ProductKernel::words; }))
            return multiply_by<ByWords<Isa>>(x, list, choose, row_each);
    }
    PackedTokens tokens{};
    if (std::ranges::any_of(list, [&](const QuantProduct& p) { return path(p) != ProductKernel::rows; }))
        tokens = pack_all_tokens<Isa>(x, row_each);
    constexpr int n = block_rows<Isa>;
    auto n_blocks = [](const QuantProduct& p) { return (p.w.n_rows + n - 1) / n; };
    // Threads take blocks in long runs, one stream for each, and few at a time near the end.
    parallel_lists(list, n_blocks, [&](const QuantProduct& p, int begin, int end) {
        static thread_local BlockMemory memory;
        const int row = row_each ? int(&p - list.data()) : 0;
        const size_t first = size_t(row) * tokens.width;
        const PackedTokens packed{tokens.codes + first * x.n_cols / 4, tokens.scales + first * n_groups(x),
                                  tokens.sums + first * n_groups(x), tokens.width};
        QuantRows rows = x;
        rows.codes = row_codes(x, row), rows.scales = row_scales(x, row), rows.sums = row_sums(x, row);
        rows.n_rows = n_tokens;
        auto multiply = [&](auto format) {
            multiply_blocks<decltype(format)>(memory, n_tokens, packed, p, begin, end);
        };
        if (path(p) == ProductKernel::int8) return multiply(WordFormat<Isa, 8, QUANT_GEMM_SIGNED>());
        if (path(p) == ProductKernel::words) return with_format<Isa>(p.w, multiply);
        multiply_rows<Isa>(p.out, rows, p.w, begin * n, std::min(end * n, p.w.n_rows));
    });
}
