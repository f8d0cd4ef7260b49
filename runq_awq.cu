// runq_awq: Llama 3 and Qwen3 inference in AWQ int4 on a GPU, to read from top to bottom.
//
// Weights are int4 with an integer zero point and an fp16 scale per output channel and group of 128 (or 64)
// input channels: w = (q - zero) * scale, rounded to fp16 (AWQ: Lin et al. 2023, arXiv 2306.00978).
// Activations are fp16 where a matrix reads them and in the KV cache, and fp32 elsewhere. Weights stay int4
// in memory. The thread that multiplies by a weight converts it in its registers, two weights at a time and
// without a conversion instruction; only long prompts expand one matrix at a time to fp16 in memory. Tensor
// cores multiply, for one token as for many. docs/awq.md has the bits.
//
// The same source compiles for a GPU with nvcc, and for any CPU through simt/, an emulator that runs every
// lane of every warp. That is slow, and it checks everything: docs/simt.md.
//
// This file has what is AWQ's own: the matrix, int4 -> fp16, the matrix products from the plain loop to the
// tensor cores, the tensors of a file, and the forward pass. The rest is in common/: the other operations on
// a GPU (gpu/), model files (model/), the tokenizer (text/), the command line (app/). docs/forward-pass.md
// walks through the same steps with equations and numbers.
//
//     make runq_awq model_awq.bin && ./runq_awq model_awq.bin -i "Once upon a time" -n 32

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/app/device_recorder.h"
#include "common/app/memory.h"
#include "common/app/model.h"
#include "common/app/options.h"
#include "common/app/streams.h"
#include "common/app/trace.h"
#include "common/gpu/attention.cuh"
#include "common/gpu/bandwidth.h"
#include "common/gpu/cublas.h"
#include "common/gpu/device.h"
#include "common/gpu/graph.cuh"
#include "common/gpu/half2.h"
#include "common/gpu/kv_cache.cuh"
#include "common/gpu/ops.cuh"
#include "common/gpu/reduce.cuh"
#include "common/gpu/rows.cuh"
#include "common/gpu/weights.h"
#include "common/model/header.h"
#include "common/model/model_file.h"
#include "common/model/scheme.h"
#include "common/model/tensors.h"
#include "common/os/machine.h"
#include "simt/ptx.h"

// ----------------------------------------------------------------------------
// AWQ: the matrix

// A matrix of n_in rows (input channels) and n_out columns (output channels), on the device. A word holds
// eight columns of a row, in AutoAWQ's order: the even ones in its low half and the odd ones in its high
// half, four bits each. So column 8c + i is in bits 4 * {0, 4, 1, 5, 2, 6, 3, 7}[i] of word c.
struct AwqMatrix {
    const uint32_t* qweight = nullptr;  // (n_in, n_out / 8)
    const uint32_t* qzeros = nullptr;   // (n_in / group_size, n_out / 8)
    const half* scales = nullptr;       // (n_in / group_size, n_out)
    // (n_in, n_out), the same weights expanded; only with --matmul predequant and fp16
    const half* fp16 = nullptr;
    int n_in = 0, n_out = 0, group_size = 128;

    size_t n_weights() const { return size_t(n_in) * size_t(n_out); }
    size_t n_groups() const { return n_weights() / size_t(group_size); }
    size_t n_bytes() const {  // quantized
        return (n_weights() + n_groups()) / 8 * sizeof(uint32_t) + n_groups() * sizeof(half);
    }
};

// A product, out (n_tokens, n_out) = x * w, or += with `add`.
struct AwqProduct {
    AwqMatrix w;
    float* out = nullptr;
    bool add = false;
};

// The products of one launch. They read the same x (n_tokens, n_in).
struct AwqProducts {
    AwqProduct of[3];
    int n = 0;
};

// Split-K partial sums; one arrival counter per tile. Where there are too few tiles (blocks of outputs) to
// occupy the device, n_splits blocks compute each tile, from different input channels. Each writes its
// partial sums; the last to arrive adds them up.
struct Scratch {
    float* partials = nullptr;     // (n_splits, n_tiles, values of a tile)
    unsigned* arrivals = nullptr;  // (n_tiles,), 0 between launches; see is_last()
};

// ----------------------------------------------------------------------------
// int4 -> fp16, in registers
//
// 0x6400 is 1024 in fp16, and the lowest of its ten mantissa bits is worth 1. So 0x6400 | q is 1024 + q for a
// nibble q (four bits): setting the bits converts it. One lop3, (word & mask) | 0x64006400, does that for two
// nibbles 16 bits apart; one subtraction removes 1024 and the zero point, exactly. A nibble four bits higher
// gives 1024 + 16 q, and one multiply-add removes the factor, too: (1024 + 16 q) / 16 - (64 + zero) = q -
// zero, also exact. Only the multiplication by the scale rounds.

constexpr unsigned and_or = (0xF0 & 0xCC) | 0xAA;  // lop3's truth table of (a & b) | c: PTX ISA, lop3

// Pair p (0 to 3) of eight nibbles: the one at bit 4p and the one at bit 4p + 16, each + 1024 if p is even,
// * 16 + 1024 if it is odd.
__device__ inline half2 with_magic(uint32_t nibbles, int p) {
    const uint32_t mask = p % 2 == 0 ? 0x000f000f : 0x00f000f0;
    return as_half2(lop3<and_or>(p >= 2 ? nibbles >> 8 : nibbles, mask, 0x64006400));
}

