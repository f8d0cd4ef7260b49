// The KV cache, in the order in which attention reads it, and attention over it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "engine/cpu/half.h"
#include "engine/cpu/quantize.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/vector.h"
#include "engine/os/memory.h"
#include "engine/os/threads.h"

// Positions whose keys lie side by side, one in each lane of this many vectors.
constexpr int key_vectors = vector_lanes == 4 ? 4 : 2;
constexpr int key_block = key_vectors * vector_lanes;

// n, up to the next multiple of a block of keys.
constexpr int padded(int n) { return (n + key_block - 1) / key_block * key_block; }

constexpr int max_attention_rows = 16;  // queries that share the keys they read

// Floats that a thread needs for the probabilities of its queries, in rows of `width` positions. Rounded up
// to a power of two, so that they do not grow with every token, but for the context's end.
inline size_t attention_room(size_t width, int context) {
    return max_attention_rows * std::min(std::bit_ceil(width), size_t(padded(context)));
}

// How a number is kept:
//   f32   as it is
//   f16   as fp16, rounded to nearest even (IEEE 754; above 65519 that is infinity)
//   q8    as int8, the head_dim numbers of a position and head under one fp32 scale (quantize_group)
enum class KvFormat { f32, f16, q8 };

inline int number_bytes(KvFormat format) {
    return format == KvFormat::f32 ? 4 : format == KvFormat::f16 ? 2 : 1;
}

// Bytes of the keys, or of the values, of one position and kv head.
inline size_t kv_head_bytes(KvFormat format, int head_dim) {
    return size_t(head_dim) * number_bytes(format) + (format == KvFormat::q8 ? sizeof(float) : 0);
}

// Keys (part 0) or values (part 1), n of them, of one position of a layer that nothing was run for: numbers
// from 0.5 to 1 of either sign, by the rule of docs/real-size.md.
inline void made_up(float* to, int n, int layer, int part, int pos) {
    const uint64_t tensor = (uint64_t{1} << 22) + 2 * uint64_t(layer) + uint64_t(part);
    for (int i = 0; i < n; i++) {
        const uint64_t element = uint64_t(pos) * uint64_t(n) + uint64_t(i);
        uint64_t z = (tensor << 40) + element / 2 + 0x9e3779b97f4a7c15;  // splitmix64
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        z ^= z >> 31;
        const auto u = uint32_t(element % 2 == 0 ? z : z >> 32);
        to[i] = std::bit_cast<float>((u & 0x807fffff) | 126u << 23);
    }
}

// The keys and values of every position so far, whatever they are kept as. Memory grows with the positions
// used: a page holds those of 256 positions, of all layers and heads.
class KvPages {
  public:
    static constexpr int page = 256;  // positions

    int n_kv_heads() const { return n_kv_heads_; }
    int head_dim() const { return head_dim_; }
    int context() const { return context_; }  // positions

    // Bytes of the keys and of the values of one position and head, without their scales.
    size_t key_bytes() const { return key_bytes_; }
    size_t value_bytes() const { return value_bytes_; }

    // Keys of a block of positions that begins with pos, and values from pos to the end of its page: the
    // order of their numbers is that of the kind of cache.
    template <class T>
    const T* keys(int layer, int head, int pos) const {
        return keys_.as<const T>() + head_at(layer, head, pos) * key_bytes_ / sizeof(T);
    }
    template <class T>
    const T* values(int layer, int head, int pos) const {
        return values_.as<const T>() + head_at(layer, head, pos) * value_bytes_ / sizeof(T);
    }
    // Scales of keys and of values, from position pos to the end of its page; null if there are none.
    const float* key_scales(int layer, int head, int pos) const {
        return scale_at(key_scales_, layer, head, pos);
    }
    const float* value_scales(int layer, int head, int pos) const {
        return scale_at(value_scales_, layer, head, pos);
    }

