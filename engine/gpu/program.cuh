// What runq_awq.cu has before its operations when it is compiled alone, under the same names: a header and
// tensors, options and trace. And what its products, its attention and its classifier ask first. It is
// included there behind the rows and the KV cache, which it takes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/app/model.h"
#include "engine/app/options.h"
#include "engine/app/trace.h"
#include "engine/gpu/attention.cuh"
#include "engine/gpu/cublas.h"
#include "engine/gpu/device.h"
#include "engine/gpu/graph.cuh"
#include "engine/gpu/ops.cuh"
#include "engine/model/config.h"
#include "engine/model/model_file.h"
#include "engine/model/scheme.h"
#include "simt/ptx.h"

template <>
inline constexpr const char* tensor_type<half> = "F16";

// How products are computed: --matmul. `fused` is what runq_awq is for. The next three are the steps that led
// to it, and what it has to beat. They need cuBLAS.
enum class Matmul {
    fused,       // int4 to the tensor cores; long prompts as `dequant`
    dequant,     // prompts: one matrix at a time to fp16 in a buffer, then cuBLAS
    predequant,  // prompts: cuBLAS with fp16 weights made when loading; single tokens: int4
    fp16,        // cuBLAS with fp16 weights for everything
    plain,       // runq_awq.cu's plain loop
};

inline Matmul matmul_option(const Options& o) {
    const std::string& name = o.own.at("--matmul");
    return name == "dequant"      ? Matmul::dequant
           : name == "predequant" ? Matmul::predequant
           : name == "fp16"       ? Matmul::fp16
           : name == "plain"      ? Matmul::plain
                                  : Matmul::fused;
}

// Whether all matrices are expanded to fp16 when loading: AwqMatrix::fp16.
inline bool keeps_fp16(Matmul how) { return how == Matmul::predequant || how == Matmul::fp16; }

// Tokens from which on expanding a matrix for cuBLAS is faster than awq_gemm: docs/gpu-results.md.
[[maybe_unused]] constexpr int dequantize_from = 256;

// Whether cuBLAS multiplies n_tokens tokens, and not a kernel of runq_awq.cu.
inline bool takes_cublas([[maybe_unused]] Matmul how, [[maybe_unused]] int n_tokens) {
#ifdef HAVE_CUBLAS
    return how == Matmul::fp16 || (n_tokens > 1 && (how == Matmul::dequant || how == Matmul::predequant)) ||
           (n_tokens >= dequantize_from && how == Matmul::fused);
#else
    return false;
#endif
}

// How products are computed, and the memory that it takes, in chunks of up to max_tokens tokens.
struct FastMatmul {
    Matmul how;
    DeviceBuffer<half> expanded;  // where cuBLAS takes one matrix at a time; otherwise empty

    FastMatmul(const ModelConfig& c, const Options& o, int max_tokens)
        : how(matmul_option(o)),
          expanded(takes_cublas(how, max_tokens) && !keeps_fp16(how)
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
    BestToken best{};
    uint64_t memory_bytes = 0;  // of the host that a run takes, with the file's weights
    Graphs graphs{};            // by the arguments of run_step()
};