// Zero points and scales of a word's eight columns, each in both halves of a register. Columns 2p and 2p + 1
// are pair p.
struct Columns {
    half2 zero[8];  // 1024 + zero point if the column's pair is even, -(64 + zero point) if it is odd
    half2 scale[8];
};

__device__ inline Columns columns_of(uint32_t zeros, uint4 scales) {
    Columns c;
    const uint32_t packed[4] = {scales.x, scales.y, scales.z, scales.w};
    for (int p = 0; p < 4; p++) {
        half2 zero = with_magic(zeros, p);
        if (p % 2 == 1) zero = __hmul2(zero, __float2half2_rn(-1.0f / 16));
        const half2 scale = as_half2(packed[p]);
        c.zero[2 * p] = __half2half2(__low2half(zero));
        c.zero[2 * p + 1] = __half2half2(__high2half(zero));
        c.scale[2 * p] = __half2half2(__low2half(scale));
        c.scale[2 * p + 1] = __half2half2(__high2half(scale));
    }
    return c;
}

// The weights of column 2p (2p + 1 if `odd`) in two rows. nibbles: the even (odd) columns of one row in the
// low half, of the other row in the high half.
__device__ inline uint32_t dequantize(uint32_t nibbles, int p, int odd, const Columns& c) {
    const half2 q = with_magic(nibbles, p);
    const half2 difference = p % 2 == 0 ? __hsub2(q, c.zero[2 * p + odd])
                                        : __hfma2(q, __float2half2_rn(1.0f / 16), c.zero[2 * p + odd]);
    return as_bits(__hmul2(difference, c.scale[2 * p + odd]));
}

// The tensor core's operand A has 16 rows by 16 columns of fp16: here 16 output channels by 16 inputs. Lane
// 4g + t holds, of rows g and g + 8, the columns 2t, 2t + 1, 2t + 8, 2t + 9 (PTX ISA, mma.m16n8k16). It makes
// them from four words, one for each of these four inputs: columns 2p and 2p + 1 of a word (pair p) become
// rows g and g + 8. A register of operand A holds two inputs of one output channel, but half a word holds
// channels of one input only. So pair_rows() first exchanges halves between two words: four prmt, then all 32
// weights of the four words are in place.
struct RowPairs {
    uint32_t even[2], odd[2];  // nibbles of the even (odd) columns in inputs 2t, 2t + 1, and 2t + 8, 2t + 9
};

__device__ inline RowPairs pair_rows(uint32_t w0, uint32_t w1, uint32_t w8, uint32_t w9) {
    constexpr uint32_t low_halves = 0x5410, high_halves = 0x7632;
    return {{prmt(w0, w1, low_halves), prmt(w8, w9, low_halves)},
            {prmt(w0, w1, high_halves), prmt(w8, w9, high_halves)}};
}

__device__ inline void dequantize(uint32_t (&a)[4], const RowPairs& w, int p, const Columns& c) {
    a[0] = dequantize(w.even[0], p, 0, c);
    a[1] = dequantize(w.odd[0], p, 1, c);
    a[2] = dequantize(w.even[1], p, 0, c);
    a[3] = dequantize(w.odd[1], p, 1, c);
}

// Which product a block computes, and from which of its columns on.
struct Tile {
    int product = 0, first_column = 0;
};

// Blocks are numbered over all products: each has ceil(n_out / width) tiles of `width` columns.
__device__ inline Tile find_tile(const AwqProducts& products, int block, int width) {
    Tile tile;
    for (; tile.product < products.n - 1; tile.product++) {
        const int n_tiles = (products.of[tile.product].w.n_out + width - 1) / width;
        if (block < n_tiles) break;
        block -= n_tiles;
    }
    tile.first_column = block * width;
    return tile;
}

// ----------------------------------------------------------------------------
// Matrix products, the specification: one thread per output

// grid: (tiles of blockDim.x columns of all products, n_tokens).
__global__ void awq_reference(const half* x, int n_tokens, AwqProducts products) {
    const Tile tile = find_tile(products, blockIdx.x, blockDim.x);
    const AwqProduct& product = products.of[tile.product];
    const AwqMatrix& w = product.w;
    const int column = tile.first_column + threadIdx.x, token = blockIdx.y;
    if (column >= w.n_out || token >= n_tokens) return;
    const int shift = 4 * (column % 8 / 2 + column % 2 * 4), n_words = w.n_out / 8;
    float sum = 0;
    for (int k = 0; k < w.n_in; k++) {
        const int group = k / w.group_size;
        const int q = w.qweight[size_t(k) * n_words + column / 8] >> shift & 15;
        const int zero = w.qzeros[size_t(group) * n_words + column / 8] >> shift & 15;
        const half weight = __hmul(__float2half(float(q - zero)), w.scales[size_t(group) * w.n_out + column]);
        sum = fmaf(__half2float(x[size_t(token) * w.n_in + k]), __half2float(weight), sum);
    }
    float* out = product.out + size_t(token) * w.n_out + column;
    *out = product.add ? *out + sum : sum;
}

