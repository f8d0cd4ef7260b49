// awq_gemm: several tokens by int4 matrices.
//
// A block computes a tile of 256 output channels by 16, 32 or 64 tokens, each of its four warps 64 of the
// channels. Activations and packed weights of 64 inputs at a time (a stage) go through shared memory, in a
// ring of four stages that cp.async fills ahead. Weights are operand A, as in awq_gemv; tokens are operand B,
// which ldmatrix loads. Each weight is dequantized once for all tokens of the tile, into the registers that
// mma reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "engine/gpu/awq_dequantize.cuh"
#include "engine/gpu/awq_matrix.cuh"
#include "engine/gpu/awq_tiles.cuh"
#include "engine/gpu/device.h"
#include "engine/gpu/reduce.cuh"
#include "simt/ptx.h"

constexpr int gemm_warps = 4, gemm_threads = 32 * gemm_warps, gemm_columns = 64 * gemm_warps;
constexpr int gemm_inputs = 64;  // of a stage; a group is a multiple of it
constexpr int gemm_stages = 4;

template <int tile_tokens>
struct GemmStage {
    // Rows are padded by four words, so that the rows that a warp reads at once lie in different banks. With
    // 36 words per row, consecutive rows are 4 banks apart for ldmatrix, and the words that lanes t and t + 1
    // read (two rows) are 8 banks apart.
    half x[tile_tokens][gemm_inputs + 8];
    uint32_t words[gemm_inputs][gemm_columns / 8 + 4];
    uint32_t zeros[gemm_columns / 8];
    half scales[gemm_columns];
};

// Starts the copies of one stage: inputs k to k + gemm_inputs. Values outside the matrices become 0.
template <int tile_tokens>
__device__ inline void load_stage(GemmStage<tile_tokens>& stage, const half* x, int n_tokens,
                                  const AwqMatrix& w, int first_token, int first_column, int k) {
    constexpr int x_pieces = gemm_inputs / 8;  // of 16 bytes, per row
    for (int i = threadIdx.x; i < tile_tokens * x_pieces; i += gemm_threads) {
        const int token = first_token + i / x_pieces, part = i % x_pieces * 8;
        const bool valid = token < n_tokens;
        cp_async<16>(&stage.x[i / x_pieces][part], x + size_t(valid ? token : 0) * w.n_in + k + part, valid);
    }
    const int row_words = w.n_out / 8, first_word = first_column / 8, group = k / w.group_size;
    constexpr int tile_words = gemm_columns / 8;
    const uint32_t* zeros = w.qzeros + size_t(group) * row_words;
    if (row_words % 4 == 0) {
        constexpr int pieces = tile_words / 4;
        for (int i = threadIdx.x; i < gemm_inputs * pieces; i += gemm_threads) {
            const int row = i / pieces, part = i % pieces * 4;
            const bool valid = first_word + part < row_words;
            cp_async<16>(&stage.words[row][part],
                         w.qweight + size_t(k + row) * row_words + (valid ? first_word + part : 0), valid);
        }
        for (int part = 4 * threadIdx.x; part < tile_words; part += 4 * gemm_threads) {
            const bool valid = first_word + part < row_words;
            cp_async<16>(&stage.zeros[part], zeros + (valid ? first_word + part : 0), valid);
        }
    } else {  // rows that begin at any multiple of 4 bytes
        for (int i = threadIdx.x; i < gemm_inputs * tile_words; i += gemm_threads) {
            const int row = i / tile_words, part = i % tile_words;
            const bool valid = first_word + part < row_words;
            cp_async<4>(&stage.words[row][part],
                        w.qweight + size_t(k + row) * row_words + (valid ? first_word + part : 0), valid);
        }
        for (int part = threadIdx.x; part < tile_words; part += gemm_threads) {
            const bool valid = first_word + part < row_words;
            cp_async<4>(&stage.zeros[part], zeros + (valid ? first_word + part : 0), valid);
        }
    }
    for (int part = threadIdx.x; part < tile_words; part += gemm_threads) {
        const bool valid = first_word + part < row_words;
        const half* scales = w.scales + size_t(group) * w.n_out + 8 * (valid ? first_word + part : 0);
        cp_async<16>(&stage.scales[8 * part], scales, valid);
    }
}

