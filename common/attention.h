// Attention in fp32 over a cache of keys and values, the same whatever the scheme of the weights.
//
// The cost is that of reading the cache. So everything read is used as often as possible before it leaves the
// registers or the first-level cache again: by all query heads that share a kv head, and in a prompt by
// several tokens. Scores are never added up across the lanes of a vector, because the keys of neighbouring
// positions lie side by side, one in each lane.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "vector.h"

// Queries that go through together, and vectors of keys or of a value's elements that they meet: as many sums
// as the registers hold.
constexpr int query_rows = vector_lanes == 16 ? 8 : 4;
constexpr int key_vectors = vector_lanes == 4 ? 4 : 2;
constexpr int key_block = key_vectors * vector_lanes;  // positions whose keys lie side by side

// n, up to the next multiple of a block of keys.
constexpr int padded(int n) { return (n + key_block - 1) / key_block * key_block; }

// Zeroed memory that the system provides as it is first touched, in huge pages where it has them: hardware
// stops fetching ahead at the end of each page of memory.
class LazyMemory {
  public:
    LazyMemory() = default;
    // Throws std::runtime_error if the system refuses.
    LazyMemory(size_t n_floats, const char* what) : size_(n_floats * sizeof(float)) {
        void* p =
            mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) {
            throw std::runtime_error(std::string("not enough memory for ") + what + ": " +
                                     std::to_string(size_) + " bytes");
        }
#ifdef MADV_HUGEPAGE
        madvise(p, size_, MADV_HUGEPAGE);
#endif
        data_ = static_cast<float*>(p);
    }
    ~LazyMemory() {
        if (data_ != nullptr) munmap(data_, size_);
    }
    LazyMemory(LazyMemory&& other) noexcept { *this = std::move(other); }
    LazyMemory& operator=(LazyMemory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    float* data() const { return data_; }

  private:
    float* data_ = nullptr;
    size_t size_ = 0;
};

// The keys and values of every position so far. Memory grows with the positions used: a page holds 256 of
// them, of all layers and heads.
class KvCache {
  public:
    static constexpr int page = 256;  // positions

    KvCache() = default;
    KvCache(int n_layers, int n_kv_heads, int head_dim, int context)
        : n_layers_(n_layers), n_kv_heads_(n_kv_heads), head_dim_(head_dim) {
        const size_t pages = (size_t(context) + page - 1) / page;
        const size_t size = pages * page * n_layers * n_kv_heads * head_dim;
        keys_ = LazyMemory(size, "the key cache");
        values_ = LazyMemory(size, "the value cache");
    }

    int head_dim() const { return head_dim_; }

    // Keeps k and v (head_dim,) of one position.
    void keep(int layer, int head, int pos, const float* k, const float* v) {
        const int lane = pos % key_block;
        float* keys = keys_.data() + at(layer, head, pos - lane);
        for (int d = 0; d < head_dim_; d++) keys[d * key_block + lane] = k[d];
        std::copy(v, v + head_dim_, values_.data() + at(layer, head, pos));
    }

    // Keys of positions pos .. pos + key_block - 1, [head_dim][key_block]; pos is a multiple of key_block.
    const float* keys(int layer, int head, int pos) const { return keys_.data() + at(layer, head, pos); }

    // Values from position pos to the end of its page, [position][head_dim].
    const float* values(int layer, int head, int pos) const { return values_.data() + at(layer, head, pos); }

  private:
    size_t at(int layer, int head, int pos) const {
        const size_t block = (size_t(pos / page) * n_layers_ + layer) * n_kv_heads_ + head;
        return (block * page + pos % page) * head_dim_;
    }

    int n_layers_ = 0, n_kv_heads_ = 0, head_dim_ = 0;
    LazyMemory keys_;    // [page][layer][kv head][position / key_block][head_dim][position % key_block]
    LazyMemory values_;  // [page][layer][kv head][position][head_dim]
};
static_assert(KvCache::page % key_block == 0);

// exp(x - max) / sum of the same, in place. x has room up to padded(n); there it gets zeros.
inline void softmax(float* x, int n) {
    const int end = padded(n);
    std::fill(x + n, x + end, -std::numeric_limits<float>::infinity());
    Floats maxima = load(x);
    for (int i = vector_lanes; i < end; i += vector_lanes)
        maxima = load(x + i) > maxima ? load(x + i) : maxima;
    float max = maxima[0];
    for (int i = 1; i < vector_lanes; i++) max = std::max(max, maxima[i]);
    Floats sums{};
    for (int i = 0; i < end; i += vector_lanes) {
        const Floats e = exp(load(x + i) - max);  // beyond n: e^-87, nothing beside a sum of at least 1
        store(x + i, e);
        sums += e;
    }
    const float inv = 1.0f / add_lanes(sums);
    for (int i = 0; i < end; i += vector_lanes) store(x + i, load(x + i) * inv);
    std::fill(x + n, x + end, 0.0f);
}

// With few queries, as in decode, keys and values come from memory, which keeps up only if the next lines (of
// 64 bytes) are already on their way. What comes next is not always what lies next: hence a pointer to it.
template <int n_floats>
inline void prefetch(const float* p) {
    for (int i = 0; i < n_floats; i += 16) __builtin_prefetch(p + i);
}

