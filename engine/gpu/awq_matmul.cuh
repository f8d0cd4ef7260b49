// Products by AWQ's int4 matrices through cuBLAS: a matrix is first expanded to fp16 in memory. The products
// that dequantize in registers are runq_awq.cu's, which includes this behind them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/gpu/program.cuh"

// ----------------------------------------------------------------------------
// Expanding a matrix: awq_dequantize

constexpr int dequantize_rows = 8;  // of a thread. A group has a multiple of it

// out (n_in, n_out), the weights as fp16. grid: (words of a row / 128, n_in / dequantize_rows). A thread has
// the same word of several rows of a group, with one load of zero points and scales.
static __global__ void awq_dequantize(AwqMatrix w, half* out) {
    const int row_words = w.n_out / 8, word = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * dequantize_rows, group = row / w.group_size;
    if (word >= row_words) return;
    uint32_t nibbles[dequantize_rows];
    for (int i = 0; i < dequantize_rows; i++) nibbles[i] = w.qweight[size_t(row + i) * row_words + word];
    const PairScales scales =
        pair_scales(w.qzeros[size_t(group) * row_words + word],
                    *reinterpret_cast<const uint4*>(w.scales + size_t(group) * w.n_out + 8 * word));
    wait_for_previous();
    for (int i = 0; i < dequantize_rows; i++) {
        uint32_t pairs[4];
        for (int p = 0; p < 4; p++) pairs[p] = weight_pair(nibbles[i], p, scales);
        *reinterpret_cast<uint4*>(out + size_t(row + i) * w.n_out + 8 * word) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

inline void run_dequantize(const AwqMatrix& w, half* out) {
    const dim3 grid((w.n_out / 8 + 127) / 128, w.n_in / dequantize_rows);
    launch<awq_dequantize>({.grid = grid, .block = 128, .stream = device().stream, .is_early = true}, w, out);
}

// ----------------------------------------------------------------------------
// cuBLAS

#ifdef HAVE_CUBLAS
// Each matrix is expanded into `buffer`, which has room for the largest. Null: by the copies in fp16.
inline void run_cublas(half* buffer, const half* x, int n_tokens, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqProduct& p = products.items[i];
        if (buffer != nullptr) run_dequantize(p.w, buffer);
        run_cublas(x, n_tokens, buffer != nullptr ? buffer : p.w.fp16, p.w.n_in, p.w.n_out, p.out, p.add);
    }
}
#endif

inline bool fast_matmul(const FastMatmul& fast, [[maybe_unused]] const half* x, int n_tokens,
                        [[maybe_unused]] const AwqProducts& products) {
    if (!takes_cublas(fast.how, n_tokens)) return false;
#ifdef HAVE_CUBLAS
    run_cublas(fast.expanded.get(), x, n_tokens, products);
#endif
    return true;
}
