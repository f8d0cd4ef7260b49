// Attention whose two products are int8 by int8, with exact int32 sums: what is left for a machine that has
// only int8 multipliers (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438, section 5: "INT8 batched matrix
// multiply").
//
// For a query and the keys and values of its kv head, each quantized by quantize_group, the head_dim numbers
// of a position under one scale:
//
//     scores[t] = float(sum over d of q.codes[d] * k.codes[t][d]) * ((q.scale / sqrt(head_dim)) * k.scale[t])
//     probs     = softmax(scores)
//     weights[t] = probs[t] * v.scale[t]              quantized: codes, and one scale for the query
//     out[d]    = float(sum over t of weights.codes[t] * v.codes[t][d]) * weights.scale
//
// Both sums run over lanes that each have their own position, or their own d, so that four neighbouring codes
// of what is summed over lie side by side: the instructions are those of tile_kernel.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/cpu/attention_kernels.h"
#include "engine/cpu/instructions.h"
#include "engine/cpu/kv_cache.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/quantize.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/transpose.h"
#include "engine/cpu/vector.h"
#include "engine/model/config.h"
#include "engine/os/memory.h"
#include "engine/os/system.h"
#include "engine/os/threads.h"

// The KV cache: codes, flipped as the instruction set wants weights to be, in the order in which the kernels
// below read them: keys of a block [d / 4][position][d % 4], values [position / 4][d][position % 4].
// kv_cache.h's int8 format has the same codes in another order, for products in fp32.
template <class Isa>
class Int8KvCacheOf : public KvPages {
  public:
    static constexpr int key_block = 2 * Isa::lanes;  // positions whose keys lie side by side
    static_assert(page % key_block == 0);
    // A sum of this many products of codes stays within int32: 133144 * 127 * 127 < 2^31.
    static constexpr int max_context = 133144;

    // Numbers that a thread needs for its queries' weights, in rows of `width` positions. Rounded up to a
    // power of two, so that they do not grow with every token.
    static size_t attention_room(size_t width) { return max_attention_rows * std::bit_ceil(width); }

    // A position and head has whole groups of four codes of keys, and whole vectors of values. Throws
    // std::runtime_error for a context beyond max_context.
    Int8KvCacheOf(int n_layers, int n_kv_heads, int head_dim, int context)
        : KvPages(n_layers, n_kv_heads, head_dim, context, (head_dim + 3) / 4 * 4,
                  (head_dim + Isa::lanes - 1) / Isa::lanes * Isa::lanes, true) {
        if (context == 0) return;
        if (context > max_context) {
            throw std::runtime_error("--attn int8: the context is " + std::to_string(context) +
                                     ", expected at most " + std::to_string(max_context) +
                                     ", so that sums stay within int32 (--ctx)");
        }
        // What attention_int8() takes: weights in fp32, their codes, and these packed.
        const uint64_t room = uint64_t(threads().size()) * attention_room(size_t(context));
        MemoryCount::counts_as_used(room * (sizeof(float) + 2 * sizeof(int8_t)));
    }

    // Appends k and v of one layer, of tokens at positions pos, pos + 1, ...: n_kv_heads groups of head_dim
    // codes for each token.
    void append(int layer, int pos, const Int8Rows& k, const Int8Rows& v) {
        parallel_for(k.n_rows * n_kv_heads_, [&](int i) {
            const int t = i / n_kv_heads_, h = i % n_kv_heads_;
            append(layer, h, pos + t, k.row_codes(t) + h * head_dim_, k.row_scales(t)[h],
                   v.row_codes(t) + h * head_dim_, v.row_scales(t)[h]);
        });
    }
    // Appends codes of k and v (head_dim,) and their scales, of one position and kv head.
    void append(int layer, int head, int pos, const int8_t* k, float k_scale, const int8_t* v,
                float v_scale) {
        const int lane = pos % key_block;
        auto* keys = keys_.as<uint8_t>() + head_at(layer, head, pos - lane) * key_bytes() + 4 * lane;
        auto* values = values_.as<uint8_t>() + head_at(layer, head, pos - pos % 4) * value_bytes() + pos % 4;
        for (int d = 0; d < head_dim_; d++) {
            keys[d / 4 * 4 * key_block + d % 4] = uint8_t(k[d]) ^ Isa::flip;
            values[4 * d] = uint8_t(v[d]) ^ Isa::flip;
        }
        *scale_at(key_scales_, layer, head, pos) = k_scale;
        *scale_at(value_scales_, layer, head, pos) = v_scale;
    }
};
using Int8KvCache = Int8KvCacheOf<AttentionIsa>;

