// What runq_awq.cu has before its operations when it is compiled alone, under the same names: a header and
// tensors, the device and rows on it, the KV cache, options and trace. And what its products, its attention
// and its classifier ask first.
#pragma once

#ifndef ENGINE
#error "this header is the engine's: compile with -DENGINE (make does)"
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/device_recorder.h"
#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/gpu/attention.cuh"
#include "engine/gpu/cublas.h"
#include "engine/gpu/device.h"
#include "engine/gpu/graph.cuh"
#include "engine/gpu/half2.h"
#include "engine/gpu/kv_cache.cuh"
#include "engine/gpu/ops.cuh"
#include "engine/gpu/reduce.cuh"
#include "engine/gpu/rows.cuh"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "engine/model/tensors.h"
#include "simt/ptx.h"

#ifdef __CUDACC__
constexpr bool is_gpu = true;
#else
constexpr bool is_gpu = false;
#endif

// How products are computed. `fused` is what runq_awq is for. The others are the steps that led to it, and
// what it has to beat: --matmul. They need cuBLAS.
enum class Matmul {
    fused,       // int4 to the tensor cores; long prompts as `dequant`
    dequant,     // prompts: one matrix at a time to fp16 in a buffer, then cuBLAS
    predequant,  // prompts: cuBLAS with fp16 weights made when loading; single tokens: int4
    fp16,        // cuBLAS with fp16 weights for everything
};

// What --matmul chooses, but for `plain`, which runq_awq.cu has itself.
inline Matmul matmul_option(const Options& o) {
    const std::string& name = o.own.at("--matmul");
    return name == "dequant"      ? Matmul::dequant
           : name == "predequant" ? Matmul::predequant
           : name == "fp16"       ? Matmul::fp16
                                  : Matmul::fused;
}

// Whether all matrices are expanded to fp16 when loading: AwqMatrix::fp16.
inline bool keeps_fp16(Matmul how) { return how == Matmul::predequant || how == Matmul::fp16; }

// Tokens from which on expanding a matrix for cuBLAS is assumed to be faster than awq_gemm. An estimate, not
// a measurement: to expand a matrix of 4096 x 4096 and to read it again moves 76 MB, 19 us at 4 TB/s. In 19
// us tensor cores at 600 TFLOP/s multiply 340 tokens. So if awq_gemm reaches half of cuBLAS's rate, it takes
// 19 us longer than cuBLAS for 340 tokens, and more for more.
[[maybe_unused]] constexpr int dequantize_from = 384;

enum class AwqKernel {
    own,            // runq_awq.cu's
    expand_cublas,  // awq_dequantize into a buffer, then cuBLAS
    fp16_cublas,    // cuBLAS with the weights that keeps_fp16() says are there
};

// What multiplies n_tokens tokens.
inline AwqKernel choose_kernel([[maybe_unused]] Matmul how, [[maybe_unused]] bool plain,
                               [[maybe_unused]] int n_tokens) {
#ifdef HAVE_CUBLAS
    if (how == Matmul::fp16 || (how == Matmul::predequant && n_tokens > 1)) return AwqKernel::fp16_cublas;
    if ((how == Matmul::dequant && n_tokens > 1) ||
        (how == Matmul::fused && !plain && n_tokens >= dequantize_from))
        return AwqKernel::expand_cublas;
#endif
    return AwqKernel::own;
}

// How products are computed, and the memory that it takes, in chunks of up to max_tokens tokens.
struct FastMatmul {
    Matmul how;
    bool plain;
    DeviceBuffer<half> expanded;  // one matrix at a time, see AwqKernel::expand_cublas

    FastMatmul(const ModelConfig& c, const Options& o, int max_tokens)
        : how(matmul_option(o)),
          plain(o.own.at("--matmul") == "plain"),
          expanded(choose_kernel(how, plain, max_tokens) == AwqKernel::expand_cublas
                       ? size_t(c.dim) * size_t(std::max(c.hidden_dim, c.q_dim()))  // the largest
                       : 0) {}
};

// False, and nothing done, where the program's own kernels are the fastest. See awq_matmul.cuh.
struct AwqProducts;
inline bool fast_matmul(const FastMatmul& fast, const half* x, int n_tokens, const AwqProducts& products);

// A loaded model, and all that a run of it needs. Weights and RunState are the program's own.
template <class Weights, class RunState>
struct DeviceTransformerOf {
    ModelFile file;
    Weights weights;
    RunState state;
    Trace* trace = nullptr;                   // not null: record every step
    DeviceBuffer<std::byte> weight_memory{};  // of all tensors
    DeviceBuffer<half> fp16_memory{};         // all matrices, only with predequant and fp16
    DeviceBuffer<int> best{};                 // (1,), the most probable token
    uint64_t memory_bytes = 0;                // of the host that a run takes, with the file's weights
    Graphs<std::pair<int, bool>> graphs{};    // by the arguments of run_step()
};
