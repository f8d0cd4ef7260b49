// The ladder of kernels that led to the two matrix products of runq_awq.cu: a rung is one way to multiply
// fp16 activations by int4 weights. The first is a loop per output, the last is what runq_awq does, and
// cuBLAS stands beside them. A rung's comment says what it does and what the next one improves.
//
// bench/awq_kernels.cu times the rungs, tests/awq_kernels_test.cpp checks them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#define RUNQ_NO_MAIN
#include "runq_awq.cu"

// ----------------------------------------------------------------------------
// Rung 1: plain_product. One thread per output
//
// The product as runq_awq.cu specifies it. Each thread extracts one nibble from each word of its column:
// eight threads read the same word, and every token reads all weights again.

// grid: (n_out / blockDim.x, n_tokens).
__global__ void plain_product(float* out, const half* x, AwqMatrix w) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y, row_words = w.n_out / 8;
    if (column >= w.n_out) return;
    const int shift = 4 * (column % 8 / 2 + column % 2 * 4);
    float sum = 0;
    for (int k = 0; k < w.n_in; k++) {
        const size_t group = k / w.group_size;
        const int q = w.qweight[size_t(k) * row_words + column / 8] >> shift & 15;
        const int zero = w.qzeros[group * row_words + column / 8] >> shift & 15;
        const half weight = __hmul(__float2half(float(q - zero)), w.scales[group * w.n_out + column]);
        sum = fmaf(__half2float(x[size_t(token) * w.n_in + k]), __half2float(weight), sum);
    }
    out[size_t(token) * w.n_out + column] = sum;
}

// ----------------------------------------------------------------------------
// Rung 2, one token: fma_gemv. One warp per column of words
//
// A warp computes the eight outputs whose weights share a word; each lane takes every 32nd input, and
// shuffles add up the lanes. A word is read once, and -scale * zero is computed once per group, so that a
// weight costs a shift, a conversion and two multiply-adds in fp32.
//
// What awq_gemv improves: the lanes of a warp read words that lie a row apart, so each uses four bytes of the
// 32 that a memory access fetches. Traffic would be eightfold if the block's other warps did not use the
// neighbouring words soon enough to find them in the cache. Integers are converted one by one, and each of
// the eight sums takes five shuffles.

constexpr int fma_gemv_warps = 8;