// sums[p][j]: pair p's columns by tokens 8j to 8j + 7.
template <int tile_tokens>
__device__ inline void multiply_stage(float (&sums)[4][tile_tokens / 8][4],
                                      const GemmStage<tile_tokens>& stage) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, word = threadIdx.x / 32 * 8 + g;
    const Columns columns =
        columns_of(stage.zeros[word], *reinterpret_cast<const uint4*>(&stage.scales[8 * word]));
#pragma unroll
    for (int k = 0; k < gemm_inputs; k += 16) {
        uint32_t b[tile_tokens / 8][2];
#pragma unroll
        for (int j = 0; j < tile_tokens / 8; j += 2) {
            // Lane i passes the address of row i % 8 of matrix i / 8. Matrices 0 and 1 are tokens 8j to 8j +
            // 7 by inputs from k and from k + 8 on; matrices 2 and 3 are the next 8 tokens by the same
            // inputs.
            uint32_t r[4];
            ldmatrix_x4(r, &stage.x[8 * j + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
            b[j][0] = r[0], b[j][1] = r[1], b[j + 1][0] = r[2], b[j + 1][1] = r[3];
        }
        const RowPairs pairs = pair_rows(stage.words[k + 2 * t][word], stage.words[k + 2 * t + 1][word],
                                         stage.words[k + 2 * t + 8][word], stage.words[k + 2 * t + 9][word]);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            uint32_t a[4];
            dequantize(a, pairs, p, columns);
#pragma unroll
            for (int j = 0; j < tile_tokens / 8; j++) mma_m16n8k16(sums[p][j], a, b[j]);
        }
    }
}

// Eight columns of one token.
struct EightColumns {
    float4 low, high;
};

__device__ inline EightColumns operator+(const EightColumns& a, const EightColumns& b) {
    return {make_float4(a.low.x + b.low.x, a.low.y + b.low.y, a.low.z + b.low.z, a.low.w + b.low.w),
            make_float4(a.high.x + b.high.x, a.high.y + b.high.y, a.high.z + b.high.z, a.high.w + b.high.w)};
}

__device__ inline EightColumns load_columns(const float* p) {
    const float4* v = reinterpret_cast<const float4*>(p);
    return {v[0], v[1]};
}

__device__ inline void store_columns(float* p, const EightColumns& c) {
    float4* v = reinterpret_cast<float4*>(p);
    v[0] = c.low, v[1] = c.high;
}