// Queries that go through together against two vectors of keys: as many sums as the registers hold.
template <class Isa>
constexpr int int8_query_rows = Isa::lanes == 16 ? 8 : 4;

// Codes of up to max_attention_rows queries, or of their weights of positions, as the kernels below read
// them: [row / query_rows][quad][row % query_rows][4]; with the factor of each and the sum of its codes.
template <class Isa>
struct Int8Queries {
    const int8_t* codes;
    size_t tile_bytes;  // of int8_query_rows rows
    float scale[max_attention_rows];
    int32_t sum[max_attention_rows];

    const int8_t* tile(int row) const { return codes + row / int8_query_rows<Isa> * tile_bytes; }

    // Packs n_rows rows of n_quads quads that lie `stride` bytes apart.
    void pack(int8_t* memory, const int8_t* rows, size_t stride, int n_rows, int n_quads) {
        constexpr int n = int8_query_rows<Isa>;
        codes = memory;
        tile_bytes = size_t(4) * n * n_quads;
        for (int r = 0; r < n_rows; r += n) {
            pack_words<n>(memory + r / n * tile_bytes, n, rows + r * stride, stride / 4, n_rows - r, n_quads,
                          0);
        }
    }
};

// sums[r][i] += n quads of row r of x times the n_vectors vectors of w that lie quad_bytes apart for each
// quad. `next` is what is read after w.
template <class Isa, int n_rows, int n_vectors>
__attribute__((always_inline)) inline void add_quads(typename Isa::Ints (&sums)[n_rows][n_vectors],
                                                     const int8_t* x, const uint8_t* w, size_t quad_bytes,
                                                     int n, const uint8_t* next) {
    for (int i = 0; i < n; i++, x += 4 * int8_query_rows<Isa>, w += quad_bytes, next += quad_bytes) {
        typename Isa::Ints codes[n_vectors];
        UNROLL(16)
        for (int v = 0; v < n_vectors; v++) {
            codes[v] = Isa::load(w + v * 4 * Isa::lanes);
            pin_register(codes[v]);
        }
        if (n_rows <= 4) prefetch<n_vectors * 4 * Isa::lanes>(next);
        UNROLL(8)
        for (int r = 0; r < n_rows; r++) {
            int32_t four;
            std::memcpy(&four, x + 4 * r, sizeof four);
            const auto query = Isa::splat(four);
            UNROLL(16)
            for (int v = 0; v < n_vectors; v++) {
                sums[r][v] = Isa::dot4(sums[r][v], codes[v], query);
                pin_register(sums[r][v]);
            }
        }
    }
}

// What sums start from, so that they are right in the end although codes are flipped. It may pass the end of
// int32, as the sums on their way do, and come back.
template <class Isa>
inline int32_t start_of_sum(int32_t sum_of_codes) {
    return int32_t(0u - uint32_t(Isa::offset) * uint32_t(sum_of_codes));
}

// scores[r][p] of n_rows queries, from the first-th on, and a block of keys; see the top.
template <class Isa, int n_rows>
__attribute__((noinline)) void score_keys_int8(float* scores, size_t stride, const Int8Queries<Isa>& q,
                                               int first, const uint8_t* k, const uint8_t* next,
                                               const float* key_scales, int n_quads) {
    typename Isa::Ints sums[n_rows][2];
    UNROLL(8)
    for (int r = 0; r < n_rows; r++)
        sums[r][0] = sums[r][1] = Isa::splat(start_of_sum<Isa>(q.sum[first + r]));
    add_quads<Isa, n_rows, 2>(sums, q.tile(first), k, 8 * Isa::lanes, n_quads, next);
    UNROLL(8)
    for (int r = 0; r < n_rows; r++) {
        UNROLL(2)
        for (int v = 0; v < 2; v++) {
            const auto scales = Isa::load_floats(key_scales + v * Isa::lanes) * q.scale[first + r];
            Isa::store(scores + r * stride + v * Isa::lanes,
                       Isa::add_scaled(Isa::zero(), sums[r][v], scales));
        }
    }
}