// scores[r][p] = scale * sum over d of q[r][d] * k[d][p], for n_rows queries and a block of keys. Each lane
// adds up its own key, and a vector of keys is loaded once for all queries. `next` is what is read after k.
// Inlined, g++ 12 would run out of registers.
template <int n_rows>
__attribute__((noinline)) void score_keys(float* scores, size_t stride, const float* const* q, const float* k,
                                          const float* next, int head_dim, float scale) {
    Floats sums[n_rows][key_vectors] = {};
    for (int d = 0; d < head_dim; d++, k += key_block, next += key_block) {
        Floats keys[key_vectors];
        for (int i = 0; i < key_vectors; i++) {
            keys[i] = load(k + i * vector_lanes);
            if (n_rows > 1) in_register(keys[i]);
        }
        if (n_rows <= 4) prefetch<key_block>(next);
        for (int r = 0; r < n_rows; r++) {
            const Floats query = splat(q[r][d]);
            for (int i = 0; i < key_vectors; i++) sums[r][i] += keys[i] * query;
        }
    }
    for (int r = 0; r < n_rows; r++) {
        for (int i = 0; i < key_vectors; i++)
            store(scores + r * stride + i * vector_lanes, sums[r][i] * scale);
    }
}

// out[r][d] += sum over n positions of probs[r][t] * v[t][d], for n_rows queries and the elements d of
// n_vectors vectors. `next` is what is read after v.
template <int n_rows, int n_vectors>
__attribute__((noinline)) void mix_vectors(float* const* out, const float* probs, size_t stride,
                                           const float* v, const float* next, int n, int head_dim, int d) {
    Floats sums[n_rows][n_vectors];
    for (int r = 0; r < n_rows; r++) {
        for (int i = 0; i < n_vectors; i++) sums[r][i] = load(out[r] + d + i * vector_lanes);
    }
    for (int t = 0; t < n; t++) {
        Floats values[n_vectors];
        const size_t at = size_t(t) * head_dim + d;
        for (int i = 0; i < n_vectors; i++) {
            values[i] = load(v + at + i * vector_lanes);
            if (n_rows > 1) in_register(values[i]);
        }
        if (n_rows <= 4) prefetch<n_vectors * vector_lanes>(next + at);
        for (int r = 0; r < n_rows; r++) {
            const Floats prob = splat(probs[r * stride + t]);
            for (int i = 0; i < n_vectors; i++) sums[r][i] += values[i] * prob;
        }
    }
    for (int r = 0; r < n_rows; r++) {
        for (int i = 0; i < n_vectors; i++) store(out[r] + d + i * vector_lanes, sums[r][i]);
    }
}
template <int n_rows>
inline void mix_values(float* const* out, const float* probs, size_t stride, const float* v,
                       const float* next, int n, int head_dim) {
    constexpr int n_vectors = query_rows / n_rows * key_vectors;  // with few rows, more of a value at once
    int d = 0;
    for (; d + n_vectors * vector_lanes <= head_dim; d += n_vectors * vector_lanes)
        mix_vectors<n_rows, n_vectors>(out, probs, stride, v, next, n, head_dim, d);
    for (; d + vector_lanes <= head_dim; d += vector_lanes)
        mix_vectors<n_rows, 1>(out, probs, stride, v, next, n, head_dim, d);
    for (; d < head_dim; d++) {
        for (int r = 0; r < n_rows; r++) {
            for (int t = 0; t < n; t++) out[r][d] += probs[r * stride + t] * v[size_t(t) * head_dim + d];
        }
    }
}

// Calls use(first, rows) with a compile-time number of rows for n_rows rows, query_rows at a time.
template <int n = query_rows, class Use>
inline void in_tiles(int n_rows, Use use, int first = 0) {
    for (; first + n <= n_rows; first += n) use(first, std::integral_constant<int, n>());
    if constexpr (n > 1) in_tiles<n - 1>(n_rows, use, first);
}

// Attention of n_rows queries that share a kv head: q[r] (head_dim,), rotated, against positions
// 0 .. n_seen[r] - 1 -> out[r] (head_dim,). n_seen does not decrease. `probs` is room for n_rows rows of
// `stride` floats, at least padded(n_seen[n_rows - 1]); it is left with the probabilities. If `scores` is not
// null, scores[r] gets n_seen[r] scores, for a trace.
inline void attend(float* const* out, const KvCache& cache, int layer, int head, const float* const* q,
                   const int* n_seen, int n_rows, float* probs, size_t stride, float* const* scores) {
    const int head_dim = cache.head_dim(), n_positions = n_seen[n_rows - 1];
    const float scale = 1.0f / std::sqrt(float(head_dim));

    // Scores: a block of keys at a time, which stays in the cache for all queries.
    for (int p = 0; p < n_positions; p += key_block) {
        const float* k = cache.keys(layer, head, p);
        const float* next = p + key_block < n_positions ? cache.keys(layer, head, p + key_block)
                                                        : cache.values(layer, head, 0);
        in_tiles(n_rows, [&](int r, auto n) {
            score_keys<n>(probs + r * stride + p, stride, q + r, k, next, head_dim, scale);
        });
    }

    // Softmax, over the positions that each query sees. The rest gets probability 0.
    for (int r = 0; r < n_rows; r++) {
        float* row = probs + r * stride;
        if (scores != nullptr) std::copy_n(row, n_seen[r], scores[r]);
        softmax(row, n_seen[r]);
        std::fill(row + padded(n_seen[r]), row + padded(n_positions), 0.0f);
        std::fill_n(out[r], head_dim, 0.0f);
    }

    // The weighted sum of the values: some positions at a time, which stay in the cache for all queries.
    constexpr int step = 64;
    static_assert(KvCache::page % step == 0);
    for (int p = 0; p < n_positions; p += step) {
        const float* v = cache.values(layer, head, p);
        const float* next = p + step < n_positions ? cache.values(layer, head, p + step) : v;
        in_tiles(n_rows, [&](int r, auto n) {
            mix_values<n>(out + r, probs + r * stride + p, stride, v, next, std::min(step, n_positions - p),
                          head_dim);
        });
    }
}