// ----------------------------------------------------------------------------
// One token: awq_gemv
//
// The time goes into reading the weights. So each lane loads up to 16 bytes at once, n_words of a row, and a
// warp up to 128 bytes from each of four rows. The block's four warps take different groups of inputs, as do
// the gridDim.y blocks that share a tile of columns. The tensor core's operand B has eight columns, of which
// one is the token and seven are zero. It still is the cheapest way to add up, because dequantize() leaves
// the weights in operand A's layout.

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
    awq_gemv(const half* x, AwqProducts products, Scratch scratch) {
    constexpr int width = 64 * n_words;
    const Tile tile = find_tile(products, blockIdx.x, width);
    const AwqProduct& product = products.of[tile.product];
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

// ----------------------------------------------------------------------------
// Several tokens: awq_gemm
//
// A block computes a tile of 256 output channels by 16, 32 or 64 tokens, each of its four warps 64 of the
// channels. Activations and packed weights of 64 inputs at a time (a stage) go through shared memory, in a
// ring of four stages that cp.async fills ahead. Weights are operand A, as in awq_gemv; tokens are operand B,
// which ldmatrix loads. Each weight is dequantized once for all tokens of the tile, into the registers that
// mma reads.

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
    awq_gemm(const half* x, int n_tokens, AwqProducts products, Scratch scratch) {
    auto* stages = dynamic_shared<GemmStage<tile_tokens>>();
    const Tile tile = find_tile(products, blockIdx.x, gemm_columns);
    const AwqProduct& product = products.of[tile.product];
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

    // Of each 16 by 8 result a lane has rows g and g + 8, which are columns 2p and 2p + 1 of its word, for
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

// ----------------------------------------------------------------------------
// Expanding a matrix: awq_dequantize

// out (n_in, n_out), the weights as fp16. grid: (words of a row / 256, n_in); one thread per word.
__global__ void awq_dequantize(AwqMatrix w, half* out) {
    const int row_words = w.n_out / 8, word = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (word >= row_words) return;
    const int group = row / w.group_size;
    const Columns columns =
        columns_of(w.qzeros[size_t(group) * row_words + word],
                   *reinterpret_cast<const uint4*>(w.scales + size_t(group) * w.n_out + 8 * word));
    const uint32_t nibbles = w.qweight[size_t(row) * row_words + word];
    uint32_t pairs[4];
    for (int p = 0; p < 4; p++) {  // the halves of the word are columns 2p and 2p + 1 of one row
        const half2 even = as_half2(dequantize(nibbles, p, 0, columns)),
                    odd = as_half2(dequantize(nibbles, p, 1, columns));
        pairs[p] = as_bits(__halves2half2(__low2half(even), __high2half(odd)));
    }
    *reinterpret_cast<uint4*>(out + size_t(row) * w.n_out + 8 * word) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// ----------------------------------------------------------------------------
// Products, by the kernel that suits the number of tokens

// How products are computed. `fused` is what this program is for. The others are the steps that led to it,
// and what it has to beat: --matmul.
enum class Matmul {
    fused,       // int4 to the tensor cores; long prompts as `dequant`
    dequant,     // prompts: one matrix at a time to fp16 in a buffer, then cuBLAS
    predequant,  // prompts: cuBLAS with fp16 weights made when loading; single tokens: int4
    fp16,        // cuBLAS with fp16 weights for everything
    plain,       // awq_reference
};

// Tokens from which on expanding a matrix for cuBLAS is assumed to be faster than awq_gemm. An estimate, not
// a measurement: to expand a matrix of 4096 x 4096 and to read it again moves 76 MB, 19 us at 4 TB/s. In 19
// us tensor cores at 600 TFLOP/s multiply 340 tokens. So if awq_gemm reaches half of cuBLAS's rate, it takes
// 19 us longer than cuBLAS for 340 tokens, and more for more.
[[maybe_unused]] constexpr int dequantize_from = 384;

constexpr int max_splits = 16;            // blocks that share a tile
constexpr int max_tiles = 4096;           // of one launch that is split
constexpr size_t max_partials = 1 << 22;  // values; launches that would need more are split less

// How products are computed, and the memory that it takes.
struct MatmulState {
    Matmul how = Matmul::fused;
    DeviceBuffer<float> partials{max_partials};
    DeviceBuffer<unsigned> arrivals{max_tiles};
    DeviceBuffer<half> dequantized;  // one matrix, see largest_dequantized()

    explicit MatmulState(Matmul chosen = Matmul::fused, size_t dequantized_values = 0)
        : how(chosen), dequantized(dequantized_values) {
        arrivals.clear();
    }
    Scratch scratch() const { return {partials.get(), arrivals.get()}; }
};

// Values of the largest matrix, if chunks of `chunk` tokens are computed from expanded matrices; else 0.
size_t largest_dequantized([[maybe_unused]] const ModelConfig& c, [[maybe_unused]] Matmul how,
                           [[maybe_unused]] int chunk) {
#ifdef HAVE_CUBLAS
    if (how == Matmul::dequant || (how == Matmul::fused && chunk >= dequantize_from))
        return size_t(c.dim) * std::max(c.hidden_dim, c.q_dim());
#endif
    return 0;
}

// The number of blocks per tile, at most `most`, that gives every multiprocessor a few blocks and fits the
// scratch memory.
inline int splits_for(int n_tiles, int most, size_t tile_values) {
    int n = 1;
    auto more_helps = [&] { return n < most && n < max_splits && n * n_tiles < 4 * device().n_sms; };
    while (more_helps() && n_tiles <= max_tiles && (n + 1) * n_tiles * tile_values <= max_partials) n++;
    return n;
}

inline int count_tiles(const AwqProducts& products, int width) {
    int n = 0;
    for (int i = 0; i < products.n; i++) n += (products.of[i].w.n_out + width - 1) / width;
    return n;
}

// The most blocks of awq_gemv that can share a tile: each warp has at least one group.
inline int most_gemv_splits(const AwqMatrix& w) {
    assert(w.group_size > 0);
    return (w.n_in / w.group_size + gemv_warps - 1) / gemv_warps;
}

// The most blocks of awq_gemm that can share a tile: each has at least two stages.
inline int most_gemm_splits(const AwqMatrix& w) { return std::max(1, w.n_in / gemm_inputs / 2); }

inline void run_reference(const half* x, int n_tokens, const AwqProducts& products) {
    launch<awq_reference>(
        {.grid = dim3(count_tiles(products, 128), n_tokens), .block = 128, .stream = device().stream}, x,
        n_tokens, products);
}

template <int n_words>
void run_gemv(const Scratch& scratch, const half* x, const AwqProducts& products, int n_splits) {
    launch<awq_gemv<n_words>>({.grid = dim3(count_tiles(products, 64 * n_words), n_splits),
                               .block = 32 * gemv_warps,
                               .stream = device().stream},
                              x, products, scratch);
}

template <int n_words>
void run_gemv(const MatmulState& s, const half* x, const AwqProducts& products) {
    constexpr int width = 64 * n_words;
    const int most = most_gemv_splits(products.of[0].w);
    run_gemv<n_words>(s.scratch(), x, products, splits_for(count_tiles(products, width), most, width));
}

// Words that a lane of awq_gemv loads at once. Wider loads are faster, but need rows that begin at multiples
// of a load, and leave fewer tiles: there have to be blocks for all multiprocessors.
inline int gemv_words(const AwqProducts& products) {
    for (const int n_words : {4, 2}) {
        bool fits =
            count_tiles(products, 64 * n_words) * most_gemv_splits(products.of[0].w) >= 2 * device().n_sms;
        for (int i = 0; i < products.n; i++) fits = fits && products.of[i].w.n_out % (8 * n_words) == 0;
        if (fits) return n_words;
    }
    return 1;
}

template <int tile_tokens>
void run_gemm(const Scratch& scratch, const half* x, int n_tokens, const AwqProducts& products,
              int n_splits) {
    const int n_rows = (n_tokens + tile_tokens - 1) / tile_tokens;
    launch<awq_gemm<tile_tokens>>({.grid = dim3(count_tiles(products, gemm_columns), n_rows, n_splits),
                                   .block = gemm_threads,
                                   .shared_bytes = gemm_stages * sizeof(GemmStage<tile_tokens>),
                                   .stream = device().stream},
                                  x, n_tokens, products, scratch);
}

template <int tile_tokens>
void run_gemm(const MatmulState& s, const half* x, int n_tokens, const AwqProducts& products) {
    const int n_tiles = count_tiles(products, gemm_columns) * ((n_tokens + tile_tokens - 1) / tile_tokens);
    const int n_splits =
        splits_for(n_tiles, most_gemm_splits(products.of[0].w), size_t(tile_tokens) * gemm_columns);
    run_gemm<tile_tokens>(s.scratch(), x, n_tokens, products, n_splits);
}

inline void run_dequantize(const AwqMatrix& w, half* out) {
    launch<awq_dequantize>(
        {.grid = dim3((w.n_out / 8 + 255) / 256, w.n_in), .block = 256, .stream = device().stream}, w, out);
}

// Products of x (n_tokens, n_in) with the matrices that read it.
inline void matmul(const MatmulState& s, const half* x, int n_tokens, const AwqProducts& products) {
    const bool one = n_tokens == 1;
    if (s.how == Matmul::plain) {
        run_reference(x, n_tokens, products);
        return;
    }
#ifdef HAVE_CUBLAS
    const bool ready = s.how == Matmul::fp16 || (s.how == Matmul::predequant && !one);
    const bool expand =
        !one && (s.how == Matmul::dequant || (s.how == Matmul::fused && n_tokens >= dequantize_from));
    if (ready || expand) {
        for (int i = 0; i < products.n; i++) {
            const AwqProduct& p = products.of[i];
            if (expand) run_dequantize(p.w, s.dequantized.get());
            run_cublas(x, n_tokens, expand ? s.dequantized.get() : p.w.fp16, p.w.n_in, p.w.n_out, p.out,
                       p.add);
        }
        return;
    }
#endif
    if (one) {
        const int n_words = gemv_words(products);
        n_words == 4   ? run_gemv<4>(s, x, products)
        : n_words == 2 ? run_gemv<2>(s, x, products)
                       : run_gemv<1>(s, x, products);
    } else if (n_tokens <= 16) {
        run_gemm<16>(s, x, n_tokens, products);
    } else if (n_tokens <= 32) {
        run_gemm<32>(s, x, n_tokens, products);
    } else {
        run_gemm<64>(s, x, n_tokens, products);
    }
}

// Where a product goes: out (n_tokens, n_out) = x * w.
struct Projection {
    DeviceRows<float>& out;
    const AwqMatrix& w;
};

// The products of one input with several matrices, in one launch: q, k and v; gate and up.
void matmul(const MatmulState& s, const DeviceRows<half>& x, std::initializer_list<Projection> projections) {
    AwqProducts products;
    for (const Projection& p : projections) {
        p.out.n_rows = x.n_rows;
        products.of[products.n++] = {p.w, p.out.get(), false};
    }
    matmul(s, x.get(), x.n_rows, products);
}

// x += input * w. The kernel adds to x itself; if `proj` has memory, which only traces need, it gets the
// product.
void matmul_add(const MatmulState& s, DeviceRows<float>& x, DeviceRows<float>& proj,
                const DeviceRows<half>& input, const AwqMatrix& w) {
    if (proj.is_allocated()) {
        matmul(s, input, {{proj, w}});
        add(x, proj);
    } else {
        matmul(s, input.get(), input.n_rows, {{{w, x.get(), true}}, 1});
    }
}

// ----------------------------------------------------------------------------
// The tensors of a file

// Throws if the kernels cannot run such a model.
void check_config(const ModelConfig& c) {
    auto fail = [](const std::string& what) { throw std::runtime_error(what); };
    if (c.group_size <= 0 || c.group_size % gemm_inputs != 0)
        fail("group_size is " + std::to_string(c.group_size) + ", expected a multiple of " +
             std::to_string(gemm_inputs));
    for (const auto& [name, n] : {std::pair{"dim", c.dim}, std::pair{"hidden_dim", c.hidden_dim},
                                  std::pair{"n_heads * head_dim", c.q_dim()}}) {
        if (n % c.group_size != 0)
            fail(std::string(name) + " is " + std::to_string(n) + ", not a multiple of group_size " +
                 std::to_string(c.group_size));
    }
    if (!has_attention(c.head_dim))
        fail("head_dim is " + std::to_string(c.head_dim) + ", expected 32, 64, 96 or 128");
}

// KuiperLLama's header has head_dim where llama2.c's has group_size, and group_size behind it. Its files have
// no extension block, and are Qwen3.
const FileFormat<ModelConfig> file_format{
    .scheme = scheme_awq,
    .check = check_config,
    .base = {
        .group_size = 0x29, .head_dim = 0x25, .arch = Arch::qwen3, .norm_eps = 1e-6f, .rope_theta = 1e6f}};

// Every tensor in the order of the file. A member is made as it stands here (C++ makes members in the order
// of their declaration), so the list of names and shapes and the pointers into device memory are the same
// lines.
struct Weights {
    TensorList file;
    ModelConfig c;

    LayerNorms<half> norms = file.layer_norms<half>(c);  // attn, ffn: n_layers of (dim,); last: (dim,)
    const half* embedding = file.next<half>("embed", {c.vocab_size, c.dim});
    std::vector<AwqMatrix> q_proj = awq_layers("attn.q_proj", c.dim, c.q_dim());
    std::vector<AwqMatrix> k_proj = awq_layers("attn.k_proj", c.dim, c.kv_dim());
    std::vector<AwqMatrix> v_proj = awq_layers("attn.v_proj", c.dim, c.kv_dim());
    std::vector<AwqMatrix> o_proj = awq_layers("attn.o_proj", c.q_dim(), c.dim);
    std::vector<AwqMatrix> gate_proj = awq_layers("ffn.gate_proj", c.dim, c.hidden_dim);  // w1 in llama2.c
    std::vector<AwqMatrix> down_proj = awq_layers("ffn.down_proj", c.hidden_dim, c.dim);  // w2
    std::vector<AwqMatrix> up_proj = awq_layers("ffn.up_proj", c.dim, c.hidden_dim);      // w3
    const half* classifier =
        c.shared_classifier ? embedding : file.next<half>("classifier", {c.vocab_size, c.dim});
    HeadNorms<half> head_norms = file.head_norms<half>(c);  // q, k: n_layers of (head_dim,), Qwen3 only

    AwqMatrix awq(const std::string& name, int n_in, int n_out) {
        AwqMatrix m;
        m.n_in = n_in, m.n_out = n_out, m.group_size = c.group_size;
        m.qweight = file.next<uint32_t>(name + ".qweight", {n_in, n_out / 8});
        m.qzeros = file.next<uint32_t>(name + ".qzeros", {n_in / c.group_size, n_out / 8});
        m.scales = file.next<half>(name + ".scales", {n_in / c.group_size, n_out});
        return m;
    }
    std::vector<AwqMatrix> awq_layers(const char* part, int n_in, int n_out) {
        return file.layers(c, part, [&](const std::string& name) { return awq(name, n_in, n_out); });
    }
    // Those of all layers.
    std::vector<AwqMatrix*> matrices() {
        std::vector<AwqMatrix*> all;
        for (auto* part : {&q_proj, &k_proj, &v_proj, &o_proj, &gate_proj, &down_proj, &up_proj}) {
            for (AwqMatrix& m : *part) all.push_back(&m);
        }
        return all;
    }
};

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights

#ifdef __CUDACC__
constexpr int max_chunk = 512;  // tokens of a prompt that go through together
#else
constexpr int max_chunk = 64;
#endif
constexpr int logit_rows = 16;  // tokens whose logits are computed at a time

struct RunState {
    // A row per token of the chunk.
    DeviceRows<float> x;        // (max_chunk, dim), the residual stream
    DeviceRows<half> normed;    // (max_chunk, dim), normalized x
    DeviceRows<float> q;        // (max_chunk, n_heads * head_dim)
    DeviceRows<float> k;        // (max_chunk, n_kv_heads * head_dim)
    DeviceRows<float> v;        // (max_chunk, n_kv_heads * head_dim)
    DeviceRows<half> q_rope;    // (max_chunk, n_heads * head_dim), rotated
    DeviceRows<half> attn_out;  // (max_chunk, n_heads * head_dim)
    DeviceRows<float> gate;     // (max_chunk, hidden_dim)
    DeviceRows<float> up;       // (max_chunk, hidden_dim)
    DeviceRows<half> hidden;    // (max_chunk, hidden_dim), silu(gate) * up
    DeviceRows<float> logits;   // (logit_rows, vocab_size)
    DeviceRows<float> proj;     // (max_chunk, dim), the output of o_proj and down_proj; only for traces
    DeviceRows<float> q_norm, k_norm;  // as q and k, normalized heads; only for traces

    DeviceBuffer<int> inputs;        // (1 + max_chunk,), the position of the first token, then the tokens
    DeviceBuffer<int> best;          // (1,), the most probable token
    RotationTable rotations;         // (context, head_dim / 2) cos and sin
    DeviceKvCache cache;             // keys and values of `context` positions
    MatmulState matmul;              // how products are computed
    AttentionScratch attention;      // of single tokens
    std::vector<float> host_logits;  // (1 or max_chunk, vocab_size)
    Graphs<std::pair<int, bool>> graphs;  // by the arguments of run_step()

    // Allocates a run's memory; `context` is the number of positions to keep.
    RunState(const ModelConfig& c, int context, Matmul how, bool traced)
        : rotations(c, context),
          cache(c, context),
          matmul(how, largest_dequantized(c, how, std::min(max_chunk, context))),
          attention(c.n_kv_heads, c.heads_per_kv(), c.head_dim, context) {
        const int n = std::min(max_chunk, context);
        x = DeviceRows<float>(n, c.dim);
        normed = DeviceRows<half>(n, c.dim);
        q = DeviceRows<float>(n, c.q_dim());
        k = DeviceRows<float>(n, c.kv_dim());
        v = DeviceRows<float>(n, c.kv_dim());
        q_rope = DeviceRows<half>(n, c.q_dim());
        attn_out = DeviceRows<half>(n, c.q_dim());
        gate = DeviceRows<float>(n, c.hidden_dim);
        up = DeviceRows<float>(n, c.hidden_dim);
        hidden = DeviceRows<half>(n, c.hidden_dim);
        logits = DeviceRows<float>(std::min(logit_rows, n), c.vocab_size);
        proj = DeviceRows<float>(traced ? n : 0, c.dim);
        q_norm = DeviceRows<float>(traced ? n : 0, c.q_dim());
        k_norm = DeviceRows<float>(traced ? n : 0, c.kv_dim());
        inputs = DeviceBuffer<int>(1 + n);
        best = DeviceBuffer<int>(1);
    }

    const int* pos() const { return inputs.get(); }
    const int* tokens() const { return inputs.get() + 1; }
};

struct Transformer {
    ModelFile file;
    DeviceBuffer<std::byte> weight_memory;
    DeviceBuffer<half> fp16_memory;  // all matrices, only with predequant and fp16
    Weights weights;
    RunState state;
    Trace* trace = nullptr;  // not null: record every step
};

// ----------------------------------------------------------------------------
// The forward pass, side by side with golden/forward.py: an operation per line, and behind it the name under
// which a trace has its result. Token ids and positions lie on the device (s.tokens(), s.pos()), so that the
// launches of a step do not depend on them and can be captured as a graph.
// clang-format off

// x (n_tokens, dim) += attention of layer l, for tokens at positions *s.pos(), *s.pos() + 1, ...
void attention_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record(m.trace, l);
    QkNorms norms;  // none in a Llama
    if (c.arch == Arch::qwen3) norms = {w.head_norms.q[l], w.head_norms.k[l], c.norm_eps};

    rmsnorm(s.normed, s.x, w.norms.attn[l], c.norm_eps);                   record("attn.norm", s.normed);
    matmul(s.matmul, s.normed, {{s.q, w.q_proj[l]},                        // q, k and v read the same input
                                {s.k, w.k_proj[l]},
                                {s.v, w.v_proj[l]}});                      record("attn.q_proj", s.q);
                                                                           record("attn.k_proj", s.k);
                                                                           record("attn.v_proj", s.v);
    prepare_heads(s.q_rope, s.cache, l, s.q_norm, s.k_norm,                // q_norm, k_norm, RoPE; k and v into
                  s.q, s.k, s.v, norms, s.rotations, s.pos());             // the cache
    if (c.arch == Arch::qwen3) {                                           record("attn.q_norm", s.q_norm, c.head_dim);
                                                                           record("attn.k_norm", s.k_norm, c.head_dim);
    }
                                                                           record("attn.q_rope", s.q_rope, c.head_dim);
                                                                           record("attn.k_rope", s.cache, s.pos(), s.k.n_rows);
    attention(s.attn_out, s.attention, s.q_rope, s.cache, l, s.pos());     record("attn.mix", s.attn_out);
    matmul_add(s.matmul, s.x, s.proj, s.attn_out, w.o_proj[l]);            record("attn.o_proj", s.proj);
                                                                           record("attn.residual", s.x);
}

// x (n_tokens, dim) += down_proj(silu(gate_proj(normed)) * up_proj(normed)) of layer l.
void feed_forward_block(Transformer& m, int l) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record(m.trace, l);

    rmsnorm(s.normed, s.x, w.norms.ffn[l], c.norm_eps);                    record("ffn.norm", s.normed);
    matmul(s.matmul, s.normed, {{s.gate, w.gate_proj[l]},
                                {s.up, w.up_proj[l]}});                    record("ffn.gate_proj", s.gate);
                                                                           record("ffn.up_proj", s.up);
    swiglu(s.hidden, s.gate, s.up);                                        record("ffn.swiglu", s.hidden);
    matmul_add(s.matmul, s.x, s.proj, s.hidden, w.down_proj[l]);           record("ffn.down_proj", s.proj);
                                                                           record("ffn.residual", s.x);
}

// x (n_tokens, dim) of the first n_tokens tokens of s.tokens(): the embedding and all layers.
void run_layers(Transformer& m, int n_tokens) {
    const ModelConfig& c = m.file.config;
    RunState& s = m.state;
    const DeviceRecorder record(m.trace, -1);

    embed(s.x, m.weights.embedding, s.tokens(), n_tokens);                 record("tokens", s.tokens(), n_tokens, {});
                                                                           record("embed", s.x);
    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l);
        feed_forward_block(m, l);
    }
}

