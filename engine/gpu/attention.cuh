// Attention of fp16 queries over an fp16 KV cache, whatever the scheme of the weights.
//
// The softmax is online (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). A
// warp computes a row tile: 16 queries that read the same keys, namely the query heads of one kv head, of one
// token or of several consecutive tokens. It takes some keys at a time: scores by mma, the running maximum,
// exp, and the weighted sum of the values by mma. When the maximum grows, the sums so far are scaled down to
// it. A long prompt has enough row tiles to fill the device, a single token does not: blocks and their warps
// split its keys. A warp's sums are a partial result, scaled to a maximum of its own. A block adds those of
// its warps, and the last block to finish adds those of the blocks.
//
// Keys and values go from memory to registers directly, without shared memory. Queries and keys use the same
// permutation of a head's elements, in which a lane loads 16 consecutive bytes of a key: of each chunk of 32
// elements, lane t has the eight from 8t on. Of a value's chunk of 32 elements, lane g has the four from 4g
// on; prmt combines those of two positions.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "engine/gpu/device.h"
#include "engine/gpu/half2.h"
#include "engine/gpu/kv_cache.cuh"
#include "engine/gpu/reduce.cuh"
#include "engine/gpu/rows.cuh"
#include "simt/ptx.h"

// The kernels' arguments.
struct Attention {
    const half* q;              // (n_tokens, n_kv_heads * heads_per_kv, head_dim)
    const half *keys, *values;  // of this layer: (n_kv_heads, context, head_dim)
    half* out;                  // as q
    const int* pos;             // of token 0
    int n_tokens, heads_per_kv, n_kv_heads, context;
    float scale;  // 1 / sqrt(head_dim)
    // Of a single token, by row tiles, that is (kv head, 16 of its query heads):
    int n_splits;        // the most blocks that split a tile's keys
    float* partials;     // (n_row_tiles * n_kv_heads, rows of a tile, n_splits, head_dim): sums
    float2* statistics;  // (n_row_tiles * n_kv_heads, rows of a tile, n_splits): maximum and total
    unsigned* arrivals;  // (n_row_tiles * n_kv_heads,), see is_last()
};

constexpr int attention_warps = 4;
constexpr int attention_keys = 32;  // that a warp takes at a time
constexpr int attention_rows = 16;  // queries of a row tile
// The same of a single token's attention.
constexpr int token_warps = 8;
constexpr int token_keys = 16;
constexpr int token_steps = 4;  // of token_keys keys; a block has as many or more, once they fill token_warps

// A row tile, spread over a warp. A lane has rows g and g + 8.
template <int chunks>
struct RowTile {
    uint32_t q[chunks][2][4];                 // operand A, 16 elements each
    float largest[2] = {-FLT_MAX, -FLT_MAX};  // of a row without a visible key, too
    float total[2] = {0, 0};                  // of this lane's keys, until add_lanes()
    float mix[chunks][4][4] = {};  // [c][e]: rows g, g + 8 by elements 32c + 4n + e, n = 2t and 2t + 1

    // From two queries of head_dim elements.
    __device__ void load(const half* query, const half* query_8, int t) {
        for (int c = 0; c < chunks; c++) {
            const uint4 low = *reinterpret_cast<const uint4*>(query + 32 * c + 8 * t);
            const uint4 high = *reinterpret_cast<const uint4*>(query_8 + 32 * c + 8 * t);
            q[c][0][0] = low.x, q[c][0][1] = high.x, q[c][0][2] = low.y, q[c][0][3] = high.y;
            q[c][1][0] = low.z, q[c][1][1] = high.z, q[c][1][2] = low.w, q[c][1][3] = high.w;
        }
    }

    // Makes probabilities of scores, relative to the largest so far. scores[j][0..1]: row g, keys 8j + 2t and
    // + 1 after `first`; [2..3]: row g + 8. The four lanes of a row have all its keys.
    template <int n>
    __device__ void softmax(float (&scores)[n][4], int first, const int (&last_key)[2], float scale) {
        for (int i = 0; i < 2; i++) {
            float new_largest = largest[i];
            for (int j = 0; j < n; j++) {
                for (int odd = 0; odd < 2; odd++) {
                    float& score = scores[j][2 * i + odd];
                    score = first + 8 * j + int(threadIdx.x) % 4 * 2 + odd <= last_key[i] ? score * scale
                                                                                          : -INFINITY;
                    new_largest = fmaxf(new_largest, score);
                }
            }
            new_largest = fmaxf(new_largest, __shfl_xor_sync(0xffffffff, new_largest, 1));
            new_largest = fmaxf(new_largest, __shfl_xor_sync(0xffffffff, new_largest, 2));
            const float shrink = expf(largest[i] - new_largest);
            largest[i] = new_largest;
            float sum = 0;
            for (int j = 0; j < n; j++) {
                for (int odd = 0; odd < 2; odd++) {
                    float& score = scores[j][2 * i + odd];
                    score = expf(score - new_largest);
                    sum += score;
                }
            }
            total[i] = total[i] * shrink + sum;
            for (int c = 0; c < chunks; c++) {
                for (int e = 0; e < 4; e++) mix[c][e][2 * i] *= shrink, mix[c][e][2 * i + 1] *= shrink;
            }
        }
    }

