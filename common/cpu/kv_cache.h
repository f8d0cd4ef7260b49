// The KV cache in fp32, in the order in which attention reads it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "common/cpu/lazy_memory.h"
#include "common/cpu/rows.h"
#include "common/cpu/vector.h"

// Positions whose keys lie side by side, one in each lane of this many vectors.
constexpr int key_vectors = vector_lanes == 4 ? 4 : 2;
constexpr int key_block = key_vectors * vector_lanes;

// n, up to the next multiple of a block of keys.
constexpr int padded(int n) { return (n + key_block - 1) / key_block * key_block; }

// The keys and values of every position so far. Memory grows with the positions used: a page holds those of
// 256 positions, of all layers and heads.
class KvCache {
  public:
    static constexpr int page = 256;  // positions

    KvCache() = default;
    KvCache(int n_layers, int n_kv_heads, int head_dim, int context)
        : n_layers_(n_layers), n_kv_heads_(n_kv_heads), head_dim_(head_dim), context_(context) {
        const size_t pages = (size_t(context) + page - 1) / page;
        const size_t size = pages * page * n_layers * n_kv_heads * head_dim;
        const std::string positions = std::to_string(context) + " positions (--ctx)";
        keys_ = LazyMemory(size, "the keys of " + positions);
        values_ = LazyMemory(size, "the values of " + positions);
    }

    int n_kv_heads() const { return n_kv_heads_; }
    int head_dim() const { return head_dim_; }
    int context() const { return context_; }  // positions

    // Appends k and v (n_tokens, n_kv_heads * head_dim) of one layer, of tokens at positions pos, pos + 1,
    // ...
    void append(int layer, int pos, const Rows& k, const Rows& v) {
        for_each_row(k.n_rows, [&](int t) {
            for (int h = 0; h < n_kv_heads_; h++)
                append(layer, h, pos + t, k.row(t) + h * head_dim_, v.row(t) + h * head_dim_);
        });
    }

    // Appends k and v (head_dim,) of one position and kv head.
    void append(int layer, int head, int pos, const float* k, const float* v) {
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

    int n_layers_ = 0, n_kv_heads_ = 0, head_dim_ = 0, context_ = 0;
    LazyMemory keys_;    // [page][layer][kv head][position / key_block][head_dim][position % key_block]
    LazyMemory values_;  // [page][layer][kv head][position][head_dim]
};
static_assert(KvCache::page % key_block == 0);