// logits (n_tokens, vocab_size) of n_tokens rows of x, from `first` on. At most logit_rows.
void run_classifier(Transformer& m, int first, int n_tokens) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    const DeviceRecorder record(m.trace, -1);

    rmsnorm(s.normed, s.x.slice(first, n_tokens), w.norms.last, c.norm_eps);  record("norm", s.normed);
    fp16_matmul(s.logits, s.normed, w.classifier);                            record("logits", s.logits);
}
// clang-format on

// All layers for n_tokens tokens; with `next`, also the last one's logits and the most probable next token.
void run_step(Transformer& m, int n_tokens, bool next) {
    auto step = [&] {
        run_layers(m, n_tokens);
        if (!next) return;
        run_classifier(m, n_tokens - 1, 1);
        arg_max(m.state.best, m.state.logits.get(), m.file.config.vocab_size);
    };
    if (m.trace != nullptr) {
        step();
    } else {
        m.state.graphs.run({n_tokens, next}, step);
    }
}

// Puts a chunk's position and ids where a step finds them.
void set_inputs(RunState& s, std::span<const int> tokens, int pos) {
    s.rotations.reach(pos + int(tokens.size()));
    std::vector<int> inputs{pos};
    inputs.insert(inputs.end(), tokens.begin(), tokens.end());
    s.inputs.upload(inputs.data(), inputs.size());
}