// grid: words of a row / fma_gemv_warps; block: 32 * fma_gemv_warps.
__global__ void __launch_bounds__(32 * fma_gemv_warps) fma_gemv(half* out, const half* x, AwqMatrix w) {
    const int lane = threadIdx.x % 32, word = blockIdx.x * fma_gemv_warps + threadIdx.x / 32;
    const int row_words = w.n_out / 8;
    if (word >= row_words) return;
    float sums[8] = {};
    for (int group = 0; group < w.n_in / w.group_size; group++) {
        const uint32_t zeros = __ldg(w.qzeros + size_t(group) * row_words + word);
        const half* from = w.scales + size_t(group) * w.n_out + 8 * word;
        const uint4 scales = __ldg(reinterpret_cast<const uint4*>(from));
        const uint32_t scale_bits[4] = {scales.x, scales.y, scales.z, scales.w};
        float scale[8], offset[8];
        for (int i = 0; i < 8; i++) {
            const half2 pair = as_half2(scale_bits[i / 2]);
            scale[i] = __half2float(i % 2 == 0 ? __low2half(pair) : __high2half(pair));
            offset[i] = -scale[i] * float(zeros >> 4 * (i / 2 + i % 2 * 4) & 15);
        }
        for (int k = group * w.group_size + lane; k < (group + 1) * w.group_size; k += 32) {
            const float input = __half2float(x[k]);
            const uint32_t nibbles = __ldg(w.qweight + size_t(k) * row_words + word);
            for (int i = 0; i < 8; i++) {
                const float q = float(nibbles >> 4 * (i / 2 + i % 2 * 4) & 15);
                sums[i] = fmaf(input * scale[i], q, fmaf(input, offset[i], sums[i]));
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        sums[i] = warp_sum(sums[i]);
        if (lane == 0) out[8 * word + i] = __float2half(sums[i]);
    }
}

// ----------------------------------------------------------------------------
// Rung 2, several tokens: shared_gemm. Weights dequantized into shared memory
//
// As in AutoAWQ and vLLM: two warps compute a tile of 16 tokens by `width` columns. For 32 inputs at a time
// they load the activations and the words, convert the words to fp16 weights by lop3, and write both to
// shared memory. ldmatrix loads them from there in the layout that mma reads: weights are operand B, stored
// (input, column), so transposed.
//
// What awq_gemm improves: every weight is written to shared memory as fp16 and read back, four times the
// bytes of its int4 form. Loads and tensor cores take turns, with two barriers per step and no copy in flight
// during the mma. With 16 tokens per tile, a prompt of 512 tokens dequantizes every weight 32 times. And a
// narrow matrix has too few tiles for a large device, because blocks do not split the inputs.

constexpr int shared_gemm_tokens = 16, shared_gemm_inputs = 32, shared_gemm_threads = 64;

// Pair p of a word's nibbles as numbers: columns 2p and 2p + 1.
__device__ inline half2 nibble_pair(uint32_t nibbles, int p) {
    const half2 q = __hsub2(with_magic(nibbles, p), __float2half2_rn(1024));
    return p % 2 == 0 ? q : __hmul2(q, __float2half2_rn(1.0f / 16));
}

// grid: (n_out / width, tiles of 16 tokens); block: 64; n_out a multiple of width, group_size of 32.
template <int width>
__global__ void __launch_bounds__(shared_gemm_threads)
    shared_gemm(half* out, const half* x, int n_tokens, AwqMatrix w) {
    // Rows are padded by eight halves, so that the eight rows that ldmatrix reads at once lie in different
    // banks.
    __shared__ __align__(16) half x_tile[shared_gemm_tokens][shared_gemm_inputs + 8];
    __shared__ __align__(16) half w_tile[shared_gemm_inputs][width + 8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_column = blockIdx.x * width, first_token = blockIdx.y * shared_gemm_tokens;
    const int row_words = w.n_out / 8;

    constexpr int tile_words = width / 8, rows_at_once = shared_gemm_threads / tile_words;
    const int tile_word = threadIdx.x % tile_words, word = first_column / 8 + tile_word;
    const int x_row = threadIdx.x / 4, x_part = threadIdx.x % 4 * 8;  // 16 bytes per thread
    const half* x_from = x + size_t(first_token + x_row) * w.n_in + x_part;

    float sums[width / 16][4] = {};  // of the warp's half of the columns, eight at a time
    for (int k = 0; k < w.n_in; k += shared_gemm_inputs) {
        __syncthreads();  // all threads have used the previous tiles
        uint4 inputs = make_uint4(0, 0, 0, 0);
        if (first_token + x_row < n_tokens) inputs = *reinterpret_cast<const uint4*>(x_from + k);
        *reinterpret_cast<uint4*>(&x_tile[x_row][x_part]) = inputs;

        const int group = k / w.group_size;
        const uint32_t zeros = w.qzeros[size_t(group) * row_words + word];
        const half* scales_from = w.scales + size_t(group) * w.n_out + 8 * word;
        const uint4 scales = *reinterpret_cast<const uint4*>(scales_from);
        const uint32_t scale_bits[4] = {scales.x, scales.y, scales.z, scales.w};
        for (int row = threadIdx.x / tile_words; row < shared_gemm_inputs; row += rows_at_once) {
            const uint32_t nibbles = w.qweight[size_t(k + row) * row_words + word];
            uint32_t weights[4];
            for (int p = 0; p < 4; p++) {
                const half2 difference = __hsub2(nibble_pair(nibbles, p), nibble_pair(zeros, p));
                weights[p] = as_bits(__hmul2(difference, as_half2(scale_bits[p])));
            }
            *reinterpret_cast<uint4*>(&w_tile[row][8 * tile_word]) =
                make_uint4(weights[0], weights[1], weights[2], weights[3]);
        }
        __syncthreads();

#pragma unroll
        for (int step = 0; step < shared_gemm_inputs; step += 16) {
            uint32_t a[4];
            ldmatrix_x4(a, &x_tile[lane % 16][step + lane / 16 * 8]);
#pragma unroll
            for (int j = 0; j < width / 16; j += 2) {
                // Inputs 0 to 7 and 8 to 15 of eight columns, then of the next eight.
                uint32_t b[4];
                ldmatrix_x4_trans(b, &w_tile[step + lane % 16][warp * width / 2 + 8 * j + lane / 16 * 8]);
                mma_m16n8k16(sums[j], a, {b[0], b[1]});
                mma_m16n8k16(sums[j + 1], a, {b[2], b[3]});
            }
        }
    }

    const int token = first_token + lane / 4;
    for (int j = 0; j < width / 16; j++) {
        half* to = out + size_t(token) * w.n_out + first_column + warp * width / 2 + 8 * j + lane % 4 * 2;
        for (int i = 0; i < 2; i++) {
            if (token + 8 * i >= n_tokens) continue;
            *reinterpret_cast<uint32_t*>(to + size_t(8 * i) * w.n_out) =
                as_bits(__floats2half2_rn(sums[j][2 * i], sums[j][2 * i + 1]));
        }
    }
}

// ----------------------------------------------------------------------------
// All rungs

// How a rung writes its results, and in which form it reads weights.
// The memory of rungs: for splits, and for an expanded matrix.
struct RungMemory : SplitMemory {
    DeviceBuffer<half> expanded;
};

enum class Result { fp32, fp16 };
enum class WeightsRead { int4, fp16 };

struct Rung {
    std::string name;
    Result result;
    WeightsRead reads;
    int min_tokens, max_tokens;
    std::function<bool(const AwqMatrix&)> fits;
    // Products of x (n_tokens, n_in). The results of all products lie one behind the other, from the first
    // one's `out` on, as Result says.
    std::function<void(RungMemory&, const half* x, int n_tokens, const AwqProducts&)> run;
};

// Where product i's results begin if they are fp16.
inline half* fp16_out(const AwqProducts& products, int i) {
    return reinterpret_cast<half*>(products.items[0].out) + (products.items[i].out - products.items[0].out);
}

inline void run_plain(const half* x, int n_tokens, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqProduct& p = products.items[i];
        launch<plain_product>(
            {.grid = dim3((p.w.n_out + 127) / 128, n_tokens), .block = 128, .stream = device().stream}, p.out,
            x, p.w);
    }
}

template <int width>
void run_shared_gemm(const half* x, int n_tokens, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqMatrix& w = products.items[i].w;
        const int n_rows = (n_tokens + shared_gemm_tokens - 1) / shared_gemm_tokens;
        launch<shared_gemm<width>>(
            {.grid = dim3(w.n_out / width, n_rows), .block = shared_gemm_threads, .stream = device().stream},
            fp16_out(products, i), x, n_tokens, w);
    }
}

inline void run_fma_gemv(const half* x, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqMatrix& w = products.items[i].w;
        const int n_blocks = (w.n_out / 8 + fma_gemv_warps - 1) / fma_gemv_warps;
        launch<fma_gemv>({.grid = n_blocks, .block = 32 * fma_gemv_warps, .stream = device().stream},
                         fp16_out(products, i), x, w);
    }
}

