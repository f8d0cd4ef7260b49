// The KV cache of attention_int8.h: codes, in the order in which dot products of bytes read them.
// kv_cache.h's int8 format has the same codes in another order, for products in fp32.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/cpu/instructions.h"
#include "engine/cpu/kv_cache.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/rows.h"
#include "engine/os/memory.h"
#include "engine/os/threads.h"

// Codes and scales of every position's keys and values so far, as the kernels below read them. Codes are
// flipped as the instruction set wants weights to be. Memory grows with the positions used, and is counted,
// as in KvCache. A cache for no positions takes none.
template <class Isa>
class Int8KvCacheOf {
  public:
    static constexpr int page = KvCache::page;        // positions
    static constexpr int key_block = 2 * Isa::lanes;  // positions whose keys lie side by side
    static_assert(page % key_block == 0);
    // A sum of this many products of codes stays within int32: 133144 * 127 * 127 < 2^31.
    static constexpr int max_context = 133144;

    // Numbers that a thread needs for its queries' weights, in rows of `width` positions. Rounded up to a
    // power of two, so that they do not grow with every token.
    static size_t attention_room(size_t width) { return max_attention_rows * std::bit_ceil(width); }

    Int8KvCacheOf() = default;
    // Throws std::runtime_error for a context beyond max_context.
    Int8KvCacheOf(int n_layers, int n_kv_heads, int head_dim, int context)
        : n_layers_(n_layers), n_kv_heads_(n_kv_heads), head_dim_(head_dim), context_(context) {
        if (context == 0) return;
        if (context > max_context) {
            throw std::runtime_error("--attn int8: the context is " + std::to_string(context) +
                                     ", expected at most " + std::to_string(max_context) +
                                     ", so that sums stay within int32 (--ctx)");
        }
        const size_t heads = (size_t(context) + page - 1) / page * page * n_layers * n_kv_heads;
        const std::string positions = std::to_string(context) + " positions (--ctx)";
        keys_ = LazyMemory(heads * key_bytes(), "the keys of " + positions);
        values_ = LazyMemory(heads * value_bytes(), "the values of " + positions);
        key_scales_ = LazyMemory(heads * sizeof(float), "the scales of keys of " + positions);
        value_scales_ = LazyMemory(heads * sizeof(float), "the scales of values of " + positions);
        // What attention_int8() takes: weights in fp32, their codes, and these packed.
        const uint64_t room = uint64_t(threads().size()) * attention_room(size_t(context));
        MemoryCount::counts_as_used(room * (sizeof(float) + 2 * sizeof(int8_t)));
    }

    int n_kv_heads() const { return n_kv_heads_; }
    int head_dim() const { return head_dim_; }
    int context() const { return context_; }  // positions
    // Bytes of a position and head, padded to whole groups of four codes, or to whole vectors.
    int key_bytes() const { return (head_dim_ + 3) / 4 * 4; }
    int value_bytes() const { return (head_dim_ + Isa::lanes - 1) / Isa::lanes * Isa::lanes; }

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
        key_scales_.as<float>()[head_at(layer, head, pos)] = k_scale;
        value_scales_.as<float>()[head_at(layer, head, pos)] = v_scale;
    }
    // As KvCache::fill().
    void fill(int n) {
        std::vector<int8_t> row(size_t(head_dim_) + 97);
        for (size_t i = 0; i < row.size(); i++) row[i] = int8_t(i * 7919 % 255 - 127);
        parallel_for(n, [&](int pos) {
            for (int i = 0; i < n_layers_ * n_kv_heads_; i++) {
                const int8_t* from = row.data() + (pos + i) % 97;
                append(i / n_kv_heads_, i % n_kv_heads_, pos, from, 0.01f, from, 0.01f);
            }
        });
    }

    // Keys of positions pos .. pos + key_block - 1, [d / 4][position][d % 4]; pos is a multiple of key_block.
    const uint8_t* keys(int layer, int head, int pos) const {
        return keys_.as<const uint8_t>() + head_at(layer, head, pos) * key_bytes();
    }
    // Values from position pos, a multiple of 4, to the end of its page: [position / 4][d][position % 4].
    const uint8_t* values(int layer, int head, int pos) const {
        return values_.as<const uint8_t>() + head_at(layer, head, pos) * value_bytes();
    }
    // From position pos to the end of its page.
    const float* key_scales(int layer, int head, int pos) const {
        return key_scales_.as<const float>() + head_at(layer, head, pos);
    }
    const float* value_scales(int layer, int head, int pos) const {
        return value_scales_.as<const float>() + head_at(layer, head, pos);
    }

  private:
    // The number of a position and head, in the order in which they lie.
    size_t head_at(int layer, int head, int pos) const {
        const size_t block = (size_t(pos / page) * n_layers_ + layer) * n_kv_heads_ + head;
        return block * page + pos % page;
    }

    int n_layers_ = 0, n_kv_heads_ = 0, head_dim_ = 0, context_ = 0;
    LazyMemory keys_, values_, key_scales_, value_scales_;  // [page][layer][kv head] of what is said above
};

using Int8KvCache = Int8KvCacheOf<AttentionIsa>;
