// runq_awq: Llama 3 and Qwen3 inference in AWQ int4 on a GPU, one file to read from top to bottom.
//
// Weights are int4 with an integer zero point and an fp16 scale for each group of 128 (or 64) inputs of an
// output channel: w = (q - zero) * scale, rounded to fp16 (AWQ: Lin et al. 2023, arXiv 2306.00978).
// Activations are fp16 where a matrix reads them and in the KV cache, everything between is fp32. A weight
// becomes a number in the registers of the thread that multiplies by it, two at a time and without a
// conversion instruction, and is not expanded to fp16 in memory, except one matrix at a time for long
// prompts. Tensor cores multiply, with one token as with many. docs/awq.md has the bits.
//
// The same source compiles for a GPU with nvcc, and for any CPU through simt/, which runs every lane of every
// warp. That is slow and shows everything: docs/simt.md.
//
// This file is about the scheme and the forward pass. Model files, tokens, sampling and the command line are
// in common/; docs/forward-pass.md walks through the same steps with equations and numbers.
//
//     make runq_awq model_awq.bin && ./runq_awq model_awq.bin -i "Once upon a time" -n 32

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/attention.cuh"
#include "common/cli.h"
#include "common/device.h"
#include "common/model_file.h"
#include "common/trace.h"

// ----------------------------------------------------------------------------
// Weights on the device

// A matrix of n_in rows and n_out columns. A word holds eight columns of a row, in AutoAWQ's order: the even
// ones in its low half and the odd ones in its high half, four bits each. So column 8c + i is in bits 4 * {0,
// 4, 1, 5, 2, 6, 3, 7}[i] of word c.
struct AwqMatrix {
    const uint32_t* qweight = nullptr;  // (n_in, n_out / 8)
    const uint32_t* qzeros = nullptr;   // (n_in / group_size, n_out / 8)
    const half* scales = nullptr;       // (n_in / group_size, n_out)
    const half* fp16 =
        nullptr;  // (n_in, n_out), the weights themselves; only with --matmul predequant and fp16
    int n_in = 0, n_out = 0, group_size = 128;
};

struct Weights {
    const half* attn_norm = nullptr;   // (n_layers, dim)
    const half* ffn_norm = nullptr;    // (n_layers, dim)
    const half* final_norm = nullptr;  // (dim,)
    const half* q_norm = nullptr;      // (n_layers, head_dim), Qwen3 only
    const half* k_norm = nullptr;      // (n_layers, head_dim), Qwen3 only
    const half* embedding = nullptr;   // (vocab_size, dim)
    const half* classifier = nullptr;  // (vocab_size, dim); the embedding itself if the two are tied

    std::vector<AwqMatrix> q_proj;     // n_layers of (dim, n_heads * head_dim)
    std::vector<AwqMatrix> k_proj;     // n_layers of (dim, n_kv_heads * head_dim)
    std::vector<AwqMatrix> v_proj;     // n_layers of (dim, n_kv_heads * head_dim)
    std::vector<AwqMatrix> o_proj;     // n_layers of (n_heads * head_dim, dim)
    std::vector<AwqMatrix> gate_proj;  // n_layers of (dim, hidden_dim)      w1 in llama2.c
    std::vector<AwqMatrix> down_proj;  // n_layers of (hidden_dim, dim)      w2
    std::vector<AwqMatrix> up_proj;    // n_layers of (dim, hidden_dim)      w3
};

// One of the products that read the same input. out (n_tokens, n_out) = x * w, or += with `add`.
struct Product {
    AwqMatrix w;
    float* out = nullptr;
    bool add = false;
};

struct Products {  // of one launch
    Product of[3];
    int n = 0;
};

// Where blocks that share a tile leave what they have, and count who was there. A tile has a ticket.
struct Scratch {
    float* partials = nullptr;    // (n_splits, n_tiles, values of a tile)
    unsigned* tickets = nullptr;  // (n_tiles,), 0 between launches
};

// ----------------------------------------------------------------------------
// int4 -> fp16, in registers
//
// 0x6400 is 1024 in fp16, and its ten bits of mantissa count in ones. So 0x6400 | q is 1024 + q: putting the
// bits of a nibble there converts it. One lop3, (word & mask) | 0x64006400, does that for two nibbles 16 bits
// apart; one subtraction takes off the 1024 and the zero point, too, exactly. Nibbles that lie four bits
// higher count in sixteens, and a multiply-add brings them down: (1024 + 16 q) / 16 - (64 + zero) = q - zero,
// exact as well. The multiplication by the scale is the only rounding.

constexpr unsigned and_or = (0xF0 & 0xCC) | 0xAA;  // lop3's truth table of (a & b) | c: PTX ISA, lop3

// Pair p (0 to 3) of eight nibbles: the one at bit 4p and the one at bit 4p + 16, each + 1024 if p is even,
// * 16 + 1024 if it is odd.
__device__ inline half2 with_magic(uint32_t nibbles, int p) {
    const uint32_t mask = p % 2 == 0 ? 0x000f000f : 0x00f000f0;
    return as_half2(lop3<and_or>(p >= 2 ? nibbles >> 8 : nibbles, mask, 0x64006400));
}

// What turns the nibbles of a word's eight columns into weights, each twice: columns 2p and 2p + 1 are pair
// p's.
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

// Weights of column 2p (odd: 2p + 1) in two rows, from those rows' even (odd) columns in the two halves of a
// word.
__device__ inline uint32_t dequantize(uint32_t nibbles, int p, int odd, const Columns& c) {
    const half2 q = with_magic(nibbles, p);
    const half2 difference = p % 2 == 0 ? __hsub2(q, c.zero[2 * p + odd])
                                        : __hfma2(q, __float2half2_rn(1.0f / 16), c.zero[2 * p + odd]);
    return as_bits(__hmul2(difference, c.scale[2 * p + odd]));
}

// The tensor core's operand A, 16 rows by 16 columns of fp16, is here 16 output channels by 16 inputs. Lane
// 4g + t holds of rows g and g + 8 the columns 2t, 2t + 1, 2t + 8, 2t + 9 (PTX ISA, mma.m16n8k16). It gets
// them from four words, one for each of these inputs: pair p of a word are its columns 2p and 2p + 1, they
// become rows g and g + 8. A register wants two inputs of one channel, a word has two channels of one input,
// so that halves of words change places first: two prmt for sixteen weights.
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

// Which product a block works on, and which of its tiles of `width` columns.
struct Tile {
    int product = 0, first_column = 0;
};

