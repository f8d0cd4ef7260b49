// Attention of fp16 queries over an fp16 KV cache, whatever the scheme of the weights.
//
// The softmax is online (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). A
// warp computes a row tile: 16 queries that read the same keys, namely the query heads of one kv head, of one
// token or of several consecutive tokens. It takes the keys 32 at a time: scores by mma, the running maximum,
// exp, and the weighted sum of the values by mma. When the maximum grows, the sums so far are scaled down to
// it. A long prompt has enough row tiles to fill the device. A single token does not: n_splits warps split
// its keys, and the last block to finish combines their partial sums, scaled to the largest of their maxima.
//
// Keys and values go from memory to registers directly, without shared memory. Queries and keys use the same
// permutation of a head's elements, in which a lane loads 16 consecutive bytes of a key: of each chunk of 32
// elements, lane t has the eight from 8t on. Of a value's chunk of 32 elements, lane g has the four from 4g
// on; prmt combines those of two positions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "engine/gpu/device.h"
#include "engine/gpu/half2.h"
#include "engine/gpu/kv_cache.cuh"
#include "engine/gpu/reduce.cuh"
#include "engine/gpu/rows.cuh"
#include "simt/ptx.h"

// The kernel's arguments.
struct Attention {
    const half* q;              // (n_tokens, n_heads, head_dim)
    const half *keys, *values;  // of this layer: (n_kv_heads, context, head_dim)
    half* out;                  // (n_tokens, n_heads, head_dim)
    const int* pos;             // of token 0
    int n_tokens, n_heads, n_kv_heads, context;
    float scale;      // 1 / sqrt(head_dim)
    int n_splits;     // warps that split a row tile's keys; 1: not split
    float* partials;  // (n_row_tiles * n_kv_heads, n_splits, 16, head_dim + 2): partial sums, maximum, total
    unsigned* arrivals;  // (n_row_tiles * n_kv_heads,), see is_last()
};

constexpr int attention_warps = 4;
constexpr int attention_keys = 32;  // that a warp takes at a time
constexpr int attention_rows = 16;  // queries of a row tile