    // Adds 16 values. low, high: probabilities of eight keys each, whose mma results, side by side, have the
    // layout of operand A of 16 keys. v[c][i]: elements 32c + 4g and on of key 2t + i / 2 * 8 + i % 2.
    __device__ void add_values(const float (&low)[4], const float (&high)[4], const uint2 (&v)[chunks][4]) {
        const uint32_t a[4] = {
            as_bits(__floats2half2_rn(low[0], low[1])), as_bits(__floats2half2_rn(low[2], low[3])),
            as_bits(__floats2half2_rn(high[0], high[1])), as_bits(__floats2half2_rn(high[2], high[3]))};
        for (int c = 0; c < chunks; c++) {
            const uint2(&u)[4] = v[c];
            mma_m16n8k16(mix[c][0], a, {prmt(u[0].x, u[1].x, 0x5410), prmt(u[2].x, u[3].x, 0x5410)});
            mma_m16n8k16(mix[c][1], a, {prmt(u[0].x, u[1].x, 0x7632), prmt(u[2].x, u[3].x, 0x7632)});
            mma_m16n8k16(mix[c][2], a, {prmt(u[0].y, u[1].y, 0x5410), prmt(u[2].y, u[3].y, 0x5410)});
            mma_m16n8k16(mix[c][3], a, {prmt(u[0].y, u[1].y, 0x7632), prmt(u[2].y, u[3].y, 0x7632)});
        }
    }

    __device__ void add_lanes() {
        for (float& x : total) {
            x += __shfl_xor_sync(0xffffffff, x, 1);
            x += __shfl_xor_sync(0xffffffff, x, 2);
        }
    }
    // Elements 32c + 8t + 0..7 of row g + 8i.
    __device__ void eight(float (&out)[8], int c, int i) const {
        for (int e = 0; e < 4; e++) out[e] = mix[c][e][2 * i], out[4 + e] = mix[c][e][2 * i + 1];
    }
};

// Elements 32c + 4g and on of 16 values from `first` on, as RowTile::add_values() takes them; beyond the last
// key, the last one's.
template <int chunks>
__device__ void load_values(uint2 (&v)[chunks][4], const half* values, int first, int n_keys) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        const int key = min(first + 2 * t + i / 2 * 8 + i % 2, n_keys - 1);
        for (int c = 0; c < chunks; c++) {
            v[c][i] = *reinterpret_cast<const uint2*>(values + size_t(key) * 32 * chunks + 32 * c + 4 * g);
        }
    }
}

