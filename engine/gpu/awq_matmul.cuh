// Products of fp16 activations by AWQ's int4 matrices: chooses the kernel that suits the number of tokens.
#pragma once

#include <cstddef>

#include "engine/gpu/awq_dequantize.cuh"
#include "engine/gpu/awq_gemm.cuh"
#include "engine/gpu/awq_gemv.cuh"
#include "engine/gpu/awq_matrix.cuh"
#include "engine/gpu/awq_tiles.cuh"
#include "engine/gpu/cublas.h"
#include "engine/gpu/device.h"

// How products are computed. `fused` is what runq_awq is for. The others are the steps that led to it, and
// what it has to beat: --matmul. They need cuBLAS.
enum class Matmul {
    fused,       // int4 to the tensor cores; long prompts as `dequant`
    dequant,     // prompts: one matrix at a time to fp16 in a buffer, then cuBLAS
    predequant,  // prompts: cuBLAS with fp16 weights made when loading; single tokens: int4
    fp16,        // cuBLAS with fp16 weights for everything
};

// Whether all matrices are expanded to fp16 when loading: AwqMatrix::fp16.
inline bool keeps_fp16(Matmul how) { return how == Matmul::predequant || how == Matmul::fp16; }

// Tokens from which on expanding a matrix for cuBLAS is assumed to be faster than awq_gemm. An estimate, not
// a measurement: to expand a matrix of 4096 x 4096 and to read it again moves 76 MB, 19 us at 4 TB/s. In 19
// us tensor cores at 600 TFLOP/s multiply 340 tokens. So if awq_gemm reaches half of cuBLAS's rate, it takes
// 19 us longer than cuBLAS for 340 tokens, and more for more.
[[maybe_unused]] constexpr int dequantize_from = 384;

enum class AwqKernel {
    gemv,    // awq_gemv
    gemm16,  // awq_gemm by tiles of 16, 32, 64 tokens
    gemm32,
    gemm64,
    expand_cublas,  // awq_dequantize into a buffer, then cuBLAS
    fp16_cublas,    // cuBLAS with the weights that keeps_fp16() says are there
};

// The kernel that multiplies n_tokens tokens.
inline AwqKernel choose_kernel([[maybe_unused]] Matmul how, int n_tokens) {
#ifdef HAVE_CUBLAS
    if (how == Matmul::fp16 || (how == Matmul::predequant && n_tokens > 1)) return AwqKernel::fp16_cublas;
    if ((how == Matmul::dequant && n_tokens > 1) || (how == Matmul::fused && n_tokens >= dequantize_from))
        return AwqKernel::expand_cublas;
#endif
    return n_tokens == 1    ? AwqKernel::gemv
           : n_tokens <= 16 ? AwqKernel::gemm16
           : n_tokens <= 32 ? AwqKernel::gemm32
                            : AwqKernel::gemm64;
}

// How products are computed, and the memory that it takes.
struct MatmulState {
    Matmul how = Matmul::fused;
    DeviceBuffer<float> partials;
    DeviceBuffer<unsigned> arrivals;
    DeviceBuffer<half> expanded;  // one matrix at a time, see AwqKernel::expand_cublas

    MatmulState() = default;  // without memory
    // For up to max_tokens tokens at a time, and matrices of up to max_weights weights.
    explicit MatmulState(Matmul chosen, int max_tokens, size_t max_weights)
        : how(chosen),
          partials(max_partials),
          arrivals(max_tiles),
          expanded(choose_kernel(how, max_tokens) == AwqKernel::expand_cublas ? max_weights : 0) {
        arrivals.clear();
    }
    SplitScratch scratch() const { return {partials.get(), arrivals.get()}; }
};

#ifdef HAVE_CUBLAS
inline void run_fp16_cublas(const half* x, int n_tokens, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqProduct& p = products.items[i];
        run_cublas(x, n_tokens, p.w.fp16, p.w.n_in, p.w.n_out, p.out, p.add);
    }
}

// `buffer` has room for the largest of the matrices.
inline void run_expand_cublas(half* buffer, const half* x, int n_tokens, const AwqProducts& products) {
    for (int i = 0; i < products.n; i++) {
        const AwqProduct& p = products.items[i];
        run_dequantize(p.w, buffer);
        run_cublas(x, n_tokens, buffer, p.w.n_in, p.w.n_out, p.out, p.add);
    }
}
#endif

// Products of x (n_tokens, n_in) with the matrices that read it.
inline void awq_matmul(const MatmulState& s, const half* x, int n_tokens, const AwqProducts& products) {
    switch (choose_kernel(s.how, n_tokens)) {
        case AwqKernel::gemv:
            return run_gemv(s.scratch(), x, products);
        case AwqKernel::gemm16:
            return run_gemm<16>(s.scratch(), x, n_tokens, products);
        case AwqKernel::gemm32:
            return run_gemm<32>(s.scratch(), x, n_tokens, products);
        case AwqKernel::gemm64:
            return run_gemm<64>(s.scratch(), x, n_tokens, products);
#ifdef HAVE_CUBLAS
        case AwqKernel::expand_cublas:
            return run_expand_cublas(s.expanded.get(), x, n_tokens, products);
        case AwqKernel::fp16_cublas:
            return run_fp16_cublas(x, n_tokens, products);
#else
        case AwqKernel::expand_cublas:
        case AwqKernel::fp16_cublas:
            break;  // never chosen
#endif
    }
}