// With n_splits 1, grid: (tiles of 16 queries / attention_warps, n_kv_heads); otherwise (tiles, n_kv_heads,
// n_splits / attention_warps). block: 32 * attention_warps. chunks: head_dim / 32.
template <int chunks>
__global__ void __launch_bounds__(32 * attention_warps) attention_kernel(Attention at) {
    constexpr int head_dim = 32 * chunks;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, kv = blockIdx.y;
    const bool is_split = at.n_splits > 1;
    const int row_tile = is_split ? blockIdx.x : blockIdx.x * attention_warps + warp;
    const int split = is_split ? blockIdx.z * attention_warps + warp : 0;
    const int heads_per_kv = at.n_heads / at.n_kv_heads, n_rows = at.n_tokens * heads_per_kv;
    if (row_tile * 16 >= n_rows)
        return;  // the whole warp; where warps have different row tiles, no barrier follows

    // Rows g and g + 8 of the tile. A row beyond the last repeats the last row and is not written.
    const half* query[2];
    int last_key[2];
    for (int i = 0; i < 2; i++) {
        const int row = min(row_tile * 16 + g + 8 * i, n_rows - 1), token = row / heads_per_kv;
        const int head = kv * heads_per_kv + row % heads_per_kv;
        query[i] = at.q + (size_t(token) * at.n_heads + head) * head_dim;
        last_key[i] = *at.pos + token;
    }
    const int last_row = min(row_tile * 16 + 15, n_rows - 1);
    const int n_keys = *at.pos + last_row / heads_per_kv + 1;  // that the tile's last row sees
    // Splits that have at least one key. A block whose splits all have none returns here; a warp whose split
    // has none goes on and adds zeros.
    const int n_splits = min(at.n_splits, (n_keys + attention_keys - 1) / attention_keys);
    if (is_split && int(blockIdx.z) * attention_warps >= n_splits) return;
    const half* keys = at.keys + size_t(kv) * at.context * head_dim;
    const half* values = at.values + size_t(kv) * at.context * head_dim;

    uint32_t q[chunks][2][4];  // operand A, 16 elements each
    for (int c = 0; c < chunks; c++) {
        const uint4 low = *reinterpret_cast<const uint4*>(query[0] + 32 * c + 8 * t);
        const uint4 high = *reinterpret_cast<const uint4*>(query[1] + 32 * c + 8 * t);
        q[c][0][0] = low.x, q[c][0][1] = high.x, q[c][0][2] = low.y, q[c][0][3] = high.y;
        q[c][1][0] = low.z, q[c][1][1] = high.z, q[c][1][2] = low.w, q[c][1][3] = high.w;
    }

    float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};  // of rows g and g + 8
    float mix[chunks][4][4] = {};  // [c][e]: rows g, g + 8 by elements 32c + 4n + e, n = 2t and 2t + 1
    for (int first = split * attention_keys; first < n_keys; first += at.n_splits * attention_keys) {
        float scores[attention_keys / 8][4] = {};
        for (int j = 0; j < attention_keys / 8; j++) {
            const half* key = keys + size_t(min(first + 8 * j + g, n_keys - 1)) * head_dim + 8 * t;
            for (int c = 0; c < chunks; c++) {
                const uint4 k = *reinterpret_cast<const uint4*>(key + 32 * c);
                mma_m16n8k16(scores[j], q[c][0], {k.x, k.y});
                mma_m16n8k16(scores[j], q[c][1], {k.z, k.w});
            }
        }

        // scores[j][0..1]: row g, keys 8j + 2t and + 1; [2..3]: row g + 8. The four lanes of a row have all
        // its keys.
        for (int i = 0; i < 2; i++) {
            float new_largest = largest[i];
            for (int j = 0; j < attention_keys / 8; j++) {
                for (int odd = 0; odd < 2; odd++) {
                    float& score = scores[j][2 * i + odd];
                    score = first + 8 * j + 2 * t + odd <= last_key[i] ? score * at.scale : -INFINITY;
                    new_largest = fmaxf(new_largest, score);
                }
            }
            new_largest = fmaxf(new_largest, __shfl_xor_sync(0xffffffff, new_largest, 1));
            new_largest = fmaxf(new_largest, __shfl_xor_sync(0xffffffff, new_largest, 2));
            // A row without a visible key so far stays at -inf; its sums are 0, so the factor does not
            // matter.
            const float shrink = largest[i] == new_largest ? 1.0f : expf(largest[i] - new_largest);
            largest[i] = new_largest;
            float sum = 0;
            for (int j = 0; j < attention_keys / 8; j++) {
                for (int odd = 0; odd < 2; odd++) {
                    float& score = scores[j][2 * i + odd];
                    score = score == -INFINITY ? 0.0f : expf(score - new_largest);
                    sum += score;
                }
            }
            total[i] = total[i] * shrink + sum;  // of this lane's keys; the four lanes are added at the end
            for (int c = 0; c < chunks; c++) {
                for (int e = 0; e < 4; e++) mix[c][e][2 * i] *= shrink, mix[c][e][2 * i + 1] *= shrink;
            }
        }

        // mma's results of two times 8 keys, side by side, have the layout of operand A of 16 keys.
        for (int j = 0; j < attention_keys / 8; j += 2) {
            const uint32_t a[4] = {as_bits(__floats2half2_rn(scores[j][0], scores[j][1])),
                                   as_bits(__floats2half2_rn(scores[j][2], scores[j][3])),
                                   as_bits(__floats2half2_rn(scores[j + 1][0], scores[j + 1][1])),
                                   as_bits(__floats2half2_rn(scores[j + 1][2], scores[j + 1][3]))};
            const half* rows[4];
            for (int i = 0; i < 4; i++) {
                const int key = first + 8 * j + 2 * t + i / 2 * 8 + i % 2;
                rows[i] = values + size_t(min(key, n_keys - 1)) * head_dim + 4 * g;
            }
            for (int c = 0; c < chunks; c++) {
                uint2 v[4];
                for (int i = 0; i < 4; i++) v[i] = *reinterpret_cast<const uint2*>(rows[i] + 32 * c);
                mma_m16n8k16(mix[c][0], a, {prmt(v[0].x, v[1].x, 0x5410), prmt(v[2].x, v[3].x, 0x5410)});
                mma_m16n8k16(mix[c][1], a, {prmt(v[0].x, v[1].x, 0x7632), prmt(v[2].x, v[3].x, 0x7632)});
                mma_m16n8k16(mix[c][2], a, {prmt(v[0].y, v[1].y, 0x5410), prmt(v[2].y, v[3].y, 0x5410)});
                mma_m16n8k16(mix[c][3], a, {prmt(v[0].y, v[1].y, 0x7632), prmt(v[2].y, v[3].y, 0x7632)});
            }
        }
    }
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(0xffffffff, total[i], 1);
        total[i] += __shfl_xor_sync(0xffffffff, total[i], 2);
    }

    // A lane has elements 32c + 8t + 0..7 of each row: mix[c][e][2i] is element e, mix[c][e][2i + 1] element
    // 4 + e.
    auto write = [&](int row_in_tile, int c, const float(&eight)[8]) {
        const int row = row_tile * 16 + row_in_tile;
        if (row >= n_rows) return;
        const int token = row / heads_per_kv, head = kv * heads_per_kv + row % heads_per_kv;
        half* out = at.out + (size_t(token) * at.n_heads + head) * head_dim + 32 * c + 8 * t;
        *reinterpret_cast<uint4*>(out) = make_uint4(
            as_bits(__floats2half2_rn(eight[0], eight[1])), as_bits(__floats2half2_rn(eight[2], eight[3])),
            as_bits(__floats2half2_rn(eight[4], eight[5])), as_bits(__floats2half2_rn(eight[6], eight[7])));
    };
    const size_t tile = size_t(blockIdx.x) * at.n_kv_heads + kv;
    auto partial_row = [&](int from, int row) {
        return at.partials + ((tile * at.n_splits + from) * 16 + row) * (head_dim + 2);
    };
    for (int i = 0; i < 2; i++) {
        for (int c = 0; c < chunks; c++) {
            float eight[8];
            for (int e = 0; e < 4; e++) eight[e] = mix[c][e][2 * i], eight[4 + e] = mix[c][e][2 * i + 1];
            if (!is_split) {
                for (float& x : eight) x /= total[i];
                write(g + 8 * i, c, eight);
            } else {
                float* out = partial_row(split, g + 8 * i);
                for (int e = 0; e < 8; e++) out[32 * c + 8 * t + e] = eight[e];
                if (c == 0 && t == 0) out[head_dim] = largest[i], out[head_dim + 1] = total[i];
            }
        }
    }
    if (!is_split || !is_last(at.arrivals + tile, (n_splits + attention_warps - 1) / attention_warps)) return;

    // The last block combines the partial sums: each thread one element (or a few) of every row.
    for (int row = 0; row <= last_row - row_tile * 16; row++) {
        float top = -INFINITY, sum = 0;
        for (int from = 0; from < n_splits; from++) top = fmaxf(top, partial_row(from, row)[head_dim]);
        for (int from = 0; from < n_splits; from++)
            sum += partial_row(from, row)[head_dim + 1] * expf(partial_row(from, row)[head_dim] - top);
        const int token = (row_tile * 16 + row) / heads_per_kv, head = (row_tile * 16 + row) % heads_per_kv;
        half* out = at.out + (size_t(token) * at.n_heads + kv * heads_per_kv + head) * head_dim;
        for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
            float x = 0;
            for (int from = 0; from < n_splits; from++)
                x = fmaf(expf(partial_row(from, row)[head_dim] - top), partial_row(from, row)[i], x);
            out[i] = __float2half(x / sum);
        }
    }
}