// Of several tokens. grid: (tiles of 16 queries / attention_warps, n_kv_heads). block: 32 * attention_warps.
// chunks: head_dim / 32.
template <int chunks>
__global__ void __launch_bounds__(32 * attention_warps) attention_kernel(Attention at) {
    constexpr int head_dim = 32 * chunks;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, kv = blockIdx.y;
    const int row_tile = blockIdx.x * attention_warps + warp;
    const int heads_per_kv = at.heads_per_kv, n_rows = at.n_tokens * heads_per_kv;
    if (row_tile * 16 >= n_rows) return;  // the whole warp; no barrier follows

    // Rows g and g + 8 of the tile. A row beyond the last repeats the last row and is not written.
    size_t query[2];
    int last_key[2];
    for (int i = 0; i < 2; i++) {
        const int row = min(row_tile * 16 + g + 8 * i, n_rows - 1), token = row / heads_per_kv;
        const int head = kv * heads_per_kv + row % heads_per_kv;
        query[i] = (size_t(token) * at.n_kv_heads * heads_per_kv + head) * head_dim;
        last_key[i] = *at.pos + token;
    }
    const int last_row = min(row_tile * 16 + 15, n_rows - 1);
    const int n_keys = *at.pos + last_row / heads_per_kv + 1;  // that the tile's last row sees
    const half* keys = at.keys + size_t(kv) * at.context * head_dim;
    const half* values = at.values + size_t(kv) * at.context * head_dim;

    RowTile<chunks> tile;
    tile.load(at.q + query[0], at.q + query[1], t);
    for (int first = 0; first < n_keys; first += attention_keys) {
        float scores[attention_keys / 8][4] = {};
        for (int j = 0; j < attention_keys / 8; j++) {
            const half* key = keys + size_t(min(first + 8 * j + g, n_keys - 1)) * head_dim + 8 * t;
            for (int c = 0; c < chunks; c++) {
                const uint4 k = *reinterpret_cast<const uint4*>(key + 32 * c);
                mma_m16n8k16(scores[j], tile.q[c][0], {k.x, k.y});
                mma_m16n8k16(scores[j], tile.q[c][1], {k.z, k.w});
            }
        }
        tile.softmax(scores, first, last_key, at.scale);
        for (int j = 0; j < attention_keys / 8; j += 2) {
            uint2 v[chunks][4];
            load_values(v, values, first + 8 * j, n_keys);
            tile.add_values(scores[j], scores[j + 1], v);
        }
    }
    tile.add_lanes();
    for (int i = 0; i < 2; i++) {
        if (row_tile * 16 + g + 8 * i >= n_rows) continue;
        for (int c = 0; c < chunks; c++) {
            float x[8];
            tile.eight(x, c, i);
            uint32_t pairs[4];
            for (int e = 0; e < 4; e++) {
                pairs[e] = as_bits(__floats2half2_rn(x[2 * e] / tile.total[i], x[2 * e + 1] / tile.total[i]));
            }
            *reinterpret_cast<uint4*>(at.out + query[i] + 32 * c + 8 * t) =
                make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

// Four elements of a partial result of a row: sums of exp(score - largest) * value; total is that of the
// factors.
struct Partial {
    float4 sums = {0, 0, 0, 0};
    float largest = -FLT_MAX, total = 0;
};

// The sum of n partial results of a row, scaled to the largest maximum. sums (n, row_length): of these, the
// first four elements. statistics (n,): maximum and total. at_once: so many are loaded before any is waited
// for.
template <int at_once, int row_length>
__device__ inline Partial add_partials(const float* sums, const float2* statistics, int n) {
    Partial all;
    for (int from = 0; from < n; from += at_once) {
        float4 part[at_once];
        float2 s[at_once];
        for (int i = 0; i < at_once; i++) {
            const bool is_there = from + i < n;
            s[i] = is_there ? statistics[from + i] : make_float2(-FLT_MAX, 0);
            part[i] = is_there ? *reinterpret_cast<const float4*>(sums + (from + i) * row_length)
                               : make_float4(0, 0, 0, 0);
        }
        float largest = all.largest;
        for (int i = 0; i < at_once; i++) largest = fmaxf(largest, s[i].x);
        const float shrink = expf(all.largest - largest);
        all.largest = largest, all.total *= shrink;
        all.sums.x *= shrink, all.sums.y *= shrink, all.sums.z *= shrink, all.sums.w *= shrink;
        for (int i = 0; i < at_once; i++) {
            const float weight = expf(s[i].x - largest);
            all.total = fmaf(weight, s[i].y, all.total);
            all.sums.x = fmaf(weight, part[i].x, all.sums.x),
            all.sums.y = fmaf(weight, part[i].y, all.sums.y);
            all.sums.z = fmaf(weight, part[i].z, all.sums.z),
            all.sums.w = fmaf(weight, part[i].w, all.sums.w);
        }
    }
    return all;
}

// Of one token. grid: (tiles of 16 query heads of a kv head, n_kv_heads, n_splits). block: 32 * token_warps.
// Dynamic shared memory: token_shared(). chunks: head_dim / 32.
template <int chunks>
__global__ void __launch_bounds__(32 * token_warps) token_attention(Attention at) {
    constexpr int head_dim = 32 * chunks;
    constexpr int row_size = token_warps * head_dim + 4;        // of `sums`; rows begin in different banks
    __shared__ float2 statistics[attention_rows][token_warps];  // of the warps: maximum and total
    auto* sums = dynamic_shared<float>();                       // of the warps: (n_rows, row_size)
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, kv = blockIdx.y;
    const int heads_per_kv = at.heads_per_kv, split = blockIdx.z;
    const int n_rows = min(attention_rows, heads_per_kv - int(blockIdx.x) * attention_rows);
    const half* q = at.q + size_t(kv * heads_per_kv + blockIdx.x * attention_rows) * head_dim;
    const half* keys = at.keys + size_t(kv) * at.context * head_dim;
    const half* values = at.values + size_t(kv) * at.context * head_dim;

    // The keys are split only as far as that leaves each block enough; the other blocks return here. Steps of
    // 16 keys go to the blocks in turn, and a block's to its warps in turn.
    const int n_keys = *at.pos + 1, n_steps = (n_keys + token_keys - 1) / token_keys;
    const int n_splits =
        n_steps <= token_warps ? 1 : min(at.n_splits, (n_steps + token_steps - 1) / token_steps);
    if (split >= n_splits) return;

    int first = (split + n_splits * warp) * token_keys;
    const int step = n_splits * token_warps * token_keys, last_key[2] = {n_keys - 1, n_keys - 1};
    if (first < n_keys) {
        // A row beyond the last repeats the last row and is not written.
        RowTile<chunks> tile;
        tile.load(q + min(g, n_rows - 1) * head_dim, q + min(g + 8, n_rows - 1) * head_dim, t);
        uint4 k[2][chunks];
        uint2 v[chunks][4];
        const auto load_keys = [&] {  // from `first` on; beyond the last, that one
            for (int j = 0; j < 2; j++) {
                const half* key = keys + size_t(min(first + 8 * j + g, n_keys - 1)) * head_dim + 8 * t;
                for (int c = 0; c < chunks; c++) k[j][c] = *reinterpret_cast<const uint4*>(key + 32 * c);
            }
        };
        load_keys();
        load_values(v, values, first, n_keys);
        for (bool is_last_step = false; !is_last_step;) {
            float scores[2][4] = {};
            for (int c = 0; c < chunks; c++) {
                for (int j = 0; j < 2; j++) {
                    mma_m16n8k16(scores[j], tile.q[c][0], {k[j][c].x, k[j][c].y});
                    mma_m16n8k16(scores[j], tile.q[c][1], {k[j][c].z, k[j][c].w});
                }
            }
            const int now = first;
            first += step;
            is_last_step = first >= n_keys;
            // What the next step needs is loaded as soon as there are registers for it.
            if (!is_last_step) load_keys();
            tile.softmax(scores, now, last_key, at.scale);
            tile.add_values(scores[0], scores[1], v);
            if (!is_last_step) load_values(v, values, first, n_keys);
        }
        tile.add_lanes();
        for (int i = 0; i < 2; i++) {
            const int row = g + 8 * i;
            if (row >= n_rows) continue;
            if (t == 0) statistics[row][warp] = make_float2(tile.largest[i], tile.total[i]);
            float* to = sums + row * row_size + warp * head_dim + 8 * t;
            for (int c = 0; c < chunks; c++) {
                float x[8];
                tile.eight(x, c, i);
                *reinterpret_cast<float4*>(to + 32 * c) = make_float4(x[0], x[1], x[2], x[3]);
                *reinterpret_cast<float4*>(to + 32 * c + 4) = make_float4(x[4], x[5], x[6], x[7]);
            }
        }
    }
    int n_warps = 0;  // that had keys
    for (int i = 0; i < token_warps; i++) n_warps += split + n_splits * i < n_steps;
    __syncthreads();

    // From here on, a warp has a row, or several, and a lane four elements of it.
    const auto for_each_four = [&](auto&& body) {
        for (int row = warp; row < n_rows && 4 * lane < head_dim; row += token_warps) body(row, 4 * lane);
    };
    half* out = at.out + (q - at.q);
    const auto write = [&](int row, int element, const Partial& p) {
        const float factor = 1 / p.total;
        *reinterpret_cast<uint2*>(out + row * head_dim + element) =
            make_uint2(as_bits(__floats2half2_rn(p.sums.x * factor, p.sums.y * factor)),
                       as_bits(__floats2half2_rn(p.sums.z * factor, p.sums.w * factor)));
    };
    const size_t index = size_t(blockIdx.x) * at.n_kv_heads + kv;
    const auto at_row = [&](int row) {  // what the splits have of it in memory
        return (index * min(attention_rows, heads_per_kv) + row) * at.n_splits;
    };
    for_each_four([&](int row, int element) {
        const Partial p =
            add_partials<token_warps, head_dim>(sums + row * row_size + element, statistics[row], n_warps);
        if (n_splits == 1) return write(row, element, p);
        *reinterpret_cast<float4*>(at.partials + (at_row(row) + split) * head_dim + element) = p.sums;
        if (element == 0) at.statistics[at_row(row) + split] = make_float2(p.largest, p.total);
    });
    if (n_splits == 1 || !is_last(at.arrivals + index, n_splits)) return;
    for_each_four([&](int row, int element) {
        write(row, element,
              add_partials<16, head_dim>(at.partials + at_row(row) * head_dim + element,
                                         at.statistics + at_row(row), n_splits));
    });
}

// Bytes: a warp's sums of each row of a tile.
inline size_t token_shared(int heads_per_kv, int head_dim) {
    return sizeof(float) * size_t(std::min(heads_per_kv, attention_rows) * (token_warps * head_dim + 4));
}

// Precondition: head_dim is 32, 64, 96 or 128. Of n_tokens > 1, the last four fields are not used.
inline void run_attention(const Attention& at, int head_dim) {
    const int n_tiles = (at.n_tokens * at.heads_per_kv + attention_rows - 1) / attention_rows;
    if (at.n_tokens > 1) {
        const Launch how{.grid = dim3((n_tiles + attention_warps - 1) / attention_warps, at.n_kv_heads),
                         .block = 32 * attention_warps,
                         .stream = device().stream};
        head_dim == 32   ? launch<attention_kernel<1>>(how, at)
        : head_dim == 64 ? launch<attention_kernel<2>>(how, at)
        : head_dim == 96 ? launch<attention_kernel<3>>(how, at)
                         : launch<attention_kernel<4>>(how, at);
        return;
    }
    const Launch how{.grid = dim3(n_tiles, at.n_kv_heads, at.n_splits),
                     .block = 32 * token_warps,
                     .shared_bytes = token_shared(at.heads_per_kv, head_dim),
                     .stream = device().stream};
    head_dim == 32   ? launch<token_attention<1>>(how, at)
    : head_dim == 64 ? launch<token_attention<2>>(how, at)
    : head_dim == 96 ? launch<token_attention<3>>(how, at)
                     : launch<token_attention<4>>(how, at);
}

// Memory for a single token's attention, whose keys are split among up to n_splits blocks.
struct FastAttention {
    int n_splits = 1;
    DeviceBuffer<float> partials;
    DeviceBuffer<float2> statistics;
    DeviceBuffer<unsigned> arrivals;

    // Over up to `context` positions.
    FastAttention(const ModelConfig& c, int context)
        : FastAttention(c.n_kv_heads, c.heads_per_kv(), c.head_dim, context) {}

  private:
    // n_kv_heads key heads with heads_per_kv query heads each.
    FastAttention(int n_kv_heads, int heads_per_kv, int head_dim, int context)
        : n_splits(count_splits(n_kv_heads, heads_per_kv, context)),
          partials(count_rows(n_kv_heads, heads_per_kv) * size_t(n_splits) * size_t(head_dim)),
          statistics(count_rows(n_kv_heads, heads_per_kv) * size_t(n_splits)),
          arrivals(size_t(count_tiles(n_kv_heads, heads_per_kv))) {
        arrivals.clear();
    }
    static int count_tiles(int n_kv_heads, int heads_per_kv) {
        return (heads_per_kv + attention_rows - 1) / attention_rows * n_kv_heads;
    }
    static size_t count_rows(int n_kv_heads, int heads_per_kv) {
        return size_t(count_tiles(n_kv_heads, heads_per_kv)) * size_t(std::min(heads_per_kv, attention_rows));
    }
    // One block for each multiprocessor, as far as each has enough keys.
    static int count_splits(int n_kv_heads, int heads_per_kv, int context) {
        const int keys_per_block = token_steps * token_keys;
        return std::clamp(device().n_sms / count_tiles(n_kv_heads, heads_per_kv), 1,
                          (context + keys_per_block - 1) / keys_per_block);
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
    at.n_tokens = q.n_rows, at.n_kv_heads = cache.n_kv_heads;
    at.heads_per_kv = q.n_cols / cache.head_dim / cache.n_kv_heads;
    at.context = cache.context;
    at.scale = float(1 / std::sqrt(double(cache.head_dim)));
    at.n_splits = scratch.n_splits;
    at.partials = scratch.partials.get(), at.statistics = scratch.statistics.get();
    at.arrivals = scratch.arrivals.get();
    run_attention(at, cache.head_dim);
    return true;
}