// sums[r][d] += n quads of positions of the weights times values, for the n_vectors vectors from d on. sums:
// (n_rows, width).
template <class Isa, int n_rows, int n_vectors>
__attribute__((noinline)) void weigh_vectors_int8(int32_t* sums, int width, const int8_t* weights,
                                                  const uint8_t* v, const uint8_t* next, int n_quads, int d) {
    typename Isa::Ints acc[n_rows][n_vectors];
    UNROLL(8)
    for (int r = 0; r < n_rows; r++) {
        UNROLL(8)
        for (int i = 0; i < n_vectors; i++) acc[r][i] = Isa::load(sums + r * width + d + i * Isa::lanes);
    }
    add_quads<Isa, n_rows, n_vectors>(acc, weights, v + 4 * d, 4 * size_t(width), n_quads, next + 4 * d);
    UNROLL(8)
    for (int r = 0; r < n_rows; r++) {
        UNROLL(8)
        for (int i = 0; i < n_vectors; i++)
            std::memcpy(sums + r * width + d + i * Isa::lanes, &acc[r][i], sizeof acc[r][i]);
    }
}
template <class Isa, int n_rows,
          int n_vectors = n_rows <= int8_query_rows<Isa> / 4   ? 8
                          : n_rows <= int8_query_rows<Isa> / 2 ? 4
                                                               : 2>
inline void weigh_values_int8(int32_t* sums, int width, const int8_t* weights, const uint8_t* v,
                              const uint8_t* next, int n_quads, int d = 0) {
    constexpr int n = n_vectors * Isa::lanes;
    for (; d + n <= width; d += n)
        weigh_vectors_int8<Isa, n_rows, n_vectors>(sums, width, weights, v, next, n_quads, d);
    if constexpr (n_vectors > 1)
        weigh_values_int8<Isa, n_rows, n_vectors / 2>(sums, width, weights, v, next, n_quads, d);
}