// Precondition: head_dim is 32, 64, 96 or 128.
inline void run_attention(const Attention& at, int head_dim) {
    const int n_rows = at.n_tokens * (at.n_heads / at.n_kv_heads);
    const int n_tiles = (n_rows + attention_rows - 1) / attention_rows;
    const dim3 grid = at.n_splits > 1
                          ? dim3(n_tiles, at.n_kv_heads, at.n_splits / attention_warps)
                          : dim3((n_tiles + attention_warps - 1) / attention_warps, at.n_kv_heads);
    const Launch how{.grid = grid, .block = 32 * attention_warps, .stream = device().stream};
    head_dim == 32   ? launch<attention_kernel<1>>(how, at)
    : head_dim == 64 ? launch<attention_kernel<2>>(how, at)
    : head_dim == 96 ? launch<attention_kernel<3>>(how, at)
                     : launch<attention_kernel<4>>(how, at);
}

// Memory for a single token's attention, whose keys are split among n_splits warps.
struct FastAttention {
    int n_splits = 1;
    DeviceBuffer<float> partials;
    DeviceBuffer<unsigned> arrivals;

    // Over up to `context` positions.
    FastAttention(const ModelConfig& c, int context)
        : FastAttention(c.n_kv_heads, c.heads_per_kv(), c.head_dim, context) {}

