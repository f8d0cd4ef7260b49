// awq_gemv: one token by int4 matrices.
//
// The time goes into reading the weights. So each lane loads up to 16 bytes at once, n_words of a row, and a
// warp up to 128 bytes from each of four rows. The block's four warps take different groups of inputs, as do
// the gridDim.y blocks that share a tile of columns. The tensor core's operand B has eight columns, of which
// one is the token and seven are zero. It still is the cheapest way to add up, because dequantize() leaves
// the weights in operand A's layout.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>

#include "engine/gpu/awq_dequantize.cuh"
#include "engine/gpu/awq_matrix.cuh"
#include "engine/gpu/awq_tiles.cuh"
#include "engine/gpu/device.h"
#include "engine/gpu/reduce.cuh"
#include "simt/ptx.h"

constexpr int gemv_warps = 4;

// n_words consecutive words, fetched by one load.
template <int n_words>
struct Words {
    uint32_t word[n_words];
};

template <int n_words>
__device__ inline Words<n_words> load_words(const uint32_t* p) {
    Words<n_words> words;
    if constexpr (n_words == 4) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
        words.word[0] = v.x, words.word[1] = v.y, words.word[2] = v.z, words.word[3] = v.w;
    } else if constexpr (n_words == 2) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
        words.word[0] = v.x, words.word[1] = v.y;
    } else {
        static_assert(n_words == 1);
        words.word[0] = __ldg(p);
    }
    return words;
}

// grid: (tiles of 64 * n_words columns of all products, n_splits); block: 32 * gemv_warps; n_out a multiple
// of 8 * n_words.
template <int n_words>
__global__ void __launch_bounds__(32 * gemv_warps)
    awq_gemv(const half* x, AwqProducts products, SplitScratch scratch) {
    constexpr int width = 64 * n_words;
    const Tile tile = find_tile(products, blockIdx.x, width);
    const AwqProduct& product = products.items[tile.product];
    const AwqMatrix& w = product.w;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row_words = w.n_out / 8, column = tile.first_column + 8 * n_words * g;  // the lane's first
    const bool has_columns = column < w.n_out;
    const int word = has_columns ? column / 8 : 0;  // a lane without columns repeats word 0, unused

    float sums[n_words][4][4] = {};
    const int n_groups = w.n_in / w.group_size;
    for (int group = blockIdx.y * gemv_warps + warp; group < n_groups; group += gridDim.y * gemv_warps) {
        Columns columns[n_words];
        const Words<n_words> zeros = load_words<n_words>(w.qzeros + size_t(group) * row_words + word);
        for (int j = 0; j < n_words; j++) {
            const half* scales = w.scales + size_t(group) * w.n_out + 8 * (word + j);
            columns[j] = columns_of(zeros.word[j], __ldg(reinterpret_cast<const uint4*>(scales)));
        }
        const uint32_t* rows = w.qweight + (size_t(group) * w.group_size + 4 * t) * row_words + word;
        const half* inputs = x + size_t(group) * w.group_size + 4 * t;
        // Both operands may permute the inputs of an mma in the same way: here lane t has inputs 4t to 4t + 3
        // instead of 2t, 2t + 1, 2t + 8, 2t + 9, so that it loads x by eight bytes.
#pragma unroll 4
        for (int k = 0; k < w.group_size; k += 16) {
            Words<n_words> row[4];
            for (int i = 0; i < 4; i++) row[i] = load_words<n_words>(rows + size_t(k + i) * row_words);
            uint2 b = make_uint2(0, 0);  // token g is column g of operand B, and there is only token 0
            if (g == 0) b = __ldg(reinterpret_cast<const uint2*>(inputs + k));
            for (int j = 0; j < n_words; j++) {
                const RowPairs pairs =
                    pair_rows(row[0].word[j], row[1].word[j], row[2].word[j], row[3].word[j]);
                for (int p = 0; p < 4; p++) {
                    uint32_t a[4];
                    dequantize(a, pairs, p, columns[j]);
                    mma_m16n8k16(sums[j][p], a, {b.x, b.y});
                }
            }
        }
    }

    // Column 0 of the result is the token's. Lane 4g has its rows g and g + 8: columns 2p and 2p + 1 of its
    // words.
    __shared__ float parts[gemv_warps][width];
    if (t == 0) {
        for (int j = 0; j < n_words; j++) {
            for (int p = 0; p < 4; p++) {
                parts[warp][8 * (n_words * g + j) + 2 * p] = sums[j][p][0];
                parts[warp][8 * (n_words * g + j) + 2 * p + 1] = sums[j][p][2];
            }
        }
    }
    __syncthreads();
    const int n_threads = 32 * gemv_warps;
    for (int i = threadIdx.x; i < width; i += n_threads) {
        float sum = 0;
        for (int from = 0; from < gemv_warps; from++) sum += parts[from][i];
        if (gridDim.y > 1) {
            scratch.partials[(size_t(blockIdx.y) * gridDim.x + blockIdx.x) * width + i] = sum;
        } else if (tile.first_column + i < w.n_out) {
            float* out = product.out + tile.first_column + i;
            *out = product.add ? *out + sum : sum;
        }
    }
    if (gridDim.y == 1 || !is_last(scratch.arrivals + blockIdx.x, gridDim.y)) return;
    for (int i = threadIdx.x; i < width && tile.first_column + i < w.n_out; i += n_threads) {
        float sum = 0;
        for (unsigned split = 0; split < gridDim.y; split++) {
            sum += scratch.partials[(size_t(split) * gridDim.x + blockIdx.x) * width + i];
        }
        float* out = product.out + tile.first_column + i;
        *out = product.add ? *out + sum : sum;
    }
}

// The most blocks of awq_gemv that can share a tile: each warp has at least one group.
inline int most_gemv_splits(const AwqMatrix& w) {
    assert(w.group_size > 0);
    return (w.n_in / w.group_size + gemv_warps - 1) / gemv_warps;
}

template <int n_words>
void run_gemv(const SplitScratch& scratch, const half* x, const AwqProducts& products, int n_splits) {
    launch<awq_gemv<n_words>>({.grid = dim3(count_tiles(products, 64 * n_words), n_splits),
                               .block = 32 * gemv_warps,
                               .stream = device().stream},
                              x, products, scratch);
}

// With as many splits as suit the device.
template <int n_words>
void run_gemv(const SplitScratch& scratch, const half* x, const AwqProducts& products) {
    constexpr int width = 64 * n_words;
    const int most = most_gemv_splits(products.items[0].w);
    run_gemv<n_words>(scratch, x, products, splits_for(count_tiles(products, width), most, width));
}

// Words that a lane of awq_gemv loads at once. Wider loads are faster, but need rows that begin at multiples
// of a load, and leave fewer tiles: there have to be blocks for all multiprocessors.
inline int gemv_words(const AwqProducts& products) {
    for (const int n_words : {4, 2}) {
        bool fits =
            count_tiles(products, 64 * n_words) * most_gemv_splits(products.items[0].w) >= 2 * device().n_sms;
        for (int i = 0; i < products.n; i++) fits = fits && products.items[i].w.n_out % (8 * n_words) == 0;
        if (fits) return n_words;
    }
    return 1;
}

// The product of one token, by loads of the width that suits the matrices.
inline void run_gemv(const SplitScratch& scratch, const half* x, const AwqProducts& products) {
    const int n_words = gemv_words(products);
    n_words == 4   ? run_gemv<4>(scratch, x, products)
    : n_words == 2 ? run_gemv<2>(scratch, x, products)
                   : run_gemv<1>(scratch, x, products);
}