// Attention of a chunk, as attention() in kv_cache.h, in int8: q (n_tokens, n_heads groups of head_dim
// codes), rotated, quantized.
template <class Isa>
inline void attention_int8(Rows& out, HeadScores& scores, HeadScores& probs, HeadScores& weights,
                           const Int8Rows& q, const Int8KvCacheOf<Isa>& cache, int layer, int pos) {
    const Stopwatch time(phase_seconds.attention);
    const int head_dim = cache.head_dim(), n_tokens = q.n_rows, n_heads = q.n_cols / head_dim;
    const size_t width = (size_t(pos) + n_tokens + 31) / 32 * 32;  // of a row of scores
    using Cache = Int8KvCacheOf<Isa>;
    static_assert(32 % Cache::key_block == 0 && 32 % ::key_block == 0);
    const float inv_sqrt = 1.0f / std::sqrt(float(head_dim));
    const int n_quads = int(cache.key_bytes()) / 4, value_width = int(cache.value_bytes());
    out.n_rows = n_tokens;
    scores.resize(n_tokens, n_heads, pos, width);
    probs.resize(n_tokens, n_heads, pos, width);
    weights.resize(n_tokens, n_heads, pos, width);
    for_query_blocks(cache, n_tokens, n_heads, [&](int kv, int n_rows, auto head_of) {
        auto seen_by = [&](int r) { return pos + head_of(r) / n_heads + 1; };  // positions
        auto keys_at = [&](int p) { return cache.template keys<uint8_t>(layer, kv, p); };
        auto values_at = [&](int p) { return cache.template values<uint8_t>(layer, kv, p); };
        const int n_positions = seen_by(n_rows - 1);
        const size_t room = Cache::attention_room(width);
        static thread_local std::vector<float> row_memory;
        static thread_local std::vector<int8_t> code_memory, packed_memory, query_memory;
        static thread_local std::vector<int32_t> sum_memory;
        float* rows = scratch(row_memory, room);
        int8_t *codes = scratch(code_memory, room), *packed = scratch(packed_memory, room);

        // Queries, padded to whole quads.
        Int8Queries<Isa> queries, weighing;
        const size_t q_stride = cache.key_bytes();
        int8_t* q_codes = scratch(query_memory, 2 * max_attention_rows * q_stride);
        for (int r = 0; r < n_rows; r++) {
            const int8_t* from = q.row_codes(0) + size_t(head_of(r)) * head_dim;
            int8_t* to = q_codes + r * q_stride;
            std::fill_n(std::copy_n(from, head_dim, to), q_stride - head_dim, int8_t(0));
            queries.scale[r] = q.row_scales(0)[head_of(r)] * inv_sqrt;
            queries.sum[r] = 0;
            for (int d = 0; d < head_dim; d++) queries.sum[r] += from[d];
        }
        queries.pack(q_codes + max_attention_rows * q_stride, q_codes, q_stride, n_rows, n_quads);

        // Scores: a block of keys at a time, which stays in the cache for all queries.
        for (int p = 0; p < n_positions; p += Cache::key_block) {
            const int after = p + Cache::key_block;
            const uint8_t* next = after < n_positions ? keys_at(after) : values_at(0);
            in_tiles<int8_query_rows<Isa>>(n_rows, [&](int r, auto n) {
                score_keys_int8<Isa, n>(rows + r * width + p, width, queries, r, keys_at(p), next,
                                        cache.key_scales(layer, kv, p), n_quads);
            });
        }

        // Softmax over the positions that each query sees, times the values' scales, quantized.
        for (int r = 0; r < n_rows; r++) {
            float* row = rows + r * width;
            const int seen = seen_by(r), end = (n_positions + 31) / 32 * 32;
            if (scores.wanted) std::copy_n(row, seen, scores.row(head_of(r)));
            softmax(row, seen);
            if (probs.wanted) std::copy_n(row, seen, probs.row(head_of(r)));
            for (int p = 0; p < seen; p += Cache::page) {
                const float* value_scales = cache.value_scales(layer, kv, p);
                const int n = std::min(Cache::page, seen - p);
                for (int t = 0; t < n; t++) row[p + t] *= value_scales[t];
            }
            std::fill(row + seen, row + end, 0.0f);
            int8_t* row_codes = codes + r * width;
            quantize_groups(row_codes, &weighing.scale[r], &weighing.sum[r], row, end, end);
            // A code cannot say that a weight is not finite.
            if (!all_finite(row, size_t(seen))) weighing.scale[r] = std::numeric_limits<float>::quiet_NaN();
            if (weights.wanted) std::copy_n(row, seen, weights.row(head_of(r)));
        }

        // The weighted sum of the values, a page at a time.
        weighing.pack(packed, codes, width, n_rows, (n_positions + 3) / 4);
        int32_t* sums = scratch(sum_memory, size_t(max_attention_rows) * value_width);
        for (int r = 0; r < n_rows; r++)
            std::fill_n(sums + r * value_width, value_width, start_of_sum<Isa>(weighing.sum[r]));
        constexpr int step = Cache::page;
        for (int p = 0; p < n_positions; p += step) {
            const uint8_t* v = values_at(p);
            const uint8_t* next = p + step < n_positions ? values_at(p + step) : v;
            in_tiles<int8_query_rows<Isa>>(n_rows, [&](int r, auto n) {
                weigh_values_int8<Isa, n>(sums + r * value_width, value_width,
                                          weighing.tile(r) + p * int8_query_rows<Isa>, v, next,
                                          (std::min(step, n_positions - p) + 3) / 4);
            });
        }
        for (int r = 0; r < n_rows; r++) {
            float* to = out.row(0) + size_t(head_of(r)) * head_dim;
            for (int d = 0; d < head_dim; d++) to[d] = float(sums[r * value_width + d]) * weighing.scale[r];
        }
    });
}

// What attention in int8 reads, and of a trace the weights that it multiplies values by.
struct Int8Attention {
    Int8KvCache cache;  // keys and values of the positions
    Int8Rows q, k, v;   // of the chunk in hand: a row per token, a group of head_dim codes per head
    HeadScores weights;

    // For chunks of up to max_tokens tokens; for no context it takes no memory. Throws as Int8KvCache does.
    Int8Attention(const ModelConfig& c, int max_tokens, int context, bool traced)
        : cache(c.n_layers, c.n_kv_heads, c.head_dim, context),
          q(context > 0 ? max_tokens : 0, c.q_dim(), c.head_dim),
          k(q.n_rows, c.kv_dim(), c.head_dim),
          v(q.n_rows, c.kv_dim(), c.head_dim),
          weights(traced, q.n_rows, c.n_heads, context) {}
};

// Attention of the chunk a.q, a.k and a.v: its keys and values go to a.cache; a.weights is written.
inline void attention_int8(Rows& out, HeadScores& scores, HeadScores& probs, Int8Attention& a, int layer,
                           int pos) {
    a.cache.append(layer, pos, a.k, a.v);
    attention_int8(out, scores, probs, a.weights, a.q, a.cache, layer, pos);
}
