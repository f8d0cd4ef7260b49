// Attention of fp16 queries over an fp16 KV cache, whatever the scheme of the weights.
//
// The softmax is online (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). A
// warp computes a row tile: 16 queries that read the same keys, namely the query heads of one kv head, of one
// token or of several consecutive tokens. It takes some keys at a time: scores by mma, the running maximum,
// exp, and the weighted sum of the values by mma. When the maximum grows, the sums so far are scaled down to
// it.
//
// The row tiles of a prompt fill the device: attention_kernel. The warps of a block have consecutive ones and
// read their keys and values in shared memory, where cp.async puts those of the next stage meanwhile.
//
// A single token has too few row tiles: token_attention. Blocks and their warps split its keys. A warp's sums
// are a partial result, scaled to a maximum of its own. A block adds those of its warps, and the last block
// to finish adds those of the blocks. No keys are read twice; they go from memory to registers directly.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "engine/gpu/device.h"
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

constexpr int attention_rows = 16;  // queries of a row tile
// In attention_kernel: the row tiles of a block, each a warp's, and the keys of a stage.
constexpr int attention_warps = 8;
constexpr int attention_keys = 64;
// In token_attention: the warps of a block; the keys that one takes at a time, in a step; and the steps that
// are worth a block of their own.
constexpr int token_warps = 8;
constexpr int token_keys = 16;
constexpr int token_steps = 4;

// A row tile, spread over a warp. A lane has rows g = lane / 4 and g + 8, and t = lane % 4.
template <int chunks>
struct RowTile {
    uint32_t q[chunks][2][4];                 // operand A, 16 elements each
    float largest[2] = {-FLT_MAX, -FLT_MAX};  // score * at.scale * log2(e); -FLT_MAX: none is visible yet
    float total[2] = {0, 0};                  // of this lane's keys, until add_lanes()
    float mix[chunks][4][4] = {};             // rows g, g + 8 by 8 elements; of them, columns 2t and 2t + 1