// grid: (tiles of gemm_columns columns of all products, tiles of tokens, n_splits); block: gemm_threads;
// dynamic shared memory: gemm_stages stages.
template <int tile_tokens>
__global__ void __launch_bounds__(gemm_threads)
    awq_gemm(const half* x, int n_tokens, AwqProducts products, SplitScratch scratch) {
    auto* stages = dynamic_shared<GemmStage<tile_tokens>>();
    const Tile tile = find_tile(products, blockIdx.x, gemm_columns);
    const AwqProduct& product = products.items[tile.product];
    const AwqMatrix& w = product.w;
    const int first_token = blockIdx.y * tile_tokens;

    // The block's share of the inputs: n stages from stage `first` on.
    const int n_all = w.n_in / gemm_inputs, per_split = (n_all + gridDim.z - 1) / gridDim.z;
    const int first = min(n_all, int(blockIdx.z) * per_split), n = min(n_all, first + per_split) - first;
    auto load = [&](int i) {
        if (i < n) {
            load_stage<tile_tokens>(stages[i % gemm_stages], x, n_tokens, w, first_token, tile.first_column,
                                    (first + i) * gemm_inputs);
        }
        cp_async_commit();  // past the last stage, too: cp_async_wait counts groups
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const bool warp_has_columns = tile.first_column + 64 * warp < w.n_out;
    float sums[4][tile_tokens / 8][4] = {};
    for (int i = 0; i < gemm_stages - 1; i++) load(i);
    for (int i = 0; i < n; i++) {
        cp_async_wait<gemm_stages - 2>();  // this thread's copies of stage i have landed;
        __syncthreads();                   // so have all threads', and all have used stage i - 1,
        load(i + gemm_stages - 1);         // which is overwritten here
        if (warp_has_columns) multiply_stage<tile_tokens>(sums, stages[i % gemm_stages]);
    }

    // A lane has rows g and g + 8 of each 16 by 8 result, which are columns 2p and 2p + 1 of its word, for
    // tokens 2t and 2t + 1. With p from 0 to 3 these are eight consecutive columns.
    const int column = tile.first_column + 64 * warp + 8 * g;
    const size_t tile_index = size_t(blockIdx.y) * gridDim.x + blockIdx.x,
                 n_tiles = size_t(gridDim.x) * gridDim.y;
    auto partial = [&](unsigned split, int token) {
        return scratch.partials + ((split * n_tiles + tile_index) * tile_tokens + token) * gemm_columns +
               64 * warp + 8 * g;
    };
    auto finish = [&](int token, EightColumns values) {
        if (column >= w.n_out || first_token + token >= n_tokens) return;
        float* out = product.out + size_t(first_token + token) * w.n_out + column;
        store_columns(out, product.add ? load_columns(out) + values : values);
    };
#pragma unroll
    for (int j = 0; j < tile_tokens / 8; j++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = 8 * j + 2 * t + odd;
            const EightColumns values = {
                make_float4(sums[0][j][odd], sums[0][j][2 + odd], sums[1][j][odd], sums[1][j][2 + odd]),
                make_float4(sums[2][j][odd], sums[2][j][2 + odd], sums[3][j][odd], sums[3][j][2 + odd])};
            if (gridDim.z == 1) {
                finish(token, values);
            } else {
                store_columns(partial(blockIdx.z, token), values);
            }
        }
    }
    if (gridDim.z == 1 || !is_last(scratch.arrivals + tile_index, gridDim.z)) return;
    for (int j = 0; j < tile_tokens / 8; j++) {
        for (int odd = 0; odd < 2; odd++) {
            const int token = 8 * j + 2 * t + odd;
            EightColumns values = load_columns(partial(0, token));
            for (unsigned split = 1; split < gridDim.z; split++)
                values = values + load_columns(partial(split, token));
            finish(token, values);
        }
    }
}

// The most blocks of awq_gemm that can share a tile: each has at least two stages.
inline int most_gemm_splits(const AwqMatrix& w) { return std::max(1, w.n_in / gemm_inputs / 2); }

template <int tile_tokens>
void run_gemm(const SplitScratch& scratch, const half* x, int n_tokens, const AwqProducts& products,
              int n_splits) {
    const int n_rows = (n_tokens + tile_tokens - 1) / tile_tokens;
    launch<awq_gemm<tile_tokens>>({.grid = dim3(count_tiles(products, gemm_columns), n_rows, n_splits),
                                   .block = gemm_threads,
                                   .shared_bytes = gemm_stages * sizeof(GemmStage<tile_tokens>),
                                   .stream = device().stream},
                                  x, n_tokens, products, scratch);
}

// With as many splits as suit the device.
template <int tile_tokens>
void run_gemm(const SplitScratch& scratch, const half* x, int n_tokens, const AwqProducts& products) {
    const int n_tiles = count_tiles(products, gemm_columns) * ((n_tokens + tile_tokens - 1) / tile_tokens);
    const int n_splits =
        splits_for(n_tiles, most_gemm_splits(products.items[0].w), size_t(tile_tokens) * gemm_columns);
    run_gemm<tile_tokens>(scratch, x, n_tokens, products, n_splits);
}