// Runs a chunk of up to max_chunk tokens, tokens[i] at position pos + i; each attends to every position up to
// its own. Returns logits (n_logits, vocab_size), those of the last n_logits tokens: none, one or all.
// Preconditions: pos + tokens.size() <= context; positions before pos have been run.
std::span<const float> forward(Transformer& m, std::span<const int> tokens, int pos, int n_logits) {
    RunState& s = m.state;
    const int n_tokens = int(tokens.size());
    const size_t vocab_size = m.file.config.vocab_size;
    set_inputs(s, tokens, pos);
    s.host_logits.resize(std::max(s.host_logits.size(), n_logits * vocab_size));
    if (n_logits <= 1) {
        run_step(m, n_tokens, n_logits == 1);
        if (n_logits == 1) download(s.host_logits.data(), s.logits.get(), vocab_size);
    } else {
        run_layers(m, n_tokens);
        for (int i = 0; i < n_logits; i += logit_rows) {
            const int n = std::min(logit_rows, n_logits - i);
            run_classifier(m, n_tokens - n_logits + i, n);
            download(s.host_logits.data() + i * vocab_size, s.logits.get(), n * vocab_size);
        }
    }
    return {s.host_logits.data(), n_logits * vocab_size};
}

// The same, but returns the most probable next token, which the device finds itself.
int forward_greedy(Transformer& m, std::span<const int> tokens, int pos) {
    set_inputs(m.state, tokens, pos);
    run_step(m, int(tokens.size()), true);
    int best = 0;
    download(&best, m.state.best.get(), 1);
    return best;
}

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