    // Makes probabilities of scores, relative to the largest so far: exp2(score * at.scale * log2(e) -
    // largest). scores[j][0..1]: row g, keys first + 8j + 2t and + 1; [2..3]: row g + 8. The four lanes of a
    // row have all its keys.
    template <int n>
    __device__ void softmax(float (&scores)[n][4], int first, const int (&last_key)[2], float at_scale) {
        const float scale = at_scale * 1.44269504f;
        for (int i = 0; i < 2; i++) {
            const int n_visible = last_key[i] + 1 - first - int(threadIdx.x) % 4 * 2;
            float top = -INFINITY;
            for (int j = 0; j < n; j++) {
                for (int odd = 0; odd < 2; odd++) {
                    float& score = scores[j][2 * i + odd];
                    if (8 * j + odd >= n_visible) score = -INFINITY;
                    top = fmaxf(top, score);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
            const float new_largest = fmaxf(largest[i], top * scale);
            const float shrink = exp2_approx(largest[i] - new_largest);
            largest[i] = new_largest;
            float sum = 0;
            for (int j = 0; j < n; j++) {
                for (int odd = 0; odd < 2; odd++) {
                    float& score = scores[j][2 * i + odd];
                    score = exp2_approx(fmaf(score, scale, -new_largest));
                    sum += score;
                }
            }
            total[i] = total[i] * shrink + sum;
            for (int c = 0; c < chunks; c++) {
                for (int e = 0; e < 4; e++) mix[c][e][2 * i] *= shrink, mix[c][e][2 * i + 1] *= shrink;
            }
        }
    }

    __device__ void add_lanes() {
        for (float& x : total) {
            x += __shfl_xor_sync(0xffffffff, x, 1);
            x += __shfl_xor_sync(0xffffffff, x, 2);
        }
    }
};

// Probabilities of two times eight keys, mma's results side by side: operand A of 16 keys.
__device__ inline void to_operand(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = as_bits(__floats2half2_rn(low[0], low[1])), a[1] = as_bits(__floats2half2_rn(low[2], low[3]));
    a[2] = as_bits(__floats2half2_rn(high[0], high[1])), a[3] = as_bits(__floats2half2_rn(high[2], high[3]));
}

// Keys and values in shared memory. The addresses of 8 rows are in different banks.
template <int chunks>
struct KeyStage {
    half keys[attention_keys][32 * chunks + 8], values[attention_keys][32 * chunks + 8];
};

// Of several tokens. grid: (tiles of 16 queries / attention_warps, n_kv_heads). block: 32 * attention_warps.
// Dynamic shared memory: two KeyStage. chunks: head_dim / 32.
template <int chunks>
__global__ void __launch_bounds__(32 * attention_warps, 1) attention_kernel(Attention at) {
    constexpr int head_dim = 32 * chunks;
    auto* stages = dynamic_shared<KeyStage<chunks>>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, kv = blockIdx.y;
    const int heads_per_kv = at.heads_per_kv, n_rows = at.n_tokens * heads_per_kv;
    const int block = gridDim.x - 1 - blockIdx.x;  // those with the most keys begin first
    const int first_row = (block * attention_warps + warp) * attention_rows;

    // Rows g and g + 8 of the tile. A row beyond the last repeats the last row and is not written.
    size_t query[2];
    int last_key[2];
    for (int i = 0; i < 2; i++) {
        const int row = min(first_row + g + 8 * i, n_rows - 1), token = row / heads_per_kv;
        const int head = kv * heads_per_kv + row % heads_per_kv;
        query[i] = (size_t(token) * at.n_kv_heads * heads_per_kv + head) * head_dim;
        last_key[i] = *at.pos + token;
    }
    // Keys that the last row of this warp, and of the block, sees.
    const auto n_keys_of = [&](int row) { return *at.pos + min(row, n_rows - 1) / heads_per_kv + 1; };
    const int n_keys = first_row < n_rows ? n_keys_of(first_row + attention_rows - 1) : 0;
    const int n_block_keys = n_keys_of((block + 1) * attention_warps * attention_rows - 1);

    const auto load_stage = [&](int first) {
        KeyStage<chunks>& stage = stages[first / attention_keys % 2];
        for (int key = 8 * warp + lane % 8; key < attention_keys; key += 8 * attention_warps) {
            const bool is_there = first + key < n_block_keys;
            const size_t from = (size_t(kv) * at.context + (is_there ? first + key : 0)) * head_dim;
            for (int e = lane / 8 * 8; e < head_dim; e += 32) {
                cp_async<16>(&stage.keys[key][e], at.keys + from + e, is_there);
                cp_async<16>(&stage.values[key][e], at.values + from + e, is_there);
            }
        }
        cp_async_commit();
    };
    wait_for_previous();
    load_stage(0);

    RowTile<chunks> tile;
    for (int c = 0; c < chunks; c++) {
        for (int i = 0; i < 8; i++) {
            const half* x = at.q + query[i % 2] + 32 * c + 8 * (i / 2) + 2 * t;
            tile.q[c][i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(x);
        }
    }
    for (int first = 0; first < n_block_keys; first += attention_keys) {
        cp_async_wait<0>();
        __syncthreads();  // this stage is there, and nobody reads the one before it any more
        if (first + attention_keys < n_block_keys) load_stage(first + attention_keys);
        if (first >= n_keys) continue;
        const KeyStage<chunks>& stage = stages[first / attention_keys % 2];
        float scores[attention_keys / 8][4] = {};
        for (int c = 0; c < 2 * chunks; c++) {
            uint32_t k[attention_keys / 16][4];
            for (int j = 0; j < attention_keys / 16; j++) {
                const int key = 16 * j + lane / 16 * 8 + lane % 8;
                ldmatrix_x4(k[j], &stage.keys[key][16 * c + lane / 8 % 2 * 8]);
            }
            for (int j = 0; j < attention_keys / 16; j++) {
                mma_m16n8k16(scores[2 * j], tile.q[c / 2][c % 2], {k[j][0], k[j][1]});
                mma_m16n8k16(scores[2 * j + 1], tile.q[c / 2][c % 2], {k[j][2], k[j][3]});
            }
        }
        tile.softmax(scores, first, last_key, at.scale);
        for (int j = 0; j < attention_keys / 16; j++) {
            const int key = 16 * j + lane / 8 % 2 * 8 + lane % 8;
            uint32_t a[4], v[2 * chunks][4];
            for (int e = 0; e < 2 * chunks; e++)
                ldmatrix_x4_trans(v[e], &stage.values[key][16 * e + lane / 16 * 8]);
            to_operand(a, scores[2 * j], scores[2 * j + 1]);
            for (int e = 0; e < 2 * chunks; e++) {
                mma_m16n8k16(tile.mix[e / 2][e % 2 * 2], a, {v[e][0], v[e][1]});
                mma_m16n8k16(tile.mix[e / 2][e % 2 * 2 + 1], a, {v[e][2], v[e][3]});
            }
        }
    }
    tile.add_lanes();
    for (int i = 0; i < 2; i++) {
        if (first_row + g + 8 * i >= n_rows) continue;
        const float factor = 1 / tile.total[i];
        for (int e = 0; e < 4 * chunks; e++) {
            const float* x = tile.mix[e / 4][e % 4] + 2 * i;
            *reinterpret_cast<uint32_t*>(at.out + query[i] + 8 * e + 2 * t) =
                as_bits(__floats2half2_rn(x[0] * factor, x[1] * factor));
        }
    }
}

// Of a partial result of a row: four elements of the sum of probabilities times values; the probabilities are
// relative to `largest`, and `total` is their sum.
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
        const float shrink = exp2_approx(all.largest - largest);
        all = {{shrink * all.sums.x, shrink * all.sums.y, shrink * all.sums.z, shrink * all.sums.w},
               largest,
               shrink * all.total};
        for (int i = 0; i < at_once; i++) {
            const float weight = exp2_approx(s[i].x - largest);
            all.total = fmaf(weight, s[i].y, all.total);
            all.sums.x = fmaf(weight, part[i].x, all.sums.x);
            all.sums.y = fmaf(weight, part[i].y, all.sums.y);
            all.sums.z = fmaf(weight, part[i].z, all.sums.z);
            all.sums.w = fmaf(weight, part[i].w, all.sums.w);
        }
    }
    return all;
}

// In shared memory: floats from a row's sums by the warps to the next row's, which begin in another bank.
template <int chunks>
constexpr int sums_row = token_warps * 32 * chunks + 4;

// Of one token. grid: (tiles of 16 query heads of a kv head, n_kv_heads, n_splits). block: 32 * token_warps.
// Dynamic shared memory: sums_row floats for each row of a tile. chunks: head_dim / 32.
//
// Queries and keys use the same permutation of a head's elements, in which a lane loads 16 consecutive bytes
// of a key: of each chunk of 32 elements, lane t has the eight from 8t on. Of a value's chunk, lane g has the
// four from 4g on; prmt combines those of two positions.
template <int chunks>
__global__ void __launch_bounds__(32 * token_warps) token_attention(Attention at) {
    constexpr int head_dim = 32 * chunks;
    __shared__ float2 statistics[attention_rows][token_warps];  // of the warps: maximum and total
    // The tile's queries, for all warps. A row begins 16 banks behind the one before it.
    __shared__ uint4 queries[attention_rows][4 * (chunks | 1)];
    auto* sums = dynamic_shared<float>();  // of the warps: (n_rows, sums_row)
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
    uint4 k[2][chunks];
    uint2 v[chunks][4];
    const auto load_keys = [&] {  // from `first` on; beyond the last, that one
        for (int j = 0; j < 2; j++) {
            const half* key = keys + size_t(min(first + 8 * j + g, n_keys - 1)) * head_dim + 8 * t;
            for (int c = 0; c < chunks; c++) k[j][c] = *reinterpret_cast<const uint4*>(key + 32 * c);
        }
    };
    const auto load_values = [&] {  // those of keys 2t, 2t + 1, 2t + 8 and 2t + 9
        for (int i = 0; i < 4; i++) {
            const int key = min(first + 2 * t + i / 2 * 8 + i % 2, n_keys - 1);
            const half* value = values + size_t(key) * head_dim + 4 * g;
            for (int c = 0; c < chunks; c++) v[c][i] = *reinterpret_cast<const uint2*>(value + 32 * c);
        }
    };
    // The kernel before writes the last key and value, and the query.
    const bool is_old = first + token_keys < n_keys;
    if (is_old) load_keys(), load_values();
    wait_for_previous();
    static_assert(32 * token_warps == 16 * attention_rows);
    const int own_row = threadIdx.x / 16, piece = threadIdx.x % 16;
    if (own_row < n_rows && piece < 4 * chunks)
        queries[own_row][piece] = *reinterpret_cast<const uint4*>(q + own_row * head_dim + 8 * piece);
    __syncthreads();
    if (first < n_keys) {
        if (!is_old) load_keys(), load_values();
        // A row beyond the last repeats the last row and is not written.
        RowTile<chunks> tile;
        for (int i = 0; i < 2; i++) {
            const uint4* row = queries[min(g + 8 * i, n_rows - 1)] + t;
            for (int c = 0; c < chunks; c++) {
                const uint4 x = row[4 * c];
                tile.q[c][0][i] = x.x, tile.q[c][0][2 + i] = x.y;
                tile.q[c][1][i] = x.z, tile.q[c][1][2 + i] = x.w;
            }
        }
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
            uint32_t a[4];
            to_operand(a, scores[0], scores[1]);
            for (int c = 0; c < chunks; c++) {
                const uint2(&u)[4] = v[c];
                auto& mix = tile.mix[c];
                mma_m16n8k16(mix[0], a, {prmt(u[0].x, u[1].x, 0x5410), prmt(u[2].x, u[3].x, 0x5410)});
                mma_m16n8k16(mix[1], a, {prmt(u[0].x, u[1].x, 0x7632), prmt(u[2].x, u[3].x, 0x7632)});
                mma_m16n8k16(mix[2], a, {prmt(u[0].y, u[1].y, 0x5410), prmt(u[2].y, u[3].y, 0x5410)});
                mma_m16n8k16(mix[3], a, {prmt(u[0].y, u[1].y, 0x7632), prmt(u[2].y, u[3].y, 0x7632)});
            }
            if (!is_last_step) load_values();
        }
        tile.add_lanes();
        for (int i = 0; i < 2; i++) {
            const int row = g + 8 * i;
            if (row >= n_rows) continue;
            if (t == 0) statistics[row][warp] = make_float2(tile.largest[i], tile.total[i]);
            float* to = sums + row * sums_row<chunks> + warp * head_dim + 8 * t;
            for (int c = 0; c < chunks; c++) {
                // mix[e][2i] is element 32c + 8t + e, mix[e][2i + 1] the fourth after it.
                const auto& mix = tile.mix[c];
                for (int odd = 0; odd < 2; odd++) {
                    const int n = 2 * i + odd;
                    *reinterpret_cast<float4*>(to + 32 * c + 4 * odd) =
                        make_float4(mix[0][n], mix[1][n], mix[2][n], mix[3][n]);
                }
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
        const Partial p = add_partials<token_warps, head_dim>(sums + row * sums_row<chunks> + element,
                                                              statistics[row], n_warps);
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

template <int chunks>
void run_attention(const Attention& at) {
    const int n_tiles = (at.n_tokens * at.heads_per_kv + attention_rows - 1) / attention_rows;
    if (at.n_tokens > 1) {
        launch<attention_kernel<chunks>>(
            {.grid = dim3((n_tiles + attention_warps - 1) / attention_warps, at.n_kv_heads),
             .block = 32 * attention_warps,
             .shared_bytes = 2 * sizeof(KeyStage<chunks>),
             .stream = device().stream,
             .is_early = true},
            at);
    } else {
        launch<token_attention<chunks>>(
            {.grid = dim3(n_tiles, at.n_kv_heads, at.n_splits),
             .block = 32 * token_warps,
             .shared_bytes = sizeof(float) * std::min(at.heads_per_kv, attention_rows) * sums_row<chunks>,
             .stream = device().stream,
             .is_early = true},
            at);
    }
}
// Precondition: head_dim is 32, 64, 96 or 128. Of n_tokens > 1, the last four fields are not used.
inline void run_attention(const Attention& at, int head_dim) {
    head_dim == 32   ? run_attention<1>(at)
    : head_dim == 64 ? run_attention<2>(at)
    : head_dim == 96 ? run_attention<3>(at)
                     : run_attention<4>(at);
}

// Memory for a single token's attention, whose keys are split among up to n_splits blocks.
struct FastAttention {
    int n_splits = 1;
    DeviceBuffer<float> partials;
    DeviceBuffer<float2> statistics;
    DeviceBuffer<unsigned> arrivals;

    // Over up to `context` positions. One block for each multiprocessor, as far as each has enough keys.
    FastAttention(const ModelConfig& c, int context) {
        const int rows = std::min(c.heads_per_kv(), attention_rows),
                  keys_per_block = token_steps * token_keys;
        const int n_tiles = (c.heads_per_kv() + attention_rows - 1) / attention_rows * c.n_kv_heads;
        n_splits = std::clamp(device().n_sms / n_tiles, 1, (context + keys_per_block - 1) / keys_per_block);
        const size_t n_rows = size_t(n_tiles) * size_t(rows) * size_t(n_splits);
        partials = DeviceBuffer<float>(n_rows * size_t(c.head_dim));
        statistics = DeviceBuffer<float2>(n_rows);
        arrivals = DeviceBuffer<unsigned>(size_t(n_tiles));
        arrivals.clear();
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
