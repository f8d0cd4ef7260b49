// What attention (kv_cache.h) is made of: one block of queries against the keys and values of a head.
//
// The cost is that of reading the cache. So everything read is used as often as possible before it leaves the
// registers or the first-level cache again: by all query heads that share a kv head, and in a prompt by
// several tokens. Scores are never added up across the lanes of a vector, because the keys of neighbouring
// positions lie side by side, one in each lane.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "engine/cpu/half.h"
#include "engine/cpu/kv_cache.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/vector.h"
#include "engine/os/threads.h"

inline namespace VECTORS {
// Queries that go through together, against key_vectors vectors of keys or of a value's elements: as many
// sums as the registers hold.
constexpr int query_rows = vector_lanes == 16 ? 8 : 4;

// exp(x - max) / sum of the same, in place. x has room up to padded(n); there it gets zeros.
inline void softmax(float* x, int n) {
    const int end = padded(n);
    std::fill(x + n, x + end, -std::numeric_limits<float>::infinity());
    Floats maxima = load(x);
    for (int i = vector_lanes; i < end; i += vector_lanes)
        maxima = load(x + i) > maxima ? load(x + i) : maxima;
    float max = maxima[0];
    for (int i = 1; i < vector_lanes; i++) max = std::max(max, maxima[i]);
    Floats sums[16 / vector_lanes] = {};  // of the numbers i, i + 16, i + 32, ...
    for (int i = 0; i < n; i += 16) {
        for (int j = 0; j < 16; j += vector_lanes) {
            const Floats e = exp(load(x + i + j) - max);
            store(x + i + j, e);
            if (i + 16 <= n) sums[j / vector_lanes] += e;
        }
    }
    std::fill(x + n, x + end, 0.0f);
    for (int j = 0; j < 16 && n % 16 > 0; j += vector_lanes)
        sums[j / vector_lanes] += load(x + n / 16 * 16 + j);
    float sum = 0;
    for (const Floats& v : sums)
        for (int i = 0; i < vector_lanes; i++) sum += v[i];
    const float inv = 1.0f / sum;
    for (int i = 0; i < end; i += vector_lanes) store(x + i, load(x + i) * inv);
}

// Prefetches n numbers from p on, a cache line (64 bytes) at a time. For one token, as in decode, keys and
// values come from memory: asked early, it keeps up. What is read next does not always lie next.
template <int n, class T>
inline void prefetch(const T* p) {
    for (size_t i = 0; i < n * sizeof(T); i += 64) __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t code) { return code; }
inline Floats load(const int8_t* p) {
#if defined(__AVX512F__)
    return Floats(
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__AVX2__)
    return Floats(
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#else
    typedef int8_t Codes __attribute__((vector_size(vector_lanes)));
    Codes v;
    std::memcpy(&v, p, sizeof v);
    return __builtin_convertvector(__builtin_convertvector(v, Int32s), Floats);
#endif
}

// scores[r][p] = scale * sum over d of q[r][d] * k[d][p], for n_rows queries and a block of keys. Each lane
// adds up its own key, and a vector of keys is loaded once for all queries. `next`: asked for meanwhile, or
// null; key_scales: of int8 keys. Inlined, g++ 12 would run out of registers.
template <int n_rows, class T>
__attribute__((noinline)) void score_keys(float* scores, size_t stride, const float* const* q, const T* k,
                                          const T* next, const float* key_scales, int head_dim, float scale) {
    Floats sums[n_rows][key_vectors] = {};
    for (int d = 0; d < head_dim; d++, k += key_block) {
        Floats keys[key_vectors];
        for (int i = 0; i < key_vectors; i++) {
            keys[i] = load(k + i * vector_lanes);
            if (n_rows > 1) pin_register(keys[i]);
        }
        if (next != nullptr) prefetch<key_block>(next + d * key_block);
        for (int r = 0; r < n_rows; r++) {
            const Floats query = splat(q[r][d]);
            for (int i = 0; i < key_vectors; i++) sums[r][i] = fused_multiply_add(keys[i], query, sums[r][i]);
        }
    }
    for (int i = 0; i < key_vectors; i++) {
        Floats scales = splat(scale);
        if constexpr (std::is_same_v<T, int8_t>) scales *= load(key_scales + i * vector_lanes);
        for (int r = 0; r < n_rows; r++) store(scores + r * stride + i * vector_lanes, sums[r][i] * scales);
    }
}

// out[r][d] += sum over n positions of probs[r][t] * v[t][d], for n_rows queries and the elements d of
// n_vectors vectors. `next`: asked for meanwhile, or null.
template <int n_rows, int n_vectors, class T>
__attribute__((noinline)) void weigh_vectors(float* const* out, const float* probs, size_t stride, const T* v,
                                             const T* next, int n, int head_dim, int d) {
    Floats sums[n_rows][n_vectors];
    for (int r = 0; r < n_rows; r++)
        for (int i = 0; i < n_vectors; i++) sums[r][i] = load(out[r] + d + i * vector_lanes);
    for (int t = 0; t < n; t++) {
        Floats values[n_vectors];
        const size_t at = size_t(t) * head_dim + d;
        for (int i = 0; i < n_vectors; i++) {
            values[i] = load(v + at + i * vector_lanes);
            if (n_rows > 1) pin_register(values[i]);
        }
        if (next != nullptr) prefetch<n_vectors * vector_lanes>(next + at);
        for (int r = 0; r < n_rows; r++) {
            const Floats prob = splat(probs[r * stride + t]);
            for (int i = 0; i < n_vectors; i++) sums[r][i] = fused_multiply_add(values[i], prob, sums[r][i]);
        }
    }
    for (int r = 0; r < n_rows; r++)
        for (int i = 0; i < n_vectors; i++) store(out[r] + d + i * vector_lanes, sums[r][i]);
}
template <int n_rows, class T>
inline void weigh_values(float* const* out, const float* probs, size_t stride, const T* v, const T* next,
                         int n, int head_dim) {
    constexpr int n_vectors = query_rows / n_rows * key_vectors;  // with few rows, more of a value at once
    int d = 0;
    for (; d + n_vectors * vector_lanes <= head_dim; d += n_vectors * vector_lanes)
        weigh_vectors<n_rows, n_vectors>(out, probs, stride, v, next, n, head_dim, d);
    for (; d + vector_lanes <= head_dim; d += vector_lanes)
        weigh_vectors<n_rows, 1>(out, probs, stride, v, next, n, head_dim, d);
    for (; d < head_dim; d++) {
        for (int r = 0; r < n_rows; r++) {
            for (int t = 0; t < n; t++) {
                const float value = to_float(v[size_t(t) * head_dim + d]);
                out[r][d] = fused_multiply_add(probs[r * stride + t], value, out[r][d]);
            }
        }
    }
}

// Calls use(kv, n_rows, head_of) for every block of queries of a chunk, in all threads. Query heads that
// share a kv head read the same keys and values, so they go together, and with them those of the next tokens,
// up to max_attention_rows. head_of(r) counts through the heads of all tokens, of which there are n_heads
// each.
template <class Use>
inline void for_query_blocks(const KvPages& cache, int n_tokens, int n_heads, Use use) {
    const int heads_per_kv = n_heads / cache.n_kv_heads();
    const int n_queries = n_tokens * heads_per_kv;  // of one kv head: token by token, then head by head
    const int n_blocks = (n_queries + max_attention_rows - 1) / max_attention_rows;
    parallel_for(cache.n_kv_heads() * n_blocks, [&](int i) {
        const int kv = i / n_blocks, first = i % n_blocks * max_attention_rows;
        use(kv, std::min(max_attention_rows, n_queries - first), [=](int r) {
            const int token = (first + r) / heads_per_kv;
            return token * n_heads + kv * heads_per_kv + (first + r) % heads_per_kv;
        });
    });
}

// Calls use(first, rows) with a compile-time number of rows for n_rows rows, query_rows at a time.
template <int n = query_rows, class Use>
inline void in_tiles(int n_rows, Use use, int first = 0) {
    for (; first + n <= n_rows; first += n) use(first, std::integral_constant<int, n>());
    if constexpr (n > 1) in_tiles<n - 1>(n_rows, use, first);
}

// Attention of n_rows queries that share a kv head: q[r] (head_dim,), rotated, against positions
// 0 .. kv_len[r] - 1 -> out[r] (head_dim,). kv_len does not decrease. `probs` is room for n_rows rows of
// `stride` floats, at least padded(kv_len[n_rows - 1]); it is left with the probabilities. If `scores` is not
// null, scores[r] gets kv_len[r] scores, for a trace. T is the type of the cache's format.
template <class T>
inline void attend(float* const* out, const KvCache& cache, int layer, int head, const float* const* q,
                   const int* kv_len, int n_rows, float* probs, size_t stride, float* const* scores) {
    const int head_dim = cache.head_dim(), n_positions = kv_len[n_rows - 1];
    const float scale = 1.0f / std::sqrt(float(head_dim));
    const bool once = kv_len[0] == n_positions;  // for one token, as in decode

    // Scores: a block of keys at a time, which stays in the cache for all queries.
    for (int p = 0; p < n_positions; p += key_block) {
        const T* k = cache.keys<T>(layer, head, p);
        const T* next = !once                         ? nullptr
                        : p + key_block < n_positions ? cache.keys<T>(layer, head, p + key_block)
                                                      : cache.values<T>(layer, head, 0);
        const float* key_scales = cache.key_scales(layer, head, p);
        in_tiles(n_rows, [&](int r, auto n) {
            score_keys<n>(probs + r * stride + p, stride, q + r, k, next, key_scales, head_dim, scale);
        });
    }

    // Softmax, over the positions that each query sees. The rest gets probability 0.
    for (int r = 0; r < n_rows; r++) {
        float* row = probs + r * stride;
        if (scores != nullptr) std::copy_n(row, kv_len[r], scores[r]);
        softmax(row, kv_len[r]);
        std::fill(row + padded(kv_len[r]), row + padded(n_positions), 0.0f);
        std::fill_n(out[r], head_dim, 0.0f);
    }

    // The weighted sum of the values: some positions at a time, which stay in the cache for all queries. A
    // scale of values in int8 goes to the probability.
    constexpr int step = 64;
    static_assert(KvCache::page % step == 0);
    for (int p = 0; p < n_positions; p += step) {
        const int n_values = std::min(step, n_positions - p);
        const T* v = cache.values<T>(layer, head, p);
        const T* next = once && p + step < n_positions ? cache.values<T>(layer, head, p + step) : nullptr;
        const float* weights = probs + p;
        size_t weights_stride = stride;
        float scaled[max_attention_rows * step];
        if constexpr (std::is_same_v<T, int8_t>) {
            const float* scales = cache.value_scales(layer, head, p);
            for (int r = 0; r < n_rows; r++) {
                for (int t = 0; t < n_values; t++)
                    scaled[r * step + t] = probs[r * stride + p + t] * scales[t];
            }
            weights = scaled, weights_stride = step;
        }
        in_tiles(n_rows, [&](int r, auto n) {
            weigh_values<n>(out + r, weights + r * weights_stride, weights_stride, v, next, n_values,
                            head_dim);
        });
    }
}
}  // namespace VECTORS