const OwnOption own_options[] = {{
    "--matmul",
#ifdef HAVE_CUBLAS
    {"fused", "dequant", "predequant", "fp16", "plain"},
#else
    {"fused", "plain"},
#endif
    "how products are computed",
}};

Matmul matmul_of(const Options& o) {
    const std::string& name = o.own.at("--matmul");
    return name == "dequant"      ? Matmul::dequant
           : name == "predequant" ? Matmul::predequant
           : name == "fp16"       ? Matmul::fp16
           : name == "plain"      ? Matmul::plain
                                  : Matmul::fused;
}

// Whether all matrices are expanded when loading.
bool keeps_fp16(Matmul how) { return how == Matmul::predequant || how == Matmul::fp16; }

// The device memory that load_transformer() allocates.
std::vector<MemoryPart> device_memory(const ModelConfig& c, const TensorList& tensors, int context,
                                      Matmul how, bool traced) {
    const uint64_t n = uint64_t(std::min(max_chunk, context)), f32 = sizeof(float), f16 = sizeof(half);
    const uint64_t dim = uint64_t(c.dim), q = uint64_t(c.q_dim()), kv = uint64_t(c.kv_dim()),
                   hidden = uint64_t(c.hidden_dim), n_logits = std::min(uint64_t(logit_rows), n);
    uint64_t chunk = n * (dim * (f32 + f16) + q * (f32 + 2 * f16) + 2 * kv * f32 + hidden * (2 * f32 + f16));
    if (traced) chunk += n * (dim + q + kv) * f32;
    const uint64_t scratch = max_partials * f32 + max_tiles * sizeof(unsigned) +
                             largest_dequantized(c, how, int(n)) * f16 + (2 + n) * sizeof(int) +
                             AttentionScratch::bytes(c.n_kv_heads, c.heads_per_kv(), c.head_dim, context);
    const char* advice = "a smaller --ctx takes less";
    return {{"the weights", tensors.memory_bytes()},
            {"the weights as fp16 (--matmul)", keeps_fp16(how) ? c.macs_per_token() * f16 : 0},
            kv_part(0, context, kv_bytes(c, KvFormat::f16), advice),
            {"RoPE", RotationTable::n_values(c, context) * sizeof(float2), advice},
            {"a chunk of " + std::to_string(n) + " tokens", chunk},
            logits_part(n_logits, c.vocab_size),
            {"products and attention", scratch}};
}