__device__ inline Tile find_tile(const Products& products, int block, int width) {
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
// Matrix products, the specification: a thread for each output

__global__ void awq_plain(const half* x, int n_tokens, Products products) {
    const Tile tile = find_tile(products, blockIdx.x, blockDim.x);
    const Product& product = products.of[tile.product];
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
// Reading the weights is all that takes time, so each lane reads up to 16 bytes at once, n_words of a row,
// and a warp up to 128 bytes in each of four rows. Its four warps take different groups of inputs, and so do
// the blocks that gridDim.y puts on the same columns. The tensor core multiplies by one token and seven
// columns of nothing: that is still the cheapest way to add up, as the weights come out of dequantize() in
// just the shape that it reads.

constexpr int gemv_warps = 4;

// n words in a row, as wide as one load can be.
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
    awq_gemv(const half* x, Products products, Scratch scratch) {
    constexpr int width = 64 * n_words;
    const Tile tile = find_tile(products, blockIdx.x, width);
    const Product& product = products.of[tile.product];
    const AwqMatrix& w = product.w;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row_words = w.n_out / 8, column = tile.first_column + 8 * n_words * g;  // the lane's first
    const bool has_columns = column < w.n_out;
    const int word = has_columns ? column / 8 : 0;  // elsewhere it computes what nobody reads

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
        // The order of inputs within an mma is free as long as both operands agree: lane t takes 4t to 4t
        // + 3.
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

    // Of the result, lane 4g has rows g and g + 8 of column 0: columns 2p and 2p + 1 of its words.
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
    if (gridDim.y == 1 || !is_last(scratch.tickets + blockIdx.x, gridDim.y)) return;
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
// A block makes a tile of 256 output channels by 16, 32 or 64 tokens, a warp 64 of the channels. 64 inputs at
// a time go through shared memory, packed weights and all, in a ring of stages that cp.async fills ahead.
// Weights are operand A, as in awq_gemv, and tokens operand B, which ldmatrix reads as it is. Each weight is
// dequantized once for all tokens of the tile, straight into the registers that mma reads.

constexpr int gemm_warps = 4, gemm_threads = 32 * gemm_warps, gemm_columns = 64 * gemm_warps;
constexpr int gemm_inputs = 64;  // of a stage; a group is a multiple of it
constexpr int gemm_stages = 4;

template <int tile_tokens>
struct GemmStage {
    // Rows are four words longer than they need be, so that the rows that a warp reads at once lie in
    // different banks: 36 words to a row are 4 banks from row to row for ldmatrix, and 8 from lane t to t + 1
    // for the words.
    half x[tile_tokens][gemm_inputs + 8];
    uint32_t words[gemm_inputs][gemm_columns / 8 + 4];
    uint32_t zeros[gemm_columns / 8];
    half scales[gemm_columns];
};

// Starts the copies of one stage: inputs k to k + gemm_inputs. What lies outside the matrices becomes 0.
template <int tile_tokens>
__device__ inline void load_stage(GemmStage<tile_tokens>& stage, const half* x, int n_tokens,
                                  const AwqMatrix& w, int first_token, int first_column, int k) {
    constexpr int x_pieces = gemm_inputs / 8;  // of 16 bytes, to a row
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
    } else {  // rows do not begin at multiples of 16 bytes
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
            // Lane i gives row i % 8 of matrix i / 8: tokens 8j + ..., inputs k, then k + 8; the next 8
            // tokens.
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
    awq_gemm(const half* x, int n_tokens, Products products, Scratch scratch) {
    auto* stages = dynamic_shared<GemmStage<tile_tokens>>();
    const Tile tile = find_tile(products, blockIdx.x, gemm_columns);
    const Product& product = products.of[tile.product];
    const AwqMatrix& w = product.w;
    const int first_token = blockIdx.y * tile_tokens;

    // The inputs of this block, in stages.
    const int n_all = w.n_in / gemm_inputs, per_split = (n_all + gridDim.z - 1) / gridDim.z;
    const int first = min(n_all, int(blockIdx.z) * per_split), n = min(n_all, first + per_split) - first;
    auto load = [&](int i) {
        if (i < n) {
            load_stage<tile_tokens>(stages[i % gemm_stages], x, n_tokens, w, first_token, tile.first_column,
                                    (first + i) * gemm_inputs);
        }
        cp_async_commit();  // empty at the end, so that the count of groups holds
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const bool warp_has_columns = tile.first_column + 64 * warp < w.n_out;
    float sums[4][tile_tokens / 8][4] = {};
    for (int i = 0; i < gemm_stages - 1; i++) load(i);
    for (int i = 0; i < n; i++) {
        cp_async_wait<gemm_stages - 2>();  // this thread's share of stage i is there,
        __syncthreads();                   // so is everyone's; and everyone is done with stage i - 1,
        load(i + gemm_stages - 1);         // whose place the next one takes
        if (warp_has_columns) multiply_stage<tile_tokens>(sums, stages[i % gemm_stages]);
    }

    // Of each 16 by 8 result a lane has rows g and g + 8, which are columns 2p and 2p + 1 of its word, of
    // tokens 2t and 2t + 1: all in all eight columns in a row.
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
    if (gridDim.z == 1 || !is_last(scratch.tickets + tile_index, gridDim.z)) return;
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

// out (n_in, n_out), the weights as fp16. grid: (words of a row / 256, n_in); a thread has a word.
__global__ void awq_dequantize(AwqMatrix w, half* out) {
    const int row_words = w.n_out / 8, word = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (word >= row_words) return;
    const int group = row / w.group_size;
    const Columns columns =
        columns_of(w.qzeros[size_t(group) * row_words + word],
                   *reinterpret_cast<const uint4*>(w.scales + size_t(group) * w.n_out + 8 * word));
    const uint32_t nibbles = w.qweight[size_t(row) * row_words + word];
    uint32_t pairs[4];
    for (int p = 0; p < 4; p++) {  // here both halves of the word stay where they are: columns 2p and 2p + 1
        const half2 even = as_half2(dequantize(nibbles, p, 0, columns)),
                    odd = as_half2(dequantize(nibbles, p, 1, columns));
        pairs[p] = as_bits(__halves2half2(__low2half(even), __high2half(odd)));
    }
    *reinterpret_cast<uint4*>(out + size_t(row) * w.n_out + 8 * word) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// ----------------------------------------------------------------------------
// The other operations

// x (n_tokens, dim) fp32 = rows of the table. grid: n_tokens.
__global__ void embed(float* x, const half* table, const int* tokens, int dim) {
    const half* from = table + size_t(tokens[blockIdx.x]) * dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x)
        x[size_t(blockIdx.x) * dim + i] = __half2float(from[i]);
}

// out = weight * x / sqrt(mean(x^2) + eps), rows of dim. grid: rows.
__global__ void rmsnorm(half* out, const float* x, const half* weight, int dim, float eps) {
    x += size_t(blockIdx.x) * dim, out += size_t(blockIdx.x) * dim;
    float squares = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) squares = fmaf(x[i], x[i], squares);
    const float inv = rsqrtf(block_sum(squares) / float(dim) + eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        out[i] = __float2half(__half2float(weight[i]) * (x[i] * inv));
    }
}

// What becomes of q, k and v before attention: Qwen3's norm over each head, the rotation of q and k by their
// positions, fp16; k and v go into the cache. Pairs to rotate are (i, i + head_dim / 2), as Hugging Face
// stores them.
struct Heads {
    const float *q, *k, *v;       // (n_tokens, heads * head_dim)
    half* q_out;                  // (n_tokens, n_heads, head_dim)
    half *keys, *values;          // of this layer: (n_kv_heads, context, head_dim)
    const half *q_norm, *k_norm;  // (head_dim,), or null
    const float2* rotations;      // (context, head_dim / 2) cos and sin
    const int* pos;               // of token 0
    int n_heads, n_kv_heads, head_dim, context;
    float eps;
    float *traced_q, *traced_k;  // the normalized heads, if a trace wants them
};

// grid: (n_heads + 2 n_kv_heads, n_tokens); block: a warp.
__global__ void prepare_heads(Heads h) {
    const int lane = threadIdx.x, half_dim = h.head_dim / 2, token = blockIdx.y, pos = *h.pos + token;
    const bool is_q = int(blockIdx.x) < h.n_heads, is_v = int(blockIdx.x) >= h.n_heads + h.n_kv_heads;
    const int head = is_q ? blockIdx.x : (blockIdx.x - h.n_heads) % h.n_kv_heads;
    const int n_heads = is_q ? h.n_heads : h.n_kv_heads;
    const float* in = (is_q ? h.q : is_v ? h.v : h.k) + (size_t(token) * n_heads + head) * h.head_dim;
    const size_t cached = (size_t(head) * h.context + pos) * h.head_dim;
    if (is_v) {
        for (int i = lane; i < h.head_dim; i += 32) h.values[cached + i] = __float2half(in[i]);
        return;
    }
    const half* norm = is_q ? h.q_norm : h.k_norm;
    float inv = 1;
    if (norm != nullptr) {
        float squares = 0;
        for (int i = lane; i < h.head_dim; i += 32) squares = fmaf(in[i], in[i], squares);
        inv = rsqrtf(warp_sum(squares) / float(h.head_dim) + h.eps);
    }
    half* out = is_q ? h.q_out + (size_t(token) * n_heads + head) * h.head_dim : h.keys + cached;
    float* traced = is_q ? h.traced_q : h.traced_k;
    if (traced != nullptr) traced += (size_t(token) * n_heads + head) * h.head_dim;
    for (int i = lane; i < half_dim; i += 32) {
        float a = in[i], b = in[i + half_dim];
        if (norm != nullptr) {
            a = __half2float(norm[i]) * (a * inv);
            b = __half2float(norm[i + half_dim]) * (b * inv);
            if (traced != nullptr) traced[i] = a, traced[i + half_dim] = b;
        }
        const float2 rotation = h.rotations[size_t(pos) * half_dim + i];
        out[i] = __float2half(a * rotation.x - b * rotation.y);
        out[i + half_dim] = __float2half(a * rotation.y + b * rotation.x);
    }
}

// out = silu(gate) * up, silu(z) = z / (1 + exp(-z))
__global__ void swiglu(half* out, const float* gate, const float* up, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __float2half(gate[i] / (1.0f + expf(-gate[i])) * up[i]);
}

// x += y. Only where a trace wants to see y: elsewhere products add to x themselves.
__global__ void add(float* x, const float* y, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}

// out (n_tokens, n_rows) = x (n_tokens, n_in) fp16 by each row of a matrix (n_rows, n_in) fp16: the
// classifier. A warp has a row. grid: (n_rows / 8, n_tokens); block: 256; n_in a multiple of 8.
__global__ void fp16_gemv(float* out, const half* x, const half* matrix, int n_rows, int n_in) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= n_rows) return;
    const uint4* w = reinterpret_cast<const uint4*>(matrix + size_t(row) * n_in);
    const uint4* v = reinterpret_cast<const uint4*>(x + size_t(blockIdx.y) * n_in);
    float sum = 0;
    for (int i = lane; i < n_in / 8; i += 32) {
        const uint4 a = __ldg(w + i), b = __ldg(v + i);
        const uint32_t aw[4] = {a.x, a.y, a.z, a.w}, bw[4] = {b.x, b.y, b.z, b.w};
        for (int j = 0; j < 4; j++) {
            const float2 p = __half22float2(as_half2(aw[j])), q = __half22float2(as_half2(bw[j]));
            sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) out[size_t(blockIdx.y) * n_rows + row] = sum;
}

// The first of the largest logits, one block of 1024 threads. NaN is never the largest, as in
// common/sampler.h.
__global__ void arg_max(int* best, const float* logits, int n) {
    __shared__ float values[32];
    __shared__ int indices[32];
    float value = -INFINITY;
    int index = 0x7fffffff;
    auto take = [&](float v, int i) {
        if (v > value || (v == value && i < index)) value = v, index = i;
    };
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        if (logits[i] > -INFINITY) take(logits[i], i);
    }
    auto over_warp = [&] {
        for (int distance = 16; distance > 0; distance /= 2) {
            const float v = __shfl_xor_sync(0xffffffff, value, distance);
            const int i = __shfl_xor_sync(0xffffffff, index, distance);
            take(v, i);
        }
    };
    over_warp();
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value, indices[threadIdx.x / 32] = index;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    value = threadIdx.x < blockDim.x / 32 ? values[threadIdx.x] : -INFINITY;
    index = threadIdx.x < blockDim.x / 32 ? indices[threadIdx.x] : 0x7fffffff;
    over_warp();
    if (threadIdx.x == 0) *best = index < n ? index : 0;
}

// ----------------------------------------------------------------------------
// Everything a run needs besides the weights

// How products are computed. fused is what this program is for; the others are the steps that led there, and
// what it has to beat: `--matmul`.
enum class Matmul {
    fused,       // int4 all the way, but the largest prompts by way of dequant, where that is faster
    dequant,     // prompts: one matrix to fp16 in a buffer, then cuBLAS
    predequant,  // prompts: cuBLAS with fp16 weights made at the start; single tokens: int4
    fp16,        // cuBLAS with fp16 weights for everything
    plain,       // a loop
};

// Tokens from which on dequantizing a matrix for cuBLAS is taken to be faster than awq_gemm. Not measured
// yet: to expand a matrix of 4096 x 4096 and to read it again are 76 MB, at 4 TB/s 19 us. In 19 us tensor
// cores at 600 TFLOP/s get through 340 tokens; where awq_gemm makes half of what cuBLAS makes, it has lost
// that time after as many.
[[maybe_unused]] constexpr int dequantize_from = 384;

#ifdef __CUDACC__
constexpr int max_chunk = 512;  // tokens of a prompt that go through together
#else
constexpr int max_chunk = 64;
#endif
constexpr int max_splits = 16;            // blocks that share a tile
constexpr int max_tiles = 4096;           // of one launch that is split
constexpr size_t max_partials = 1 << 22;  // values of scratch; launches that would need more are split less
constexpr int logit_rows = 16;            // tokens whose logits are computed at a time

struct RunState {
    int context = 0;  // positions the KV cache holds
    Matmul matmul = Matmul::fused;

    // One row a token of the chunk.
    DeviceBuffer<float> x;         // (max_chunk, dim), the residual stream
    DeviceBuffer<half> h;          // (max_chunk, dim), normalized x
    DeviceBuffer<float> q, k, v;   // (max_chunk, heads * head_dim)
    DeviceBuffer<half> q_rope;     // (max_chunk, n_heads, head_dim), rotated
    DeviceBuffer<half> mix;        // (max_chunk, n_heads * head_dim), attention's output
    DeviceBuffer<float> gate, up;  // (max_chunk, hidden_dim)
    DeviceBuffer<half> swiglu;     // (max_chunk, hidden_dim)
    DeviceBuffer<float> logits;    // (logit_rows, vocab_size)
    DeviceBuffer<int> inputs;      // (1 + max_chunk,), the position of the first token, then the tokens
    DeviceBuffer<int> best;        // (1,), the most probable token

    DeviceBuffer<float2> rotations;          // (context, head_dim / 2) cos and sin
    DeviceBuffer<half> keys, values;         // each (n_layers, n_kv_heads, context, head_dim)
    DeviceBuffer<float> partials;            // max_partials, of split products
    DeviceBuffer<unsigned> tickets;          // (max_tiles,)
    DeviceBuffer<float> parts;               // of attention that is split
    DeviceBuffer<half> dequantized;          // the largest matrix, if prompts are that large
    DeviceBuffer<float> projected;           // (max_chunk, dim), only for traces
    DeviceBuffer<float> traced_q, traced_k;  // normalized heads, only for traces
    int attention_parts = 1;                 // warps that share a single token's keys

    std::vector<float> host_logits;  // (1 or max_chunk, vocab_size)

    const int* pos() const { return inputs.get(); }
    const int* tokens() const { return inputs.get() + 1; }
#ifdef __CUDACC__
    struct Graph {
        int n_runs = 0;
        cudaGraphExec_t graph = nullptr;  // null: not captured
    };
    std::map<std::pair<int, bool>, Graph> graphs;  // see run_graph()
    int n_graphs = 0;                              // captured
#endif
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
// Products, by the kernel that suits the number of tokens

// The number of splits of K, at most `most`, that gives every multiprocessor a few blocks and fits the
// scratch memory.
inline int splits_for(int n_tiles, int most, size_t tile_values) {
    int n = 1;
    auto more_helps = [&] { return n < most && n < max_splits && n * n_tiles < 4 * device().n_sms; };
    while (more_helps() && n_tiles <= max_tiles && (n + 1) * n_tiles * tile_values <= max_partials) n++;
    return n;
}

inline int count_tiles(const Products& products, int width) {
    int n = 0;
    for (int i = 0; i < products.n; i++) n += (products.of[i].w.n_out + width - 1) / width;
    return n;
}

// The most blocks that can share the inputs of a column: each warp has at least one group.
inline int most_gemv_splits(const AwqMatrix& w) {
    assert(w.group_size > 0);
    return (w.n_in / w.group_size + gemv_warps - 1) / gemv_warps;
}

template <int n_words>
void run_gemv(RunState& s, const half* x, const Products& products) {
    constexpr int width = 64 * n_words;
    const int n_tiles = count_tiles(products, width);
    const int n_splits = splits_for(n_tiles, most_gemv_splits(products.of[0].w), width);
    launch<awq_gemv<n_words>>(
        {.grid = dim3(n_tiles, n_splits), .block = 32 * gemv_warps, .stream = device().stream}, x, products,
        Scratch{s.partials.get(), s.tickets.get()});
}

// Words that a lane of awq_gemv loads at once. The wider the better, but rows have to begin at multiples of a
// load, and there have to be blocks for all multiprocessors.
inline int gemv_words(const Products& products) {
    for (const int n_words : {4, 2}) {
        bool fits =
            count_tiles(products, 64 * n_words) * most_gemv_splits(products.of[0].w) >= 2 * device().n_sms;
        for (int i = 0; i < products.n; i++) fits = fits && products.of[i].w.n_out % (8 * n_words) == 0;
        if (fits) return n_words;
    }
    return 1;
}

template <int tile_tokens>
void run_gemm(RunState& s, const half* x, int n_tokens, const Products& products) {
    const int n_columns = count_tiles(products, gemm_columns),
              n_rows = (n_tokens + tile_tokens - 1) / tile_tokens;
    const int most = std::max(1, products.of[0].w.n_in / gemm_inputs / 2);  // each block at least two stages
    const int n_splits = splits_for(n_columns * n_rows, most, size_t(tile_tokens) * gemm_columns);
    launch<awq_gemm<tile_tokens>>({.grid = dim3(n_columns, n_rows, n_splits),
                                   .block = gemm_threads,
                                   .shared_bytes = gemm_stages * sizeof(GemmStage<tile_tokens>),
                                   .stream = device().stream},
                                  x, n_tokens, products, Scratch{s.partials.get(), s.tickets.get()});
}

inline void run_dequantize(const AwqMatrix& w, half* out) {
    launch<awq_dequantize>(
        {.grid = dim3((w.n_out / 8 + 255) / 256, w.n_in), .block = 256, .stream = device().stream}, w, out);
}

#ifdef HAVE_CUBLAS
// out (n_tokens, n_out) = x (n_tokens, n_in) * w, or += with `add`; w (n_in, n_out), or (n_out, n_in) if
// transposed. cuBLAS counts columns first: what it sees are the transposes, in the other order.
inline void run_cublas(const half* x, int n_tokens, const half* w, int n_in, int n_out, float* out, bool add,
                       bool transposed = false) {
    const float one = 1, beta = add ? 1 : 0;
    const cublasStatus_t status =
        cublasGemmEx(device().cublas, transposed ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, n_out, n_tokens,
                     n_in, &one, w, CUDA_R_16F, transposed ? n_in : n_out, x, CUDA_R_16F, n_in, &beta, out,
                     CUDA_R_32F, n_out, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS)
        throw std::runtime_error("cublasGemmEx: status " + std::to_string(status));
}
#endif

// Products of x (n_tokens, n_in) with matrices that read it.
inline void multiply(RunState& s, const half* x, int n_tokens, const Products& products) {
    const bool one = n_tokens == 1;
    if (s.matmul == Matmul::plain) {
        launch<awq_plain>(
            {.grid = dim3(count_tiles(products, 128), n_tokens), .block = 128, .stream = device().stream}, x,
            n_tokens, products);
        return;
    }
#ifdef HAVE_CUBLAS
    const bool ready = s.matmul == Matmul::fp16 || (s.matmul == Matmul::predequant && !one);
    const bool now =
        !one && (s.matmul == Matmul::dequant || (s.matmul == Matmul::fused && n_tokens >= dequantize_from));
    if (ready || now) {
        for (int i = 0; i < products.n; i++) {
            const Product& p = products.of[i];
            if (now) run_dequantize(p.w, s.dequantized.get());
            run_cublas(x, n_tokens, now ? s.dequantized.get() : p.w.fp16, p.w.n_in, p.w.n_out, p.out, p.add);
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

// ----------------------------------------------------------------------------
// The forward pass

// Puts a step's values (n_tokens, shape), which lie on the device, under its name into the trace, if there is
// one.
template <class T>
void record(const Transformer& m, int layer, const char* name, const T* values, int n_tokens,
            std::initializer_list<int> shape) {
    if (m.trace == nullptr) return;
    size_t n = n_tokens;
    for (const int size : shape) n *= size;
    std::vector<T> host(n);
    download(host.data(), values, n);
    if constexpr (std::is_same_v<T, half>) {
        std::vector<uint16_t> bits(n);
        std::memcpy(bits.data(), host.data(), n * sizeof(half));
        m.trace->add(step_name(layer, name), bits.data(), n_tokens, shape);
    } else {
        m.trace->add(step_name(layer, name), host.data(), n_tokens, shape);
    }
}

// The same for the keys of a layer, which lie in the cache.
void record_keys(const Transformer& m, int layer, int n_tokens) {
    if (m.trace == nullptr) return;
    const ModelConfig& c = m.file.config;
    const RunState& s = m.state;
    int pos = 0;
    download(&pos, s.pos(), 1);
    DeviceBuffer<half> keys(size_t(n_tokens) * c.kv_dim());
    for (int t = 0; t < n_tokens; t++) {
        for (int h = 0; h < c.n_kv_heads; h++) {
            const size_t row = (size_t(layer) * c.n_kv_heads + h) * s.context + pos + t;
            check(cudaMemcpyAsync(keys.get() + (size_t(t) * c.n_kv_heads + h) * c.head_dim,
                                  s.keys.get() + row * c.head_dim, c.head_dim * sizeof(half),
                                  cudaMemcpyDeviceToDevice, device().stream),
                  "cudaMemcpy");
        }
    }
    record(m, layer, "attn.k_rope", keys.get(), n_tokens, {c.n_kv_heads, c.head_dim});
}

// x (n, dim) += input * w.
void multiply_and_add(Transformer& m, int l, const char* name, const half* input, const AwqMatrix& w, int n) {
    RunState& s = m.state;
    if (m.trace == nullptr) {
        multiply(s, input, n, {{{w, s.x.get(), true}}, 1});
        return;
    }
    multiply(s, input, n, {{{w, s.projected.get(), false}}, 1});
    record(m, l, name, s.projected.get(), n, {w.n_out});
    const size_t n_values = size_t(n) * w.n_out;
    launch<add>({.grid = dim3((n_values + 255) / 256), .block = 256, .stream = device().stream}, s.x.get(),
                s.projected.get(), n_values);
}

void run_rmsnorm(const Transformer& m, half* out, const float* x, const half* weight, int n) {
    const ModelConfig& c = m.file.config;
    launch<rmsnorm>({.grid = n, .block = 256, .stream = device().stream}, out, x, weight, c.dim, c.norm_eps);
}

// s.q_rope and the cache of a layer -> s.mix, for tokens at *s.pos and on.
void run_attention(Transformer& m, int l, int n) {
    const ModelConfig& c = m.file.config;
    RunState& s = m.state;
    const size_t cache = size_t(l) * c.n_kv_heads * s.context * c.head_dim;
    Attention at{};
    at.q = s.q_rope.get(), at.out = s.mix.get(), at.pos = s.pos();
    at.keys = s.keys.get() + cache, at.values = s.values.get() + cache;
    at.n_tokens = n, at.n_heads = c.n_heads, at.n_kv_heads = c.n_kv_heads, at.context = s.context;
    at.scale = float(1 / std::sqrt(double(c.head_dim)));
    at.n_parts = n == 1 ? s.attention_parts : 1;
    at.parts = s.parts.get(), at.tickets = s.tickets.get();
    run_attention(at, c.head_dim);
}

// x (n, dim) += attention of layer l: tokens at positions pos .. pos + n - 1.
void attention_block(Transformer& m, int l, int n) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;

    // Normalize, and multiply by three matrices.
    run_rmsnorm(m, s.h.get(), s.x.get(), w.attn_norm + size_t(l) * c.dim, n);
    record(m, l, "attn.norm", s.h.get(), n, {c.dim});
    multiply(s, s.h.get(), n,
             {{{w.q_proj[l], s.q.get()}, {w.k_proj[l], s.k.get()}, {w.v_proj[l], s.v.get()}}, 3});
    record(m, l, "attn.q_proj", s.q.get(), n, {c.q_dim()});
    record(m, l, "attn.k_proj", s.k.get(), n, {c.kv_dim()});
    record(m, l, "attn.v_proj", s.v.get(), n, {c.kv_dim()});

    // Qwen3 normalizes each head of q and k on its own. Rotate q and k by their positions, and keep k and v.
    const size_t layer_cache = size_t(c.n_kv_heads) * s.context * c.head_dim;
    Heads heads{};
    heads.q = s.q.get(), heads.k = s.k.get(), heads.v = s.v.get(), heads.q_out = s.q_rope.get();
    heads.keys = s.keys.get() + l * layer_cache, heads.values = s.values.get() + l * layer_cache;
    if (c.arch == Arch::qwen3) {
        heads.q_norm = w.q_norm + size_t(l) * c.head_dim;
        heads.k_norm = w.k_norm + size_t(l) * c.head_dim;
    }
    heads.rotations = s.rotations.get(), heads.pos = s.pos();
    heads.n_heads = c.n_heads, heads.n_kv_heads = c.n_kv_heads;
    heads.head_dim = c.head_dim, heads.context = s.context, heads.eps = c.norm_eps;
    heads.traced_q = s.traced_q.get(), heads.traced_k = s.traced_k.get();
    launch<prepare_heads>(
        {.grid = dim3(c.n_heads + 2 * c.n_kv_heads, n), .block = 32, .stream = device().stream}, heads);
    if (c.arch == Arch::qwen3) {
        record(m, l, "attn.q_norm", s.traced_q.get(), n, {c.n_heads, c.head_dim});
        record(m, l, "attn.k_norm", s.traced_k.get(), n, {c.n_kv_heads, c.head_dim});
    }
    record(m, l, "attn.q_rope", s.q_rope.get(), n, {c.n_heads, c.head_dim});
    record_keys(m, l, n);

    // Scores, softmax and the weighted sum of values; then back into the residual stream.
    run_attention(m, l, n);
    record(m, l, "attn.mix", s.mix.get(), n, {c.q_dim()});
    multiply_and_add(m, l, "attn.o_proj", s.mix.get(), w.o_proj[l], n);
    record(m, l, "attn.residual", s.x.get(), n, {c.dim});
}

// x (n, dim) += down(silu(gate(h)) * up(h)) of layer l, h the normalized x.
void feed_forward_block(Transformer& m, int l, int n) {
    const ModelConfig& c = m.file.config;
    const Weights& w = m.weights;
    RunState& s = m.state;
    run_rmsnorm(m, s.h.get(), s.x.get(), w.ffn_norm + size_t(l) * c.dim, n);
    record(m, l, "ffn.norm", s.h.get(), n, {c.dim});
    multiply(s, s.h.get(), n, {{{w.gate_proj[l], s.gate.get()}, {w.up_proj[l], s.up.get()}}, 2});
    record(m, l, "ffn.gate_proj", s.gate.get(), n, {c.hidden_dim});
    record(m, l, "ffn.up_proj", s.up.get(), n, {c.hidden_dim});
    const size_t n_values = size_t(n) * c.hidden_dim;
    launch<swiglu>({.grid = dim3((n_values + 255) / 256), .block = 256, .stream = device().stream},
                   s.swiglu.get(), s.gate.get(), s.up.get(), n_values);
    record(m, l, "ffn.swiglu", s.swiglu.get(), n, {c.hidden_dim});
    multiply_and_add(m, l, "ffn.down_proj", s.swiglu.get(), w.down_proj[l], n);
    record(m, l, "ffn.residual", s.x.get(), n, {c.dim});
}

// All layers, for the n tokens in s.inputs. Nothing here depends on their ids or positions, which lie on the
// device, so that what is launched can be kept as a graph and launched again.
void run_layers(Transformer& m, int n) {
    const ModelConfig& c = m.file.config;
    RunState& s = m.state;
    // The embedding: one row of the table for each token.
    launch<embed>({.grid = n, .block = 256, .stream = device().stream}, s.x.get(), m.weights.embedding,
                  s.tokens(), c.dim);
    record(m, -1, "tokens", s.tokens(), n, {});
    record(m, -1, "embed", s.x.get(), n, {c.dim});
    for (int l = 0; l < c.n_layers; l++) {
        attention_block(m, l, n);
        feed_forward_block(m, l, n);
    }
}

// The classifier scores every token of the vocabulary: s.logits (n, vocab_size) of the n tokens from `first`
// on.
void run_classifier(Transformer& m, int first, int n) {
    const ModelConfig& c = m.file.config;
    RunState& s = m.state;
    run_rmsnorm(m, s.h.get(), s.x.get() + size_t(first) * c.dim, m.weights.final_norm, n);
    record(m, -1, "norm", s.h.get(), n, {c.dim});
#ifdef HAVE_CUBLAS
    if (n > 1) {
        run_cublas(s.h.get(), n, m.weights.classifier, c.dim, c.vocab_size, s.logits.get(), false, true);
        return;
    }
#endif
    launch<fp16_gemv>({.grid = dim3((c.vocab_size + 7) / 8, n), .block = 256, .stream = device().stream},
                      s.logits.get(), s.h.get(), m.weights.classifier, c.vocab_size, c.dim);
}

// All layers for n tokens; with `next` on to the last one's logits and the most probable next token.
void run_tokens(Transformer& m, int n, bool next) {
    RunState& s = m.state;
    run_layers(m, n);
    if (!next) return;
    run_classifier(m, n - 1, 1);
    launch<arg_max>({.grid = 1, .block = 1024, .stream = device().stream}, s.best.get(), s.logits.get(),
                    m.file.config.vocab_size);
}

// The same, by a graph for each n: the kernels are some hundred, and launching each costs more than some
// take. To make one costs more than it saves once; so the first run of each n goes without, as most prompts'
// lengths come only once. It is also when CUDA and cuBLAS set up what a graph cannot hold.
void run_graph(Transformer& m, int n, bool next) {
#ifdef __CUDACC__
    constexpr int max_graphs = 16;  // each takes some device memory
    RunState& s = m.state;
    RunState::Graph& g = s.graphs[{n, next}];
    if (m.trace == nullptr && g.n_runs++ > 0 && g.graph == nullptr && s.n_graphs < max_graphs) {
        cudaGraph_t captured = nullptr;
        check(cudaStreamBeginCapture(device().stream, cudaStreamCaptureModeRelaxed), "capture");
        try {
            run_tokens(m, n, next);
        } catch (...) {  // leaves the stream as it was
            cudaStreamEndCapture(device().stream, &captured);
            cudaGetLastError();
            if (captured != nullptr) cudaGraphDestroy(captured);
            throw;
        }
        check(cudaStreamEndCapture(device().stream, &captured), "capture");
        check(cudaGraphInstantiate(&g.graph, captured, 0), "cudaGraphInstantiate");
        check(cudaGraphDestroy(captured), "cudaGraphDestroy");
        s.n_graphs++;
    }
    if (m.trace == nullptr && g.graph != nullptr) {
        check(cudaGraphLaunch(g.graph, device().stream), "cudaGraphLaunch");
        return;
    }
#endif
    run_tokens(m, n, next);
}

// Puts a chunk's position and ids where run_layers() finds them.
void set_inputs(RunState& s, std::span<const int> tokens, int pos) {
    std::vector<int> inputs{pos};
    inputs.insert(inputs.end(), tokens.begin(), tokens.end());
    s.inputs.upload(inputs.data(), inputs.size());
}

// Runs a chunk of up to max_chunk tokens, tokens[i] at position pos + i; each attends to every position up to
// its own. Returns logits (n_logits, vocab_size), those of the last n_logits tokens: none, one or all.
// Preconditions: pos + tokens.size() <= context; positions before pos have been run.
std::span<const float> forward(Transformer& m, std::span<const int> tokens, int pos, int n_logits) {
    RunState& s = m.state;
    const int n = static_cast<int>(tokens.size());
    const size_t vocab_size = m.file.config.vocab_size;
    set_inputs(s, tokens, pos);
    s.host_logits.resize(std::max(s.host_logits.size(), n_logits * vocab_size));
    if (n_logits <= 1) {
        run_graph(m, n, n_logits == 1);
        if (n_logits == 1) download(s.host_logits.data(), s.logits.get(), vocab_size);
    } else {
        run_layers(m, n);
        for (int i = 0; i < n_logits; i += logit_rows) {
            const int n_rows = std::min(logit_rows, n_logits - i);
            run_classifier(m, n - n_logits + i, n_rows);
            download(s.host_logits.data() + i * vocab_size, s.logits.get(), n_rows * vocab_size);
        }
    }
    if (m.trace != nullptr) m.trace->add("logits", s.host_logits.data(), n_logits, {int(vocab_size)});
    return {s.host_logits.data(), n_logits * vocab_size};
}

// The same for the most probable next token, which is found on the device.
int forward_greedy(Transformer& m, std::span<const int> tokens, int pos) {
    RunState& s = m.state;
    set_inputs(s, tokens, pos);
    run_graph(m, static_cast<int>(tokens.size()), true);
    int best = 0;
    download(&best, s.best.get(), 1);
    return best;
}

// ----------------------------------------------------------------------------
// Loading, and handing the model to the command line

// Bytes of a quantized matrix in the file.
uint64_t matrix_bytes(const ModelConfig& c, uint64_t n_in, uint64_t n_out) {
    const uint64_t n_groups = n_in / c.group_size;
    return (n_in + n_groups) * (n_out / 8) * sizeof(uint32_t) + n_groups * n_out * sizeof(half);
}

// Bytes of one layer's seven matrices.
uint64_t layer_matrix_bytes(const ModelConfig& c) {
    return matrix_bytes(c, c.dim, c.q_dim()) + 2 * matrix_bytes(c, c.dim, c.kv_dim()) +
           matrix_bytes(c, c.q_dim(), c.dim) + 2 * matrix_bytes(c, c.dim, c.hidden_dim) +
           matrix_bytes(c, c.hidden_dim, c.dim);
}

// Multiply-adds of one token in the layers' matrices, which is also the number of their weights.
uint64_t macs_per_token(const ModelConfig& c) {
    return uint64_t(c.n_layers) * c.dim * (2 * c.q_dim() + 2 * c.kv_dim() + 3 * uint64_t(c.hidden_dim));
}

uint64_t norm_bytes(const ModelConfig& c) {
    const uint64_t n_layers = c.n_layers, head_norms = c.arch == Arch::qwen3 ? 2 * n_layers * c.head_dim : 0;
    return ((2 * n_layers + 1) * c.dim + head_norms) * sizeof(half);
}

uint64_t table_bytes(const ModelConfig& c) { return uint64_t(c.vocab_size) * c.dim * sizeof(half); }

// Bytes of all weights that a header implies. Throws if the kernels cannot run such a model.
uint64_t weight_bytes(const ModelConfig& c) {
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
    return norm_bytes(c) + (c.shared_classifier ? 1 : 2) * table_bytes(c) +
           c.n_layers * layer_matrix_bytes(c);
}

// Copies the weights to the device, each tensor at a multiple of 256 bytes. The order of the file: norms,
// embedding, each projection over all layers, the classifier if it has its own, and Qwen3's norms of heads at
// the end.
void load_weights(Transformer& m) {
    const ModelConfig& c = m.file.config;
    Weights& w = m.weights;
    constexpr size_t alignment = 256;
    const size_t n_tensors = 21 * size_t(c.n_layers) + 8;
    m.weight_memory = DeviceBuffer<std::byte>(m.file.weights.size() + n_tensors * alignment);
    WeightCursor cursor(m.file);
    size_t end = 0;
    auto copy = [&](size_t n_bytes) {
        std::byte* to = m.weight_memory.get() + end;
        m.weight_memory.upload(cursor.take<std::byte>(n_bytes), n_bytes, end);
        end = (end + n_bytes + alignment - 1) / alignment * alignment;
        return to;
    };
    auto halves = [&](size_t n) { return reinterpret_cast<const half*>(copy(n * sizeof(half))); };
    auto words = [&](size_t n) { return reinterpret_cast<const uint32_t*>(copy(n * sizeof(uint32_t))); };
    auto matrices = [&](int n_in, int n_out) {
        const size_t n_groups = n_in / c.group_size;
        std::vector<AwqMatrix> layers;
        for (int l = 0; l < c.n_layers; l++) {
            AwqMatrix a{};
            a.n_in = n_in, a.n_out = n_out, a.group_size = c.group_size;
            a.qweight = words(size_t(n_in) * (n_out / 8));
            a.qzeros = words(n_groups * (n_out / 8));
            a.scales = halves(n_groups * n_out);
            layers.push_back(a);
        }
        return layers;
    };
    const size_t n_layers = c.n_layers, table = size_t(c.vocab_size) * c.dim;
    w.attn_norm = halves(n_layers * c.dim);
    w.ffn_norm = halves(n_layers * c.dim);
    w.final_norm = halves(c.dim);
    w.embedding = halves(table);
    w.q_proj = matrices(c.dim, c.q_dim());
    w.k_proj = matrices(c.dim, c.kv_dim());
    w.v_proj = matrices(c.dim, c.kv_dim());
    w.o_proj = matrices(c.q_dim(), c.dim);
    w.gate_proj = matrices(c.dim, c.hidden_dim);
    w.down_proj = matrices(c.hidden_dim, c.dim);
    w.up_proj = matrices(c.dim, c.hidden_dim);
    w.classifier = c.shared_classifier ? w.embedding : halves(table);
    if (c.arch == Arch::qwen3) {
        w.q_norm = halves(n_layers * c.head_dim);
        w.k_norm = halves(n_layers * c.head_dim);
    }
}

// All matrices as fp16, for --matmul predequant and fp16.
void dequantize_weights(Transformer& m) {
    Weights& w = m.weights;
    std::vector<AwqMatrix>* all[] = {&w.q_proj,    &w.k_proj,    &w.v_proj, &w.o_proj,
                                     &w.gate_proj, &w.down_proj, &w.up_proj};
    size_t n = 0;
    for (const auto* layers : all) n += layers->size() * layers->front().n_in * layers->front().n_out;
    m.fp16_memory = DeviceBuffer<half>(n);
    half* next = m.fp16_memory.get();
    for (auto* layers : all) {
        for (AwqMatrix& matrix : *layers) {
            run_dequantize(matrix, next);
            matrix.fp16 = next;
            next += size_t(matrix.n_in) * matrix.n_out;
        }
    }
    wait_for_device();
}

// Radians per position of each pair, theta^(-2i / head_dim), (head_dim / 2,). Llama 3.1 and later stretch the
// long wavelengths by `factor`, leave the short ones alone and blend in between; this holds at every
// position, so leaving it out changes every token.
std::vector<float> rope_frequencies(const ModelConfig& c) {
    std::vector<float> freq(c.head_dim / 2);
    for (int i = 0; i < c.head_dim / 2; i++) {
        double f = std::pow(double(c.rope_theta), -2.0 * i / c.head_dim);
        if (const RopeScaling& s = c.rope_scaling; s.llama3) {
            const double turns =
                s.original_max_position_embeddings * f / (2 * M_PI);  // within the original context
            const double low = s.low_freq_factor, high = s.high_freq_factor;
            const double smooth = std::clamp((turns - low) / (high - low), 0.0, 1.0);
            f = (1 - smooth) * f / s.factor + smooth * f;
        }
        freq[i] = static_cast<float>(f);
    }
    return freq;
}

// cos and sin of every position and pair.
std::vector<float2> rotation_table(const ModelConfig& c, int context) {
    const std::vector<float> freq = rope_frequencies(c);
    std::vector<float2> table(size_t(context) * freq.size());
    for (int pos = 0; pos < context; pos++) {
        for (size_t i = 0; i < freq.size(); i++) {
            const double angle = double(pos) * freq[i];
            table[pos * freq.size() + i] = make_float2(float(std::cos(angle)), float(std::sin(angle)));
        }
    }
    return table;
}

// Allocates a run's memory; `context` is the number of positions to keep.
RunState make_run_state(const ModelConfig& c, int context, Matmul matmul, bool traced) {
    const size_t chunk = std::min(max_chunk, context);
    RunState s;
    s.context = context, s.matmul = matmul;
    s.x = DeviceBuffer<float>(chunk * c.dim);
    s.h = DeviceBuffer<half>(chunk * c.dim);
    s.q = DeviceBuffer<float>(chunk * c.q_dim());
    s.k = DeviceBuffer<float>(chunk * c.kv_dim());
    s.v = DeviceBuffer<float>(chunk * c.kv_dim());
    s.q_rope = DeviceBuffer<half>(chunk * c.q_dim());
    s.mix = DeviceBuffer<half>(chunk * c.q_dim());
    s.gate = DeviceBuffer<float>(chunk * c.hidden_dim);
    s.up = DeviceBuffer<float>(chunk * c.hidden_dim);
    s.swiglu = DeviceBuffer<half>(chunk * c.hidden_dim);
    s.logits = DeviceBuffer<float>(std::min<size_t>(logit_rows, chunk) * c.vocab_size);
    s.inputs = DeviceBuffer<int>(1 + chunk);
    s.best = DeviceBuffer<int>(1);
    const std::vector<float2> rotations = rotation_table(c, context);
    s.rotations = DeviceBuffer<float2>(rotations.size());
    s.rotations.upload(rotations.data(), rotations.size());
    const size_t cache = size_t(c.n_layers) * c.n_kv_heads * context * c.head_dim;
    s.keys = DeviceBuffer<half>(cache);
    s.values = DeviceBuffer<half>(cache);
    s.partials = DeviceBuffer<float>(max_partials);
    s.tickets = DeviceBuffer<unsigned>(max_tiles);
    s.tickets.clear();
    // A warp for every 32 keys is the most that helps; a block has attention_warps.
    const int row_tiles = (c.heads_per_kv() + 15) / 16;
    const int blocks =
        std::min({(context + 127) / 128, 64, 1 + 4 * device().n_sms / (row_tiles * c.n_kv_heads)});
    s.attention_parts = blocks * attention_warps;
    s.parts =
        DeviceBuffer<float>(size_t(row_tiles) * c.n_kv_heads * s.attention_parts * 16 * (c.head_dim + 2));
#ifdef HAVE_CUBLAS
    if (matmul == Matmul::dequant || (matmul == Matmul::fused && chunk >= size_t(dequantize_from))) {
        s.dequantized = DeviceBuffer<half>(size_t(c.dim) * std::max(c.hidden_dim, c.q_dim()));
    }
#endif
    if (traced) {
        s.projected = DeviceBuffer<float>(chunk * c.dim);
        s.traced_q = DeviceBuffer<float>(chunk * c.q_dim());
        s.traced_k = DeviceBuffer<float>(chunk * c.kv_dim());
    }
    return s;
}

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

// Throws std::runtime_error if weights and cache do not fit the device, before anything is copied.
void check_device_memory(const ModelConfig& c, int context, Matmul matmul) {
    device();
    const double weights = double(weight_bytes(c)),
                 cache = 2.0 * c.n_layers * c.kv_dim() * context * sizeof(half);
    double fp16 = 0;
    if (matmul == Matmul::predequant || matmul == Matmul::fp16)
        fp16 = double(macs_per_token(c)) * sizeof(half);
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    if (weights + cache + fp16 <= double(free)) return;
    std::string what = format("weights of %.2f GB", weights / 1e9);
    if (fp16 > 0) what += format(", again as fp16 %.2f GB,", fp16 / 1e9);
    what += format(
        " and a cache of %.2f GB for %d positions (--ctx) do not fit: %.2f GB of %.2f GB of device memory "
        "are free",
        cache / 1e9, context, double(free) / 1e9, double(all) / 1e9);
    throw std::runtime_error(what);
}

// Opens an AWQ file, copies it to the device and allocates a run's memory. Throws std::runtime_error with one
// line that names the file.
Transformer load_transformer(const std::string& path, const Options& options, Trace* trace) {
    Transformer m;
    m.file = open_model_file(path, magic_awq, version_awq, weight_bytes);
    const ModelConfig& c = m.file.config;
    if (options.rope_theta) m.file.config.rope_theta = *options.rope_theta;
    const Matmul matmul = matmul_of(options);
    const int context = context_length(options, c);
    m.trace = trace;
    try {
        check_device_memory(c, context, matmul);
        load_weights(m);
        m.state = make_run_state(c, context, matmul, trace != nullptr);
        if (matmul == Matmul::predequant || matmul == Matmul::fp16) dequantize_weights(m);
    } catch (const std::runtime_error& e) {
        throw std::runtime_error(path + ": " + e.what());
    }
    return m;
}

Model load_model(const Options& options, Trace* trace) {
    auto m = std::make_shared<Transformer>(load_transformer(options.model_path, options, trace));
    const ModelConfig& c = m->file.config;
    Model model;
    model.config = c;
    if (!m->file.tokenizer.empty()) {
        try {
            model.tokenizer = Tokenizer::load(m->file.tokenizer, c.vocab_size);
        } catch (const std::runtime_error& e) {
            throw std::runtime_error(m->file.path + ": " + e.what());
        }
    }
    model.scheme = "AWQ: int4 groups of " + std::to_string(c.group_size) + ", fp16 activations";
    model.kernel = device().name;
    if (m->state.matmul != Matmul::fused) model.kernel += ", --matmul " + options.own.at("--matmul");
    model.file_bytes = m->file.map.bytes().size();
    model.weight_bytes = m->file.weights.size();
    model.macs_per_token = macs_per_token(c);
    const bool fp16 = m->state.matmul == Matmul::fp16;
    const uint64_t layers = fp16 ? model.macs_per_token * sizeof(half) : c.n_layers * layer_matrix_bytes(c);
    model.weight_bytes_per_token = layers + norm_bytes(c) + table_bytes(c);
    model.kv_bytes_per_position = uint64_t(2) * c.n_layers * c.kv_dim() * sizeof(half);
    model.max_chunk = max_chunk;
    model.device_bytes = [] { return device().peak; };
    model.device_bandwidth = copy_bandwidth;
    model.forward = [m](std::span<const int> tokens, int pos, bool all_logits) {
        std::span<const float> logits;
        while (!tokens.empty()) {
            const auto chunk = tokens.first(std::min<size_t>(tokens.size(), max_chunk));
            tokens = tokens.subspan(chunk.size());
            // A trace has the logits of every token, so that it does not depend on how the tokens were fed.
            // Otherwise only the last chunk's are wanted.
            const bool all = all_logits || m->trace != nullptr;
            logits = forward(*m, chunk, pos, all ? int(chunk.size()) : tokens.empty() ? 1 : 0);
            pos += int(chunk.size());
        }
        return all_logits ? logits : logits.last(m->file.config.vocab_size);
    };
    if (trace == nullptr) {
        model.forward_greedy = [m](std::span<const int> tokens, int pos) {
            while (tokens.size() > max_chunk) {
                forward(*m, tokens.first(max_chunk), pos, 0);
                tokens = tokens.subspan(max_chunk);
                pos += max_chunk;
            }
            return forward_greedy(*m, tokens, pos);
        };
    }
    return model;
}

#ifndef RUNQ_NO_MAIN
int main(int argc, char** argv) {
    return run_command_line(argc, argv,
                            {"runq_awq", "Llama 3 and Qwen3 in AWQ (int4 by fp16)", load_model, own_options});
}
#endif