  protected:
    // has_scales: there is an fp32 scale of the keys and one of the values of each position and head. A cache
    // for no positions takes no memory.
    KvPages(int n_layers, int n_kv_heads, int head_dim, int context, size_t key_bytes, size_t value_bytes,
            bool has_scales)
        : n_layers_(n_layers), n_kv_heads_(n_kv_heads), head_dim_(head_dim), context_(context) {
        key_bytes_ = key_bytes, value_bytes_ = value_bytes;
        if (context == 0) return;
        const size_t heads = (size_t(context) + page - 1) / page * page * n_layers * n_kv_heads;
        const std::string positions = std::to_string(context) + " positions (--ctx)";
        keys_ = LazyMemory(heads * key_bytes, "the keys of " + positions);
        values_ = LazyMemory(heads * value_bytes, "the values of " + positions);
        if (!has_scales) return;
        key_scales_ = LazyMemory(heads * sizeof(float), "the scales of keys of " + positions);
        value_scales_ = LazyMemory(heads * sizeof(float), "the scales of values of " + positions);
    }

    // The number of a position and head, in the order in which they lie.
    size_t head_at(int layer, int head, int pos) const {
        const size_t block = (size_t(pos / page) * n_layers_ + layer) * n_kv_heads_ + head;
        return block * page + pos % page;
    }
    float* scale_at(const LazyMemory& scales, int layer, int head, int pos) const {
        float* all = scales.as<float>();
        return all != nullptr ? all + head_at(layer, head, pos) : nullptr;
    }

    int n_layers_, n_kv_heads_, head_dim_, context_;
    size_t key_bytes_, value_bytes_;
    LazyMemory keys_, values_, key_scales_, value_scales_;  // [page][layer][kv head] of a page's positions
};

// In the order in which attention() reads them: keys of a block [head_dim][key_block], values
// [position][head_dim], in the type of the format. Where memory is counted (MemoryCount), so is what all
// threads take for attention() over them, once they have seen the whole context.
class KvCache : public KvPages {
  public:
    KvCache(KvFormat format, int n_layers, int n_kv_heads, int head_dim, int context)
        : KvPages(n_layers, n_kv_heads, head_dim, context, head_dim * number_bytes(format),
                  head_dim * number_bytes(format), format == KvFormat::q8),
          format_(format) {
        const size_t room = attention_room(size_t(padded(context)), context);
        MemoryCount::counts_as_used(uint64_t(threads().size()) * room * sizeof(float));
    }

    KvFormat format() const { return format_; }

    // Appends k and v (n_tokens, n_kv_heads * head_dim) of one layer, of tokens at pos, pos + 1, ...
    void append(int layer, int pos, const Rows& k, const Rows& v) {
        parallel_for(k.n_rows * n_kv_heads_, [&](int i) {
            const int t = i / n_kv_heads_, h = i % n_kv_heads_;
            append(layer, h, pos + t, k.row(t) + h * head_dim_, v.row(t) + h * head_dim_);
        });
    }

    // Appends k and v (head_dim,) of one position and kv head.
    void append(int layer, int head, int pos, const float* k, const float* v) {
        const int lane = pos % key_block;
        put(keys_, head_at(layer, head, pos - lane) * head_dim_ + lane, key_block, k,
            scale_at(key_scales_, layer, head, pos));
        put(values_, head_at(layer, head, pos) * head_dim_, 1, v, scale_at(value_scales_, layer, head, pos));
    }

  private:
    // Number i of x, of head_dim, becomes number first + i * stride. *scale is written if there is one.
    void put(const LazyMemory& memory, size_t first, size_t stride, const float* x, float* scale) {
        if (format_ == KvFormat::f32) {
            float* to = memory.as<float>() + first;
            for (int i = 0; i < head_dim_; i++) to[i * stride] = x[i];
        } else if (format_ == KvFormat::f16) {
            Half* to = memory.as<Half>() + first;
            for (int i = 0; i < head_dim_; i++) to[i * stride] = to_half(x[i]);
        } else {
            *scale = quantize_group(memory.as<int8_t>() + first, stride, x, head_dim_);
            if (!all_finite(x, size_t(head_dim_)))  // which codes cannot say
                *scale = std::numeric_limits<float>::quiet_NaN();
        }
    }

    KvFormat format_;
};
static_assert(KvCache::page % key_block == 0);

// Attention of a chunk, in fp32 whatever the format of the cache: q (n_tokens, n_heads * head_dim), rotated,
// of tokens at positions pos, pos + 1, ..., each against all positions up to its own -> out, same shape.
// Their keys and values are in the cache. If `scores` and `probs` are wanted, they get what every head makes
// of every position.
void attention(Rows& out, HeadScores& scores, HeadScores& probs, const Rows& q, const KvCache& cache,
               int layer, int pos);