  private:
    // n_kv_heads key heads with heads_per_kv query heads each.
    FastAttention(int n_kv_heads, int heads_per_kv, int head_dim, int context)
        : n_splits(count_splits(n_kv_heads, heads_per_kv, context)),
          partials(size_t(count_tiles(n_kv_heads, heads_per_kv)) * size_t(n_splits) * attention_rows *
                   size_t(head_dim + 2)),
          arrivals(size_t(count_tiles(n_kv_heads, heads_per_kv))) {
        arrivals.clear();
    }
    static int count_tiles(int n_kv_heads, int heads_per_kv) {
        return (heads_per_kv + attention_rows - 1) / attention_rows * n_kv_heads;
    }
    // More warps than one for every 32 keys do not help; a block has attention_warps.
    static int count_splits(int n_kv_heads, int heads_per_kv, int context) {
        const int keys_per_block = attention_warps * attention_keys;
        return attention_warps * std::min({(context + keys_per_block - 1) / keys_per_block, 64,
                                           1 + 4 * device().n_sms / count_tiles(n_kv_heads, heads_per_kv)});
    }
};

// out (n_tokens, n_heads * head_dim): each head's mean of the values under softmax(q . keys /
// sqrt(head_dim)). q: (n_tokens, n_heads * head_dim), of tokens at positions *pos, *pos + 1, ..., whose keys
// and values are in the cache. Always true: it is faster than the program's own.
inline bool fast_attention(DeviceRows<half>& out, const FastAttention& scratch, const DeviceRows<half>& q,
                           const DeviceKvCache& cache, int layer, const int* pos) {
    Attention at{};
    at.q = q.get(), at.out = out.get(), at.pos = pos;
    at.keys = cache.keys(layer), at.values = cache.values(layer);
    at.n_tokens = q.n_rows, at.n_heads = q.n_cols / cache.head_dim, at.n_kv_heads = cache.n_kv_heads;
    at.context = cache.context;
    at.scale = float(1 / std::sqrt(double(cache.head_dim)));
    at.n_splits = q.n_rows == 1 ? scratch.n_splits : 1;
    at.partials = scratch.partials.get(), at.arrivals = scratch.arrivals.get();
    run_attention(at, cache.head_dim);
    return true;
}