// Throws std::runtime_error if a run's memory is not there, on the device or on the host, before any of it is
// allocated.
void check_run_memory(const ModelFile& file, const TensorList& tensors, const Options& o, int context,
                      bool traced) {
    const uint64_t n_logits = o.ppl || traced ? uint64_t(std::min(max_chunk, context)) : 1;
    std::vector<MemoryPart> on_host = {logits_part(n_logits, file.config.vocab_size),
                                       {"the tokenizer", file.tokenizer.size()}};
    device();
#ifdef HAVE_CUBLAS
    cublas();  // its workspace takes device memory, too
#endif
    const std::vector<MemoryPart> on_device =
        device_memory(file.config, tensors, context, matmul_of(o), traced);
#ifdef __CUDACC__
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    check_memory(on_device, free, "device memory");
#else
    on_host.insert(on_host.end(), on_device.begin(), on_device.end());  // the emulator's is the host's
#endif
    check_memory(on_host, available_memory());
}

// All matrices as fp16, for --matmul predequant and fp16.
DeviceBuffer<half> dequantize_all(Weights& w) {
    size_t n = 0;
    for (const AwqMatrix* matrix : w.matrices()) n += matrix->n_weights();
    DeviceBuffer<half> memory(n);
    half* next = memory.get();
    for (AwqMatrix* matrix : w.matrices()) {
        run_dequantize(*matrix, next);
        matrix->fp16 = next;
        next += matrix->n_weights();
    }
    wait_for_device();
    return memory;
}