// As --matmul fused does.
inline void run_chosen(RungMemory& s, const half* x, int n_tokens, const AwqProducts& products) {
#ifdef HAVE_CUBLAS
    if (takes_cublas(Matmul::fused, n_tokens)) return run_cublas(s.expanded.get(), x, n_tokens, products);
#endif
    run_fused(s.scratch(), x, n_tokens, products);
}

inline std::vector<Rung> all_rungs() {
    constexpr int any = 1 << 30;
    constexpr int reference_tokens = 128;  // more would take many times longer than all other rungs together
    auto always = [](const AwqMatrix&) { return true; };
    auto columns = [](int n) { return [n](const AwqMatrix& w) { return w.n_out % n == 0; }; };
    using S = RungMemory&;
    using X = const half*;
    using P = const AwqProducts&;
    std::vector<Rung> rungs = {
        {"plain", Result::fp32, WeightsRead::int4, 1, reference_tokens, always,
         [](S, X x, int n, P p) { run_plain(x, n, p); }},
        {"fma_gemv", Result::fp16, WeightsRead::int4, 1, 1, always,
         [](S, X x, int, P p) { run_fma_gemv(x, p); }},
        {"awq_gemv<1>", Result::fp32, WeightsRead::int4, 1, 1, always,
         [](S s, X x, int, P p) { run_gemv<1>(s.scratch(), x, p); }},
        {"awq_gemv<4>", Result::fp32, WeightsRead::int4, 1, 1, columns(32),
         [](S s, X x, int, P p) { run_gemv<4>(s.scratch(), x, p); }},
        {"shared_gemm<64>", Result::fp16, WeightsRead::int4, 1, any, columns(64),
         [](S, X x, int n, P p) { run_shared_gemm<64>(x, n, p); }},
        {"shared_gemm<128>", Result::fp16, WeightsRead::int4, 1, any, columns(128),
         [](S, X x, int n, P p) { run_shared_gemm<128>(x, n, p); }},
        {"awq_gemm<16>", Result::fp32, WeightsRead::int4, 1, any, always,
         [](S s, X x, int n, P p) { run_gemm<16>(s.scratch(), x, n, p); }},
        {"awq_gemm<32>", Result::fp32, WeightsRead::int4, 1, any, always,
         [](S s, X x, int n, P p) { run_gemm<32>(s.scratch(), x, n, p); }},
        {"awq_gemm<64>", Result::fp32, WeightsRead::int4, 1, any, always,
         [](S s, X x, int n, P p) { run_gemm<64>(s.scratch(), x, n, p); }},
        {"runq_awq", Result::fp32, WeightsRead::int4, 1, any, always,
         [](S s, X x, int n, P p) { run_chosen(s, x, n, p); }},
    };
#ifdef HAVE_CUBLAS
    rungs.push_back({"dequantize + cuBLAS", Result::fp32, WeightsRead::int4, 1, any, always,
                     [](S s, X x, int n, P p) { run_cublas(s.expanded.get(), x, n, p); }});
    rungs.push_back({"fp16 cuBLAS", Result::fp32, WeightsRead::fp16, 1, any, always,
                     [](S, X x, int n, P p) { run_cublas(nullptr, x, n, p); }});
#endif
    return rungs;
}