// Opens an AWQ file, copies it to the device and allocates a run's memory. Throws std::runtime_error with one
// line that names the file.
Transformer load_transformer(const std::string& path, const Options& options, Trace* trace) {
    ModelFile file = open_model_file(path, file_format);
    const Weights planned{planned_tensors(), file.config};
    planned.file.check_end(file);
    if (options.rope_theta) file.config.rope_theta = *options.rope_theta;
    const Matmul how = matmul_of(options);
    const int context = context_length(options, file.config);
    try {
        check_run_memory(file, planned.file, options, context, trace != nullptr);
        DeviceBuffer<std::byte> memory = upload_weights(file, planned.file);
        Weights weights{tensors_in(memory), file.config};
        RunState state(file.config, context, how, trace != nullptr);
        DeviceBuffer<half> fp16_memory;
        if (keeps_fp16(how)) fp16_memory = dequantize_all(weights);
        return {std::move(file),    std::move(memory), std::move(fp16_memory),
                std::move(weights), std::move(state),  trace};
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
}

Model load_model(const Options& options, Trace* trace) {
    auto m = std::make_shared<Transformer>(load_transformer(options.model_path, options, trace));
    const ModelConfig& c = m->file.config;
    const Matmul how = m->state.matmul.how;
    Model model = model_of(m->file, m->weights.file, KvFormat::f16);
    model.scheme = "AWQ: int4 groups of " + std::to_string(c.group_size) + ", fp16 activations";
    model.kernel = device().name;
    if (how != Matmul::fused) model.kernel += ", --matmul " + options.own.at("--matmul");
    if (how == Matmul::fp16) {  // decode reads the expanded matrices
        for (const AwqMatrix* matrix : m->weights.matrices())
            model.weight_bytes_per_token += matrix->n_weights() * sizeof(half) - matrix->n_bytes();
    }
    model.max_chunk = max_chunk;
    model.device_bytes = [] { return device().peak; };
    model.device_bandwidth = copy_bandwidth;
    const ForwardChunk chunk = [m](auto... arguments) { return forward(*m, arguments...); };
    model.forward = in_chunks(chunk, max_chunk, c.vocab_size, trace != nullptr);
    model.prefill = without_logits(chunk, trace != nullptr);
    if (trace == nullptr) {
        model.forward_greedy = [m](std::span<const int> tokens, int pos) {
            return forward_greedy(*m, tokens, pos);
        };
    }
    return model;
}

#ifndef RUNQ_NO_MAIN
#include "common/app/cli.h"

int main(int argc, char** argv) {
    return run_command_line(argc, argv,
                            {"runq_awq", "Llama 3 and Qwen3 in AWQ (int4 by fp16)", load_model, own_options});
}
#endif
